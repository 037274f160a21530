"""Retraining from scratch (the paper's B1): the yardstick of every other method.

A fresh model, all weights and all buffers, trained on the remaining data alone. ``retrain`` does so
with the learning rate that it is given. ``retrain-tuned``, which is ours, first tries a few and
counts what that costs: a slow baseline would flatter all other methods.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, cast

from pydantic import Field, field_validator

from goldfish.errors import ConfigError, DivergenceError
from goldfish.methods import fedavg
from goldfish.methods.method import Method, Plan, bytes_sent, measures_weights
from goldfish.methods.steps import answer
from goldfish.settings import Count, Positive, Settings
from goldfish.training.server_test import ServerTest
from goldfish.types import (
    Client,
    Context,
    Failure,
    Federation,
    Round,
    RoundReplies,
    Step,
    Task,
    Update,
    Workspace,
)


class RetrainSettings(Settings):
    """Retraining has no settings of its own: it uses those of the training."""


class RetrainTunedSettings(Settings):
    """The sweep over learning rates that comes before retraining."""

    factors: Annotated[tuple[Positive, ...], Field(min_length=1)] = (0.3, 1.0, 3.0)
    """The learning rates to try, in units of training.learning_rate."""
    sweep_rounds: Count = 2
    """Rounds that each learning rate is tried for; the best one goes on from there."""

    @field_validator("factors")
    @classmethod
    def _all_different(cls, factors: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(factors)) < len(factors):
            raise ValueError("a factor is there twice, and would be paid for twice")
        return factors


def check_tuned(plan: Plan, _settings: RetrainTunedSettings) -> None:
    """Raise where retrain-tuned cannot do what is asked."""
    if plan.training.shards > 1 and plan.training.shard_mode == "isolated":
        raise ConfigError(
            "retrain-tuned cannot go on after an interruption with isolated shards, which start "
            "from what clients kept and not from the server's model: use retrain."
        )


def unlearn_tuned(plan: Plan, settings: RetrainTunedSettings) -> Iterator[Round]:
    """Yield the rounds of retraining with the best learning rate of the sweep.

    They are those that ``retrain`` yields with that learning rate, bit for bit. Round 1 also
    carries what all that the other candidates did has cost. The rounds of the sweep are yielded
    when it is over, so the seconds of all of them are in round 1.
    """
    if plan.server is None:
        raise ConfigError(
            "retrain-tuned compares learning rates on the server's test set: pass one (test=...), "
            "or use retrain."
        )
    last = plan.last
    if last is None:
        tried = _sweep(plan, plan.server, settings)
        yield from tried
        last = tried[-1]
    chosen = _at_rate(plan, float(last.memo["learning_rate"]))
    for this in fedavg.train(replace(chosen, last=last), plan.fresh):
        yield replace(this, memo=last.memo)


class KeepSettings(Settings):
    """What all clients are told after the sweep."""

    chosen: str
    """The phase of the best candidate."""


def keep_step(task: Task[KeepSettings], client: Client, _workspace: Workspace) -> Update:
    """Keep the shard models of the chosen candidate as the method's own, and drop the others'."""
    own, chosen = f"{task.context.phase}/", f"{task.settings.chosen}/"
    kept = client.state.arrays
    models = {key: kept.pop(key) for key in list(kept) if key.startswith(own)}
    for key, model in models.items():
        if key.startswith(chosen):
            kept[own + key.removeprefix(chosen)] = model
    return answer(task, {}, 0, [])


KEEP = Step("keep", keep_step, KeepSettings)


class _Metered:
    """A federation that also notes what came back, whether or not it is of use."""

    def __init__(self, inner: Federation) -> None:
        self._inner = inner
        self.metrics: list[Mapping[str, float]] = []
        self.failures: list[Failure] = []
        self.bytes_sent = 0

    def run(self, tasks: Sequence[Task[Any]]) -> RoundReplies:
        replies = self._inner.run(tasks)
        self.metrics.extend(update.metrics for update in replies.updates)
        self.failures.extend(replies.failures)
        self.bytes_sent += bytes_sent(tasks, replies, ())
        return replies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # all else is the federation's own


@dataclass(frozen=True)
class _Candidate:
    """One learning rate of a sweep: how far it came, what it cost and how good it is."""

    rate: float
    phase: str
    rounds: Sequence[Round]
    spent: _Metered
    loss: float
    """On the server's test set after its last round; infinite when it diverged."""


def _sweep(plan: Plan, server: ServerTest, settings: RetrainTunedSettings) -> list[Round]:
    """Try all learning rates; return the rounds of the best, with the whole cost in the first."""
    rates = [factor * plan.training.learning_rate for factor in settings.factors]
    candidates = [_try(plan, server, rate, settings.sweep_rounds) for rate in rates]
    best = min(candidates, key=lambda candidate: candidate.loss)
    if not math.isfinite(best.loss):
        tried = ", ".join(f"{rate:g}" for rate in rates)
        raise DivergenceError(
            f"All learning rates of retrain-tuned diverged ({tried}): lower learning_rate (now "
            f"{plan.training.learning_rate:g}), or add smaller factors."
        )
    first, *later = best.rounds
    others = [candidate.spent for candidate in candidates if candidate is not best]
    first = replace(
        first,
        failures=[
            *first.failures,
            *(f for spent in others for f in spent.failures),
            *_keep(plan, best.phase),
        ],
        bytes_sent=first.bytes_sent + sum(spent.bytes_sent for spent in others),
        discarded=[*first.discarded, *(m for spent in others for m in spent.metrics)],
    )
    return [replace(this, memo={"learning_rate": best.rate}) for this in (first, *later)]


def _try(plan: Plan, server: ServerTest, rate: float, rounds: int) -> _Candidate:
    """Retrain with one learning rate for some rounds; when it diverges, that is its end."""
    spent = _Metered(plan.federation)
    # A name of its own, so that no candidate finds the shard models of another.
    phase, federation = f"{plan.phase}/{rate:.17g}", cast("Federation", spent)
    own = replace(_at_rate(plan, rate), federation=federation, phase=phase)
    done: list[Round] = []
    loss = math.inf
    with contextlib.suppress(DivergenceError):
        done.extend(islice(fedavg.train(own, plan.fresh), rounds))
        loss = server.score(done[-1].params).loss
    return _Candidate(rate, own.phase, done, spent, loss if math.isfinite(loss) else math.inf)


def _at_rate(plan: Plan, rate: float) -> Plan:
    return replace(plan, training=plan.training.model_copy(update={"learning_rate": rate}))


def _keep(plan: Plan, chosen: str) -> Sequence[Failure]:
    """Let all clients keep what belongs to the chosen candidate; return those that did not."""
    if plan.training.shards == 1:
        return ()
    settings, context = KeepSettings(chosen=chosen), Context(phase=plan.phase)
    tasks = [Task(c, KEEP, {}, settings, context) for c in plan.federation.client_ids]
    return plan.federation.run(tasks).failures


RETRAIN = Method(
    name="retrain",
    summary="Train a fresh model on the remaining data (B1): exact, and the slowest.",
    settings=RetrainSettings,
    unlearn=lambda plan, _settings: fedavg.train(plan, plan.fresh),
    guarantee="exact",
    source="the paper's B1",
)

RETRAIN_TUNED = Method(
    name="retrain-tuned",
    summary="Retrain with the best learning rate of a small sweep, whose cost is counted.",
    settings=RetrainTunedSettings,
    steps=[KEEP],
    unlearn=unlearn_tuned,
    guarantee="exact",
    source="the paper's B1, with a sweep of ours",
    check=check_tuned,
    measures=lambda plan, settings: (
        f"which of {len(settings.factors)} learning rates was used",
        *measures_weights(plan, settings),
    ),
)
