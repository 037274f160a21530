"""The library's two verbs: :func:`train` a federation, and :func:`unlearn` from it.

Both make a plan (:func:`training_plan`, :func:`unlearning_plan`) and go through the rounds of
:func:`run_phase`, the only phase loop. A caller that wants to look at each round does the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import nn
from torch.utils.data import Dataset

from goldfish.data import as_examples, removal
from goldfish.errors import ConfigError, DivergenceError, unknown
from goldfish.evaluation.scores import score
from goldfish.federation import InProcess
from goldfish.hardware.native import working_clock
from goldfish.methods import (
    Method,
    Plan,
    RoundRecord,
    Trained,
    deletion_kind,
    fedavg,
    method_named,
    not_honoured,
    notes_of,
    refuse_few,
    refuse_unhandled,
)
from goldfish.methods.records import file
from goldfish.models import fresh_params
from goldfish.params import all_finite
from goldfish.results import Cost
from goldfish.settings import TrainingSettings
from goldfish.training.fit import predict
from goldfish.training.server_test import ServerTest, measured_samples
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import (
    DeletionRequest,
    Examples,
    Federation,
    HistoryEntry,
    Memo,
    NotHonoured,
    Params,
    Round,
    S,
    States,
)


@dataclass(frozen=True)
class Unlearned:
    """The result of unlearning: its model, what it cost, and which requests it does not honour."""

    method: str
    trained: Trained
    """What later unlearning starts from: this model, free of what it honours. It can be saved."""
    notes: Sequence[str] = ()
    not_honoured: Sequence[NotHonoured] = ()
    """Requests whose data is still in the model, and why. Empty when the deletion is done."""

    @property
    def federation(self) -> Federation:
        """The federation that unlearned."""
        return self.trained.federation

    @property
    def params(self) -> Params:
        """The unlearned parameters."""
        return self.trained.params

    @property
    def rounds(self) -> Sequence[RoundRecord]:
        """The rounds of the unlearning."""
        return self.trained.rounds

    @property
    def model(self) -> nn.Module:
        """A new module that holds the unlearned parameters."""
        return self.trained.model

    @property
    def cost(self) -> Cost:
        """The whole cost of the unlearning."""
        return self.trained.cost


def train(
    federation: Federation,
    *,
    test: Examples | Dataset[Any] | None = None,
    seed: int = 0,
    keep_for: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    method: str | Method[Any] | None = None,
    **settings: Any,
) -> Trained:
    """Train the federation's model from newly initialised weights.

    ``settings`` are those of :class:`TrainingSettings`: ``rounds``, ``learning_rate``,
    ``local_epochs``, ``shards`` and so on. With a ``test`` set every round is scored.
    ``keep_for`` names methods that need updates of this training kept (``["fed-eraser"]``, or with
    their settings ``{"fed-eraser": {"keep_every": 1}}``); ``method`` is one that has a training of
    its own (``sisa``), whose settings may be given too.
    """
    scored = None if test is None else as_examples(test)
    if isinstance(keep_for, str):
        raise ConfigError(f"keep_for is a list of methods: write [{keep_for!r}].")
    if method is not None and keep_for:
        raise ConfigError("keep_for goes with FedAvg training: leave it or method out.")
    kept: set[int] = set()
    work: Work = original_training
    if method is None:
        checked = TrainingSettings.parse(settings)
        plan = training_plan(federation, checked, seed, scored)
        wanted = keep_for if isinstance(keep_for, Mapping) else {name: {} for name in keep_for}
        for name, values in wanted.items():
            needed = method_named(name)
            kept.update(needed.kept_rounds(needed.settings.parse(values), checked.rounds))
    else:
        chosen = _chosen(method)
        checked, own = _divide(settings, TrainingSettings(), chosen)
        plan, work = own_training(federation, chosen, own, checked, seed, scored)
    records, params, history, memo = _collect(plan, work, scored, kept)
    return Trained(
        federation,
        params,
        checked,
        seed,
        records,
        plan.phase,
        history,
        None if method is None else chosen.name,
        memo,
        federation.states(),
        removed=_removed(federation),
    )


def unlearn(
    trained: Trained | Unlearned,
    requests: Iterable[DeletionRequest],
    *,
    method: str | Method[Any] = "goldfish",
    rounds: int | None = None,
    test: Examples | Dataset[Any] | None = None,
    seed: int | None = None,
    **settings: Any,
) -> Unlearned:
    """Return a model without the data that the requests name.

    ``trained`` is what :func:`train`, :func:`load` or an earlier :func:`unlearn` returned; what
    earlier calls removed stays removed. It stays as it is: the same call gives the same bits again,
    unless clients were asked to remove more in between. They leave that out of every later call.

    ``settings`` are those of the method (``temperature``, ``mu_c``, ...) and, to train
    differently than before, those of the training (``learning_rate``, ``local_epochs``, ...).
    ``method`` is a name from ``goldfish methods`` or a :class:`Method` of your own. ``test`` is
    the server's test set: adaptive weights and the round-level stop measure models on it, and
    every round is scored.

    Look at ``not_honoured`` of the result: it lists the requests that the model does not honour,
    because a client that the method forgets through was not there often enough. The next call that
    starts from the result takes them up again.

    A call that is refused (a :class:`ConfigError`) leaves an :class:`InProcess` federation as it
    was. On other machines clients remember what they were asked.
    """
    if isinstance(trained, Unlearned):
        trained = trained.trained
    if not isinstance(trained, Trained):
        what = type(trained).__name__
        raise ConfigError(f"unlearn() takes what train() returned, not a value of type {what}.")
    requests = [*trained.lost, *listed(requests)]
    chosen = _chosen(method)
    training, own = _divide(settings, trained.settings, chosen)
    refuse_training(trained, chosen, own)
    scored = None if test is None else as_examples(test)
    plan = unlearning_plan(
        trained,
        requests,
        chosen,
        own,
        training=training,
        rounds=training.rounds if rounds is None else rounds,
        test=scored,
        seed=trained.seed if seed is None else seed,
    )
    work, federation = bind(chosen.unlearn, own), trained.federation
    with federation.unless_refused() if isinstance(federation, InProcess) else nullcontext():
        if isinstance(federation, InProcess):
            federation.remember(trained.removed)
        file(federation, plan.new, trained.honoured)
        records, params, _, memo = _collect(plan, work, scored, states=trained.states)
    lost = not_honoured(plan, [record.absent for record in records], params)
    for left in lost:
        warnings.warn(
            f"The request of {left.request.client_id} is not honoured: {left.reason}. Its data is "
            "still in the model.",
            RuntimeWarning,
            stacklevel=2,
        )
    after = replace(
        trained_after(plan, params, memo, lost),
        rounds=records,
        states=federation.states(),
        removed=_removed(federation),
    )
    return Unlearned(chosen.name, after, notes_of(chosen, plan, own), lost)


def _chosen(method: str | Method[Any]) -> Method[Any]:
    """Return the method that is given, or the one of that name."""
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        what = type(method).__name__
        raise ConfigError(f"method is a name or a goldfish.Method, not a value of type {what}.")
    return method_named(method)


def _removed(federation: Federation) -> Mapping[str, Sequence[str]]:
    """Return the ids that clients remember as removed, as far as they live in this process."""
    return federation.removed if isinstance(federation, InProcess) else {}


def listed(requests: Iterable[DeletionRequest]) -> list[DeletionRequest]:
    """Return requests as a list: an iterator could be read once only. Nothing else is accepted."""
    if isinstance(requests, DeletionRequest):
        raise ConfigError("Requests are given as a list: write [request].")
    found = list(requests)
    for request in found:
        if not isinstance(request, DeletionRequest):
            what = type(request).__name__
            raise ConfigError(f"Requests are goldfish.DeletionRequest values, not {what}.")
    return found


def trained_after(plan: Plan, params: Params, memo: Memo, lost: Sequence[NotHonoured]) -> Trained:
    """Return what later unlearning starts from, once a plan was carried out but for ``lost``."""
    still = [left.request for left in lost]
    free_of = [request for request in plan.requests if request not in still]
    return replace(
        plan.origin, params=params, phase=plan.phase, memo=memo, honoured=free_of, lost=still
    )


def training_plan(
    federation: Federation,
    settings: TrainingSettings,
    seed: int = 0,
    test: Examples | None = None,
    phase: str = "origin",
) -> Plan:
    """Return what the original training needs, or a method's own."""
    plan = Plan(
        phase=phase,
        federation=federation,
        training=settings,
        rounds=settings.rounds,
        seed=seed,
        fresh=fresh_params(federation.model, seed, "initial"),
        server=_server(federation, settings, test, seed),
    )
    refuse_few(plan)
    return plan


def unlearning_plan(
    trained: Trained,
    requests: Sequence[DeletionRequest],
    method: Method[S],
    own: S,
    *,
    training: TrainingSettings,
    rounds: int,
    seed: int,
    test: Examples | None = None,
) -> Plan:
    """Return what a method's ``unlearn`` needs: the same for every method of a comparison.

    ``requests`` are new; those that the trained model is free of already are left out.
    """
    federation, honoured = trained.federation, trained.honoured
    rounds = TrainingSettings.parse({"rounds": rounds}).rounds
    if not requests:
        raise ConfigError("There is no deletion request: nothing to unlearn.")
    for request in requests:
        if request.client_id not in federation.client_ids:
            hint = f"The federation has {len(federation.client_ids)} clients."
            raise ConfigError(unknown("client", request.client_id, federation.client_ids, hint))
    new = [request for request in dict.fromkeys(requests) if not removal.covered(request, honoured)]
    if not new:
        raise ConfigError("The model is free of all that is asked for: it was unlearned before.")
    left = {request.client_id for request in honoured if deletion_kind(request) == "client"}
    for request in new:
        if request.client_id in left:
            raise ConfigError(
                f"{request.client_id} has left with all of its data: the model is free of it."
            )
    refuse_unhandled(method, new)
    plan = Plan(
        phase=_next_phase(trained.phase, method.name),
        federation=federation,
        training=training,
        rounds=rounds,
        seed=seed,
        fresh=fresh_params(federation.model, seed, "fresh", len(honoured)),
        requests=(*honoured, *new),
        trained=trained,
        server=_server(federation, training, test, seed),
        never_learned=lambda plan: method.never_learned(plan, own),
        lasts=lambda plan: method.lasts(plan, own),
    )
    if not plan.staying:
        raise ConfigError("No client has any data left: all of them leave with theirs.")
    method.check(plan, own)
    if method.needs_askers(plan, own):
        asking = {request.client_id for request in plan.new}
        plan = replace(plan, askers=[c for c in federation.client_ids if c in asking])
    refuse_few(plan)
    return plan


def _next_phase(before: str, method: str) -> str:
    """Return a name under which clients keep nothing of the phase before, which is still needed.

    >>> [_next_phase(phase, "sisa") for phase in ("origin", "sisa", "sisa.2")]
    ['sisa', 'sisa.2', 'sisa.3']
    """
    name, _, number = before.partition(".")
    return f"{method}.{int(number or 1) + 1}" if name == method else method


def _server(
    federation: Federation, settings: TrainingSettings, test: Examples | None, seed: int
) -> ServerTest | None:
    if test is None:
        return None
    samples = settings.server_samples or measured_samples(len(federation.client_ids))
    return ServerTest(federation.model, test, samples, seed)


Work: TypeAlias = Callable[[Plan], Iterator[Round]]
"""What is done in a phase: yields its rounds, after the last one that the plan holds."""


@dataclass(frozen=True)
class FinishedRound:
    """A finished round of a phase, and what the loop of all phases knows of it."""

    round: Round
    start: Params
    """The global model before it."""
    cost: Cost


def run_phase(plan: Plan, work: Work, states: States | None = None) -> Iterator[FinishedRound]:
    """Yield the rounds of a phase as they are finished: the only phase loop.

    ``states`` is what the clients keep before the phase; None: what they keep now. A phase that
    starts with its first round drops what they keep of an earlier phase of its name. The time that
    the caller takes between two rounds, or a C compiler for layers, is not counted.
    """
    before = plan.federation.states() if states is None else states
    if plan.last is None:
        before = _select(before, lambda key: not key.startswith(f"{plan.phase}/"))
    plan.federation.restore(before)
    start = plan.last.params if plan.last else plan.fresh
    rounds = work(plan)
    while True:
        begin = working_clock()
        this = next(rounds, None)
        if this is None:
            return
        seconds = working_clock() - begin
        if not all_finite(this.params):
            raise DivergenceError(
                f"The model of round {this.index} of {plan.phase} is not finite, though every "
                "client's numbers were: some are too large to be added up. Set "
                "training.max_update_norm, or leave out the clients that send them."
            )
        by_server = 0 if plan.server is None else plan.server.take_measured()
        kept = plan.federation.bytes_kept(plan.phase)
        yield FinishedRound(this, start, round_cost(this, seconds, kept, by_server))
        start = this.params


def round_cost(finished: Round, seconds: float, bytes_kept: int = 0, by_server: int = 0) -> Cost:
    """Return what one finished round cost.

    ``seconds``, ``bytes_kept`` and what the server measured are the caller's measurements; the rest
    is what the clients that answered report.
    """
    reported = [*(update.metrics for update in finished.updates), *finished.discarded]
    return Cost(
        seconds=seconds,
        steps=sum(int(metrics["steps"]) for metrics in reported),
        samples=sum(int(metrics["samples"]) for metrics in reported),
        bytes_sent=finished.bytes_sent,
        bytes_kept=bytes_kept,
        teacher_samples=sum(int(metrics.get("teacher_samples", 0)) for metrics in reported),
        fisher_samples=sum(int(metrics.get("fisher_samples", 0)) for metrics in reported),
        measured_samples=by_server
        + sum(int(metrics.get("measured_samples", 0)) for metrics in reported),
    )


def bind(work: Callable[[Plan, S], Iterator[Round]], settings: S) -> Work:
    """Return a method's work with its settings given."""
    return lambda plan: work(plan, settings)


def original_training(plan: Plan) -> Iterator[Round]:
    """Yield the rounds of the original training: FedAvg from the fresh model."""
    return fedavg.train(plan, plan.fresh)


def own_training(
    federation: Federation,
    method: Method[S],
    own: S,
    training: TrainingSettings,
    seed: int,
    test: Examples | None,
) -> tuple[Plan, Work]:
    """Return the plan and the work of a method's own training."""
    if method.prepare is None:
        raise ConfigError(f"{method.name} has no training of its own: leave method out.")
    plan = training_plan(federation, training, seed, test, phase=f"{method.name}-training")
    plan = replace(plan, lasts=lambda plan: method.lasts(plan, own))
    return plan, bind(method.prepare, own)


def states_of(federation: Federation, phase: str) -> States:
    """Return what the clients keep under the name of a phase."""
    return _select(federation.states(), lambda key: key.startswith(f"{phase}/"))


def _select(states: States, wanted: Callable[[str], bool]) -> States:
    return {
        client_id: {key: params for key, params in kept.items() if wanted(key)}
        for client_id, kept in states.items()
    }


def _collect(
    plan: Plan,
    work: Work,
    test: Examples | None,
    kept: Collection[int] = (),
    states: States | None = None,
) -> tuple[list[RoundRecord], Params, dict[int, HistoryEntry], Memo]:
    """Run a phase; return its records, the last model, the rounds in ``kept``, and the memo."""
    records = []
    history = {}
    params = plan.fresh
    memo: Memo = {}
    device = "cpu" if test is None else test.labels.device
    workspace = LocalWorkspace(plan.federation.model, device)
    for done in run_phase(plan, work, states):
        this = done.round
        params, memo = this.params, this.memo
        if this.index in kept:
            history[this.index] = HistoryEntry(this.index, done.start, this.updates)
        scores = None
        if test is not None:
            logits = predict(workspace.load("test", params).module, test)
            scores = score(logits, test.labels.cpu(), logits.shape[-1])
        for failure in this.failures:
            warnings.warn(
                f"{failure.client_id} did not answer in {plan.phase}: {failure.error}: "
                f"{failure.cause}",
                RuntimeWarning,
                stacklevel=3,
            )
        records.append(
            RoundRecord(this.index, done.cost, this.failures, scores, this.absent, this.shortened)
        )
    own = {name: t.clone() for name, t in params.items()}  # for a user to change
    return records, own, history, memo


def refuse_training(trained: Trained, method: Method[S], own: S) -> None:
    """Raise where a method needs another training than the one that was done."""
    if method.prepare is not None and trained.method != method.name:
        raise ConfigError(
            f"{method.name} has a training of its own: train with "
            f"goldfish.train(..., method={method.name!r})."
        )
    if trained.method not in (None, method.name):
        raise ConfigError(
            f"This model is {trained.method}'s own, from which {method.name} cannot start: train "
            "without method=."
        )
    needed = method.kept_rounds(own, trained.settings.rounds)
    if not set(needed) <= set(trained.history):
        raise ConfigError(
            f"{method.name} needs client updates that were not kept: train with "
            f"goldfish.train(..., keep_for=[{method.name!r}]), and with the same settings."
        )


def _divide(
    values: dict[str, Any], training: TrainingSettings, method: Method[S]
) -> tuple[TrainingSettings, S]:
    """Tell the settings of the training from the method's, which a name of both belongs to."""
    names = TrainingSettings.model_fields.keys() - method.settings.model_fields.keys()
    changed = {k: v for k, v in values.items() if k in names}
    own = {k: v for k, v in values.items() if k not in changed}
    known = [*TrainingSettings.model_fields, *method.settings.model_fields]
    for name in own:
        if name not in method.settings.model_fields:
            hint = f"{method.name} takes: {', '.join(method.settings.model_fields) or 'none'}."
            raise ConfigError(unknown("setting", name, known, hint))
    merged = TrainingSettings.parse({**training.model_dump(), **changed})
    return merged, method.settings.parse(own)
