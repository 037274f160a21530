"""FedEraser: who is asked, what is kept from whom, and where the trajectory starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import goldfish
from goldfish.data import TensorExamples
from goldfish.methods import Plan
from goldfish.methods.fed_eraser import FED_ERASER, FedEraserSettings
from goldfish.params import all_finite, digest, num_bytes, weighted_mean
from goldfish.types import Client, DeletionRequest, HistoryEntry, Round
from goldfish.workflow import unlearning_plan

MakeClients = Callable[..., list[Client]]
REQUESTS = {
    "samples": [DeletionRequest("client-1", sample_ids=["c1-0", "c1-9"])],
    "class": [DeletionRequest(f"client-{n}", class_label=2) for n in (1, 2, 3)],
    "client": [DeletionRequest("client-3")],
    "two kinds": [DeletionRequest("client-1", ["c1-0"]), DeletionRequest("client-2")],
}


def train(clients: Sequence[Client], net: type[nn.Module], **settings: Any) -> goldfish.Trained:
    """Train and keep every round."""
    workers = settings.pop("workers", None)
    federation = goldfish.InProcess(clients, net, workers=workers)
    values = {"rounds": 5, "learning_rate": 0.1, "batch_size": 8, **settings}
    return goldfish.train(federation, keep_for={"fed-eraser": {"keep_every": 1}}, **values)


def plan_for(trained: goldfish.Trained, requests: Sequence[DeletionRequest], **more: Any) -> Plan:
    return unlearning_plan(
        trained,
        requests,
        FED_ERASER,
        FedEraserSettings(),
        training=trained.settings,
        rounds=more.pop("rounds", 3),
        seed=0,
        **more,
    )


def rounds_of(plan: Plan, **settings: Any) -> list[Round]:
    return list(FED_ERASER.unlearn(plan, FedEraserSettings(**settings)))


@pytest.fixture
def trained(make_clients: MakeClients, small_net: type[nn.Module]) -> goldfish.Trained:
    return train(make_clients(), small_net)


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_kind_of_deletion(
    trained: goldfish.Trained, test_set: TensorExamples, kind: str
) -> None:
    result = goldfish.unlearn(trained, REQUESTS[kind], method=FED_ERASER, test=test_set)
    assert [record.index for record in result.rounds] == [1, 2, 3]
    assert not any(record.failures for record in result.rounds)
    assert result.rounds[-1].scores is not None
    assert all_finite(result.params)
    assert bool((result.params["norm.running_var"] > 0).all())
    assert any("goes past it" in note for note in result.notes) == (kind != "client")


@pytest.mark.parametrize("rounds", [1, 9])
def test_what_was_kept_sets_the_number_of_rounds(trained: goldfish.Trained, rounds: int) -> None:
    plan = plan_for(trained, REQUESTS["samples"], rounds=rounds)
    assert [(r.index, r.final) for r in rounds_of(plan)] == [(1, False), (2, False), (3, True)]
    assert [r.final for r in rounds_of(plan, keep_every=4)] == [False, True]


def test_rounds_that_were_not_kept_are_an_error(trained: goldfish.Trained) -> None:
    without = replace(trained, history={1: trained.history[1]})
    with pytest.raises(goldfish.ConfigError, match=r"keep_for=\['fed-eraser'\]"):
        goldfish.unlearn(without, REQUESTS["samples"], method=FED_ERASER)


def test_the_first_round_of_the_others_is_used_as_it_is(trained: goldfish.Trained) -> None:
    """It started from nothing: without the client that leaves it is the first round of others."""
    first, second, _ = rounds_of(plan_for(trained, REQUESTS["client"]))
    others = trained.history[1].updates[:2]
    mean = weighted_mean((u.params for u in others), [u.num_examples for u in others])
    assert digest(first.params) == digest(mean)
    assert (list(first.updates), first.bytes_sent) == ([], 0)
    assert [u.client_id for u in second.updates] == ["client-1", "client-2"]
    assert second.bytes_sent == 4 * num_bytes(mean)


def test_a_client_that_removes_samples_calibrates_in_the_first_round(
    trained: goldfish.Trained,
) -> None:
    first, second, _ = rounds_of(plan_for(trained, REQUESTS["samples"]))
    assert [u.client_id for u in first.updates] == ["client-1"]
    assert [u.client_id for u in second.updates] == ["client-1", "client-2", "client-3"]


def test_updates_have_the_kept_length_in_every_tensor(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    """With one client left the average is its update: |new - old| is what was kept of it."""
    trained = train(make_clients((20, 16)), small_net, rounds=3)
    first, second = rounds_of(plan_for(trained, [DeletionRequest("client-1")]))
    entry = trained.history[3]
    for name in ("hidden.weight", "norm.weight", "norm.bias", "out.weight", "out.bias"):
        kept = (entry.updates[1].params[name] - entry.start[name]).norm()
        assert (second.params[name] - first.params[name]).norm() == pytest.approx(kept.item(), 1e-3)
    calibrated = second.updates[0].params["norm.running_var"]
    assert torch.allclose(second.params["norm.running_var"], calibrated)


def test_neither_the_old_model_nor_a_later_start_is_a_start(trained: goldfish.Trained) -> None:
    """Move the old model, and round 3 as a whole: no update changes its length, so no bit either.

    A power of 2 as the distance, and weights on its grid, keep the differences exact.
    """
    grid = 2.0**-12

    def snapped(entry: HistoryEntry, by: float) -> HistoryEntry:
        def snap(params: dict[str, Tensor]) -> dict[str, Tensor]:
            return {
                n: (t / grid).round() * grid + by if t.is_floating_point() else t
                for n, t in params.items()
            }

        updates = [replace(u, params=snap(dict(u.params))) for u in entry.updates]
        return replace(entry, start=snap(dict(entry.start)), updates=updates)

    digests = set()
    for by in (0.0, 8.0):
        history = {**trained.history, 3: snapped(trained.history[3], by)}
        moved = {n: t + by if t.is_floating_point() else t for n, t in trained.params.items()}
        plan = plan_for(replace(trained, params=moved, history=history), REQUESTS["samples"])
        digests.add(digest(rounds_of(plan)[-1].params))
    assert len(digests) == 1


def test_no_removed_sample_is_ever_read(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    removed = {"c1-2", "c1-7"}

    class Guarded(TensorExamples):
        armed = False

        def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
            assert not (self.armed and {self.ids[p] for p in positions.tolist()} & removed)
            return super().batch(positions)

    clients = make_clients()
    data = clients[0].retained
    assert isinstance(data, TensorExamples)
    guard = Guarded(data.images, data.labels, data.ids)
    trained = train([replace(clients[0], retained=guard), *clients[1:]], small_net)
    guard.armed = True
    request = DeletionRequest("client-1", sample_ids=sorted(removed))
    result = goldfish.unlearn(trained, [request], method=FED_ERASER)
    assert not any(record.failures for record in result.rounds)


@pytest.mark.parametrize("kind", REQUESTS)
def test_same_bits_after_resuming_from_each_round(trained: goldfish.Trained, kind: str) -> None:
    plan = plan_for(trained, REQUESTS[kind])
    whole = rounds_of(plan)
    for place, last in enumerate(whole, start=1):
        stored = Round(last.index, last.params, (), (), 0, memo=last.memo)
        rest = rounds_of(replace(plan, last=stored))
        assert [digest(r.params) for r in rest] == [digest(r.params) for r in whole[place:]]


def test_same_bits_on_one_and_two_workers_and_in_any_order_of_what_was_kept(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    digests = set()
    for workers in (1, 2):
        trained = train(make_clients(), small_net, workers=workers)
        if workers == 2:
            turned = {
                index: replace(entry, updates=list(reversed(entry.updates)))
                for index, entry in trained.history.items()
            }
            trained = replace(trained, history=turned)
        digests.add(digest(rounds_of(plan_for(trained, REQUESTS["two kinds"]))[-1].params))
    assert len(digests) == 1


def test_it_learns(
    make_clients: MakeClients, small_net: type[nn.Module], test_set: TensorExamples
) -> None:
    trained = train(make_clients(), small_net, rounds=20)
    result = goldfish.unlearn(trained, REQUESTS["samples"], method=FED_ERASER, test=test_set)
    scores = [record.scores.accuracy for record in result.rounds if record.scores]
    assert len(scores) == 10
    assert scores[-1] > 65 > scores[0]


def test_calibration_is_a_share_of_the_local_steps(trained: goldfish.Trained) -> None:
    """30 and 24 samples in batches of 8: 4 and 3 steps. Half of them: 2 and, rounded, 2."""
    plan = plan_for(trained, REQUESTS["client"])

    def steps(**settings: Any) -> list[float]:
        return [u.metrics["steps"] for u in rounds_of(plan, **settings)[-1].updates]

    assert steps() == [2, 2]
    assert steps(calibration_ratio=1.0) == [4, 3]
    assert steps(calibration_ratio=0.01) == [1, 1]
    assert steps(calibration_steps=1) == [1, 1]
    assert steps(calibration_steps=100) == [4, 3]


def test_only_those_who_took_part_in_a_kept_round_are_asked(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    trained = train(make_clients(), small_net, participation=0.5)
    rounds = rounds_of(plan_for(trained, REQUESTS["samples"]))
    for this, index in zip(rounds[1:], (3, 5), strict=True):
        took_part = [u.client_id for u in trained.history[index].updates]
        assert [u.client_id for u in this.updates] == took_part
    assert len(rounds[-1].updates) == 2


def test_a_kept_round_of_clients_that_left_changes_nothing(trained: goldfish.Trained) -> None:
    alone = replace(trained.history[3], updates=trained.history[3].updates[2:])
    plan = plan_for(
        replace(trained, history={**trained.history, 3: alone}), [DeletionRequest("client-3")]
    )
    first, second, third = rounds_of(plan)
    assert digest(first.params) == digest(second.params) != digest(third.params)


def test_a_client_without_data_left_does_not_count(trained: goldfish.Trained) -> None:
    """Client 3 removes all of its samples one by one: as if it had left."""
    samples = [DeletionRequest("client-3", sample_ids=[f"c3-{i}" for i in range(18)])]
    emptied = rounds_of(plan_for(trained, samples))[-1]
    left = rounds_of(plan_for(trained, REQUESTS["client"]))[-1]
    assert digest(emptied.params) == digest(left.params)


def test_a_deletion_that_leaves_nothing_is_an_error(trained: goldfish.Trained) -> None:
    everything = [DeletionRequest(f"client-{n}") for n in (1, 2, 3)]
    with pytest.raises(goldfish.ConfigError, match="No client has any data left"):
        goldfish.unlearn(trained, everything, method=FED_ERASER)


def test_a_schedule_spans_the_kept_rounds(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    """Over the plan's one round the cosine would be 0 in round 2, and nothing would move."""
    trained = train(make_clients(), small_net, schedule="cosine")
    rounds = rounds_of(plan_for(trained, REQUESTS["client"], rounds=1))
    assert len({digest(r.params) for r in rounds}) == 3
    for this in rounds[1:]:
        assert (this.updates[0].params["out.weight"] != rounds[0].params["out.weight"]).any()
