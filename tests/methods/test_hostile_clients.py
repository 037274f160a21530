"""Clients that send what they please: robust means, bounded updates, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import goldfish
from goldfish import params as P  # noqa: N812
from goldfish.data import TensorExamples
from goldfish.experiments.config import parse_config
from goldfish.experiments.runner import check_experiment
from goldfish.experiments.scenario import Machine
from goldfish.federation.spool import Spool
from goldfish.methods.method import average
from goldfish.settings import TrainingSettings
from goldfish.types import Client, Params, RoundReplies, Task, Update

MakeClients = Callable[..., list[Client]]
REQUEST = [goldfish.DeletionRequest("client-1", sample_ids=["c1-0", "c1-1"])]


class Hostile(goldfish.InProcess):
    """A federation whose last client sends ``forge(what it was sent, what it learned)``."""

    forge: Callable[[Params, Params], Params] = staticmethod(lambda _sent, learned: learned)

    def run(self, tasks: Sequence[Task[Any]]) -> RoundReplies:
        replies = super().run(tasks)
        sent = {task.client_id: task.arrays.get("model", {}) for task in tasks}
        last = self.client_ids[-1]
        updates = [
            replace(u, params=self.forge(sent[last], u.params)) if u.client_id == last else u
            for u in replies.updates
        ]
        return RoundReplies(updates, replies.failures)


def floats(value: float) -> Callable[[Params, Params], Params]:
    """Return a forgery: a model all of whose numbers are ``value``."""
    return lambda _sent, learned: {
        n: torch.full_like(t, value) if t.is_floating_point() else t for n, t in learned.items()
    }


@pytest.fixture
def hostile(make_clients: MakeClients, small_net: type[nn.Module]) -> Hostile:
    return Hostile(make_clients((30, 24, 18, 24, 30)), small_net)


def updates_of(*values: float) -> list[Update]:
    return [Update(f"c{n}", {"w": torch.tensor([v])}, n + 1, {}) for n, v in enumerate(values)]


@pytest.mark.parametrize(
    ("aggregation", "trim", "values", "expected"),
    [
        ("size", 0.2, (3.0, 6.0), 5.0),  # (1 * 3 + 2 * 6) / 3
        ("median", 0.2, (9.0, 1.0, 4.0), 4.0),
        ("median", 0.2, (9.0, 1.0, 4.0, 5.0), 4.5),
        ("trimmed-mean", 0.2, (9.0, 1.0, 4.0, 5.0, 6.0), 5.0),  # 1 and 9 go: (4 + 5 + 6) / 3
        ("trimmed-mean", 0.4, (9.0, 1.0, 4.0, 5.0, 6.0), 5.0),  # two of five at each end
        ("trimmed-mean", 0.01, (9.0, 1.0, 4.0), 4.0),  # one at each end, however small the share
        ("trimmed-mean", 0.45, (2.0, 4.0), 3.0),  # of two none can go
        ("trimmed-mean", 0.45, (7.0,), 7.0),
    ],
)
def test_means_by_hand(
    aggregation: str, trim: float, values: tuple[float, ...], expected: float
) -> None:
    """Client n has n + 1 samples, which count with ``size`` alone."""
    training = TrainingSettings.parse({"aggregation": aggregation, "trim": trim})
    assert average(updates_of(*values), training)["w"].item() == pytest.approx(expected)


def test_models_that_wait_on_disk_have_the_same_means() -> None:
    """Of many clients' models those that are too many for the memory are read when needed."""
    models = [{"a": torch.randn(3, 2), "b": torch.randn(5), "n": torch.tensor(k)} for k in range(5)]
    spool = Spool()
    waiting = [spool.put(model) for model in models]
    assert P.digest(P.trimmed_mean(waiting, 1)) == P.digest(P.trimmed_mean(models, 1))
    near = [P.shortened(models[0], model, 0.5) for model in waiting[1:]]
    assert [P.distance(models[0], model) for model in near] == pytest.approx([0.5] * 4, rel=1e-5)
    assert P.all_finite(P.weighted_mean(near, [1.0] * 4))
    spool._file.close()


@pytest.mark.parametrize("aggregation", ["trimmed-mean", "median"])
def test_one_of_five_cannot_move_a_robust_mean_far(hostile: Hostile, aggregation: str) -> None:
    """It sends 1e30 everywhere: by size the model is lost, otherwise it stays near the honest."""
    hostile.forge = floats(1e30)
    robust = goldfish.train(hostile, rounds=3, aggregation=aggregation)
    assert all(float(t.abs().max()) < 100 for t in robust.params.values())
    by_size = goldfish.train(hostile, rounds=1)
    assert float(by_size.params["out.weight"].abs().max()) > 1e28


def test_a_bound_on_updates_holds_and_each_round_says_whose_were_shortened(
    hostile: Hostile,
) -> None:
    """Nobody is further than 5 from what it was sent; what is kept is what was used."""
    hostile.forge = floats(1e30)
    trained = goldfish.train(
        hostile, rounds=3, max_update_norm=5.0, learning_rate=0.01, keep_for=["fed-recovery"]
    )
    assert [record.shortened for record in trained.rounds] == [["client-5"]] * 3
    for entry in trained.history.values():
        moved = [P.distance(entry.start, update.params) for update in entry.updates]
        assert moved[-1] == pytest.approx(5.0, rel=1e-5)
        assert max(moved) <= 5.0 * (1 + 1e-5)
    free = goldfish.train(hostile, rounds=1)
    assert not free.rounds[0].shortened
    result = goldfish.unlearn(trained, REQUEST, method="fed-recovery")
    assert P.all_finite(result.params)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("goldfish", {"aggregation": "median"}, "set adaptive_weights = false for this method"),
        ("fed-eraser", {"aggregation": "median"}, "weighed by samples; aggregation = 'median'"),
        ("fed-recovery", {"aggregation": "trimmed-mean"}, "which aggregation = 'trimmed-mean'"),
        ("sisa", {"aggregation": "median"}, "SISA averages nothing"),
        ("sisa", {"max_update_norm": 1.0}, "SISA averages nothing"),
        ("retrain", {"aggregation": "median", "participation": 0.5}, "needs 3 clients in a round"),
        ("retrain", {"max_update_norm": 1.0, "shards": 2}, "shards may start from models that"),
        ("retrain", {"max_update_norm": 0}, "greater than 0"),
        ("retrain", {"trim": 0.5}, "less than 0.5"),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_work(
    method: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(goldfish.ConfigError, match=message):
        check_experiment(
            parse_config(
                {
                    "data": {"clients": 4},
                    "training": settings,
                    "deletion": {"rate": 0.1},
                    "unlearning": {"methods": [method]},
                }
            ),
            Machine(),
        )


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_adaptive_weights_of_huge_numbers_are_their_clients_failure(
    hostile: Hostile, test_set: TensorExamples, value: float
) -> None:
    """The round goes on without that client, and says so; below the quorum it ends the run.

    What the client computed counts: the five hold 30 + 24 + 18 + 24 + 30 samples.
    """
    honest = goldfish.train(hostile, rounds=1, aggregation="adaptive", test=test_set)
    assert not honest.rounds[0].failures
    hostile.forge = floats(value)
    with pytest.warns(RuntimeWarning, match="client-5 did not answer .*its predictions are none"):
        trained = goldfish.train(hostile, rounds=2, aggregation="adaptive", test=test_set)
    assert [[f.client_id for f in r.failures] for r in trained.rounds] == [["client-5"]] * 2
    assert [r.cost.samples for r in trained.rounds] == [126, 126]
    assert P.all_finite(trained.params)
    with pytest.raises(goldfish.DivergenceError, match="client-5 in round 1 of origin"):
        goldfish.train(hostile, rounds=1, aggregation="adaptive", test=test_set, quorum=1.0)


@pytest.mark.parametrize("method", ["retrain", "fed-eraser"])
def test_finite_numbers_that_cannot_be_added_up_are_a_sentence(
    make_clients: MakeClients, small_net: type[nn.Module], method: str
) -> None:
    """Two that collude: the mean of 3e38 and -3e38 passes through infinity in single precision."""
    federation = Hostile(make_clients((30, 24)), small_net)
    trained = goldfish.train(federation, rounds=2, keep_for=["fed-eraser"])
    federation.forge = floats(3e38)
    other = federation.run

    def both(tasks: Sequence[Task[Any]]) -> RoundReplies:
        replies = other(tasks)
        forged = floats(-3e38)({}, replies.updates[0].params)
        first = replace(replies.updates[0], params=forged, num_examples=10**6)
        return RoundReplies([first, *replies.updates[1:]], replies.failures)

    federation.run = both  # type: ignore[method-assign]
    with pytest.raises(
        goldfish.DivergenceError, match=r"round \d of .* is not finite, though every"
    ):
        goldfish.unlearn(
            trained,
            [goldfish.DeletionRequest(f"client-{n}", class_label=1) for n in (1, 2)],
            method=method,
            rounds=1,
        )


def test_sisas_own_training_refuses_them_too(hostile: Hostile) -> None:
    with pytest.raises(goldfish.ConfigError, match="SISA averages nothing"):
        goldfish.train(hostile, method="sisa", aggregation="median", rounds=1)
