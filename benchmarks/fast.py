"""How much sooner than retraining the fast method is, and what it leaves behind.

    python benchmarks/fast.py --out DIR --data-dir DIR --device cuda --seconds 1500
    python benchmarks/fast.py --out DIR --table

A queue of runs, one for each dataset, number of clients, partition and seed; all methods of a run
start from one origin. Each finished run adds one line a method to ``DIR/fast.csv``. Beside the
methods there is *retrain-short*: retraining with a cosine of its own over as many samples as the
fast method took. ``--try anneal_step=0.75,mu_d=3`` adds the fast method with other settings, also
to finished runs. With ``--models N`` the first run of each setting is then audited with so many
models a side (``DIR/distances.csv``). The queue ends when its seconds are used up; the same command
goes on where it ended, within a run too. ``--table`` prints what is there as Markdown.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from scipy.stats import t as student

import goldfish
from goldfish.audits import read_audit
from goldfish.experiments.audit import audit_run
from goldfish.experiments.config import Config, parse_config
from goldfish.experiments.engine import in_process
from goldfish.experiments.evaluator import Evaluator
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.results import MARGINS, Cost, Final, MethodResult, Record, Result

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
    *("to_accuracy_seconds", "to_accuracy_samples"),
)
HEADINGS = (
    *("fewer samples", "sooner", "seconds", "samples", "rounds", "MB", "accuracy", "backdoor"),
    *("gap", "distance"),
)
DISTANCES = (
    *("dataset", "clients", "partition"),
    *("method", "models", "removed", "unseen", "memory", "low", "high", "verdict"),
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

    @property
    def setting(self) -> dict[str, Any]:
        """Its columns in both tables."""
        return {"dataset": self.dataset, "clients": self.clients, "partition": self.partition}

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


def finish(name: str, steps: Iterable[object], until: float) -> bool:
    """Go through the steps of a run or an audit; tell whether it was finished in time."""
    for _ in steps:
        if time.monotonic() > until:
            print(f"{name}: to be continued")
            return False
    return True


def lines(cell: Cell, config: Config, out: Path, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield what is known of each method of a finished run."""
    result = Result.model_validate_json((out / "result.json").read_text())
    who = {**cell.setting, "seed": cell.seed}
    for name, method in result.methods.items():
        if method.final is None or method.cost is None:  # it diverged
            yield {**who, "method": name}
            continue
        line = _line(method.final, method.cost, len(method.rounds))
        line |= to_accuracy(method.rounds, result.retrain)
        yield {**who, "method": name, **line}
    fast, full = result.methods[FAST].cost, result.methods["retrain"].cost
    if fast is not None and full is not None:
        rounds = max(1, round(config.unlearning.rounds * fast.samples / full.samples))
        short = {"method": "retrain", "rounds": rounds, "schedule": "cosine"}
        yield {**who, "method": SHORT, **_from_origin(config, out, machine, **short)}


def variant(
    cell: Cell, config: Config, out: Path, machine: Machine, changed: str
) -> dict[str, Any]:
    """Return the line of the fast method with other settings: ``name=value,name=value``."""
    pairs = (pair.partition("=") for pair in changed.split(","))
    settings = {name: float(value) if "." in value else int(value) for name, _, value in pairs}
    line = _from_origin(config, out, machine, method=FAST, **settings)
    return {**cell.setting, "seed": cell.seed, "method": _variant_name(changed), **line}


def _variant_name(changed: str) -> str:
    return f"{FAST} {changed}"


def to_accuracy(rounds: Sequence[Record], retrain: MethodResult) -> dict[str, float]:
    """Return what was spent until the accuracy was within a margin of retrain's final one."""
    if retrain.final is None:
        return {}
    spent = Cost()
    for record in rounds:
        spent += record.cost
        if record.accuracy >= retrain.final.accuracy - MARGINS.accuracy:
            return {"to_accuracy_seconds": spent.seconds, "to_accuracy_samples": spent.samples}
    return {}


def _from_origin(config: Config, out: Path, machine: Machine, **how: Any) -> dict[str, Any]:
    """Unlearn once more from a finished run's origin."""
    scenario = build_scenario(config, machine, out)
    federation = in_process(scenario, machine, "")
    origin, retrained = (
        load_file(out / "checkpoints" / f"{name}.safetensors") for name in ("origin", "retrain")
    )
    trained = goldfish.Trained(federation, origin, config.training, config.seed)
    found = goldfish.unlearn(trained, scenario.requests, test=scenario.test, **how)
    evaluator = Evaluator(scenario, machine.device)
    evaluator.compare_with(retrained)
    return _line(evaluator.measure(found.params), found.cost, len(found.rounds))


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


def distances(cell: Cell, out: Path) -> Iterator[dict[str, Any]]:
    """Yield how far each method's models are from retrained ones, and these from each other."""
    audit = read_audit(out)
    if audit is None or audit.noise is None:
        raise SystemExit(f"{out} was not audited.")
    who = {**cell.setting, "models": audit.models}
    yield {**who, "method": "oracles", **audit.noise.model_dump()}
    for name, found in audit.methods.items():
        line: dict[str, Any] = {"method": name, "verdict": found.word}
        if found.distances is not None:
            line |= found.distances.model_dump()
        if found.memory is not None:
            line |= found.memory.model_dump(include={"low", "high"})
            line["memory"] = found.memory.value
        yield {**who, **line}


def add(table: Path, columns: Sequence[str], found: Iterable[Mapping[str, Any]]) -> None:
    """Append lines to a table; it begins with the names of the columns."""
    new = not table.exists()
    with table.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(found)


def read(table: Path) -> list[dict[str, str]]:
    """Return the lines of a table; none where it is not there yet."""
    if not table.exists():
        return []
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(folder: Path) -> Iterator[str]:
    """Yield one table for each setting: means over its seeds, with a 95 % interval of the gap."""
    measured = read(folder / "distances.csv")
    settings = itertools.groupby(sorted(read(folder / "fast.csv"), key=_setting), key=_setting)
    for setting, found in settings:
        rows = list(found)
        methods = list(dict.fromkeys(row["method"] for row in rows))
        quality = {r["seed"]: r for r in rows if r["method"] == "retrain"}
        yield f"{setting[0]}, {setting[1]} clients, {setting[2]}, {len(quality)} seeds"
        yield ""
        yield f"| method | {' | '.join(HEADINGS)} |"
        yield "|---" * (1 + len(HEADINGS)) + "|"
        for method in methods:
            own = [row for row in rows if row["method"] == method and row["seconds"]]
            apart = [r for r in measured if _setting(r) == setting and r["method"] == method]
            cells = (
                _cells(own, quality, apart) if own else ["diverged", *[""] * (len(HEADINGS) - 1)]
            )
            yield f"| {method} | {' | '.join(cells)} |"
        for noise in measured:
            if _setting(noise) == setting and noise["method"] == "oracles":
                yield "| oracles" + " |" * len(HEADINGS) + f" {_distance(noise)} |"
        yield ""


def _setting(row: Mapping[str, str]) -> tuple[str, int, str]:
    return row["dataset"], int(row["clients"]), row["partition"]


def _distance(row: Mapping[str, str]) -> str:
    return f"{float(row['removed']):.2f} / {float(row['unseen']):.2f}"


def _cells(
    own: Sequence[Mapping[str, str]],
    quality: Mapping[str, Mapping[str, str]],
    apart: Sequence[Mapping[str, str]],
) -> Iterator[str]:
    """Yield the cells of one method, of the runs that did not diverge."""

    def mean(column: str) -> float:
        return statistics.mean(float(row[column]) for row in own)

    for kind in ("samples", "seconds"):
        ratios = [float(quality[r["seed"]][f"to_accuracy_{kind}"]) / float(r[kind]) for r in own]
        yield f"{statistics.mean(ratios):.1f}" if own[0]["method"] != "origin" else ""
    yield f"{mean('seconds'):.2f}"
    yield f"{mean('samples'):,.0f}"
    yield f"{mean('rounds'):.0f}"
    yield f"{mean('bytes') / 1e6:.1f}"
    yield f"{mean('accuracy'):.2f}"
    yield f"{mean('backdoor'):.2f}"
    gaps = [float(row["gap"]) for row in own]
    wide = 0.0
    if len(gaps) > 1:
        wide = student.ppf(0.975, len(gaps) - 1) * statistics.stdev(gaps) / len(gaps) ** 0.5
    yield f"{mean('gap'):+.3f} ± {wide:.3f}"
    yield _distance(apart[0]) if apart else ""


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
    parser.add_argument(
        "--try",
        dest="changes",
        nargs="*",
        default=[],
        metavar="NAME=VALUE,...",
        help="the fast method with other settings",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="of training and retraining, to try it")
    parser.add_argument("--models", type=int, default=0, help="of an audit of the first seed")
    parser.add_argument("--compile", action="store_true", help="compile the models")
    parser.add_argument("--table", action="store_true", help="print what is there, as Markdown")
    options = parser.parse_args(arguments)
    if options.table:
        print("\n".join(markdown(options.out)))
        return
    until = time.monotonic() + options.seconds
    machine = Machine(options.data_dir, options.device, compiled=options.compile, elsewhere=True)
    options.out.mkdir(parents=True, exist_ok=True)
    runs, audits = options.out / "fast.csv", options.out / "distances.csv"
    choices = (options.datasets, options.clients, options.partitions)
    settings: list[tuple[str, int, str]] = list(itertools.product(*choices))
    for seed, setting in itertools.product(range(options.seeds), settings):
        cell = Cell(*setting, seed)
        config, out = cell.config(options.others, options.rounds), options.out / cell.name
        rows = [row for row in read(runs) if (*_setting(row), int(row["seed"])) == (*setting, seed)]
        done = [row["method"] for row in rows]
        if not done:
            steps = run_experiment(config, out, machine, resume=True)
            there = (out / "result.json").exists()
            if time.monotonic() > until or not (there or finish(cell.name, steps, until)):
                return
            add(runs, COLUMNS, list(lines(cell, config, out, machine)))
            print(f"{cell.name}: done")
        for changed in options.changes:
            if _variant_name(changed) in done:
                continue
            if time.monotonic() > until:
                return
            add(runs, COLUMNS, [variant(cell, config, out, machine, changed)])
            print(f"{cell.name}: {changed}")
    for setting in settings if options.models else ():
        if any(_setting(row) == setting for row in read(audits)):
            continue
        cell = Cell(*setting, 0)
        audit = audit_run(options.out / cell.name, machine, models=options.models)
        if time.monotonic() > until or not finish(f"{cell.name}, audit", audit, until):
            return
        add(audits, DISTANCES, distances(cell, options.out / cell.name))
        print(f"{cell.name}: audited")


if __name__ == "__main__":
    main()
