"""A run: train the original, file the deletion, let each method unlearn, measure, keep it all."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from goldfish.errors import DivergenceError, StoreError
from goldfish.experiments.config import Config
from goldfish.experiments.engine import EngineFactory, in_process
from goldfish.experiments.evaluator import Evaluator
from goldfish.experiments.evidence import Diverged, Outcome, collect_evidence, environment
from goldfish.experiments.scenario import Machine, Scenario, build_scenario
from goldfish.methods import METHODS, Method, Plan, Trained, not_honoured, notes_of
from goldfish.methods.records import file
from goldfish.models import fresh_params
from goldfish.params import num_bytes
from goldfish.results import ORIGIN, YARDSTICK, Measures, NoAnswer, Progress, Record
from goldfish.store import CONFIG, RESULT, Checkpoint, KeptHistory, RunDirectory, run_id_of
from goldfish.types import DeletionRequest, Federation, HistoryEntry, NotHonoured, Round, States
from goldfish.workflow import (
    Work,
    bind,
    original_training,
    own_training,
    run_phase,
    states_of,
    trained_after,
    training_plan,
    unlearning_plan,
)


def run_experiment(
    config: Config,
    out: Path,
    machine: Machine,
    *,
    resume: bool = False,
    engine: EngineFactory = in_process,
) -> Iterator[Progress]:
    """Yield the run's progress; ``out`` holds ``result.json`` when the iterator ends.

    The run can be stopped at any time and goes on after its last finished round with ``resume``:
    the models it then computes have the same bits as if it had not been stopped.
    """
    with ExitStack() as held:
        run: RunDirectory | None = None
        if resume and (out / CONFIG).exists():
            run = held.enter_context(RunDirectory.open(out, config.to_toml(), resume=True))
        scenario = build_scenario(config, machine, out if run else None)
        run_id = run_id_of(out)
        federation = engine(scenario, machine, run_id)
        trained = _checked(config, scenario, federation)
        methods = {name: METHODS[name] for name in config.unlearning.methods}
        if run is None:
            run = held.enter_context(RunDirectory.open(out, config.to_toml(), resume=resume))
        run.pin(
            {
                "run": run_id,
                "client_threads": federation.threads,
                "compiled": machine.compiled,
                "deletion": scenario.digest,
            }
        )
        before = run.pin_machine(machine.facts, elsewhere=machine.elsewhere)
        scenario.save(out)
        _refuse_missing(scenario, run)
        evaluator = Evaluator(scenario, machine.device, of_clients=config.evaluation.clients)
        kept = config.kept_rounds
        history = KeptHistory(run, {index for rounds in kept.values() for index in rounds})
        plan = training_plan(federation, config.training, config.seed, scenario.test)
        origin = yield from recorded_phase(plan, original_training, run, evaluator, history=history)
        outcomes: dict[str, Outcome | Diverged] = {ORIGIN: origin}
        trained = replace(trained, params=origin.params, history=history)
        for name in sorted(methods, key=lambda name: name != YARDSTICK):  # the yardstick goes first
            method = methods[name]
            try:
                outcome = yield from _run_method(config, method, trained, origin, run, evaluator)
                if name == YARDSTICK:
                    evaluator.compare_with(outcome.params)
                own = sum(r.history_bytes for r in origin.records if r.round in kept[name])
                outcomes[name] = replace(outcome, history_bytes=own)
            except DivergenceError as error:
                stages = range(1, len(scenario.stages) + 1)
                kept_so_far = [run.load(phase_name(name, stage)) for stage in stages]
                records = [own for _, own in kept_so_far]
                outcomes[name] = Diverged(str(error), _numbered(records))
                ended = sum(done is not None and done.final for done, _ in kept_so_far)
                last = min(ended, len(stages) - 1)
                done, all_of_it = len(records[last]), stage_rounds(config, last + 1)
                yield Progress(
                    phase=phase_name(name, last + 1),
                    round=done,
                    rounds=max(done, all_of_it),
                    diverged=str(error),
                )
        where = environment(federation, machine, before)
        result, samples = collect_evidence(config, scenario, outcomes, evaluator, where)
        run.write_json("samples.json", samples.model_dump())
        run.write_json(RESULT, result.model_dump())


def _refuse_missing(scenario: Scenario, run: RunDirectory) -> None:
    """Raise where the original training still needs samples that are deleted already."""
    if not scenario.missing:
        return
    before, _ = run.load(ORIGIN)
    if before is None or not before.final:
        raise StoreError(
            f"{len(scenario.missing)} of the samples to be removed are not there any more, and the "
            "original training, which uses them, is not finished. Put them back until it is, or "
            "start the run anew without them."
        )


def check_experiment(config: Config, machine: Machine, run: Path | None = None) -> None:
    """Raise where a run could not do what its configuration asks; leaves nothing behind.

    ``run`` is the directory of a run that goes on.
    """
    scenario = build_scenario(config, machine, run)
    _checked(config, scenario, in_process(scenario, machine, ""))


def _checked(config: Config, scenario: Scenario, federation: Federation) -> Trained:
    """Return the federation before its training, once all methods can do what is asked of them."""
    fresh = fresh_params(federation.model, config.seed, "initial")
    untrained = Trained(federation, fresh, config.training, config.seed)
    for name in config.unlearning.methods:
        _unlearning_plan(config, scenario, METHODS[name], untrained, scenario.requests)
    return untrained


def _unlearning_plan(
    config: Config,
    scenario: Scenario,
    method: Method[Any],
    trained: Trained,
    new: Sequence[DeletionRequest],
    stage: int = 1,
) -> Plan:
    """Return the plan of a method's stage."""
    return unlearning_plan(
        trained,
        new,
        method,
        config.methods[method.name],
        training=config.unlearning_training,
        rounds=stage_rounds(config, stage),
        seed=config.seed,
        test=scenario.test,
    )


def stage_rounds(config: Config, stage: int) -> int:
    """Return how long a stage lasts: until the next request arrives; the last one all rounds."""
    later = config.deletion.then
    return later[stage - 1].after if stage <= len(later) else config.unlearning.rounds


def phase_name(method: str, stage: int) -> str:
    """Return the phase of a method's stage."""
    return method if stage == 1 else f"{method}.{stage}"


def _numbered(stages: Sequence[Sequence[Record]]) -> list[Record]:
    """Return the records of all stages in a row, their rounds numbered through."""
    records: list[Record] = []
    for stage, own in enumerate(stages, start=1):
        done = len(records)
        records += [r.model_copy(update={"round": done + r.round, "stage": stage}) for r in own]
    return records


def _run_method(
    config: Config,
    method: Method[Any],
    trained: Trained,
    origin: Outcome,
    run: RunDirectory,
    evaluator: Evaluator,
) -> Generator[Progress, None, Outcome]:
    """Let a method honour the requests of all stages, each from its own result before."""
    settings, scenario = config.methods[method.name], evaluator.scenario
    before: Outcome = origin
    preparation: Outcome | None = None
    if method.prepare is not None:
        plan, work = own_training(
            trained.federation, method, settings, config.training, config.seed, scenario.test
        )
        preparation = before = yield from recorded_phase(plan, work, run, evaluator)
        trained = replace(
            trained,
            params=before.params,
            phase=plan.phase,
            method=method.name,
            history={},
            memo=before.memo,
        )
    stages: list[Sequence[Record]] = []
    lost: list[NotHonoured] = []
    notes: Sequence[str] = ()
    for number, stage in enumerate(scenario.stages, start=1):
        new = [*(left.request for left in lost), *stage]
        if scenario.partition is None:  # the clients alone know their data
            file(trained.federation, new, trained.honoured)
        plan = _unlearning_plan(config, scenario, method, trained, new, number)
        after = yield from recorded_phase(
            plan, bind(method.unlearn, settings), run, evaluator, before.states
        )
        stages.append(after.records)
        lost = not_honoured(plan, [record.absent for record in after.records], after.params)
        notes = notes_of(method, plan, settings)
        before = replace(after, states=_merge(before.states, after.states))
        trained = trained_after(plan, after.params, after.memo, lost)
    return Outcome(
        before.params,
        _numbered(stages),
        notes=tuple(notes),
        not_honoured=tuple(lost),
        preparation=preparation,
    )


def recorded_phase(
    plan: Plan,
    work: Work,
    run: RunDirectory,
    evaluator: Evaluator,
    states: States | None = None,
    history: Collection[int] = (),
) -> Generator[Progress, None, Outcome]:
    """Run a phase from its last checkpoint on, and measure and keep each of its rounds.

    ``states`` is what the clients keep before it; of the rounds in ``history`` every client's
    update is kept on disk.
    """
    checkpoint, records = run.load(plan.phase)
    last = checkpoint or Checkpoint(0, plan.fresh)
    before = records[-1] if records else None
    if checkpoint is not None:
        done = Round(last.round, last.params, (), (), 0, memo=last.memo)
        plan = replace(plan, last=done)
    rounds = last.round if last.final else plan.lasts(plan)
    yield Progress(phase=plan.phase, round=last.round, rounds=rounds, record=before)
    if last.final:
        return Outcome(last.params, records, last.states, last.memo)
    for finished in run_phase(plan, work, _merge(states or {}, last.states)):
        this, history_bytes = finished.round, 0
        rounds = this.index if this.final else plan.lasts(replace(plan, last=this))
        if this.index in history:
            run.save_history(HistoryEntry(this.index, finished.start, this.updates))
            kept_models = [finished.start, *(u.params for u in this.updates)]
            history_bytes = sum(num_bytes(model) for model in kept_models)
        scores = evaluator.measure(this.params, plan.requests)
        record = Record(
            round=this.index,
            failures=[
                NoAnswer(client_id=f.client_id, error=f.error, cause=f.cause) for f in this.failures
            ],
            absent=list(this.absent),
            shortened=list(this.shortened),
            history_bytes=history_bytes,
            client_accuracies=evaluator.client_accuracies(this.updates),
            **scores.model_dump(include=set(Measures.model_fields)),
            **finished.cost.model_dump(),
        )
        records.append(record)
        kept = states_of(plan.federation, plan.phase)
        last = Checkpoint(this.index, this.params, kept, this.final, this.memo)
        run.save(plan.phase, last, record)
        yield Progress(phase=plan.phase, round=this.index, rounds=rounds, record=record)
    return Outcome(last.params, records, last.states, last.memo)


def _merge(before: States, own: States) -> States:
    clients = before.keys() | own.keys()
    return {c: {**before.get(c, {}), **own.get(c, {})} for c in clients}
