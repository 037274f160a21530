"""Retraining checks itself: all of it is new, and no removed sample is ever read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import goldfish
from goldfish.data import TensorExamples
from goldfish.methods.retrain import RetrainSettings
from goldfish.models import fresh_params
from goldfish.types import Client, DeletionRequest
from goldfish.workflow import unlearning_plan

FORBIDDEN = {"c1-2", "c1-7", "c1-20"}


class Guarded(TensorExamples):
    """Examples that raise when a forbidden sample is read, once they are armed."""

    armed = False

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        read = {self.ids[p] for p in positions.tolist()} & FORBIDDEN
        if self.armed and read:
            raise AssertionError(f"removed samples were read: {read}")
        return super().batch(positions)


@pytest.fixture
def guarded(
    make_clients: Callable[..., list[Client]], small_net: type[nn.Module]
) -> tuple[goldfish.Trained, Guarded]:
    clients = make_clients()
    data = clients[0].retained
    assert isinstance(data, TensorExamples)
    guard = Guarded(data.images, data.labels, data.ids)
    clients[0] = replace(clients[0], retained=guard)
    trained = goldfish.train(goldfish.InProcess(clients, small_net), rounds=2, learning_rate=0.1)
    guard.armed = True
    return trained, guard


REQUEST = DeletionRequest("client-1", sample_ids=sorted(FORBIDDEN))


@pytest.mark.parametrize("shards", [1, 3])
def test_no_removed_sample_is_ever_read(
    guarded: tuple[goldfish.Trained, Guarded], shards: int
) -> None:
    trained, _ = guarded
    result = goldfish.unlearn(trained, [REQUEST], method="retrain", rounds=3, shards=shards)
    assert [record.failures for record in result.rounds] == [[], [], []]


def test_the_guard_would_notice(guarded: tuple[goldfish.Trained, Guarded]) -> None:
    """Goldfish does read removed samples (to confuse the student): the guard must see it."""
    trained, _ = guarded
    result = goldfish.unlearn(
        trained, [REQUEST], method="goldfish", rounds=1, adaptive_weights=False
    )
    assert [f.client_id for f in result.rounds[0].failures] == ["client-1"]
    assert "removed samples were read" in result.rounds[0].failures[0].cause


def test_every_weight_and_buffer_is_new(guarded: tuple[goldfish.Trained, Guarded]) -> None:
    """The plan's fresh model is that of a new module, in nothing the old one."""
    trained, _ = guarded
    plan = unlearning_plan(
        trained,
        [REQUEST],
        goldfish.METHODS["retrain"],
        RetrainSettings(),
        training=trained.settings,
        rounds=1,
        seed=trained.seed,
    )
    untouched = fresh_params(trained.federation.model, trained.seed, "fresh", 0)
    for name, fresh in plan.fresh.items():
        assert torch.equal(fresh, untouched[name]), name
        if name != "norm.weight" and name != "norm.bias":
            assert not torch.equal(fresh, trained.params[name]), name
    assert plan.fresh["norm.num_batches_tracked"] == 0
    assert torch.equal(plan.fresh["norm.running_mean"], torch.zeros(8))
    assert torch.equal(plan.fresh["norm.running_var"], torch.ones(8))


def test_retraining_does_not_depend_on_the_old_model(
    guarded: tuple[goldfish.Trained, Guarded],
) -> None:
    """Poison the old model: if retraining looked at it, the result would change."""
    trained, _ = guarded
    ruined = replace(trained, params={n: t * 0 for n, t in trained.params.items()})
    results = [
        goldfish.unlearn(t, [REQUEST], method="retrain", rounds=2) for t in (trained, ruined)
    ]
    for name, tensor in results[0].params.items():
        assert torch.equal(tensor, results[1].params[name]), name
