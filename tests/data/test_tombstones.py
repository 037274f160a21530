"""A deletion lasts: what a client was asked to remove is left out of everything from then on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import goldfish
from goldfish.data import Subset, TensorExamples, removal
from goldfish.params import digest
from goldfish.types import Client, DeletionRequest
from goldfish.unlearning.optimization import partition_shards

MakeClients = Callable[..., list[Client]]
Net = type[nn.Module]
REQUEST = DeletionRequest("client-1", sample_ids=["c1-0", "c1-9"])
SETTINGS: dict[str, Any] = {"rounds": 2, "batch_size": 8}


def never_had(clients: list[Client], *ids: str) -> list[Client]:
    """Return the clients as if they had never held these samples."""
    parts = [[p for p, i in enumerate(c.retained.ids) if i not in ids] for c in clients]
    return [Client(c.id, Subset(c.retained, part)) for c, part in zip(clients, parts, strict=True)]


def test_a_later_training_leaves_removed_samples_out(
    make_clients: MakeClients, small_net: Net, test_set: TensorExamples
) -> None:
    clients = make_clients()
    federation = goldfish.InProcess(clients, small_net)
    trained = goldfish.train(federation, **SETTINGS)
    goldfish.unlearn(trained, [REQUEST], rounds=1, test=test_set)
    again = goldfish.train(federation, **SETTINGS)
    never = goldfish.train(
        goldfish.InProcess(never_had(make_clients(), "c1-0", "c1-9"), small_net), **SETTINGS
    )
    assert digest(again.params) == digest(never.params) != digest(trained.params)
    other = goldfish.train(goldfish.InProcess(clients, small_net), **SETTINGS)
    assert digest(other.params) == digest(never.params), "the client itself remembers"
    clients[0].state.tombstones.clear()
    lifted = goldfish.train(federation, **SETTINGS)
    assert digest(lifted.params) == digest(trained.params)


WRONG = {
    "an id that its client does not hold": [REQUEST, DeletionRequest("client-2", ["c9"])],
    "a class that nobody holds": [REQUEST, DeletionRequest("client-2", class_label=7)],
    "all clients": [DeletionRequest(f"client-{n}") for n in (1, 2, 3)],
    "all samples": [
        DeletionRequest(f"client-{n}", [f"c{n}-{i}" for i in range(size)])
        for n, size in ((1, 30), (2, 24), (3, 18))
    ],
}


@pytest.mark.parametrize("what", WRONG)
def test_a_deletion_that_is_refused_removes_nothing(
    make_clients: MakeClients, small_net: Net, what: str
) -> None:
    clients = make_clients()
    federation = goldfish.InProcess(clients, small_net)
    trained = goldfish.train(federation, shards=2, **SETTINGS)
    kept = federation.states()
    with pytest.raises(goldfish.ConfigError):
        goldfish.unlearn(trained, WRONG[what], rounds=1)
    assert not any(client.state.tombstones for client in clients)
    assert federation.states().keys() == kept.keys()
    again = goldfish.train(federation, shards=2, **SETTINGS)
    assert digest(again.params) == digest(trained.params)


@pytest.mark.parametrize("method", ["fed-recovery", "goldfish"])
def test_a_client_that_leaves_remembers_it_too(
    make_clients: MakeClients, small_net: Net, test_set: TensorExamples, method: str
) -> None:
    """No method asks it for anything, and it is told all the same."""
    clients = make_clients()
    federation = goldfish.InProcess(clients, small_net)
    trained = goldfish.train(federation, keep_for=["fed-recovery"], **SETTINGS)
    leave = DeletionRequest("client-3")
    goldfish.unlearn(trained, [leave], method=method, rounds=1, test=test_set)
    assert len(clients[2].state.tombstones) == 18
    again = goldfish.train(federation, **SETTINGS)
    two = goldfish.train(goldfish.InProcess(make_clients()[:2], small_net), **SETTINGS)
    assert digest(again.params) == digest(two.params)


def test_what_was_deleted_from_the_disk_is_no_error(make_clients: MakeClients) -> None:
    """Its owner asked, remembers, and deleted the samples: they count as gone."""
    client, *_ = make_clients()
    with pytest.raises(goldfish.ConfigError, match="does not hold samples 'c1-0', 'c1-9'"):
        removal.split(never_had([client], "c1-0", "c1-9")[0], [REQUEST])
    before = removal.split(client, [REQUEST])
    shards = [list(shard.retained.ids) for shard in partition_shards(before, 3, 0)]
    (left,) = never_had([client], "c1-0", "c1-9")
    left.state.tombstones.update(["c1-0", "c1-9"])
    after = removal.split(left, [REQUEST])
    assert after.removed is None
    assert sorted(after.gone) == ["c1-0", "c1-9"]
    assert [list(shard.retained.ids) for shard in partition_shards(after, 3, 0)] == shards


@pytest.mark.parametrize(
    "name", ["goldfish-sprint", "goldfish-warm", "incompetent-teacher", "gradient-ascent"]
)
def test_a_method_that_must_see_them_once_more_says_so(
    make_clients: MakeClients, small_net: Net, test_set: TensorExamples, name: str
) -> None:
    trained = goldfish.train(goldfish.InProcess(make_clients(), small_net), **SETTINGS)
    clients = never_had(make_clients(), "c1-0")
    clients[0].state.tombstones.update(["c1-0", "c1-9"])
    later = replace(trained, federation=goldfish.InProcess(clients, small_net))
    with pytest.raises(goldfish.ConfigError, match="'c1-0' of client-1 is not there any more"):
        goldfish.unlearn(later, [REQUEST], method=name, rounds=1, test=test_set)
    done = goldfish.unlearn(later, [REQUEST], method="retrain", rounds=1, test=test_set)
    assert not done.not_honoured


@pytest.mark.parametrize(
    "name", ["goldfish-sprint", "goldfish-warm", "incompetent-teacher", "gradient-ascent"]
)
def test_a_later_request_may_name_earlier_samples_once_more(
    make_clients: MakeClients, small_net: Net, test_set: TensorExamples, name: str
) -> None:
    """Here or deleted since, by id or by its class: the model is free of it, and of more now."""
    clients = make_clients()
    of_class = int(clients[0].retained.labels[4])
    trained = goldfish.train(goldfish.InProcess(clients, small_net), **SETTINGS)
    before = [REQUEST, DeletionRequest("client-1", class_label=of_class)]
    done = goldfish.unlearn(trained, before, method=name, rounds=1, test=test_set)
    left = next(i for i, k in enumerate(clients[0].retained.labels) if k != of_class and i > 9)
    more = DeletionRequest("client-1", sample_ids=["c1-0", "c1-4", f"c1-{left}"])
    for deleted in ((), ("c1-0",)):
        own = never_had(clients, *deleted)
        own[0].state.tombstones.update(clients[0].state.tombstones)
        later = replace(done.trained, federation=goldfish.InProcess(own, small_net))
        again = goldfish.unlearn(later, [more], method=name, rounds=1, test=test_set)
        assert not again.not_honoured
        with pytest.raises(goldfish.ConfigError, match="free of all that is asked for"):
            goldfish.unlearn(later, [DeletionRequest("client-1", sample_ids=["c1-9"])], method=name)


def test_earlier_requests_are_gone_and_new_ones_removed(make_clients: MakeClients) -> None:
    client, *_ = make_clients()
    later = DeletionRequest("client-1", sample_ids=["c1-9", "c1-4"])
    split = removal.split(client, [later], [REQUEST])
    assert split.removed is not None
    assert list(split.removed.ids) == ["c1-4"]
    assert sorted(split.gone) == ["c1-0", "c1-9"]
    assert len(split.retained) == 27
