"""Gradient ascent in a federation: who ascends, how far, and what comes after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.nn.functional as F  # noqa: N812
from torch import nn

import goldfish
from goldfish.data import removal
from goldfish.methods import fedavg
from goldfish.methods.gradient_ascent import GRADIENT_ASCENT, GradientAscentSettings, ascend_step
from goldfish.methods.method import Plan
from goldfish.params import digest, distance, num_bytes, weighted_mean
from goldfish.training.fit import predict
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import Client, DeletionRequest, Params, Round, Task, Update, Workspace
from goldfish.workflow import unlearning_plan

MakeClients = Callable[..., list[Client]]
SAMPLES = [DeletionRequest("client-1", sample_ids=[f"c1-{i}" for i in range(10)])]
TWO = [*SAMPLES, DeletionRequest("client-2", sample_ids=["c2-5", "c2-6"])]
CLASS = [DeletionRequest(f"client-{n}", class_label=2) for n in (1, 2, 3)]
LEAVES = [DeletionRequest("client-3")]
WEIGHTS = ("hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "out.weight", "out.bias")


def build(
    make_clients: MakeClients, model: Callable[[], nn.Module], workers: int = 1, **settings: Any
) -> goldfish.Trained:
    federation = goldfish.InProcess(make_clients(), model, workers=workers)
    return goldfish.train(
        federation, **{"rounds": 4, "learning_rate": 0.1, "batch_size": 8, **settings}
    )


@pytest.fixture
def trained(make_clients: MakeClients, small_net: type[nn.Module]) -> goldfish.Trained:
    return build(make_clients, small_net)


def plan_for(
    trained: goldfish.Trained, requests: list[DeletionRequest], rounds: int = 3, **more: Any
) -> Plan:
    return unlearning_plan(
        trained,
        requests,
        GRADIENT_ASCENT,
        GradientAscentSettings(),
        training=trained.settings,
        rounds=rounds,
        seed=trained.seed,
        **more,
    )


def rounds_of(plan: Plan, **settings: Any) -> list[Round]:
    return list(GRADIENT_ASCENT.unlearn(plan, GradientAscentSettings(**settings)))


def loss_on_removed(
    trained: goldfish.Trained, params: Params, requests: list[DeletionRequest]
) -> float:
    client = trained.federation._clients[requests[0].client_id]  # type: ignore[attr-defined]
    gone = removal.split(client, requests).removed
    assert gone is not None
    model = LocalWorkspace(trained.federation.model).load("m", params).module
    return F.cross_entropy(predict(model, gone), gone.labels).item()


@pytest.mark.parametrize(
    ("requests", "first", "later"),
    [
        (SAMPLES, ["client-1"], ["client-1", "client-2", "client-3"]),
        (TWO, ["client-1", "client-2"], ["client-1", "client-2", "client-3"]),
        (CLASS, ["client-1", "client-2", "client-3"], ["client-1", "client-2", "client-3"]),
        (LEAVES, ["client-3"], ["client-1", "client-2"]),
    ],
    ids=["samples", "two clients", "class", "client"],
)
def test_first_those_who_ask_then_those_who_stay(
    trained: goldfish.Trained, requests: list[DeletionRequest], first: list[str], later: list[str]
) -> None:
    rounds = rounds_of(plan_for(trained, requests))
    assert [r.index for r in rounds] == [1, 2, 3]
    assert [r.final for r in rounds] == [False, False, True]
    assert [u.client_id for u in rounds[0].updates] == first
    assert all([u.client_id for u in r.updates] == later for r in rounds[1:])
    size = num_bytes(trained.params)
    assert [r.bytes_sent for r in rounds] == [2 * size * len(c) for c in (first, later, later)]
    before = loss_on_removed(trained, trained.params, requests)
    assert loss_on_removed(trained, rounds[0].params, requests) > before + 0.3


def test_the_ascent_stays_in_the_ball_of_weights(trained: goldfish.Trained) -> None:
    """Radius 1/100 of the distance of the weights; BatchNorm's statistics stay the old model's."""
    plan = plan_for(trained, SAMPLES, rounds=1)
    (ascended,) = rounds_of(plan, radius=0.01)
    old, fresh, new = (
        {n: params[n] for n in WEIGHTS} for params in (trained.params, plan.fresh, ascended.params)
    )
    assert distance(old, new) == pytest.approx(0.01 * distance(old, fresh), rel=1e-4)
    for name in set(trained.params) - set(WEIGHTS):
        assert trained.params[name].equal(ascended.params[name]), name


def test_several_ascents_are_averaged_by_the_number_of_removed_samples(
    trained: goldfish.Trained,
) -> None:
    (ascended,) = rounds_of(plan_for(trained, TWO, rounds=1))
    assert [u.num_examples for u in ascended.updates] == [10, 2]
    mean = weighted_mean([u.params for u in ascended.updates], [10, 2])
    assert digest(ascended.params) == digest(mean)


def test_the_recovery_is_fedavg_from_the_ascended_model(
    trained: goldfish.Trained,
) -> None:
    plan = plan_for(trained, SAMPLES)
    rounds = rounds_of(plan)
    again = list(fedavg.train(replace(plan, last=rounds[0]), plan.fresh))
    assert [digest(r.params) for r in again] == [digest(r.params) for r in rounds[1:]]


def test_a_single_sample_can_be_removed_although_there_is_batch_norm(
    trained: goldfish.Trained,
) -> None:
    rounds = rounds_of(plan_for(trained, [DeletionRequest("client-1", ["c1-0"])]))
    assert all(not r.failures for r in rounds)
    assert rounds[0].updates[0].metrics["samples"] > 0


def test_requests_that_are_honoured_already_ascend_no_more(trained: goldfish.Trained) -> None:
    """The old model is free of the first request: only the second is ascended on."""
    more = DeletionRequest("client-1", sample_ids=["c1-20", "c1-21"])
    plan = plan_for(replace(trained, honoured=TWO), [more])
    first, second, _ = rounds_of(plan)
    assert [(u.client_id, u.num_examples) for u in first.updates] == [("client-1", 2)]
    assert [u.num_examples for u in second.updates] == [18, 22, 18]


def test_one_who_asks_and_does_not_answer_is_an_error(trained: goldfish.Trained) -> None:
    """Its data would stay in the model: the quorum of other rounds does not do."""

    def broken(task: Task[Any], client: Client, workspace: Workspace) -> Update:
        if task.client_id == "client-2":
            raise RuntimeError("gone fishing")
        return ascend_step(task, client, workspace)

    run = trained.federation.run

    def run_broken(tasks: Any) -> Any:
        return run([replace(task, step=replace(task.step, run=broken)) for task in tasks])

    trained.federation.run = run_broken  # type: ignore[method-assign]
    with pytest.raises(goldfish.QuorumError, match="gone fishing"):
        rounds_of(plan_for(trained, TWO))


def test_a_deletion_that_leaves_nothing_is_an_error_before_it_is_recovered_from(
    trained: goldfish.Trained,
) -> None:
    classes = [DeletionRequest(f"client-{n}", class_label=k) for n in (1, 2, 3) for k in range(3)]
    with pytest.raises(goldfish.ConfigError, match="No client has any data left in round 1"):
        rounds_of(plan_for(trained, classes, rounds=1))


def test_a_class_that_the_asking_client_does_not_hold_leaves_nothing_to_ascend(
    trained: goldfish.Trained,
) -> None:
    with pytest.raises(goldfish.ConfigError, match="hold nothing of what they want removed"):
        rounds_of(plan_for(trained, [DeletionRequest("client-1", class_label=9)]))


@pytest.mark.parametrize("requests", [TWO, LEAVES], ids=["samples", "client"])
def test_same_bits_with_one_worker_and_with_two(
    make_clients: MakeClients, small_net: type[nn.Module], requests: list[DeletionRequest]
) -> None:
    results = [
        goldfish.unlearn(
            build(make_clients, small_net, workers), requests, method=GRADIENT_ASCENT, rounds=3
        )
        for workers in (1, 2)
    ]
    assert digest(results[0].params) == digest(results[1].params)


def test_same_bits_after_every_interruption(trained: goldfish.Trained) -> None:
    plan = plan_for(trained, SAMPLES)
    rounds = rounds_of(plan)
    for done in rounds:
        last = Round(done.index, done.params, (), (), 0, memo=done.memo)
        again = rounds_of(replace(plan, last=last))
        assert [digest(r.params) for r in again] == [digest(r.params) for r in rounds[done.index :]]


def test_dropout_is_noticed_even_when_the_first_to_work_has_no_data_left(
    make_clients: MakeClients,
) -> None:
    """The engine looks at the model in the first round, here with a client that leaves."""

    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    trained = build(make_clients, dropping)
    results = []
    for workers in (1, 2, 2):
        federation = goldfish.InProcess(make_clients(), dropping, workers=workers)
        anew = replace(trained, federation=federation)
        results.append(goldfish.unlearn(anew, LEAVES, method=GRADIENT_ASCENT, rounds=3))
    assert len({digest(result.params) for result in results}) == 1


def test_the_result_says_that_it_may_come_back(trained: goldfish.Trained) -> None:
    (note,) = goldfish.unlearn(trained, SAMPLES, method=GRADIENT_ASCENT, rounds=2).notes
    assert "can bring a part of it back" in note
