"""The server's side of Goldfish, and what its clients do with shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import goldfish
from goldfish.data import TensorExamples
from goldfish.data.removal import split
from goldfish.methods import ordinary
from goldfish.params import digest, num_bytes
from goldfish.types import Client, DeletionRequest, Params
from goldfish.unlearning.optimization import combine, partition_shards
from goldfish.workflow import training_plan

MakeClients = Callable[..., list[Client]]
SHARDS = 4


@pytest.fixture
def trained(make_clients: MakeClients, small_net: type[nn.Module]) -> goldfish.Trained:
    federation = goldfish.InProcess(make_clients(), small_net)
    return goldfish.train(federation, rounds=3, learning_rate=0.1, batch_size=8)


@pytest.fixture
def sharded(
    make_clients: MakeClients, small_net: type[nn.Module], request: pytest.FixtureRequest
) -> goldfish.Trained:
    federation = goldfish.InProcess(make_clients(), small_net)
    mode = getattr(request, "param", "shared")
    return goldfish.train(
        federation, rounds=3, learning_rate=0.1, batch_size=8, shards=SHARDS, shard_mode=mode
    )


def hit_one_shard(make_clients: MakeClients, seed: int = 0) -> tuple[DeletionRequest, int]:
    """Return a request for two samples that lie in one shard of client-1, and that shard."""
    shard = partition_shards(make_clients()[0], SHARDS, seed)[2]
    return DeletionRequest("client-1", sample_ids=list(shard.retained.ids)[:2]), shard.index


def kept(trained: goldfish.Trained, client: str, phase: str) -> dict[int, Params]:
    states: Mapping[str, Params] = trained.federation.states()[client]
    return {
        int(key.rsplit("-", 1)[1]): params
        for key, params in states.items()
        if key.startswith(f"{phase}/")
    }


def unlearn(trained: goldfish.Trained, request: DeletionRequest, **more: Any) -> goldfish.Unlearned:
    return goldfish.unlearn(trained, [request], **{"rounds": 1, "adaptive_weights": False, **more})


def test_the_teacher_travels_once(trained: goldfish.Trained) -> None:
    result = unlearn(trained, DeletionRequest("client-1", ["c1-1"]), rounds=3)
    model = num_bytes(trained.params)
    assert [r.cost.bytes_sent for r in result.rounds] == [9 * model, 6 * model, 6 * model]


def test_adaptive_weights_need_the_servers_test_set(trained: goldfish.Trained) -> None:
    with pytest.raises(goldfish.ConfigError, match=r"pass one \(test=\.\.\.\)"):
        unlearn(trained, DeletionRequest("client-1", ["c1-1"]), adaptive_weights=True)


def test_adaptive_weights_change_the_aggregate(
    trained: goldfish.Trained, test_set: TensorExamples
) -> None:
    request = DeletionRequest("client-1", ["c1-1"])
    adaptive = unlearn(trained, request, adaptive_weights=True, test=test_set)
    by_size = unlearn(trained, request)
    assert digest(adaptive.params) != digest(by_size.params)


def test_round_stop_ends_when_the_student_is_as_good_as_the_teacher(
    trained: goldfish.Trained, test_set: TensorExamples
) -> None:
    request = DeletionRequest("client-1", ["c1-1"])
    easy = unlearn(trained, request, rounds=5, round_stop=True, delta=100.0, test=test_set)
    hard = unlearn(
        trained, request, rounds=3, round_stop=True, delta=0.0, test=test_set, learning_rate=1e-6
    )
    assert (len(easy.rounds), len(hard.rounds)) == (1, 3)
    with pytest.raises(goldfish.ConfigError, match="round_stop compares losses"):
        unlearn(trained, request, round_stop=True)


@pytest.mark.parametrize("sharded", ["shared", "isolated"], indirect=True)
def test_only_the_shard_that_was_hit_is_retrained(
    sharded: goldfish.Trained, make_clients: MakeClients
) -> None:
    """In the first round all other shards keep their bits, and the others' clients take no step."""
    request, hit = hit_one_shard(make_clients)
    result = unlearn(sharded, request)
    for client in ("client-1", "client-2", "client-3"):
        before, after = kept(sharded, client, "origin"), kept(sharded, client, "goldfish")
        for index in range(SHARDS):
            changed = digest(before[index]) != digest(after[index])
            assert changed == (client == "client-1" and index == hit), (client, index)
    remaining = len(partition_shards(make_clients()[0], SHARDS, 0)[hit].retained) - 2
    assert result.cost.steps == 1  # six samples left in the shard, one batch of eight
    assert remaining < 8


@pytest.mark.parametrize(
    ("sharded", "all_move"), [("shared", True), ("isolated", False)], indirect=["sharded"]
)
def test_later_rounds(
    sharded: goldfish.Trained, make_clients: MakeClients, *, all_move: bool
) -> None:
    """Shared shards start again from the global model; isolated ones that were not hit stay."""
    request, hit = hit_one_shard(make_clients)
    unlearn(sharded, request, rounds=2)
    before, after = kept(sharded, "client-2", "origin"), kept(sharded, "client-2", "goldfish")
    moved = {index for index in before if digest(before[index]) != digest(after[index])}
    assert moved == (set(range(SHARDS)) if all_move else set())
    own_before, own_after = (
        kept(sharded, "client-1", "origin"),
        kept(sharded, "client-1", "goldfish"),
    )
    assert digest(own_before[hit]) != digest(own_after[hit])


@pytest.mark.parametrize("sharded", ["isolated"], indirect=True)
def test_isolated_shards_never_depend_on_other_clients(
    sharded: goldfish.Trained, make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    alone = goldfish.train(
        goldfish.InProcess(make_clients()[:1], small_net, threads=1),
        rounds=3,
        learning_rate=0.1,
        batch_size=8,
        shards=SHARDS,
        shard_mode="isolated",
    )
    together, single = kept(sharded, "client-1", "origin"), kept(alone, "client-1", "origin")
    assert {i: digest(p) for i, p in together.items()} == {i: digest(p) for i, p in single.items()}


@pytest.mark.parametrize("sharded", ["isolated"], indirect=True)
def test_an_isolated_shard_that_was_not_hit_never_saw_the_removed_samples(
    sharded: goldfish.Trained, make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    """Train without the removed samples from the start: all other shards get the same bits."""
    request, hit = hit_one_shard(make_clients)
    federation = goldfish.InProcess(make_clients(), small_net)
    plan = replace(training_plan(federation, sharded.settings), requests=(request,))
    rounds = list(ordinary.train(plan, plan.fresh))
    never = goldfish.Trained(federation, rounds[-1].params, sharded.settings, 0)
    for client in ("client-1", "client-2", "client-3"):
        clean, original = kept(never, client, "origin"), kept(sharded, client, "origin")
        for index in range(SHARDS):
            same = digest(clean[index]) == digest(original[index])
            assert same == (client != "client-1" or index != hit), (client, index)


def test_retraining_the_client_recovers_its_shards_by_equation_10(
    sharded: goldfish.Trained, make_clients: MakeClients
) -> None:
    """After recovery, equation (8) of the kept shard models is again the client's model."""
    request, _ = hit_one_shard(make_clients)
    captured: dict[str, Params] = {}
    original_run = sharded.federation.run

    def spy(*args: Any) -> Any:
        replies = original_run(*args)
        captured.update({u.client_id: u.params for u in replies.updates})
        return replies

    sharded.federation.run = spy  # type: ignore[method-assign, assignment]
    unlearn(sharded, request, shard_retraining="client", rounds=2)
    for client in make_clients():
        shards = partition_shards(split(client, [request]), SHARDS, 0)
        sizes = {shard.index: len(shard.retained) for shard in shards}
        again = combine(kept(sharded, client.id, "goldfish"), sizes)
        for name, tensor in captured[client.id].items():
            if name == "norm.num_batches_tracked":
                continue  # a counter, never averaged
            if name == "norm.running_var":
                assert (again[name] >= 0).all()  # where (10) gives less, it is not followed
                continue
            assert torch.allclose(again[name].double(), tensor.double(), atol=1e-5), name


def test_a_whole_shard_can_go(sharded: goldfish.Trained, make_clients: MakeClients) -> None:
    shard = partition_shards(make_clients()[0], SHARDS, 0)[1]
    result = unlearn(sharded, DeletionRequest("client-1", list(shard.retained.ids)))
    assert result.cost.steps == 0  # nothing of it is left to retrain, nothing else was hit
    assert sorted(kept(sharded, "client-1", "goldfish")) == [0, 2, 3]


def test_several_shards_at_once(sharded: goldfish.Trained, make_clients: MakeClients) -> None:
    shards = partition_shards(make_clients()[0], SHARDS, 0)
    ids = [next(iter(shards[i].retained.ids)) for i in (0, 3)]
    unlearn(sharded, DeletionRequest("client-1", ids))
    before, after = kept(sharded, "client-1", "origin"), kept(sharded, "client-1", "goldfish")
    assert {i for i in before if digest(before[i]) != digest(after[i])} == {0, 3}


def test_all_shards_hit_start_fresh(sharded: goldfish.Trained, make_clients: MakeClients) -> None:
    """No shard is left to take a checkpoint from: the client starts from the fresh student."""
    shards = partition_shards(make_clients()[0], SHARDS, 0)
    request = DeletionRequest("client-1", [next(iter(s.retained.ids)) for s in shards])
    tiny = unlearn(sharded, request, learning_rate=1e-9)
    after = kept(sharded, "client-1", "goldfish")
    assert tiny.cost.steps == SHARDS
    distances = [(after[0][n] - after[3][n]).abs().max() for n in ("hidden.weight", "out.weight")]
    assert max(distances) < 1e-6  # both still at the one fresh start
    trained_weight = kept(sharded, "client-1", "origin")[0]["hidden.weight"]
    assert (after[0]["hidden.weight"] - trained_weight).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("sharded", "words"),
    [("shared", "not free of it"), ("isolated", "never saw the removed")],
    indirect=["sharded"],
)
def test_the_result_says_which_kind_of_shards_was_used(
    sharded: goldfish.Trained, make_clients: MakeClients, words: str
) -> None:
    request, _ = hit_one_shard(make_clients)
    (note,) = unlearn(sharded, request).notes
    assert words in note


@pytest.mark.parametrize("sharded", ["isolated"], indirect=True)
def test_client_retraining_would_end_isolation(
    sharded: goldfish.Trained, make_clients: MakeClients
) -> None:
    request, _ = hit_one_shard(make_clients)
    with pytest.raises(goldfish.ConfigError, match="ends their isolation"):
        unlearn(sharded, request, shard_retraining="client")
