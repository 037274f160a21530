"""How much sooner than retraining the fast method is, and what it leaves behind.

    python benchmarks/fast.py --out DIR --data-dir DIR --device cuda --seconds 1500

A queue of runs, one for each dataset, number of clients, partition and seed; all methods of a run
start from one origin. Each finished run adds one line a method to ``DIR/fast.csv``. The queue ends
when its seconds are used up; the same command goes on where it ended, within a run too. Beside the
methods there is *retrain-short*: retraining with a cosine of its own over as many samples as the
fast method took.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import goldfish
from goldfish.experiments.config import Config, parse_config
from goldfish.experiments.engine import in_process
from goldfish.experiments.evaluator import Evaluator
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.results import Cost, Final, Result

FAST, SHORT = "goldfish-sprint", "retrain-short"
OTHERS = ("retrain-tuned", "goldfish", "goldfish-warm")
PARTITIONS: Mapping[str, dict[str, Any]] = {
    "iid": {"partition": "iid"},
    "dirichlet": {"partition": "dirichlet", "alpha": 0.3},
}
SETTINGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "digits": (
        "lenet5",
        {"rounds": 20, "local_epochs": 2, "batch_size": 20, "learning_rate": 0.01},
    ),
    "mnist": ("lenet5", {"rounds": 10, "learning_rate": 0.05}),
    "cifar-10": (
        "resnet32",
        {
            "rounds": 30,
            "local_epochs": 2,
            "learning_rate": 0.1,
            "schedule": "cosine",
            "weight_decay": 0.0005,
            "augment": True,
            "precision": "bf16",
        },
    ),
}
"""Model and training of each dataset. 3 % of the data is removed with a backdoor, 3 % without."""
MANY_CLIENTS, LONGER = 100, 4
"""With so many clients each has few steps in a round: training takes so many times the rounds."""
COLUMNS = (
    *("dataset", "clients", "partition", "seed", "method"),
    *(
        "seconds",
        "samples",
        "rounds",
        "bytes",
        "accuracy",
        "backdoor",
        "gap",
        "gap_low",
        "gap_high",
    ),
    *("gap_to_retrain", "gap_to_retrain_low", "gap_to_retrain_high"),
    *("to_quality_seconds", "to_quality_samples"),
)


@dataclass(frozen=True)
class Cell:
    """One run of the queue."""

    dataset: str
    clients: int
    partition: str
    seed: int

    @property
    def name(self) -> str:
        """The run's directory."""
        return f"{self.dataset}-{self.clients}-{self.partition}-{self.seed}"

    def config(self, others: Sequence[str], rounds: int | None) -> Config:
        """Return the run's configuration; ``rounds`` shortens it."""
        model, training = SETTINGS[self.dataset]
        longer = LONGER if self.clients >= MANY_CLIENTS else 1
        training = training | {"rounds": longer * training["rounds"] if rounds is None else rounds}
        data = {"name": self.dataset, "clients": self.clients, **PARTITIONS[self.partition]}
        return parse_config(
            {
                "seed": self.seed,
                "data": data,
                "model": {"name": model},
                "training": training,
                "deletion": {"rate": 0.03, "clean_rate": 0.03, "backdoor_target": 7},
                "unlearning": {"methods": ["retrain", FAST, *others], "rounds": training["rounds"]},
            }
        )


def finish(cell: Cell, config: Config, out: Path, machine: Machine, until: float) -> bool:
    """Run a cell, or go on with it; tell whether it was finished in time."""
    if (out / "result.json").exists():
        return True
    for _ in run_experiment(config, out, machine, resume=True):
        if time.monotonic() > until:
            print(f"{cell.name}: to be continued")
            return False
    return True


def lines(cell: Cell, config: Config, out: Path, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield what is known of each method of a finished run."""
    result = Result.model_validate_json((out / "result.json").read_text())
    who = {"dataset": cell.dataset, "clients": cell.clients, "partition": cell.partition}
    for name, method in result.methods.items():
        if method.final is None or method.cost is None:  # it diverged
            yield {**who, "seed": cell.seed, "method": name}
            continue
        line = _line(method.final, method.cost, len(method.rounds))
        if method.time_to_quality is not None:
            line["to_quality_seconds"] = method.time_to_quality.seconds
            line["to_quality_samples"] = method.time_to_quality.samples
        yield {**who, "seed": cell.seed, "method": name, **line}
    fast, full = result.methods[FAST].cost, result.methods["retrain"].cost
    if fast is not None and full is not None:
        rounds = max(1, round(config.unlearning.rounds * fast.samples / full.samples))
        short = _retrain_short(config, out, machine, rounds)
        yield {**who, "seed": cell.seed, "method": SHORT, **short}


def _retrain_short(config: Config, out: Path, machine: Machine, rounds: int) -> dict[str, Any]:
    """Retrain with a cosine over so many rounds."""
    scenario = build_scenario(config, machine, out)
    federation = in_process(scenario, machine, "")
    origin, retrained = (
        load_file(out / "checkpoints" / f"{name}.safetensors") for name in ("origin", "retrain")
    )
    short = goldfish.unlearn(
        goldfish.Trained(federation, origin, config.training, config.seed),
        scenario.requests,
        method="retrain",
        rounds=rounds,
        schedule="cosine",
    )
    evaluator = Evaluator(scenario, machine.device)
    evaluator.compare_with(retrained)
    return _line(evaluator.measure(short.params), short.cost, rounds)


def _line(final: Final, cost: Cost, rounds: int) -> dict[str, Any]:
    line = {
        "seconds": cost.seconds,
        "samples": cost.samples,
        "rounds": rounds,
        "bytes": cost.bytes_sent,
        "accuracy": final.accuracy,
        "backdoor": final.backdoor_success,
        "gap_to_retrain": final.gap_to_retrain,
        "gap_to_retrain_low": final.gap_to_retrain_low,
        "gap_to_retrain_high": final.gap_to_retrain_high,
    }
    if final.memory is not None:
        gap = final.memory.gap
        line |= {"gap": gap.value, "gap_low": gap.low, "gap_high": gap.high}
    return line


def add(table: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Append lines to the table; it begins with the names of the columns."""
    new = not table.exists()
    with table.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(found)


def done(table: Path) -> set[str]:
    """Return the names of the runs that the table has."""
    if not table.exists():
        return set()
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        Cell(r["dataset"], int(r["clients"]), r["partition"], int(r["seed"])).name for r in rows
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Go through the queue."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--datasets", nargs="+", default=["mnist", "cifar-10"], choices=SETTINGS)
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 25, 100])
    parser.add_argument("--partitions", nargs="+", default=list(PARTITIONS), choices=PARTITIONS)
    parser.add_argument(
        "--others",
        nargs="*",
        default=OTHERS,
        choices=OTHERS,
        help="beside retrain and the fast one",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="of training and retraining, to try it")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.seconds
    machine = Machine(data_dir=options.data_dir, device=options.device, elsewhere=True)
    options.out.mkdir(parents=True, exist_ok=True)
    table = options.out / "fast.csv"
    queue = itertools.product(
        range(options.seeds), options.datasets, options.clients, options.partitions
    )
    for seed, dataset, clients, partition in queue:
        cell = Cell(dataset, clients, partition, seed)
        config, out = cell.config(options.others, options.rounds), options.out / cell.name
        if cell.name in done(table):
            continue
        if time.monotonic() > until or not finish(cell, config, out, machine, until):
            return
        add(table, list(lines(cell, config, out, machine)))
        print(f"{cell.name}: done")


if __name__ == "__main__":
    main()
