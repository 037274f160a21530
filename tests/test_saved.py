"""A trained federation is saved and loaded, unlearned from again and again, and adopted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import goldfish
from goldfish.data import Subset
from goldfish.errors import ConfigError, StoreError
from goldfish.params import digest, params_of
from goldfish.types import Client, DeletionRequest, ModelFactory

MakeClients = Callable[..., list[Client]]
FIRST = DeletionRequest("client-1", sample_ids=["c1-1", "c1-2"])
SECOND = DeletionRequest("client-2", sample_ids=["c2-3"])
TRAINING: dict[str, Any] = {"rounds": 2, "learning_rate": 0.1, "batch_size": 8}


def reloaded(
    trained: goldfish.Trained, folder: Path, make_clients: MakeClients, model: ModelFactory
) -> goldfish.Trained:
    """Save, and load in a federation that knows nothing: as another process would."""
    trained.save(folder)
    return goldfish.load(folder, goldfish.InProcess(make_clients(), model))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("goldfish", {"shards": 3, "shard_mode": "isolated"}),
        ("goldfish-warm", {}),
        ("fed-eraser", {}),
        ("sisa", {"shards": 2}),
    ],
)
def test_a_saved_federation_unlearns_with_the_same_bits(
    make_clients: MakeClients,
    small_net: ModelFactory,
    tmp_path: Path,
    method: str,
    settings: dict[str, Any],
) -> None:
    """Twice, also from what the first unlearning left: shards, updates and slices travel along."""
    own = method if goldfish.METHODS[method].prepare else None
    trained = goldfish.train(
        goldfish.InProcess(make_clients(), small_net),
        method=own,
        keep_for=[] if own else [method],
        **TRAINING,
        **settings,
    )
    again = reloaded(trained, tmp_path / "trained", make_clients, small_net)
    first = goldfish.unlearn(trained, [FIRST], method=method)
    assert digest(goldfish.unlearn(again, [FIRST], method=method).params) == digest(first.params)
    later = reloaded(first.trained, tmp_path / "unlearned", make_clients, small_net)
    assert later.honoured == (FIRST,)
    second = goldfish.unlearn(first, [SECOND], method=method)
    assert digest(goldfish.unlearn(later, [SECOND], method=method).params) == digest(second.params)
    assert digest(second.params) != digest(first.params)
    assert second.trained.honoured == [FIRST, SECOND]


def test_what_was_removed_stays_removed(
    make_clients: MakeClients, small_net: ModelFactory, tmp_path: Path
) -> None:
    """A second unlearning reads no sample of the first, though nothing but the folder knows it."""
    trained = goldfish.train(goldfish.InProcess(make_clients(), small_net), **TRAINING)
    first = goldfish.unlearn(trained, [FIRST], method="retrain")
    later = reloaded(first.trained, tmp_path / "unlearned", make_clients, small_net)
    second = goldfish.unlearn(later, [SECOND], method="retrain", rounds=1)
    held = sum(len(client.retained) for client in make_clients())
    assert second.cost.samples == held - 3


def test_samples_stay_in_their_shards_when_those_of_a_removed_class_are_deleted(
    make_clients: MakeClients, small_net: ModelFactory, tmp_path: Path
) -> None:
    """The shard that saw a sample is the one that is trained anew, for each of ten samples.

    Which shard that is depends on the ids of all samples; a request for a class names none, and
    another process finds them neither in the data nor in the requests.
    """

    def without_class_2() -> list[Client]:
        whole = make_clients()
        left = [(c.retained.labels != 2).nonzero().flatten() for c in whole]
        return [Client(c.id, Subset(c.retained, p)) for c, p in zip(whole, left, strict=True)]

    shards: dict[str, Any] = {"shards": 3, "shard_mode": "isolated"}
    trained = goldfish.train(goldfish.InProcess(make_clients(), small_net), **TRAINING, **shards)
    asked = [DeletionRequest(f"client-{n}", class_label=2) for n in (1, 2, 3)]
    first = goldfish.unlearn(trained, asked, method="retrain").trained
    first.save(tmp_path / "first")
    for sample_id in without_class_2()[0].retained.ids[:10]:
        request = DeletionRequest("client-1", sample_ids=[sample_id])
        digests = []
        for clients in (make_clients(), without_class_2()):
            federation = goldfish.InProcess(clients, small_net)
            start = goldfish.load(tmp_path / "first", federation)
            goldfish.unlearn(start, [request], rounds=1)
            kept = federation.states()["client-1"]
            digests.append([digest(kept[f"goldfish/shard-{n}"]) for n in range(3)])
        assert digests[0] == digests[1]


def test_what_is_honoured_already_is_not_done_again(
    make_clients: MakeClients, small_net: ModelFactory
) -> None:
    trained = goldfish.train(goldfish.InProcess(make_clients(), small_net), **TRAINING)
    first = goldfish.unlearn(trained, [FIRST], method="retrain")
    with pytest.raises(ConfigError, match="free of all that is asked for"):
        goldfish.unlearn(first, [FIRST])


def test_a_client_that_left_need_not_be_there_when_loaded(
    make_clients: MakeClients, small_net: ModelFactory, tmp_path: Path
) -> None:
    trained = goldfish.train(goldfish.InProcess(make_clients(), small_net), **TRAINING)
    left = goldfish.unlearn(trained, [DeletionRequest("client-3")], method="retrain")
    left.trained.save(tmp_path / "left")
    rest = goldfish.InProcess(make_clients()[:2], small_net)
    second = goldfish.unlearn(goldfish.load(tmp_path / "left", rest), [FIRST], method="retrain")
    assert not second.not_honoured
    trained.save(tmp_path / "whole")
    with pytest.raises(ConfigError, match="trained with client-3: not in this federation"):
        goldfish.load(tmp_path / "whole", rest)


def test_a_model_trained_elsewhere_unlearns(
    make_clients: MakeClients, small_net: ModelFactory
) -> None:
    """The same state dict and settings give the same bits as the training that it came from."""
    federation = goldfish.InProcess(make_clients(), small_net)
    trained = goldfish.train(federation, **TRAINING)
    adopted = goldfish.Trained.from_state_dict(federation, trained.model.state_dict(), **TRAINING)
    results = [
        goldfish.unlearn(start, [FIRST], method="goldfish-warm") for start in (trained, adopted)
    ]
    assert digest(results[0].params) == digest(results[1].params)
    with pytest.raises(ConfigError, match="does not fit the federation's model"):
        goldfish.Trained.from_state_dict(federation, {"weight": torch.zeros(2)})
    with pytest.raises(ConfigError, match="needs client updates that were not kept"):
        goldfish.unlearn(adopted, [FIRST], method="fed-eraser")


class Tied(nn.Module):
    """A model that holds one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.out(self.second(self.first(inputs).relu()).relu())
        return logits


def test_an_adopted_model_is_a_copy_in_the_models_own_types(
    make_clients: MakeClients, tmp_path: Path
) -> None:
    """What becomes of the module that it came from does not matter, and it can be saved."""
    federation = goldfish.InProcess(make_clients(), Tied)
    module = Tied()
    before = digest(params_of(module))
    adopted = goldfish.Trained.from_state_dict(federation, module.state_dict(), **TRAINING)
    with torch.no_grad():
        module.first.weight.zero_()
    assert digest(adopted.params) == before
    adopted.save(tmp_path / "adopted")
    assert digest(goldfish.load(tmp_path / "adopted", federation).params) == before

    double = goldfish.Trained.from_state_dict(federation, module.double().state_dict(), **TRAINING)
    assert {t.dtype for t in double.params.values()} == {torch.float32}
    module.out.bias.data[0] = math.nan
    with pytest.raises(ConfigError, match="not finite: that model has diverged"):
        goldfish.Trained.from_state_dict(federation, module.state_dict(), **TRAINING)


def test_broken_folders_are_a_sentence(
    make_clients: MakeClients, small_net: ModelFactory, tmp_path: Path
) -> None:
    federation = goldfish.InProcess(make_clients(), small_net)
    trained = goldfish.train(federation, **TRAINING)
    folder = trained.save(tmp_path / "trained")
    with pytest.raises(StoreError, match="holds a trained model already"):
        trained.save(folder)
    with pytest.raises(StoreError, match=r"trained\.json is missing"):
        goldfish.load(tmp_path, federation)
    about = folder / "trained.json"
    values = json.loads(about.read_text())
    about.write_text(json.dumps({**values, "version": 2}))
    with pytest.raises(StoreError, match="cannot be used"):
        goldfish.load(folder, federation)
    about.write_text(json.dumps(values))
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(StoreError):
        goldfish.load(folder, federation)


def test_a_trained_federation_prints_in_a_line(
    make_clients: MakeClients, small_net: ModelFactory
) -> None:
    """Neither its weights, nor kept updates, nor what clients keep."""
    federation = goldfish.InProcess(make_clients(), small_net)
    trained = goldfish.train(federation, keep_for=["fed-eraser"], **TRAINING)
    again = goldfish.unlearn(trained, [FIRST], method="fed-eraser")
    for printed in (repr(trained), repr(again)):
        assert "tensor" not in printed
        assert len(printed) < 3000
