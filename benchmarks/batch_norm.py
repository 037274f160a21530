"""What it costs to keep removed samples out of BatchNorm's statistics, and what it does.

    python benchmarks/batch_norm.py --data-dir DIR --device cuda --precision bf16

Two ways take turns: *apart*, as it is, and *together*, where removed samples enter the batches'
statistics, as they did before. Speed: images a second of the complete Goldfish step, when all
clients remove a class (``goldfish bench`` measures the same). Result: a run on CIFAR-10 with a
backdoor, and the accuracy and backdoor success of each round of the methods that see removed data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from goldfish.bench.rounds import Bench, Workload, load_images
from goldfish.experiments.config import parse_config
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine

WAYS = ("together", "apart")
METHODS = ("goldfish", "goldfish-warm", "incompetent-teacher")


def going(way: str) -> AbstractContextManager[Any]:
    """Return the context in which one of the two ways is gone."""
    if way == "apart":
        return nullcontext()
    whole = "goldfish.unlearning.basic_model.statistics_of_first"
    return patch(whole, lambda _model, _count: nullcontext())


def rates(options: argparse.Namespace) -> None:
    """Print the speed of the complete step, both ways by turns."""
    work = Workload(
        model=options.model,
        clients=(options.clients,),
        samples=options.samples,
        device=options.device,
        precision=options.precision,
        data_dir=options.data_dir,
    )
    data, what = load_images(work)
    print(f"{options.model}, {options.precision}, {options.clients} clients, {what}")
    benches = {way: Bench(work, data, options.clients) for way in WAYS}
    measured: dict[str, list[float]] = {way: [] for way in WAYS}
    trained = {way: bench.train() for way, bench in benches.items()}
    for _ in range(options.turns):
        for way, bench in benches.items():
            with going(way):
                requests = bench.a_class_of_all()
                _, *later = bench.unlearning(trained[way], "goldfish", requests)
            measured[way] += [cost.samples / cost.seconds for cost in later]
    for way, found in measured.items():
        print(f"{way:9} {statistics.median(found):10,.0f} images a second  ({len(found)} rounds)")


def results(options: argparse.Namespace, seed: int) -> None:
    """Print accuracy and backdoor success of every round, both ways."""
    values: dict[str, Any] = {
        "seed": seed,
        "data": {"name": "cifar-10", "clients": options.clients},
        "model": {"name": options.model},
        "training": {
            "rounds": options.rounds,
            "local_epochs": 2,
            "learning_rate": 0.05,
            "schedule": "cosine",
            "weight_decay": 0.0005,
            "augment": True,
            "precision": options.precision,
        },
        "deletion": {"rate": 0.06, "backdoor_target": 1},
        "unlearning": {"rounds": options.unlearning_rounds, "methods": [*METHODS, "retrain"]},
    }
    machine = Machine(data_dir=options.data_dir, device=options.device)
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder, going(way):
            out = Path(folder) / "run"
            for _ in run_experiment(parse_config(values), out, machine):
                pass
            methods = json.loads((out / "result.json").read_text())["methods"]
        for name, method in methods.items():
            rounds = method["rounds"][-1:] if name == "origin" else method["rounds"]
            course = "  ".join(f"{r['accuracy']:.1f}/{r['backdoor_success']:.1f}" for r in rounds)
            print(f"seed {seed}  {way:9} {name:20} {course}  ({method['cost']['seconds']:.1f} s)")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="resnet32")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--unlearning-rounds", type=int, default=6)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    options = parser.parse_args()
    rates(options)
    for seed in options.seeds:
        results(options, seed)


if __name__ == "__main__":
    main()
