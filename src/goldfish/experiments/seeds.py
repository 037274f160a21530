"""One configuration under several seeds: the runs, and their means with spread and paired test."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from goldfish.evaluation import paired_p
from goldfish.experiments.config import Config
from goldfish.experiments.evaluator import memory_finding
from goldfish.experiments.runner import Progress, run_experiment
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.store import RunDirectory, write_whole

SPREAD = ("accuracy", "backdoor_success", "memory_gap")
"""Final scores whose spread over the seeds is reported."""


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
            steps = run(replace(config, seed=seed), place, machine, resume=resume or place.exists())
            for step in steps:
                yield replace(step, phase=f"{step.phase} #{seed}")
            results.append(json.loads((place / "result.json").read_text()))
        write_whole(out / "samples.json", (out / f"seed-{seeds[0]}" / "samples.json").read_text())
        top.write_json("result.json", combine_results(results, seeds))


def combine_results(results: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    """Return one result whose numbers are means over those of several seeds, with their spread."""
    names = list(results[0]["methods"])
    methods = {
        name: _combine_method([r["methods"] for r in results], name, seeds) for name in names
    }
    slow = (methods.get("retrain", {}).get("time_to_quality") or {}).get("seconds")
    for method in methods.values():
        fast = (method.get("time_to_quality") or {}).get("seconds")
        method["speed_up"] = slow / fast if slow and fast else None
    return {**results[0], "seeds": list(seeds), "methods": methods}


def _combine_method(
    runs: Sequence[Mapping[str, Any]], name: str, seeds: Sequence[int]
) -> dict[str, Any]:
    own = [run[name] for run in runs]
    diverged = [
        f"seed {seed}: {method['diverged']}"
        for seed, method in zip(seeds, own, strict=True)
        if "diverged" in method
    ]
    if diverged:
        return {"diverged": " ".join(diverged), "rounds": []}
    combined: dict[str, Any] = {
        **own[0],
        **{key: _mean([m[key] for m in own]) for key in ("similarity", "cost")},
        "final": _mean_scores([m["final"] for m in own]),
        "rounds": _combine_rounds([m["rounds"] for m in own]),
        "spread": _spread(runs, name),
        "not_honoured": [
            {**request, "reason": f"seed {seed}: {request['reason']}"}
            for seed, method in zip(seeds, own, strict=True)
            for request in method.get("not_honoured", ())
        ],
    }
    if any("time_to_quality" in m for m in own):
        combined["time_to_quality"] = _mean([m.get("time_to_quality") for m in own])
    if "training" in own[0]:
        combined["training"] = {
            "final": _mean_scores([m["training"]["final"] for m in own]),
            "cost": _mean([m["training"]["cost"] for m in own]),
        }
    return combined


def _mean_scores(finals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average final scores; what they show of memory follows from the means."""
    mean: dict[str, Any] = _mean(finals)
    memory = mean.get("memory")
    if memory is not None and memory["finding"] is not None:
        memory["finding"] = memory_finding(memory)
    return mean


def _combine_rounds(all_rounds: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Average round by round, as far as all seeds have it."""
    rounds = []
    for same in zip(*all_rounds, strict=False):
        record = _mean([{k: v for k, v in r.items() if k != "failures"} for r in same])
        for name in SPREAD:
            record[f"{name}_std"] = _deviation([r[name] for r in same])
        record["failures"] = [failure for r in same for failure in r["failures"]]
        rounds.append(record)
    return rounds


def _spread(runs: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    values = {key: [run[name]["final"][key] for run in runs] for key in SPREAD}
    values["seconds"] = [run[name]["cost"]["seconds"] for run in runs]
    reached = [run[name].get("time_to_quality") for run in runs]
    values["time_to_quality"] = [None if one is None else one["seconds"] for one in reached]
    compared = name != "retrain" and all("final" in run.get("retrain", {}) for run in runs)
    spread = {}
    for key, own in values.items():
        p = None
        if compared and key in SPREAD and None not in own:
            p = paired_p(own, [run["retrain"]["final"][key] for run in runs])
        spread[key] = {
            "mean": _mean(own),
            "std": _deviation(own),
            "values": own,
            "p_vs_retrain": p,
        }
    return spread


def _mean(values: Sequence[Any]) -> Any:
    """Average numbers, or what is built of numbers; None where one of them is missing.

    Of words the first is taken.
    """
    first = values[0]
    if any(value is None for value in values):
        return None
    if isinstance(first, str):
        return first
    if isinstance(first, Mapping):
        return {key: _mean([value.get(key) for value in values]) for key in first}
    if isinstance(first, list):
        return [_mean(same) for same in zip(*values, strict=True)]
    return statistics.fmean(values)


def _deviation(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) == len(values) > 1 else None
