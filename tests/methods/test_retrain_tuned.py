"""Retraining with a swept learning rate: the bits of retraining, and the whole cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import goldfish
from goldfish.data import TensorExamples
from goldfish.methods.retrain import RETRAIN_TUNED, RetrainTunedSettings
from goldfish.params import digest, num_bytes
from goldfish.types import Client, DeletionRequest, Round, RoundReplies, Task
from goldfish.workflow import round_cost, unlearning_plan

MakeClients = Callable[..., list[Client]]
REQUESTS = {
    "samples": [DeletionRequest("client-1", sample_ids=["c1-0", "c1-9"])],
    "class": [DeletionRequest(f"client-{n}", class_label=2) for n in (1, 2, 3)],
    "client": [DeletionRequest("client-3")],
}
DIVERGES = 1e30


@pytest.fixture
def trained(make_clients: MakeClients, small_net: type[nn.Module]) -> goldfish.Trained:
    federation = goldfish.InProcess(make_clients(), small_net)
    return goldfish.train(federation, rounds=2, learning_rate=0.1, batch_size=8)


def rounds_of(
    trained: goldfish.Trained,
    test: TensorExamples,
    *,
    last: Round | None = None,
    rounds: int = 4,
    training: Mapping[str, Any] | None = None,
    **own: Any,
) -> list[Round]:
    settings = RetrainTunedSettings(**own)
    plan = unlearning_plan(
        trained,
        REQUESTS["samples"],
        RETRAIN_TUNED,
        settings,
        training=trained.settings.model_copy(update=dict(training or {})),
        rounds=rounds,
        seed=0,
        test=test,
    )
    return list(RETRAIN_TUNED.unlearn(replace(plan, last=last), settings))


def steps(this: Round) -> int:
    return int(round_cost(this, 0.0).steps)


@pytest.mark.parametrize("kind", sorted(RETRAIN_TUNED.deletions))
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_it_is_retraining_with_the_best_rate_bit_for_bit(
    trained: goldfish.Trained, test_set: TensorExamples, kind: str, rounds: int
) -> None:
    """The oracle: retrain with each learning rate for the rounds of the sweep, and compare."""
    factors, request = (0.01, 1.0, 3.0), REQUESTS[kind]

    def retrained(factor: float, rounds: int) -> goldfish.Unlearned:
        rate = factor * 0.1
        return goldfish.unlearn(
            trained, request, method="retrain", rounds=rounds, test=test_set, learning_rate=rate
        )

    losses = {}
    for factor in factors:
        scores = retrained(factor, min(2, rounds)).rounds[-1].scores
        assert scores is not None
        losses[factor] = scores.loss
    wanted = retrained(min(factors, key=losses.__getitem__), rounds)
    result = goldfish.unlearn(
        trained, request, method=RETRAIN_TUNED, rounds=rounds, test=test_set, factors=factors
    )
    assert digest(result.params) == digest(wanted.params)
    assert [r.index for r in result.rounds] == list(range(1, rounds + 1))
    assert [r.scores for r in result.rounds] == [r.scores for r in wanted.rounds]
    assert [r.cost.steps for r in result.rounds[1:]] == [r.cost.steps for r in wanted.rounds[1:]]


class Watched(goldfish.InProcess):
    """Counts everything that its clients were asked and answered."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps = self.samples = self.bytes = self.failures = 0

    def run(self, tasks: Sequence[Task[Any]]) -> RoundReplies:
        replies = super().run(tasks)
        self.bytes += sum(num_bytes(p) for t in tasks for p in t.arrays.values())
        for update in replies.updates:
            self.bytes += num_bytes(update.params)
            self.steps += int(update.metrics["steps"])
            self.samples += int(update.metrics["samples"])
        self.failures += len(replies.failures)
        return replies


@pytest.mark.parametrize(
    "factors", [(0.3, 1.0, 3.0), (1.0,), (1.0, DIVERGES), (DIVERGES, 0.3, 2 * DIVERGES)]
)
@pytest.mark.parametrize("shards", [1, 3])
def test_the_cost_is_whole(
    make_clients: MakeClients,
    small_net: type[nn.Module],
    trained: goldfish.Trained,
    test_set: TensorExamples,
    factors: tuple[float, ...],
    shards: int,
) -> None:
    """What the rounds report is what the clients did, those of diverged candidates included."""
    watched = Watched(make_clients(), small_net)
    result = goldfish.unlearn(
        replace(trained, federation=watched),
        REQUESTS["samples"],
        method=RETRAIN_TUNED,
        rounds=3,
        test=test_set,
        factors=factors,
        shards=shards,
    )
    assert result.cost.steps == watched.steps > 0
    assert result.cost.samples == watched.samples
    assert result.cost.bytes_sent == watched.bytes
    assert sum(len(r.failures) for r in result.rounds) == watched.failures
    assert result.rounds[0].cost.seconds > 0


def test_the_sweep_stands_in_the_first_round(
    trained: goldfish.Trained, test_set: TensorExamples
) -> None:
    """Two losers of two rounds each and the winner's own first: five times a round's steps.

    Its updates are the winner's alone: one of each client.
    """
    rounds = rounds_of(trained, test_set)
    clients = list(trained.federation.client_ids)
    assert [[update.client_id for update in r.updates] for r in rounds] == [clients] * 4
    assert [steps(r) for r in rounds] == [5 * steps(rounds[1]), *[steps(rounds[1])] * 3]
    assert [r.bytes_sent // rounds[1].bytes_sent for r in rounds] == [5, 1, 1, 1]
    assert [r.final for r in rounds] == [False, False, False, True]


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("shards", [1, 3])
def test_workers_and_interruptions_do_not_change_the_bits(
    make_clients: MakeClients,
    small_net: type[nn.Module],
    trained: goldfish.Trained,
    test_set: TensorExamples,
    shards: int,
    schedule: str,
) -> None:
    training = {"shards": shards, "schedule": schedule}
    whole = rounds_of(trained, test_set, training=training)
    wanted = [digest(r.params) for r in whole]
    states = trained.federation.states()
    for workers in (1, 2):
        other = goldfish.InProcess(make_clients(), small_net, workers=workers)
        rounds = rounds_of(replace(trained, federation=other), test_set, training=training)
        assert [digest(r.params) for r in rounds] == wanted
    for done in whole:
        # As the runner does: of the last round only these three are kept.
        last = Round(done.index, done.params, (), (), 0, memo=done.memo)
        fresh = replace(trained, federation=goldfish.InProcess(make_clients(), small_net))
        resumed = rounds_of(fresh, test_set, last=last, training=training)
        assert [digest(r.params) for r in resumed] == wanted[done.index :]
        assert all(r.memo == done.memo for r in resumed)
        if resumed and shards > 1:
            assert kept(fresh.federation.states()) == kept(states)


def kept(states: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {
        f"{client}:{key}": digest(params)
        for client, own in states.items()
        for key, params in own.items()
        if key.startswith("retrain-tuned/")
    }


@pytest.mark.parametrize("rounds", [2, 3])
def test_clients_keep_the_shards_of_the_winner_alone(
    make_clients: MakeClients,
    small_net: type[nn.Module],
    trained: goldfish.Trained,
    test_set: TensorExamples,
    rounds: int,
) -> None:
    """Those that retrain leaves behind with the chosen learning rate, and no loser's."""
    tuned, plain = (
        replace(trained, federation=goldfish.InProcess(make_clients(), small_net)) for _ in range(2)
    )
    training = {"shards": 3}
    done = rounds_of(tuned, test_set, rounds=rounds, training=training, factors=(1.0, 0.01))
    goldfish.unlearn(
        plain,
        REQUESTS["samples"],
        method="retrain",
        rounds=rounds,
        shards=3,
        learning_rate=float(done[0].memo["learning_rate"]),
    )
    own = {key.replace("retrain-tuned/", "retrain/"): v for key, v in _all(tuned).items()}
    assert own == _all(plain)
    assert len(own) == 9


def _all(trained: goldfish.Trained) -> dict[str, str]:
    return {
        f"{client}:{key}": digest(params)
        for client, own in trained.federation.states().items()
        for key, params in own.items()
    }


def test_a_candidate_that_diverges_is_out(
    trained: goldfish.Trained, test_set: TensorExamples
) -> None:
    alone = rounds_of(trained, test_set, factors=(1.0,))
    rounds = rounds_of(trained, test_set, factors=(DIVERGES, 1.0))
    assert [digest(r.params) for r in rounds] == [digest(r.params) for r in alone]
    assert {r.memo["learning_rate"] for r in rounds} == {0.1}
    assert {f.error for f in rounds[0].failures} <= {"DivergenceError"}


def test_when_all_diverge_it_is_an_error(
    trained: goldfish.Trained, test_set: TensorExamples
) -> None:
    with pytest.raises(goldfish.DivergenceError, match=r"All learning rates.*1e\+29.*lower"):
        rounds_of(trained, test_set, factors=(DIVERGES, 2 * DIVERGES))


def test_what_is_refused(trained: goldfish.Trained, test_set: TensorExamples) -> None:
    request = REQUESTS["samples"]
    with pytest.raises(goldfish.ConfigError, match=r"pass one \(test=\.\.\.\)"):
        goldfish.unlearn(trained, request, method=RETRAIN_TUNED)
    with pytest.raises(goldfish.ConfigError, match="isolated shards"):
        rounds_of(trained, test_set, training={"shards": 2, "shard_mode": "isolated"})
    wrong: list[dict[str, Any]] = [
        {"factors": ()},
        {"factors": (0.0, 1.0)},
        {"factors": (1.0, 1.0)},
        {"sweep_rounds": 0},
    ]
    for values in wrong:
        with pytest.raises(goldfish.ConfigError, match=next(iter(values))):
            goldfish.unlearn(trained, request, method=RETRAIN_TUNED, test=test_set, **values)


def test_the_note_says_how_the_rate_was_chosen(
    trained: goldfish.Trained, test_set: TensorExamples
) -> None:
    result = goldfish.unlearn(
        trained, REQUESTS["samples"], method=RETRAIN_TUNED, rounds=1, test=test_set
    )
    (note,) = result.notes
    assert "The server's test set decided which of 3 learning rates was used" in note
