"""Goldfish with a warm start: where the student begins, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import goldfish
from goldfish.methods.goldfish import GOLDFISH, GOLDFISH_WARM, GoldfishWarmSettings
from goldfish.methods.method import Method, deletion_kind
from goldfish.params import digest
from goldfish.types import Client, DeletionRequest, Params, Round
from goldfish.unlearning.basic_model import GoldfishSettings
from goldfish.unlearning.optimization import partition_shards
from goldfish.workflow import unlearning_plan

MakeClients = Callable[..., list[Client]]
SAMPLES = [DeletionRequest("client-1", sample_ids=[f"c1-{i}" for i in range(8)])]
CLASS = [DeletionRequest(f"client-{n}", class_label=2) for n in (1, 2, 3)]
LEAVES = [DeletionRequest("client-3")]
WEIGHTS = ("hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "out.weight", "out.bias")


def build(
    make_clients: MakeClients, model: type[nn.Module], workers: int = 1, **settings: Any
) -> goldfish.Trained:
    federation = goldfish.InProcess(make_clients(), model, workers=workers)
    return goldfish.train(
        federation, **{"rounds": 3, "learning_rate": 0.1, "batch_size": 8, **settings}
    )


@pytest.fixture
def trained(make_clients: MakeClients, small_net: type[nn.Module]) -> goldfish.Trained:
    return build(make_clients, small_net)


def unlearn(
    trained: goldfish.Trained,
    method: Method[Any],
    requests: list[DeletionRequest] | None = None,
    **more: Any,
) -> goldfish.Unlearned:
    more = {"rounds": 2, "adaptive_weights": False, **more}
    return goldfish.unlearn(trained, requests or SAMPLES, method=method, **more)


def far(a: Params, b: Params) -> float:
    return max((a[n] - b[n]).abs().max().item() for n in WEIGHTS)


def test_without_steps_the_warm_student_is_the_teacher(trained: goldfish.Trained) -> None:
    warm = unlearn(trained, GOLDFISH_WARM, learning_rate=1e-9)
    fresh = unlearn(trained, GOLDFISH, learning_rate=1e-9)
    assert far(warm.params, trained.params) < 1e-6
    assert far(fresh.params, trained.params) > 1e-2


def test_fresh_stays_the_default_of_goldfish(trained: goldfish.Trained) -> None:
    assert GoldfishSettings().student == "fresh"
    assert GoldfishWarmSettings().student == "teacher"
    default, said = unlearn(trained, GOLDFISH), unlearn(trained, GOLDFISH, student="fresh")
    assert digest(default.params) == digest(said.params)


def test_goldfish_warm_is_goldfish_with_another_start(trained: goldfish.Trained) -> None:
    warm, told = unlearn(trained, GOLDFISH_WARM), unlearn(trained, GOLDFISH, student="teacher")
    cold = unlearn(trained, GOLDFISH_WARM, student="fresh")
    assert digest(warm.params) == digest(told.params)
    assert digest(cold.params) == digest(unlearn(trained, GOLDFISH).params)


def test_it_needs_no_test_set_of_the_server(trained: goldfish.Trained) -> None:
    """Its clients count by their size unless adaptive weights are asked for."""
    assert goldfish.unlearn(trained, SAMPLES, method=GOLDFISH_WARM, rounds=1).rounds


@pytest.mark.parametrize("requests", [SAMPLES, CLASS], ids=["samples", "class"])
def test_what_it_claims_it_removes(
    trained: goldfish.Trained, requests: list[DeletionRequest]
) -> None:
    assert {deletion_kind(r) for r in requests} <= GOLDFISH_WARM.deletions
    result = unlearn(trained, GOLDFISH_WARM, requests)
    assert [r.failures for r in result.rounds] == [[], []]
    assert far(result.params, trained.params) > 1e-3


def test_a_client_that_leaves_is_refused(trained: goldfish.Trained) -> None:
    """Nobody would be left who pushes the old model away from the data."""
    with pytest.raises(goldfish.ConfigError, match="cannot remove what client-3 asks for"):
        unlearn(trained, GOLDFISH_WARM, LEAVES)
    with pytest.raises(goldfish.ConfigError, match="nobody is left to unteach the old model"):
        unlearn(trained, GOLDFISH, LEAVES, student="teacher")
    assert unlearn(trained, GOLDFISH, LEAVES).rounds


def test_the_result_says_that_it_may_remember(trained: goldfish.Trained) -> None:
    (note,) = unlearn(trained, GOLDFISH_WARM).notes
    assert "started from the old model" in note
    assert not unlearn(trained, GOLDFISH).notes


def test_a_stop_that_a_warm_student_meets_at_once_is_refused(trained: goldfish.Trained) -> None:
    with pytest.raises(goldfish.ConfigError, match="is so at once"):
        unlearn(trained, GOLDFISH_WARM, round_stop=True)


def test_with_shards_the_start_is_the_checkpoint_as_ever(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    """One shard of client-1 is hit: in the first round no client starts from the global model."""
    trained = build(make_clients, small_net, shards=4)
    shard = partition_shards(make_clients()[0], 4, 0)[2]
    request = [DeletionRequest("client-1", list(shard.retained.ids)[:2])]
    warm, fresh = (
        unlearn(trained, method, request, rounds=1) for method in (GOLDFISH_WARM, GOLDFISH)
    )
    for name, tensor in warm.params.items():
        assert torch.equal(tensor, fresh.params[name]), name


def test_same_bits_with_one_worker_and_with_two(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    results = [
        unlearn(build(make_clients, small_net, workers), GOLDFISH_WARM) for workers in (1, 2)
    ]
    assert digest(results[0].params) == digest(results[1].params)


def test_same_bits_after_every_interruption(trained: goldfish.Trained) -> None:
    settings = GoldfishWarmSettings()
    plan = unlearning_plan(
        trained,
        SAMPLES,
        GOLDFISH_WARM,
        settings,
        training=trained.settings,
        rounds=3,
        seed=trained.seed,
    )
    rounds = list(GOLDFISH_WARM.unlearn(plan, settings))
    for done in rounds:
        last = Round(done.index, done.params, (), (), 0, memo=done.memo)
        again = list(GOLDFISH_WARM.unlearn(replace(plan, last=last), settings))
        assert [digest(r.params) for r in again] == [digest(r.params) for r in rounds[done.index :]]
