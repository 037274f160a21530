"""What a robust mean or a bound on updates costs, and what it saves from one hostile client.

    python benchmarks/robust.py [--seeds 3]

LeNet-5 on the embedded digits, ten clients, 20 rounds. The client with the most samples is honest,
or it sends ten times its update, or its update backwards. Printed is the accuracy on the test half,
in percent: mean and range over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import goldfish
from goldfish.experiments.config import parse_config
from goldfish.experiments.engine import in_process
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.params import add, scale, subtract
from goldfish.types import RoundReplies, Task

MEANS: Mapping[str, dict[str, Any]] = {
    "mean": {},
    "trimmed mean": {"aggregation": "trimmed-mean"},
    "median": {"aggregation": "median"},
    "bound 1.0": {"max_update_norm": 1.0},
}
FACTORS: Mapping[str, float] = {"honest": 1.0, "10 times": 10.0, "backwards": -1.0}
"""What the hostile client does with its update."""
DATA: Mapping[str, dict[str, Any]] = {
    "iid": {"partition": "iid"},
    "Dirichlet 0.3": {"partition": "dirichlet", "alpha": 0.3},
}
TRAINING = {"rounds": 20, "local_epochs": 2, "batch_size": 20, "learning_rate": 0.01}


def accuracy(data: dict[str, Any], mean: dict[str, Any], factor: float, seed: int) -> float | None:
    """Return the accuracy of a federation whose largest client multiplies its updates.

    None where the training left the finite numbers.
    """
    config = parse_config(
        {
            "seed": seed,
            "data": {"name": "digits", "clients": 10, **data},
            "training": {**TRAINING, **mean},
            "deletion": {"rate": 0.1},
            "unlearning": {"methods": ["retrain"]},
        }
    )
    machine = Machine(compiled=True)
    scenario = build_scenario(config, machine)
    federation = in_process(scenario, machine, "")
    hostile = max(scenario.clients, key=lambda client: len(client.retained)).id
    honest: Callable[[Sequence[Task[Any]]], RoundReplies] = federation.run

    def run(tasks: Sequence[Task[Any]]) -> RoundReplies:
        sent = {task.client_id: task.arrays["model"] for task in tasks}
        replies = honest(tasks)
        updates = [
            replace(u, params=add(sent[hostile], scale(subtract(u.params, sent[hostile]), factor)))
            if u.client_id == hostile and factor != 1
            else u
            for u in replies.updates
        ]
        return RoundReplies(updates, replies.failures)

    federation.run = run  # type: ignore[method-assign]
    try:
        settings = config.training.model_dump()
        trained = goldfish.train(federation, test=scenario.test, seed=seed, **settings)
    except goldfish.DivergenceError:
        return None
    scores = trained.rounds[-1].scores
    return None if scores is None else scores.accuracy


def cell(found: Sequence[float | None]) -> str:
    """Return mean and range of the seeds, and how many of them diverged."""
    there = [value for value in found if value is not None]
    lost = f"{len(found) - len(there)} of {len(found)} diverged" if len(there) < len(found) else ""
    if not there:
        return lost
    spread = f"{min(there):.1f} to {max(there):.1f}"
    return ", ".join(filter(None, [f"{statistics.mean(there):.1f} ({spread})", lost]))


def main() -> None:
    """Measure all and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for partition, data in DATA.items():
        print(f"| {partition} | {' | '.join(FACTORS)} |")
        print(f"|---|{'---|' * len(FACTORS)}")
        for name, mean in MEANS.items():
            cells = []
            for factor in FACTORS.values():
                seeds = range(options.seeds)
                cells.append(cell([accuracy(data, mean, factor, seed) for seed in seeds]))
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
