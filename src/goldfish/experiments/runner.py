"""A run: train the original, file the deletion, let each method unlearn, measure, keep it all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from goldfish.errors import DivergenceError, StoreError
from goldfish.evaluation import round_cost
from goldfish.experiments.config import Config
from goldfish.experiments.engine import EngineFactory, in_process
from goldfish.experiments.evaluator import Evaluator
from goldfish.experiments.evidence import Diverged, Outcome, collect_evidence
from goldfish.experiments.scenario import Machine, Scenario, build_scenario
from goldfish.methods import METHODS, Method, Plan, Trained, fedavg, not_honoured, notes_of
from goldfish.methods.filing import file
from goldfish.params import num_bytes
from goldfish.store import BEFORE, CONFIG, Checkpoint, KeptHistory, RunDirectory, run_id_of
from goldfish.types import DeletionRequest, Federation, HistoryEntry, NotHonoured, Round, S, States
from goldfish.workflow import states_of, timed, training_plan, unlearning_plan

ORIGIN = "origin"


@dataclass(frozen=True)
class Progress:
    """Where a run is: a phase, its last finished round (0 at the start) and what it measured."""

    phase: str
    round: int
    rounds: int
    record: Mapping[str, Any] = field(default_factory=dict)


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
    run: RunDirectory | None = None
    if resume and (out / CONFIG).exists():
        run = RunDirectory.open(out, config.to_toml(), resume=True)
    scenario = build_scenario(config, machine, out if run else None)
    run_id = run_id_of(out)
    federation = engine(scenario, machine, run_id)
    training = _checked_plan(config, scenario, federation)
    methods = {name: METHODS[name] for name in config.unlearning.methods}
    run = run or RunDirectory.open(out, config.to_toml(), resume=resume)
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
    evaluator = Evaluator(scenario, machine.device)
    kept = {
        name: method.kept_rounds(config.methods[name], config.training.rounds)
        for name, method in methods.items()
    }
    history = KeptHistory(run, {index for rounds in kept.values() for index in rounds})
    origin = yield from _run_phase(
        training, lambda plan: fedavg.train(plan, plan.fresh), run, evaluator, history=history
    )
    outcomes: dict[str, Outcome | Diverged] = {ORIGIN: origin}
    trained = Trained(federation, origin.params, config.training, config.seed, history=history)
    for name in sorted(methods, key=lambda name: name != "retrain"):  # the yardstick goes first
        method = methods[name]
        try:
            outcome = yield from _run_method(
                config, scenario, method, trained, origin, run, evaluator
            )
            if name == "retrain":
                evaluator.compare_with(outcome.params)
            own = sum(r["history_bytes"] for r in origin.records if r["round"] in kept[name])
            outcomes[name] = replace(outcome, history_bytes=own)
        except DivergenceError as error:
            stages = range(1, len(scenario.stages) + 1)
            records = _numbered([run.load(_phase_name(name, stage))[1] for stage in stages])
            outcomes[name] = Diverged(str(error), records)
            yield Progress(name, len(records), config.unlearning.rounds, {"diverged": str(error)})
    result, samples = collect_evidence(config, scenario, outcomes, evaluator, federation)
    result["environment"] |= machine.facts | ({BEFORE: before} if before else {})
    run.write_json("samples.json", samples)
    run.write_json("result.json", result)


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
    _checked_plan(config, scenario, in_process(scenario, machine, ""))


def _checked_plan(config: Config, scenario: Scenario, federation: Federation) -> Plan:
    """Return the plan of the original training, once all methods can do what is asked of them."""
    training = training_plan(federation, config.training, config.seed, scenario.test)
    for name in config.unlearning.methods:
        _refuse_early(config, scenario, METHODS[name], training)
    return training


def _refuse_early(config: Config, scenario: Scenario, method: Method[Any], training: Plan) -> None:
    """Raise before any work is done where a method cannot do what is asked of it."""
    settings = config.methods[method.name]
    untrained = Trained(
        training.federation,
        training.fresh,
        config.training,
        config.seed,
        history=dict.fromkeys(
            method.kept_rounds(settings, config.training.rounds),
            HistoryEntry(0, training.fresh, ()),
        ),
        method=None if method.prepare is None else method.name,
    )
    unlearning_plan(
        untrained,
        scenario.requests,
        method,
        settings,
        training=config.unlearning_training,
        rounds=config.unlearning.rounds,
        seed=config.seed,
        test=scenario.test,
    )


def _phase_name(method: str, stage: int) -> str:
    return method if stage == 1 else f"{method}.{stage}"


def _numbered(stages: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the records of all stages in a row, their rounds numbered through."""
    records: list[dict[str, Any]] = []
    for stage, own in enumerate(stages, start=1):
        done = len(records)
        records += [{**r, "round": done + r["round"], "stage": stage} for r in own]
    return records


def _run_method(
    config: Config,
    scenario: Scenario,
    method: Method[Any],
    trained: Trained,
    origin: Outcome,
    run: RunDirectory,
    evaluator: Evaluator,
) -> Generator[Progress, None, Outcome]:
    """Let a method honour the requests of all stages, each from its own result before."""
    settings = config.methods[method.name]
    before: Outcome = origin
    preparation: Outcome | None = None
    if method.prepare is not None:
        own = training_plan(
            trained.federation,
            config.training,
            config.seed,
            scenario.test,
            phase=f"{method.name}-training",
        )
        preparation = yield from _run_phase(own, _bind(method.prepare, settings), run, evaluator)
        before = preparation
        trained = replace(
            trained,
            params=preparation.params,
            phase=own.phase,
            method=method.name,
            history={},
            memo=preparation.memo,
        )
    stages: list[Sequence[Mapping[str, Any]]] = []
    honoured: list[DeletionRequest] = []
    lost: list[NotHonoured] = []
    notes: Sequence[str] = ()
    for number, stage in enumerate(scenario.stages, start=1):
        new = [*(left.request for left in lost), *stage]
        if scenario.partition is None:  # the clients alone know their data
            file(trained.federation, new, honoured)
        plan = unlearning_plan(
            trained,
            [*honoured, *new],
            method,
            settings,
            training=config.unlearning_training,
            rounds=_stage_rounds(config, number),
            seed=config.seed,
            test=scenario.test,
            honoured=honoured,
        )
        plan = replace(plan, phase=_phase_name(method.name, number))
        after = yield from _run_phase(
            plan, _bind(method.unlearn, settings), run, evaluator, before.states
        )
        stages.append(after.records)
        lost = not_honoured(plan, [record["absent"] for record in after.records], after.params)
        honoured += [request for request in new if request not in [left.request for left in lost]]
        notes = notes_of(method, plan, settings)
        before = replace(after, states=_merge(before.states, after.states))
        trained = replace(trained, params=after.params, phase=plan.phase, memo=after.memo)
    return Outcome(
        before.params,
        _numbered(stages),
        notes=tuple(notes),
        not_honoured=tuple(lost),
        preparation=preparation,
    )


def _stage_rounds(config: Config, number: int) -> int:
    """Return the rounds of a stage: until the next request arrives, or all for the last one."""
    later = config.deletion.then
    return later[number - 1].after if number <= len(later) else config.unlearning.rounds


def _bind(
    work: Callable[[Plan, S], Iterator[Round]], settings: S
) -> Callable[[Plan], Iterator[Round]]:
    return lambda plan: work(plan, settings)


def _run_phase(
    plan: Plan,
    begin: Callable[[Plan], Iterator[Round]],
    run: RunDirectory,
    evaluator: Evaluator,
    states: States | None = None,
    history: Collection[int] = (),
) -> Generator[Progress, None, Outcome]:
    """Run a phase from its last checkpoint on.

    ``states`` is what the clients keep before it; of the rounds in ``history`` every client's
    update is kept on disk.
    """
    checkpoint, records = run.load(plan.phase)
    done = checkpoint.round if checkpoint else 0
    kept = checkpoint.states if checkpoint else {}
    params = checkpoint.params if checkpoint else plan.fresh
    memo = checkpoint.memo if checkpoint else {}
    plan.federation.restore(_merge(states or {}, kept))
    yield Progress(plan.phase, done, plan.rounds, records[-1] if records else {})
    if checkpoint is None or not checkpoint.final:
        last = Round(done, params, (), (), 0, memo=checkpoint.memo) if checkpoint else None
        for this, seconds in timed(begin(replace(plan, last=last))):
            before, params, memo = params, this.params, this.memo
            kept = states_of(plan.federation, plan.phase)
            by_server = 0 if plan.server is None else plan.server.take_measured()
            cost = round_cost(this, seconds, plan.federation.bytes_kept(plan.phase), by_server)
            record = {
                "round": this.index,
                **evaluator.measure_round(params, plan.requests),
                **cost.as_dict(),
                "failures": [asdict(failure) for failure in this.failures],
                "absent": list(this.absent),
            }
            if this.index in history:
                entry = HistoryEntry(this.index, before, this.updates)
                run.save_history(entry)
                kept_models = [entry.start, *(u.params for u in entry.updates)]
                record["history_bytes"] = sum(num_bytes(model) for model in kept_models)
            records.append(record)
            run.save(
                plan.phase, Checkpoint(this.index, params, kept, this.final, this.memo), record
            )
            yield Progress(
                plan.phase, this.index, this.index if this.final else plan.rounds, record
            )
    return Outcome(params, records, kept, memo)


def _merge(before: States, own: States) -> States:
    clients = before.keys() | own.keys()
    return {c: {**before.get(c, {}), **own.get(c, {})} for c in clients}
