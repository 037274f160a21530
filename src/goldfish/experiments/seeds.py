"""One configuration under several seeds: the runs, and their means with spread and paired test."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from goldfish.evaluation.similarity import paired_p
from goldfish.experiments.config import Config
from goldfish.experiments.evidence import speed_up
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.files import write_whole
from goldfish.results import (
    METRICS,
    YARDSTICK,
    MethodResult,
    Metric,
    Part,
    Progress,
    Record,
    Result,
    Similarity,
    Spread,
)
from goldfish.store import RESULT, RunDirectory

P = TypeVar("P", bound=Part)


def run_seeds(
    config: Config,
    out: Path,
    machine: Machine,
    *,
    count: int,
    resume: bool = False,
    run: Callable[..., Iterator[Progress]] = run_experiment,
) -> Iterator[Progress]:
    """Yield the progress of ``count`` runs with seeds from the configuration's on.

    Each has its directory ``seed-N`` under ``out``, which itself gets a ``result.json`` of the same
    shape as that of one run, with means instead of single numbers. ``run`` runs one of them.
    """
    seeds = [config.seed + number for number in range(count)]
    # What cannot run leaves no directory behind; what goes on has stored what was asked for.
    build_scenario(config, machine, out / f"seed-{seeds[0]}" if resume else None)
    text = f"# seeds = {seeds}\n{config.to_toml()}"
    results = []
    with RunDirectory.open(out, text, resume=resume) as top:
        for seed in seeds:
            place = out / f"seed-{seed}"
            own = config.model_copy(update={"seed": seed})
            steps = run(own, place, machine, resume=resume or place.exists())
            for step in steps:
                yield step.model_copy(update={"phase": f"{step.phase} #{seed}"})
            results.append(Result.read(place / RESULT))
        write_whole(out / "samples.json", (out / f"seed-{seeds[0]}" / "samples.json").read_text())
        top.write_json(RESULT, combine_results(results, seeds).model_dump())


def combine_results(results: Sequence[Result], seeds: Sequence[int]) -> Result:
    """Return one result whose numbers are means over those of several seeds, with their spread."""
    retrained = [result.retrain for result in results]
    methods = {
        name: _combine(
            [result.methods[name] for result in results],
            seeds,
            [] if name == YARDSTICK else retrained,
        )
        for name in results[0].methods
    }
    slow = methods.get(YARDSTICK, MethodResult()).time_to_quality
    for name, method in methods.items():
        factor = speed_up(slow, method.time_to_quality)
        methods[name] = method.model_copy(update={"speed_up": factor})
    return results[0].model_copy(update={"seeds": list(seeds), "methods": methods})


def _combine(
    own: Sequence[MethodResult], seeds: Sequence[int], retrained: Sequence[MethodResult]
) -> MethodResult:
    pairs = list(zip(seeds, own, strict=True))
    diverged = [f"seed {seed}: {one.diverged}" for seed, one in pairs if one.diverged]
    if diverged:
        return MethodResult(diverged=" ".join(diverged))
    tested = [one.time_to_quality for one in own if one.quality_tested]
    return MethodResult(
        final=mean([one.final for one in own]),
        rounds=_combine_rounds([one.rounds for one in own]),
        similarity=mean([one.similarity for one in own]) or Similarity(),
        cost=mean([one.cost for one in own]),
        quality_tested=bool(tested),
        time_to_quality=mean(tested) if tested else None,
        notes=own[0].notes,
        not_honoured=[
            lost.model_copy(update={"reason": f"seed {seed}: {lost.reason}"})
            for seed, one in pairs
            for lost in one.not_honoured
        ],
        training=mean([one.training for one in own]),
        spread={metric.key: _spread(metric, own, retrained) for metric in METRICS if metric.spread},
    )


def _combine_rounds(all_rounds: Sequence[Sequence[Record]]) -> list[Record]:
    """Average round by round, stage by stage, as far as all seeds have it."""
    stages = sorted({record.stage for own in all_rounds for record in own})
    alike = [
        same
        for stage in stages
        for same in zip(*([r for r in own if r.stage == stage] for own in all_rounds), strict=False)
    ]
    keys = [metric.key for metric in METRICS if metric.chart and metric.spread]
    rounds = []
    for number, same in enumerate(alike, start=1):
        stds = {key: _deviation([getattr(record, key) for record in same]) for key in keys}
        more = {
            "failures": [failure for record in same for failure in record.failures],
            **{
                name: list(dict.fromkeys(c for record in same for c in getattr(record, name)))
                for name in ("absent", "shortened")
            },
            "round": number,
            "stage": same[0].stage,
            "client_accuracies": [],
            "std": {key: std for key, std in stds.items() if std is not None},
        }
        numbers = _mean([record.model_dump(exclude=set(more)) for record in same])
        rounds.append(Record(**numbers, **more))
    return rounds


def _spread(
    metric: Metric, own: Sequence[MethodResult], retrained: Sequence[MethodResult]
) -> Spread:
    values, theirs = ([metric.of(one) for one in side] for side in (own, retrained))
    ours, floor = ([v for v in side if v is not None] for side in (values, theirs))
    compared = metric.spread == "paired" and len(ours) == len(floor) == len(values)
    return Spread(
        mean=_mean(values),
        std=_deviation(values),
        values=values,
        p_vs_retrain=paired_p(ours, floor) if compared else None,
    )


def mean(parts: Sequence[P | None]) -> P | None:
    """Average the numbers of equal parts of several results; None where one of them is missing."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return type(known[0]).model_validate(_mean([part.model_dump() for part in known]))


def _mean(values: Sequence[Any]) -> Any:
    """Average numbers, or what is built of numbers; None where one of them is missing."""
    first = values[0]
    if any(value is None for value in values):
        return None
    if isinstance(first, Mapping):
        return {key: _mean([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [_mean(same) for same in zip(*values, strict=True)]
    return statistics.fmean(values)


def _deviation(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) == len(values) > 1 else None
