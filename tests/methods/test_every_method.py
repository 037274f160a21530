"""What must hold for every method in the registry, found by the tests themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import goldfish
from goldfish.data import TensorExamples
from goldfish.methods import deletion_kind
from goldfish.params import digest
from goldfish.types import Client, DeletionRequest
from goldfish.workflow import unlearning_plan

MakeClients = Callable[..., list[Client]]
Prepare = Callable[..., goldfish.Trained]
NAMES = sorted(goldfish.METHODS)
REQUESTS = {
    "samples": [DeletionRequest("client-1", sample_ids=["c1-0", "c1-9"])],
    "class": [DeletionRequest(f"client-{n}", class_label=2) for n in (1, 2, 3)],
    "client": [DeletionRequest("client-3")],
    "two clients": [
        DeletionRequest("client-1", sample_ids=["c1-0"]),
        DeletionRequest("client-2", sample_ids=["c2-5", "c2-6"]),
    ],
}
HANDLED = [
    (name, what)
    for name in NAMES
    for what, requests in REQUESTS.items()
    if deletion_kind(requests[0]) in goldfish.METHODS[name].deletions
]
REFUSED = [(n, w) for n in NAMES for w in REQUESTS if (n, w) not in HANDLED]


@pytest.fixture
def prepared(make_clients: MakeClients, small_net: type[nn.Module]) -> Prepare:
    """Train a federation as a method needs it."""

    def prepare(name: str, workers: int | None = None) -> goldfish.Trained:
        federation = goldfish.InProcess(make_clients(), small_net, workers=workers)
        own = name if goldfish.METHODS[name].prepare else None
        keep = [] if own else [name]
        return goldfish.train(
            federation, method=own, keep_for=keep, rounds=4, learning_rate=0.1, batch_size=8
        )

    return prepare


def test_there_are_methods() -> None:
    assert len(NAMES) >= 9
    assert all(goldfish.METHODS[name].name == name for name in NAMES)
    for method in goldfish.METHODS.values():
        assert method.source, f"{method.name} cites no source"
        assert method.deletions
        assert method.settings.__doc__


@pytest.mark.parametrize(("name", "what"), HANDLED)
def test_every_kind_of_deletion_that_it_handles(
    prepared: Prepare, test_set: TensorExamples, name: str, what: str
) -> None:
    trained = prepared(name)
    result = goldfish.unlearn(trained, REQUESTS[what], method=name, rounds=3, test=test_set)
    assert [record.index for record in result.rounds] == list(range(1, len(result.rounds) + 1))
    assert all(not record.failures for record in result.rounds)
    assert result.rounds[-1].scores is not None
    assert digest(result.params) != digest(trained.params)


@pytest.mark.parametrize(("name", "what"), REFUSED)
def test_any_other_deletion_is_refused_in_words(
    prepared: Prepare, test_set: TensorExamples, name: str, what: str
) -> None:
    with pytest.raises(goldfish.ConfigError, match=rf"{name} cannot remove what client-\d asks"):
        goldfish.unlearn(prepared(name), REQUESTS[what], method=name, rounds=1, test=test_set)


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_depend_on_the_seed_and_not_on_the_workers(
    prepared: Prepare, test_set: TensorExamples, name: str
) -> None:
    def once(workers: int, seed: int | None = None) -> str:
        result = goldfish.unlearn(
            prepared(name, workers),
            REQUESTS["samples"],
            method=name,
            rounds=2,
            test=test_set,
            seed=seed,
        )
        return digest(result.params)

    assert once(1) == once(2)
    assert once(1) != once(1, seed=5)


@pytest.mark.parametrize("aggregation", ["size", "adaptive"])
@pytest.mark.parametrize("name", NAMES)
def test_who_measures_on_the_servers_test_set_says_so_and_counts_it(
    prepared: Prepare, test_set: TensorExamples, name: str, aggregation: str
) -> None:
    """The note is there exactly if something was measured, by whatever part of the method."""
    result = goldfish.unlearn(
        prepared(name),
        REQUESTS["samples"],
        method=name,
        rounds=3,
        test=test_set,
        aggregation=aggregation,
    )
    said = [note for note in result.notes if "The server's test set decided" in note]
    assert len(said) == (result.cost.measured_samples > 0)
    always = name in ("goldfish", "goldfish-sprint", "retrain-tuned")
    never = name in ("sisa", "fed-eraser", "fed-recovery", "goldfish-warm")
    assert bool(said) == (always or (aggregation == "adaptive" and not never))


def test_what_is_measured_is_named_and_counted(prepared: Prepare, test_set: TensorExamples) -> None:
    """60 test samples: 3 clients in each of 2 rounds, the teacher, and each round's student."""
    result = goldfish.unlearn(
        prepared("goldfish"),
        REQUESTS["samples"],
        rounds=2,
        test=test_set,
        round_stop=True,
        delta=0.0,
    )
    assert len(result.rounds) == 2
    assert [r.cost.measured_samples for r in result.rounds] == [60 * (1 + 3 + 1), 60 * (3 + 1)]
    assert "how much each client counts (equation 12) and when the rounds ended" in result.notes[-1]


@pytest.mark.parametrize("name", NAMES)
def test_resuming_after_any_round_gives_the_same_bits(
    prepared: Prepare, test_set: TensorExamples, name: str
) -> None:
    """Replay from each yielded round, with the clients' states of that moment put back."""
    method = goldfish.METHODS[name]
    trained = prepared(name)
    own = method.settings()
    plan = unlearning_plan(
        trained,
        REQUESTS["samples"],
        method,
        own,
        training=trained.settings,
        rounds=3,
        seed=0,
        test=test_set,
    )
    seen = []
    for this in method.unlearn(plan, own):
        seen.append((this, trained.federation.states()))
    assert seen[-1][0].final
    for this, states in seen[:-1]:
        trained.federation.restore(states)
        last = replace(this, updates=(), failures=(), bytes_sent=0)
        rest = list(method.unlearn(replace(plan, last=last), own))
        assert [r.index for r in rest] == [r.index for r, _ in seen[this.index :]]
        for again, (before, _) in zip(rest, seen[this.index :], strict=True):
            assert digest(again.params) == digest(before.params)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_sample_id_is_an_error_not_a_skipped_client(
    prepared: Prepare, test_set: TensorExamples, name: str
) -> None:
    """A request that cannot be honoured must not be passed over as one failed client."""
    request = DeletionRequest("client-1", sample_ids=["c1-0", "nobody"])
    with pytest.raises(goldfish.ConfigError, match="does not hold sample 'nobody'"):
        goldfish.unlearn(prepared(name), [request], method=name, rounds=1, test=test_set)


@pytest.mark.parametrize("name", [n for n in NAMES if "class" in goldfish.METHODS[n].deletions])
def test_a_class_that_nobody_holds_is_an_error(
    prepared: Prepare, test_set: TensorExamples, name: str
) -> None:
    trained = prepared(name)

    def unlearn(*clients: str) -> None:
        requests = [DeletionRequest(client, class_label=77) for client in clients]
        goldfish.unlearn(trained, requests, method=name, rounds=1, test=test_set)

    with pytest.raises(goldfish.ConfigError, match="'client-1' holds no sample of class 77"):
        unlearn("client-1")
    with pytest.raises(goldfish.ConfigError, match="None of the 3 clients that were asked holds"):
        unlearn("client-1", "client-2", "client-3")


def test_what_a_method_needs_must_have_been_kept(
    make_clients: MakeClients, small_net: type[nn.Module], test_set: TensorExamples
) -> None:
    plain = goldfish.train(goldfish.InProcess(make_clients(), small_net), rounds=4)
    with pytest.raises(goldfish.ConfigError, match=r"keep_for=\['fed-eraser'\]"):
        goldfish.unlearn(plain, REQUESTS["samples"], method="fed-eraser", test=test_set)
    with pytest.raises(goldfish.ConfigError, match="a training of its own"):
        goldfish.unlearn(plain, REQUESTS["samples"], method="sisa", test=test_set)
    with pytest.raises(goldfish.ConfigError, match="has no training of its own"):
        goldfish.train(plain.federation, method="goldfish", rounds=1)


def test_participation_asks_a_share_of_the_clients(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    federation = goldfish.InProcess(make_clients((20,) * 6), small_net)
    trained = goldfish.train(federation, rounds=8, participation=0.5, batch_size=20)
    size = sum(t.numel() * t.element_size() for t in trained.params.values())
    assert [r.cost.bytes_sent for r in trained.rounds] == [2 * 3 * size] * 8
    assert [r.cost.steps for r in trained.rounds] == [3] * 8
    again = goldfish.train(federation, rounds=8, participation=0.5, batch_size=20)
    assert digest(again.params) == digest(trained.params)
    assert torch.isfinite(trained.params["out.weight"]).all()
