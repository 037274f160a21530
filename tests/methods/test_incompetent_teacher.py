"""Bad teaching in a federation: who imitates whom, what travels, and the same bits again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import goldfish
from goldfish.data import TensorExamples, removal
from goldfish.methods.incompetent_teacher import (
    BAD_TEACHING,
    INCOMPETENT_TEACHER,
    IncompetentTeacherSettings,
    bad_teaching_step,
)
from goldfish.methods.method import Plan
from goldfish.params import digest, distance, num_bytes
from goldfish.training.fit import predict
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import (
    Client,
    Context,
    DeletionRequest,
    Examples,
    Params,
    Round,
    RoundReplies,
    Task,
)
from goldfish.workflow import unlearning_plan

MakeClients = Callable[..., list[Client]]
GONE = [f"c1-{i}" for i in range(12)]
SAMPLES = [DeletionRequest("client-1", sample_ids=GONE)]
CLASS = [DeletionRequest(f"client-{n}", class_label=2) for n in (1, 2, 3)]


def build(
    make_clients: MakeClients, model: type[nn.Module], workers: int = 1, **settings: Any
) -> goldfish.Trained:
    federation = goldfish.InProcess(make_clients(), model, workers=workers)
    return goldfish.train(
        federation, **{"rounds": 4, "learning_rate": 0.1, "batch_size": 8, **settings}
    )


@pytest.fixture
def trained(make_clients: MakeClients, small_net: type[nn.Module]) -> goldfish.Trained:
    return build(make_clients, small_net)


def unlearn(
    trained: goldfish.Trained, requests: list[DeletionRequest], **more: Any
) -> goldfish.Unlearned:
    more = {"rounds": 3, **more}
    return goldfish.unlearn(trained, requests, method=INCOMPETENT_TEACHER, **more)


def plan_for(trained: goldfish.Trained, rounds: int = 3) -> Plan:
    return unlearning_plan(
        trained,
        SAMPLES,
        INCOMPETENT_TEACHER,
        IncompetentTeacherSettings(),
        training=trained.settings,
        rounds=rounds,
        seed=trained.seed,
    )


def answers(plan: Plan) -> RoundReplies:
    """Return what the clients answer in the first round."""
    (first,) = INCOMPETENT_TEACHER.unlearn(replace(plan, rounds=1), IncompetentTeacherSettings())
    return RoundReplies(first.updates, first.failures)


def confidence(trained: goldfish.Trained, params: Params, parts: list[Examples]) -> float:
    """Return the mean probability that a model gives to the labels."""
    model = LocalWorkspace(trained.federation.model).load("m", params).module
    return (
        torch.cat(
            [predict(model, part).softmax(dim=1).gather(1, part.labels[:, None]) for part in parts]
        )
        .mean()
        .item()
    )


@pytest.mark.parametrize("requests", [SAMPLES, CLASS], ids=["samples", "class"])
def test_removed_samples_lose_the_probability_of_their_label(
    make_clients: MakeClients, small_net: type[nn.Module], requests: list[DeletionRequest]
) -> None:
    """The others lose less: what is alike on both sides is taught both ways."""
    trained = build(make_clients, small_net, rounds=20)
    result = unlearn(trained, requests, rounds=12)
    parts = [removal.split(client, requests) for client in make_clients()]
    retained = [part.retained for part in parts]
    removed = [part.removed for part in parts if part.removed is not None]
    lost, kept = (
        confidence(trained, trained.params, data) - confidence(trained, result.params, data)
        for data in (removed, retained)
    )
    assert lost > 0.1
    assert lost > kept + 0.05


def test_clients_without_removed_data_stay_with_the_competent_teacher(
    make_clients: MakeClients,
) -> None:
    """Their student *is* the teacher: without BatchNorm there is nothing to learn, to the bit."""

    def linear() -> nn.Module:
        return nn.Linear(6, 3)

    federation = goldfish.InProcess(make_clients(), linear)
    trained = goldfish.train(federation, rounds=2, learning_rate=0.1, batch_size=8)
    updates = answers(plan_for(trained)).updates
    moved = [distance(u.params, trained.params) for u in updates]
    assert moved[0] > 1e-2
    assert max(moved[1:]) < 1e-6
    assert [u.metrics["loss"] < 1e-9 for u in updates] == [False, True, True]


def test_clients_count_by_all_that_they_train_on(trained: goldfish.Trained) -> None:
    """Removed samples are part of the mixture: 18 + 12, 24 and 18."""
    assert [u.num_examples for u in answers(plan_for(trained)).updates] == [30, 24, 18]


def test_both_teachers_travel_once(trained: goldfish.Trained) -> None:
    """Three clients: student both ways, and the two teachers in the first round."""
    size = num_bytes(trained.params)
    result = unlearn(trained, SAMPLES)
    assert [r.cost.bytes_sent for r in result.rounds] == [12 * size, 6 * size, 6 * size]


def test_a_client_that_had_nothing_left_before_has_nothing_to_learn(
    trained: goldfish.Trained, make_clients: MakeClients
) -> None:
    client = removal.split(make_clients()[0], [], [DeletionRequest("client-1")])
    arrays, settings = {"model": trained.params}, IncompetentTeacherSettings()
    task = Task("client-1", BAD_TEACHING, arrays, settings, Context(phase="unlearning"))
    workspace = LocalWorkspace(trained.federation.model)
    assert bad_teaching_step(task, client, workspace).num_examples == 0


def test_a_client_that_leaves_is_refused(trained: goldfish.Trained) -> None:
    """Nobody would show its data to the incompetent teacher: the old model would stay as it is."""
    with pytest.raises(goldfish.ConfigError, match="cannot remove what client-3 asks for"):
        unlearn(trained, [DeletionRequest("client-3")])


def test_same_bits_with_one_worker_and_with_two(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    results = [unlearn(build(make_clients, small_net, workers), SAMPLES) for workers in (1, 2)]
    assert digest(results[0].params) == digest(results[1].params)


def test_same_bits_after_every_interruption(trained: goldfish.Trained) -> None:
    plan, settings = plan_for(trained), IncompetentTeacherSettings()
    rounds = list(INCOMPETENT_TEACHER.unlearn(plan, settings))
    assert [r.final for r in rounds] == [False, False, True]
    for done in rounds:
        last = Round(done.index, done.params, (), (), 0, memo=done.memo)
        again = list(INCOMPETENT_TEACHER.unlearn(replace(plan, last=last), settings))
        assert [digest(r.params) for r in again] == [digest(r.params) for r in rounds[done.index :]]


def test_the_temperature_matters(trained: goldfish.Trained) -> None:
    warm, hot = unlearn(trained, SAMPLES), unlearn(trained, SAMPLES, temperature=4.0)
    assert digest(warm.params) != digest(hot.params)


def test_augmented_batches_ask_the_competent_teacher_anew() -> None:
    """Crops and flips change the inputs, so logits known beforehand would be of other images."""

    def convolution() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))

    images = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = TensorExamples(images, torch.arange(20) % 3, [f"c1-{i}" for i in range(20)])
    federation = goldfish.InProcess([Client("client-1", data)], convolution)
    trained = goldfish.train(federation, rounds=2, batch_size=8)
    request = [DeletionRequest("client-1", ["c1-0"])]
    result = unlearn(trained, request, augment=True, rounds=2, learning_rate=0.001)
    assert digest(result.params) != digest(trained.params)
    assert distance(result.params, trained.params) < 0.1


def test_shards_are_named_as_not_used(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    trained = build(make_clients, small_net, shards=3)
    memory, shards = unlearn(trained, SAMPLES).notes
    assert "started from the old model" in memory
    assert "Shards were not used" in shards
