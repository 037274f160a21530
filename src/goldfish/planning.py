"""What each method would cost, before any of them is run: :func:`plan`.

A method is rehearsed: its server's side runs as it is, and of the clients one of each kind takes
each step twice: as it does the first time, and as it does later. Clients that ask for nothing are a
kind, and so are those that lose about the same share of their data. What the others, and later
rounds, would take follows from how much data they have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from goldfish.data import as_examples
from goldfish.errors import ConfigError, GoldfishError
from goldfish.federation import InProcess
from goldfish.hardware.native import working_clock
from goldfish.methods import METHODS, Method, Trained, method_named
from goldfish.methods.records import look
from goldfish.results import Cost
from goldfish.settings import Settings, TrainingSettings
from goldfish.types import DeletionRequest, ModelFactory, RoundReplies, States, Task, Update
from goldfish.workflow import (
    Unlearned,
    bind,
    listed,
    refuse_training,
    round_cost,
    run_phase,
    unlearning_plan,
)

FAST, EXACT = "goldfish-sprint", "retrain"
WORTH = 0.5
"""The fast method is advised where it takes at most this share of what retraining takes: it is
approximate, and its result must be looked at."""
FEW_STEPS = 250
"""Where a client takes fewer steps in all of the retraining, that is advised: the fast method was
measured to lose 1.5 points with 200 steps (docs/fast.md)."""
TEST_SAMPLES = 10
"""Test samples on which a server measures models while a method is rehearsed."""
SMALL_LOSS = -4
"""Clients that remove at most about 2 to this power of what they keep lose about the same share."""


@dataclass(frozen=True)
class Estimate:
    """What a method would cost for some requests, or why it cannot serve them."""

    method: str
    guarantee: str
    rounds: int = 0
    cost: Cost = field(default_factory=Cost)
    """About: a method that stops early, or passes over clients, takes less."""
    refused: str | None = None


@dataclass(frozen=True)
class Advice:
    """What each method would cost, the cheapest one first, and the one to take."""

    estimates: Sequence[Estimate]
    method: str
    reason: str


def plan(
    trained: Trained | Unlearned,
    requests: Iterable[DeletionRequest],
    *,
    methods: Mapping[str, Mapping[str, Any]] | None = None,
    training: TrainingSettings | None = None,
    rounds: int | None = None,
    test: Any = None,
    seconds_per_sample: float | None = None,
) -> Advice:
    """Say what each method would cost for these requests, and which one to take.

    The arguments are those of :func:`goldfish.unlearn`; ``methods`` are the settings of each method
    to look at, by default all methods as they are, and ``training`` says how clients train in them,
    by default as before. ``seconds_per_sample`` is what the training took on this machine, if that
    is known; otherwise a few steps are measured. Nothing is changed: the clients neither unlearn
    nor remember the requests.
    """
    origin = trained.trained if isinstance(trained, Unlearned) else trained
    federation = origin.federation
    if not isinstance(federation, InProcess):
        raise ConfigError("Methods are rehearsed in this process: goldfish.InProcess(...).")
    requests = [*origin.lost, *listed(requests)]
    wanted = {name: {} for name in METHODS} if methods is None else methods
    few = None if test is None else as_examples(test)
    how = training or origin.settings
    estimates = []
    for name, values in wanted.items():
        method = method_named(name)
        own = method.settings.parse(values)
        rehearsal = _Rehearsal(federation)
        with federation.trial():
            federation.remember(origin.removed)
            try:
                refuse_training(origin, method, own)
                full = unlearning_plan(
                    replace(origin, federation=rehearsal),
                    requests,
                    method,
                    own,
                    training=how.model_copy(update={"server_samples": TEST_SAMPLES}),
                    rounds=origin.settings.rounds if rounds is None else rounds,
                    seed=origin.seed,
                    test=few,
                )
                look(federation, full.new, origin.honoured)
                costs = list(rehearsal.costs(full, method, own, origin.states))
                total = sum(costs, Cost())
                estimates.append(Estimate(name, method.guarantee, len(costs), total))
            except GoldfishError as error:
                estimates.append(Estimate(name, method.guarantee, refused=str(error)))
    if seconds_per_sample is not None:
        estimates = _calibrated(estimates, seconds_per_sample)
    estimates.sort(key=lambda own: (own.refused is not None, own.cost.seconds))
    return Advice(estimates, *advise(estimates, len(federation.client_ids)))


def advise(estimates: Sequence[Estimate], clients: int) -> tuple[str, str]:
    """Return the method to take in a federation of so many clients, and why, in a sentence."""
    if not estimates:
        raise ConfigError("No method was looked at: name one at least.")
    looked_at = {own.method for own in estimates}
    able = {own.method: own for own in estimates if own.refused is None}
    exact = [own for own in able.values() if own.guarantee == "exact"]
    if not able:
        raise ConfigError(f"No method can serve these requests. {estimates[0].refused}")
    if not exact:
        cheapest = min(able.values(), key=lambda own: own.cost.seconds)
        if any(own.guarantee == "exact" for own in estimates):
            return cheapest.method, "no exact method that was looked at can serve these requests"
        return cheapest.method, "it is the fastest one; no exact method was looked at"
    best = min(exact, key=lambda own: own.cost.seconds)
    fast = able.get(FAST)
    if FAST not in looked_at:
        return best.method, f"it is exact; {FAST} was not looked at"
    if fast is None:
        return best.method, f"{FAST} cannot serve these requests, and {best.method} is exact"
    if EXACT in able and able[EXACT].cost.steps < FEW_STEPS * clients:
        few = f"{EXACT} takes fewer than {FEW_STEPS} steps a client"
        return best.method, f"it is exact, and {few}, where {FAST} was seen to lose accuracy"
    share = fast.cost.seconds / best.cost.seconds
    if share <= WORTH:
        return FAST, f"it takes {share:.0%} of the time of {best.method}, and is approximate"
    return best.method, f"it is exact, and {FAST} would still take {share:.0%} of its time"


def _calibrated(estimates: Sequence[Estimate], seconds_per_sample: float) -> list[Estimate]:
    """Scale all times so that retraining takes as long a sample as the training did."""
    costs = [own.cost for own in estimates if own.method == EXACT and own.cost.seconds]
    factor = seconds_per_sample * costs[0].samples / costs[0].seconds if costs else 1.0
    return [
        replace(own, cost=own.cost.model_copy(update={"seconds": factor * own.cost.seconds}))
        for own in estimates
    ]


class _Kind(NamedTuple):
    """What clients of one kind have in common."""

    step: str
    settings: str
    asks: bool
    learns: bool
    """Something is left to learn from."""
    loss: int | None
    """The binary logarithm of what it removes over what it keeps, rounded."""
    size: int | None
    """That of what an asker keeps: its steps may be as many as those of a larger one."""


class _Turn(NamedTuple):
    """What a client answered, and in how many seconds."""

    update: Update
    seconds: float


class _Rehearsal:
    """A federation in which one client of each kind works, and the others are reckoned."""

    def __init__(self, inner: InProcess) -> None:
        self._inner = inner
        self._known: dict[_Kind, tuple[int, _Turn, _Turn]] = {}
        """The size of the client that worked, its first turn, and its later ones."""
        self._asked: set[tuple[_Kind, str]] = set()
        self._seconds = 0.0
        """What the clients would take, less what the rehearsal took."""

    @property
    def client_ids(self) -> Sequence[str]:
        """The ids of all clients."""
        return self._inner.client_ids

    @property
    def model(self) -> ModelFactory:
        """Builds the model."""
        return self._inner.model

    def costs(
        self, full: Any, method: Method[Any], own: Settings, states: States | None
    ) -> Iterator[Cost]:
        """Yield what each round of a method would cost."""
        for done in run_phase(full, bind(method.unlearn, own), states):
            reckoned = round_cost(done.round, max(0.0, done.cost.seconds + self._seconds))
            self._seconds = 0.0
            yield reckoned

    def run(self, tasks: Sequence[Task[Any]]) -> RoundReplies:
        """Answer tasks by what one of each kind took."""
        begin = working_clock()
        answers = [self._answer(task) for task in tasks]
        times = [seconds for _, seconds in answers]
        if times:
            together = max(max(times), sum(times) / self._inner.workers)
            self._seconds += together - (working_clock() - begin)
        return RoundReplies([update for update, _ in answers], [])

    def _answer(self, task: Task[Any]) -> tuple[Update, float]:
        kept, removed = self._inner.sizes(task)
        kind = _kind(task, kept, removed)
        size = kept or removed
        if kind not in self._known:
            if not self._known:  # the first time of all also prepares what later ones find
                before = self._inner.states()
                self._work(task)
                self._inner.restore(before)
            self._known[kind] = size, self._work(task), self._work(task)
        whole, first, later = self._known[kind]
        update, seconds = later if (kind, task.client_id) in self._asked else first
        self._asked.add((kind, task.client_id))
        share = size / max(1, whole)
        counted = {n: v if n == "loss" else share * v for n, v in update.metrics.items()}
        learned = max(1, round(share * update.num_examples)) if update.num_examples else 0
        return Update(task.client_id, update.params, learned, counted), share * seconds

    def _work(self, task: Task[Any]) -> _Turn:
        begin = working_clock()
        replies = self._inner.run([task])
        seconds = working_clock() - begin
        for failure in replies.failures:
            raise ConfigError(f"{failure.client_id}: {failure.cause}")
        return _Turn(replies.updates[0], seconds)

    def states(self) -> States:
        """Return what the clients keep."""
        return self._inner.states()

    def restore(self, states: States) -> None:
        """Put back what :meth:`states` returned."""
        self._inner.restore(states)

    def bytes_kept(self, phase: str) -> int:
        """Return how many bytes the clients keep under the name of a phase."""
        return self._inner.bytes_kept(phase)


def _kind(task: Task[Any], kept: int, removed: int) -> _Kind:
    """Return the kind of a client that keeps and removes so many samples."""
    loss = max(SMALL_LOSS, round(math.log2(removed / kept))) if kept and removed else None
    settings = task.settings.model_dump_json()
    size = round(math.log2(kept)) if kept and task.requests else None
    return _Kind(task.step.name, settings, bool(task.requests), kept > 0, loss, size)
