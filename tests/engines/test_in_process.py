"""The in-process engine: same bits whatever the workers, failures survived, states kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import goldfish
from goldfish.data import Subset, TensorExamples
from goldfish.errors import ConfigError
from goldfish.federation.in_process import _pin, _pool
from goldfish.params import digest
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import Client, DeletionRequest

MakeClients = Callable[..., list[Client]]


class Broken(TensorExamples):
    """A client whose disk fails."""

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        raise OSError("the disk is gone")


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


@pytest.mark.parametrize("shards", [1, 3])
def test_bits_do_not_depend_on_workers(
    make_clients: MakeClients, small_net: type[nn.Module], test_set: TensorExamples, shards: int
) -> None:
    def result(workers: int) -> tuple[str, str]:
        federation = goldfish.InProcess(make_clients(), small_net, workers=workers)
        trained = goldfish.train(
            federation, rounds=2, learning_rate=0.1, batch_size=8, shards=shards
        )
        request = DeletionRequest("client-1", sample_ids=["c1-3", "c1-4"])
        unlearned = goldfish.unlearn(trained, [request], rounds=2, test=test_set)
        return digest(trained.params), digest(unlearned.params)

    assert result(1) == result(2) == result(3)


def test_the_client_with_the_most_data_is_trained_first(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    """Begun last, it would keep one worker busy alone. Who is trained shows in who is read."""
    read: list[str] = []

    class Watched(TensorExamples):
        def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
            read.append(self.ids[0].partition("-")[0])
            return super().batch(positions)

    clients = []
    for client, size in zip(make_clients(), (4, 12, 8), strict=True):
        data = client.retained
        assert isinstance(data, TensorExamples)
        own = Watched(data.images[:size], data.labels[:size], data.ids[:size])
        clients.append(replace(client, retained=own))
    goldfish.train(goldfish.InProcess(clients, small_net, workers=1), rounds=1)
    order = list(dict.fromkeys(read[1:]))  # the first one was asked whether its model has dropout
    assert order == ["c2", "c3", "c1"]


def test_bits_of_a_model_with_dropout_do_not_depend_on_workers(make_clients: MakeClients) -> None:
    """Dropout draws from torch's global generator, which all threads share."""

    def result(workers: int) -> str:
        federation = goldfish.InProcess(make_clients(), with_dropout, workers=workers)
        return digest(goldfish.train(federation, rounds=3, batch_size=4, local_epochs=3).params)

    assert result(1) == result(3)


class Jittered(TensorExamples):
    """Data with a random transform of its own, as torchvision's are."""

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        inputs, labels = super().batch(positions)
        return inputs + torch.randn(inputs.shape), labels


def test_random_transforms_are_noticed_at_every_client(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    """The first client's data draws nothing; what the others draw was once a matter of chance."""

    def result(workers: int, callers_seed: int) -> str:
        first, *others = make_clients()
        clients = [first]
        for client in others:
            inputs, labels = client.retained.batch(torch.arange(len(client.retained)))
            clients.append(replace(client, retained=Jittered(inputs, labels, client.retained.ids)))
        torch.manual_seed(callers_seed)
        federation = goldfish.InProcess(clients, small_net, workers=workers)
        return digest(goldfish.train(federation, rounds=2, learning_rate=0.1, batch_size=8).params)

    assert result(1, callers_seed=1) == result(1, callers_seed=2) == result(3, callers_seed=3)


def test_dropout_is_noticed_when_the_first_task_goes_to_a_client_without_data(
    make_clients: MakeClients, tmp_path: Path
) -> None:
    """A client has deleted its data and leaves: its request is filed before anybody trains."""
    goldfish.train(goldfish.InProcess(make_clients(), with_dropout), rounds=1).save(tmp_path / "t")

    def result(workers: int) -> str:
        first, *others = make_clients()
        emptied = replace(first, retained=Subset(first.retained, []))
        federation = goldfish.InProcess([emptied, *others], with_dropout, workers=workers)
        trained = goldfish.load(tmp_path / "t", federation)
        more: dict[str, Any] = {
            "method": "retrain",
            "rounds": 1,
            "local_epochs": 2,
            "batch_size": 4,
        }
        torch.manual_seed(workers)
        return digest(goldfish.unlearn(trained, [DeletionRequest(first.id)], **more).params)

    assert result(1) == result(2)


def test_the_callers_random_numbers_are_left_alone(make_clients: MakeClients) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    goldfish.train(goldfish.InProcess(make_clients(), with_dropout, workers=1), rounds=1)
    assert torch.equal(torch.rand(3), expected)


def test_a_client_that_raises_is_reported_and_survived(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    clients = make_clients()
    broken = clients[1].retained
    assert isinstance(broken, TensorExamples)
    clients[1] = replace(clients[1], retained=Broken(broken.images, broken.labels, broken.ids))
    trained = goldfish.train(goldfish.InProcess(clients, small_net), rounds=2)
    for record in trained.rounds:
        assert [(f.client_id, f.error, f.cause) for f in record.failures] == [
            ("client-2", "OSError", "the disk is gone")
        ]
    healthy = goldfish.train(goldfish.InProcess([clients[0], clients[2]], small_net), rounds=2)
    assert digest(trained.params) == digest(healthy.params)


def test_below_the_quorum_the_round_is_an_error(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    clients = make_clients()
    for place in (0, 1):
        data = clients[place].retained
        assert isinstance(data, TensorExamples)
        clients[place] = replace(
            clients[place], retained=Broken(data.images, data.labels, data.ids)
        )
    federation = goldfish.InProcess(clients, small_net)
    message = r"Only 1 of 3 clients answered in round 1 of origin; the quorum is 50%.*disk is gone"
    with pytest.raises(goldfish.QuorumError, match=message):
        goldfish.train(federation, rounds=1)
    assert len(goldfish.train(federation, rounds=1, quorum=0.3).rounds) == 1


def test_states_can_be_taken_out_and_put_back(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    federation = goldfish.InProcess(make_clients(), small_net)
    goldfish.train(federation, rounds=1, shards=2)
    states = federation.states()
    assert {c: sorted(kept) for c, kept in states.items()} == {
        f"client-{n}": ["origin/shard-0", "origin/shard-1"] for n in (1, 2, 3)
    }
    federation.restore({})
    assert federation.states() == {}
    federation.restore(states)
    assert digest(federation.states()["client-2"]["origin/shard-1"]) == digest(
        states["client-2"]["origin/shard-1"]
    )


@pytest.mark.parametrize(
    ("cores", "clients", "threads"), [(2, 3, 1), (3, 3, 1), (8, 3, 2), (8, 1, 8), (None, 3, 1)]
)
def test_fewer_clients_than_cores_share_the_cores(
    make_clients: MakeClients,
    small_net: type[nn.Module],
    monkeypatch: pytest.MonkeyPatch,
    cores: int | None,
    clients: int,
    threads: int,
) -> None:
    """The threads of a client depend on clients and cores, never on the number of workers."""
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    for workers in (None, 1, 3):
        federation = goldfish.InProcess(make_clients()[:clients], small_net, workers=workers)
        assert federation.threads == threads
    assert goldfish.InProcess(make_clients(), small_net, threads=5).threads == 5


@pytest.mark.parametrize("name", ["workers", "threads"])
def test_workers_and_threads_are_at_least_one(
    make_clients: MakeClients, small_net: type[nn.Module], name: str
) -> None:
    with pytest.raises(goldfish.ConfigError, match=f"{name} must be at least 1, not 0"):
        goldfish.InProcess(make_clients(), small_net, **{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "and there is none"), (["a", "b", "a"], "these ids are used twice: a")],
)
def test_a_federation_needs_clients_with_different_ids(
    make_clients: MakeClients, small_net: type[nn.Module], ids: list[str], message: str
) -> None:
    data = make_clients()[0].retained
    with pytest.raises(goldfish.ConfigError, match=message):
        goldfish.InProcess([Client(i, data) for i in ids], small_net)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_models_learn_the_same(
    make_clients: Callable[..., list[Client]], small_net: type[nn.Module]
) -> None:
    found = []
    for compiled in (False, True):
        federation = goldfish.InProcess(make_clients((40, 40)), small_net, compiled=compiled)
        trained = goldfish.train(federation, rounds=2, learning_rate=0.05, batch_size=20)
        found.append(trained.params)
    for name, value in found[0].items():
        assert torch.allclose(found[1][name].double(), value.double(), atol=1e-5), name


def test_an_unknown_device_is_refused_in_words(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    with pytest.raises(ConfigError, match="device is 'cpu' or 'cuda', not 'tpu'"):
        goldfish.InProcess(make_clients(), small_net, device="tpu")


def test_pinned_clients_share_the_data_evenly(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    """60 samples and 20 for the first two clients; 20, 20 and 10 then go where there is less."""
    clients = make_clients((60, 20, 20, 20, 10))
    first, second = (_pool([LocalWorkspace(small_net)]) for _ in range(2))
    pinned = _pin(clients, [first, second])
    assert list(pinned) == [client.id for client in clients]
    assert list(pinned.values()) == [first, second, second, second, first]
