"""The one shape of all methods, and the round loop that they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal

import torch

from goldfish.errors import ConfigError, DivergenceError, QuorumError
from goldfish.methods.trained import Trained
from goldfish.params import (
    all_finite,
    digest,
    largest_change,
    num_bytes,
    shortened,
    trimmed_mean,
    weighted_mean,
)
from goldfish.randomness import generator
from goldfish.results import DeletionKind
from goldfish.settings import Settings, TrainingSettings, learning_rate_at
from goldfish.training.server_test import ServerTest
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import (
    Constant,
    Context,
    DeletionRequest,
    Failure,
    Federation,
    HistoryEntry,
    ModelFactory,
    NotHonoured,
    Params,
    Round,
    RoundReplies,
    S,
    Step,
    Task,
    Update,
)
from goldfish.unlearning.extension import adaptive_weights

ENDS_THE_RUN = ("DivergenceError", "ConfigError")
"""Errors of a client that asking again does not mend. One ends the phase when the engine knows it
for sure (``Failure.final``), or when so many clients report it that the others are no quorum."""

ASKED_AGAIN = 2
"""How often an asker that must take part in a round, and fails, is asked once more."""

UNCHANGED = 1e-6
"""A model whose weights all moved by no more than this share of the largest has not changed."""

FEWEST_VOTES = 3
"""Clients that a round needs for a median or a trimmed mean: of two, none can be told wrong."""

ASKER_QUORUM = 0.5
"""Share of a method's rounds that an asker must take part in, where the method needs it."""


@dataclass(frozen=True)
class Plan:
    """What a phase (the original training, or one method's unlearning) is given.

    All methods of a comparison get the same plan, apart from its name.
    """

    phase: str
    """A name, under which clients keep what they must: ``origin``, or the method's."""
    federation: Federation
    training: TrainingSettings
    rounds: int
    seed: int
    fresh: Params
    """Newly initialised weights and buffers."""
    requests: Sequence[DeletionRequest] = ()
    trained: Trained | None = None
    """What unlearning starts from; None in the original training."""
    askers: Sequence[str] = ()
    """Clients that must take part, because the method forgets what they unteach and no more."""
    server: ServerTest | None = None
    last: Round | None = None
    """The last finished round, when the phase goes on after an interruption."""
    never_learned: Callable[[Plan], Sequence[DeletionRequest]] = lambda _plan: ()
    """The method's, with its settings given."""
    lasts: Callable[[Plan], int] = lambda plan: plan.rounds
    """The method's, with its settings given."""

    @property
    def origin(self) -> Trained:
        """What unlearning starts from; an error in the original training, which has none."""
        if self.trained is None:
            raise ConfigError(f"{self.phase} needs a trained model to unlearn from.")
        return self.trained

    @property
    def honoured(self) -> Sequence[DeletionRequest]:
        """Those of the requests that the original model is free of already."""
        return () if self.trained is None else self.trained.honoured

    @property
    def to_do(self) -> range:
        """The rounds that are not done yet; the first one is 1."""
        return range(self.last.index + 1 if self.last else 1, self.rounds + 1)

    @property
    def new(self) -> list[DeletionRequest]:
        """The requests that the original model is not free of yet."""
        done = set(self.honoured)
        return [request for request in self.requests if request not in done]

    @property
    def leaving(self) -> list[str]:
        """Clients that leave now, with all of their data."""
        return [r.client_id for r in self.new if deletion_kind(r) == "client"]

    @property
    def staying(self) -> list[str]:
        """All clients but those that leave now or have left."""
        gone = {r.client_id for r in self.requests if deletion_kind(r) == "client"}
        return [c for c in self.federation.client_ids if c not in gone]


WARM_START = (
    "The student started from the old model: what the removed data taught it to do fades, but most "
    "of what it remembers of single removed samples stays."
)
"""The note of methods that start from the model that they unlearn from."""

WEIGHTS = "how much each client counts (equation 12)"
"""What is measured with adaptive weights, in words."""


def measures_weights(plan: Plan, _settings: Settings) -> Sequence[str]:
    """Return what a method decides by the server's test set that goes by ``aggregation``."""
    return (WEIGHTS,) if plan.training.aggregation == "adaptive" else ()


@dataclass(frozen=True)
class Method(Generic[S]):
    """A way to unlearn: its settings, the server's side as rounds, and the client's steps."""

    name: str
    summary: str
    settings: type[S]
    unlearn: Callable[[Plan, S], Iterator[Round]]
    steps: Sequence[Step[Any]] = ()
    """The client's side, for engines that call it by name. FedAvg's is always there."""
    kind: Literal["retraining", "update adjustment"] = "retraining"
    """The two kinds that the paper tells apart."""
    guarantee: Literal["exact", "approximate", "bounded"] = "approximate"
    """Exact: the distribution of retraining. Bounded: within a stated distance of it."""
    deletions: frozenset[DeletionKind] = frozenset({"samples", "class", "client"})
    """What it can remove; anything else is refused."""
    needs_askers: Callable[[Plan, S], bool] = lambda _plan, _settings: False
    """Whether it forgets through the clients that asked: without them it forgets nothing."""
    never_learned: Callable[[Plan, S], Sequence[DeletionRequest]] = lambda _plan, _settings: ()
    """The new requests whose data the model knows nothing of, if it has not changed."""
    lasts: Callable[[Plan, S], int] = lambda plan, _settings: plan.rounds
    """How many rounds there will be, as far as is known after ``plan.last``: for progress bars."""
    source: str = ""
    """The paper that it comes from."""
    keeps: str = "nothing"
    """What is kept during the original training, in words."""
    kept_rounds: Callable[[S, int], Sequence[int]] = lambda _settings, _rounds: ()
    """Of which training rounds the server must keep every client's update."""
    kept_models: Callable[[S, int, int], int] | None = None
    """How many models are kept; by default, of each kept round its start and every update."""
    check: Callable[[Plan, S], None] = lambda _plan, _settings: None
    """Raises, before any work is done, where the method cannot do what the plan asks."""
    prepare: Callable[[Plan, S], Iterator[Round]] | None = None
    """The method's own training, when it cannot start from FedAvg."""
    measures: Callable[[Plan, S], Sequence[str]] = measures_weights
    """What it decides by models' scores on the server's test set, in words."""
    notes: Callable[[Plan, S], Sequence[str]] = lambda _plan, _settings: ()
    """What a reader of the result must know, in sentences; :func:`notes_of` adds to it."""


def notes_of(method: Method[S], plan: Plan, settings: S) -> Sequence[str]:
    """Return what a reader of a method's result must know: its notes, and what it measured."""
    notes = list(method.notes(plan, settings))
    decided = method.measures(plan, settings)
    if decided and plan.server is not None:
        notes.append(
            f"The server's test set decided {' and '.join(decided)}, so scores on that set flatter "
            "this method a little. The removed data had no part in that."
        )
    return notes


def count_kept_models(method: Method[S], settings: S, clients: int, rounds: int) -> int:
    """Return how many models a method keeps during a training of so many clients and rounds."""
    if method.kept_models is not None:
        return method.kept_models(settings, clients, rounds)
    return (clients + 1) * len(method.kept_rounds(settings, rounds))


def deletion_kind(request: DeletionRequest) -> DeletionKind:
    """Return what a request removes."""
    if request.sample_ids is not None:
        return "samples"
    return "client" if request.class_label is None else "class"


def by_client(requests: Sequence[DeletionRequest]) -> dict[str, list[DeletionRequest]]:
    """Return the requests of each client that has some, in their order."""
    found: dict[str, list[DeletionRequest]] = {}
    for request in requests:
        found.setdefault(request.client_id, []).append(request)
    return found


def weight_names(factory: ModelFactory, params: Params) -> list[str]:
    """Return, sorted, the names of what training learns; all others are buffers, or frozen.

    Buffers (BatchNorm's running statistics) are averages of what passed through the model, not
    sums of updates: stretched, subtracted or perturbed, a variance can become negative.
    """
    module = LocalWorkspace(factory).load("names", params).module
    weights = module.named_parameters(remove_duplicate=False)
    return sorted(name for name, weight in weights if weight.requires_grad)


def kept_updates(plan: Plan, entry: HistoryEntry) -> dict[str, Update]:
    """Return the updates that went into a kept round's average, in the federation's order."""
    updates = {update.client_id: update for update in entry.updates if update.num_examples > 0}
    return {c: updates[c] for c in plan.federation.client_ids if c in updates}


def refuse_unhandled(method: Method[Any], requests: Sequence[DeletionRequest]) -> None:
    """Raise when a method cannot remove what is asked."""
    for request in requests:
        kind = deletion_kind(request)
        if kind not in method.deletions:
            able = ", ".join(sorted(method.deletions))
            raise ConfigError(
                f"{method.name} cannot remove what {request.client_id} asks for (kind: {kind}); it "
                f"handles: {able}. 'goldfish methods' says what the others handle."
            )


def not_honoured(
    plan: Plan, absences: Sequence[Sequence[str]], params: Params
) -> list[NotHonoured]:
    """Return the requests that a finished phase does not honour.

    They are those whose client had to take part and did so in too few rounds, and when the model
    has not changed all whose data it may have learned. ``absences`` holds the ``absent`` of every
    round, ``params`` is the model of the last one.
    """
    if largest_change(plan.origin.params, params) <= UNCHANGED:
        never = plan.never_learned(plan)
        return [NotHonoured(r, "the model has not changed") for r in plan.new if r not in never]
    rounds = len(absences)
    lost = []
    for request in plan.new:
        there = sum(request.client_id not in absent for absent in absences)
        if request.client_id in plan.askers and there < ASKER_QUORUM * rounds:
            lost.append(NotHonoured(request, f"took part in {there} of {rounds} rounds"))
    return lost


def participants(plan: Plan, index: int) -> list[str]:
    """Return the clients of a round: the askers that must be there, and the share of the others.

    The others are drawn anew for each round and for each deletion. The share is theirs alone:
    askers who counted towards it would leave nobody else in the rounds.
    """
    staying = plan.staying
    draws = generator(plan.seed, "participation", index, len(plan.requests))
    order = [staying[place] for place in torch.randperm(len(staying), generator=draws).tolist()]
    askers = set(plan.askers).intersection(staying)
    others = [client_id for client_id in order if client_id not in askers]
    chosen = {*askers, *others[: math.ceil(plan.training.participation * len(others))]}
    return [client_id for client_id in staying if client_id in chosen]


def ask(
    plan: Plan,
    step: Step[S],
    index: int,
    params: Params,
    settings: S,
    *,
    constants: Mapping[str, Constant] | None = None,
    clients: Sequence[str] | None = None,
    starts: Mapping[str, Params] | None = None,
    quorum: float | None = None,
    may_be_empty: bool = False,
) -> Round:
    """Let clients run ``step`` on ``params``; raise when too few answer, or with nonsense.

    Returns the round as it is before the server has made a new model of what was learned.
    ``starts`` holds what a client is given instead of ``params``, by its id. ``quorum`` counts
    instead of that of the training. That nobody has any data left, or that nobody is to be asked,
    is an error unless ``may_be_empty``.
    """
    new, honoured = by_client(plan.new), by_client(plan.honoured)
    before = plan.trained
    context = Context(
        phase=plan.phase,
        round=index,
        learning_rate=learning_rate_at(plan.training, index, plan.rounds),
        seed=int(plan.seed),
        shard_seed=int(before.seed if before else plan.seed),
        original_phase=before.phase if before else "origin",
        warm=bool(plan.askers),
    )
    tasks = [
        Task(
            client_id,
            step,
            {"model": (starts or {}).get(client_id, params)},
            settings,
            context,
            plan.training,
            requests=new.get(client_id, ()),
            honoured=honoured.get(client_id, ()),
            constants=constants or {},
        )
        for client_id in (participants(plan, index) if clients is None else clients)
    ]
    replies, sent = _run(plan, tasks)
    quorum = plan.training.quorum if quorum is None else quorum
    _check(replies, quorum, len(tasks), index, plan)
    told: set[str] = set()
    if constants:
        told = {client_id for past in range(1, index) for client_id in participants(plan, past)}
    there = {update.client_id for update in replies.updates}
    absent = [client_id for client_id in plan.askers if client_id not in there]
    sent_bytes = bytes_sent(sent, replies, told)
    updates = _bounded(tasks, replies.updates, plan.training.max_update_norm)
    pairs = zip(updates, replies.updates, strict=True)
    far = [own.client_id for own, said in pairs if own.params is not said.params]
    asked = Round(
        index, params, updates, replies.failures, sent_bytes, absent=absent, shortened=far
    )
    if not asked.learned and not may_be_empty:
        raise nothing_left(plan, index)
    return asked


def _run(plan: Plan, tasks: Sequence[Task[S]]) -> tuple[RoundReplies, list[Task[S]]]:
    """Run the tasks; an asker that must take part and fails is asked again.

    Returns the replies, in the order of the tasks, and all tasks that were sent.
    """
    if not tasks:
        return RoundReplies([], []), []
    sent = list(tasks)
    replies = plan.federation.run(tasks)
    for _ in range(ASKED_AGAIN):
        failed = {f.client_id for f in replies.failures if f.error not in ENDS_THE_RUN}
        again = [t for t in tasks if t.client_id in failed and t.client_id in plan.askers]
        if not again:
            break
        sent += again
        more = plan.federation.run(again)
        asked = {task.client_id for task in again}
        updates = {u.client_id: u for u in (*replies.updates, *more.updates)}
        failures = [f for f in replies.failures if f.client_id not in asked]
        replies = RoundReplies(
            [updates[task.client_id] for task in tasks if task.client_id in updates],
            [*failures, *more.failures],
        )
    return replies, sent


def _bounded(
    tasks: Sequence[Task[S]], updates: Sequence[Update], most: float | None
) -> Sequence[Update]:
    """Return the updates, none further than ``most`` from the model that its task brought."""
    if most is None:
        return updates
    sent = {task.client_id: task.arrays["model"] for task in tasks}
    return [
        replace(update, params=shortened(sent[update.client_id], update.params, most))
        if update.num_examples > 0
        else update
        for update in updates
    ]


def nothing_left(plan: Plan, index: int) -> ConfigError:
    """Return the error of a round after which there would be no model."""
    return ConfigError(
        f"No client has any data left in round {index} of {plan.phase}: "
        "there is nothing to learn from."
    )


def average(
    updates: Sequence[Update], training: TrainingSettings, weights: Sequence[float] | None = None
) -> Params:
    """Return the mean of the updates: by ``weights``, or as the training's ``aggregation`` says.

    Without weights, ``"adaptive"`` stands for ``"size"``.
    """
    if weights is None and training.robust:
        count, most = len(updates), (len(updates) - 1) // 2
        # A share times a number of clients may lie a rounding error above a whole number.
        wanted = math.ceil(training.trim * count - 1e-9)
        cut = most if training.aggregation == "median" else min(wanted, most)
        return trimmed_mean([u.params for u in updates], cut)
    by_size = [float(u.num_examples) for u in updates]
    return weighted_mean((u.params for u in updates), by_size if weights is None else weights)


def refuse_few(plan: Plan) -> None:
    """Raise where a round has too few clients for a robust mean: two cannot outvote one."""
    asked = len(participants(plan, 1))
    if plan.training.robust and asked < FEWEST_VOTES:
        raise ConfigError(
            f"aggregation = {plan.training.aggregation!r} needs {FEWEST_VOTES} clients in a round, "
            f"and {plan.phase} has {asked}: use aggregation = 'size', or a higher participation."
        )


def federated_rounds(
    plan: Plan,
    step: Step[S],
    settings: S,
    *,
    start: Params,
    constants: Mapping[str, Params] | None = None,
    adaptive: bool | None = None,
) -> Iterator[Round]:
    """Yield rounds in which clients run ``step`` on the global model and the server averages.

    ``constants`` are arrays that every client needs and that do not change. ``adaptive`` weighs
    clients by their error on the server's test set; by default the training's ``aggregation`` says.
    """
    if adaptive is None:
        adaptive = plan.training.aggregation == "adaptive"
    if adaptive and plan.server is None:
        raise ConfigError(
            "Adaptive weights (equation 12) measure clients on the server's test set: pass one "
            "(test=...), or switch them off (adaptive_weights = false, aggregation = 'size')."
        )
    once = {name: Constant(arrays, digest(arrays)) for name, arrays in (constants or {}).items()}
    params = plan.last.params if plan.last else start
    for index in plan.to_do:
        asked = ask(plan, step, index, params, settings, constants=once)
        weights = None
        if adaptive and plan.server is not None:
            asked, weights = _weighed(plan, asked, plan.server)
        params = average(asked.learned, plan.training, weights)
        yield replace(asked, params=params, final=index == plan.rounds)


def _weighed(plan: Plan, asked: Round, server: ServerTest) -> tuple[Round, Sequence[float]]:
    """Return the weights of equation (12), and the round without clients that have none.

    Numbers can be finite and yet so large that the model's predictions are not: that is a failure
    of its client.
    """
    scores = server.scores([update.params for update in asked.learned])
    errors = {u.client_id: own.mse for u, own in zip(asked.learned, scores, strict=True)}
    wrong = [name for name, error in errors.items() if not math.isfinite(error)]
    cause = "the numbers of its model are so large that its predictions are none"
    if wrong:
        failures = [*asked.failures, *(Failure(name, "DivergenceError", cause) for name in wrong)]
        updates = [update for update in asked.updates if update.client_id not in wrong]
        count = len(asked.updates) + len(asked.failures)
        _check(RoundReplies(updates, failures), plan.training.quorum, count, asked.index, plan)
        absent = [name for name in plan.askers if name in {*asked.absent, *wrong}]
        spent = [update.metrics for update in asked.updates if update.client_id in wrong]
        asked = replace(asked, updates=updates, failures=failures, absent=absent, discarded=spent)
    if not asked.learned:
        raise DivergenceError(f"{wrong[0]} in round {asked.index} of {plan.phase}: {cause}.")
    return asked, adaptive_weights([errors[u.client_id] for u in asked.learned])


def _check(replies: RoundReplies, quorum: float, asked: int, index: int, plan: Plan) -> None:
    """Raise where numbers are not finite, or too few clients answered."""
    where = f"in round {index} of {plan.phase}"
    for failure in replies.failures:
        same = sum(other.error == failure.error for other in replies.failures)
        sure = failure.final or asked - same < quorum * asked
        if failure.error not in ENDS_THE_RUN or not sure:
            continue
        if failure.error == "DivergenceError":
            raise DivergenceError(
                f"Non-finite loss on {failure.client_id} {where}: {failure.cause}. A lower "
                f"learning_rate (now {plan.training.learning_rate:g}) may help."
            )
        raise ConfigError(f"{failure.client_id} {where}: {failure.cause}")
    answered = len(replies.updates)
    if answered < quorum * asked:
        causes = "; ".join(f"{f.client_id}: {f.error}: {f.cause}" for f in replies.failures[:3])
        needed = [f.client_id for f in replies.failures if f.client_id in plan.askers]
        hint = f" Without {', '.join(needed)} their requests are not honoured." if needed else ""
        raise QuorumError(
            f"Only {answered} of {asked} clients answered {where}; the quorum is "
            f"{quorum:.0%}.{hint}",
            causes,
        )
    for update in replies.updates:
        if update.num_examples > 0 and not all_finite(update.params):
            raise DivergenceError(
                f"Non-finite weights from {update.client_id} {where}: lower learning_rate "
                f"(now {plan.training.learning_rate:g})."
            )


def bytes_sent(tasks: Sequence[Task[S]], replies: RoundReplies, told: Collection[str]) -> int:
    """Count what crosses the wire: arrays both ways, constants to clients not ``told`` before."""
    down = sum(num_bytes(p) for t in tasks for p in t.arrays.values())
    new = [task for task in tasks if task.client_id not in told]
    once = sum(num_bytes(c.params) for task in new for c in task.constants.values())
    up = sum(num_bytes(u.params) for u in replies.updates)
    return down + once + up
