"""A run: train the original, file the deletion, let each method unlearn, measure, keep it all."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from goldfish.errors import DivergenceError
from goldfish.evaluation import round_cost
from goldfish.experiments.config import Config
from goldfish.experiments.evidence import Diverged, Evaluator, Outcome, collect_evidence
from goldfish.experiments.scenario import build_scenario
from goldfish.methods import METHODS, Method, Plan, ordinary
from goldfish.store import Checkpoint, RunDirectory, write_whole
from goldfish.training import Settings
from goldfish.types import Params, Round
from goldfish.workflow import Trained, bytes_kept, timed, training_plan, unlearning_plan

ORIGIN = "origin"

States: TypeAlias = Mapping[str, Mapping[str, Params]]
"""What each client keeps, by key."""


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
    *,
    resume: bool = False,
    data_dir: Path | None = None,
    device: str = "cpu",
    workers: int | None = None,
) -> Iterator[Progress]:
    """Yield the run's progress; ``out`` holds ``result.json`` when the iterator ends.

    The run can be stopped at any time and goes on after its last finished round with ``resume``:
    the models it then computes have the same bits as if it had not been stopped.
    """
    scenario = build_scenario(config, data_dir=data_dir, device=device, workers=workers)
    run = RunDirectory.open(out, config.to_toml(), resume=resume)
    write_whole(out / "partition.json", scenario.partition.to_json())
    evaluator = Evaluator(scenario, device)

    training = training_plan(scenario.federation, config.training, config.seed, scenario.test)
    origin = yield from _run_phase(
        training, lambda plan: ordinary.train(plan, plan.fresh), run, evaluator
    )
    outcomes: dict[str, Outcome | Diverged] = {ORIGIN: origin}
    trained = Trained(scenario.federation, origin.params, config.training, config.seed)
    for name in config.unlearning.methods:
        method, settings = METHODS[name], config.methods[name]
        plan = unlearning_plan(
            trained,
            scenario.requests,
            method,
            settings,
            training=config.unlearning_training,
            rounds=config.unlearning.rounds,
            seed=config.seed,
            test=scenario.test,
        )
        try:
            outcome = yield from _run_phase(
                plan, _unlearning(method, settings), run, evaluator, origin.states
            )
            outcomes[name] = replace(outcome, notes=tuple(method.notes(plan, settings)))
        except DivergenceError as error:
            _, records = run.load(name)
            outcomes[name] = Diverged(str(error), records)
            yield Progress(name, len(records), plan.rounds, {"diverged": str(error)})
    result, samples = collect_evidence(config, scenario, outcomes, evaluator)
    run.write_json("samples.json", samples)
    run.write_json("result.json", result)


def _unlearning(method: Method, settings: Settings) -> Callable[[Plan], Iterator[Round]]:
    return lambda plan: method.unlearn(plan, settings)


def _run_phase(
    plan: Plan,
    begin: Callable[[Plan], Iterator[Round]],
    run: RunDirectory,
    evaluator: Evaluator,
    states: States | None = None,
) -> Generator[Progress, None, Outcome]:
    """Run a phase from its last checkpoint on; ``states`` is what the clients keep before it."""
    checkpoint, records = run.load(plan.phase)
    done = checkpoint.round if checkpoint else 0
    kept = checkpoint.states if checkpoint else {}
    params = checkpoint.params if checkpoint else plan.fresh
    plan.federation.restore(_merge(states or {}, kept))
    yield Progress(plan.phase, done, plan.rounds, records[-1] if records else {})
    if checkpoint is None or not checkpoint.final:
        last = Round(done, params, (), (), 0, memo=checkpoint.memo) if checkpoint else None
        for this, seconds in timed(begin(replace(plan, last=last))):
            params, kept = this.params, _own(plan)
            cost = round_cost(this, seconds, bytes_kept(plan.federation, plan.phase))
            measured = evaluator.measure(params)
            measured.pop("per_class")
            record = {
                "round": this.index,
                **measured,
                **cost.as_dict(),
                "failures": [asdict(failure) for failure in this.failures],
            }
            records.append(record)
            final = this.final or this.index == plan.rounds
            run.save(plan.phase, Checkpoint(this.index, params, kept, final, this.memo), record)
            yield Progress(plan.phase, this.index, plan.rounds, record)
    return Outcome(params, records, kept)


def _own(plan: Plan) -> States:
    """Return what the clients keep under the name of this phase."""
    return {
        client_id: {k: v for k, v in kept.items() if k.startswith(f"{plan.phase}/")}
        for client_id, kept in plan.federation.states().items()
    }


def _merge(before: States, own: States) -> States:
    clients = before.keys() | own.keys()
    return {c: {**before.get(c, {}), **own.get(c, {})} for c in clients}
