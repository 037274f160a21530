"""The paper's tables and figures: a preset says what to run, a run of it leaves values.

A preset is one TOML file: a configuration, what changes along its rows (``[x]``) and from series to
series, which numbers are read, and the paper's claims. Each distinct configuration is a *cell*, an
ordinary run directory whose name comes from its settings: presets that need the same run find it,
and cells that differ in their unlearning alone share one trained federation. Values of seeds and
rows that were measured before stay, so that a preset can be run in parts, on several machines.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shlex
import shutil
import statistics
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from pydantic import Field, model_validator

from goldfish.errors import ConfigError, StoreError, unknown
from goldfish.experiments.config import Config, parse_config, read_override, set_value
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import PARTITION, REQUESTS, Machine
from goldfish.files import write_whole
from goldfish.results import BY_KEY, ORIGIN, Measures, Part, Progress, Record, Result
from goldfish.settings import Count, Settings
from goldfish.store import CONFIG, RESULT, load_checkpoint
from goldfish.store.runs import CHECKPOINTS, METRICS, PINNED

PRESETS = Path(__file__).parent / "presets"
VALUES, ABOUT = "values.csv", "run.json"
COMPILED = "--compile"
PartOf: TypeAlias = tuple[int, float | None]
"""A seed and a row; None for the row where rows are the rounds of one run."""


class Axis(Settings):
    """What the rows of a table, or the horizontal axis of a figure, are."""

    label: str
    """What it is called."""
    setting: str | None = None
    """The setting that changes from row to row; without it a row is a round."""
    values: list[float] = Field(default_factory=list)
    """The rows; for rounds, those that are read (all where none is named)."""
    factor: float = 1.0
    """What a row is multiplied by to give the setting: 0.01 for percentages."""
    one_seed: list[float] = Field(default_factory=list)
    """Rows that are run with the first seed alone, where runs take long."""
    training: bool = False
    """Rounds count from the first round of the training on, not from the deletion."""


class Series(Settings):
    """A column of a table, or a line of a figure."""

    name: str
    method: str = ORIGIN
    """Whose numbers these are: a method of the run, or origin."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Settings in which its run differs, by their full names."""


class Claim(Settings):
    """A claim of the paper, as data: one series compared with others, or with a number."""

    text: str
    metric: str
    subject: str
    """The series that the claim is about."""
    holds: Literal["higher", "lower", "alike"]
    """How the subject compares: not below, not above, or not further away than ``margin``."""
    than: list[str] = Field(default_factory=list)
    """Other series; "paper" is the paper's own value of the subject."""
    bound: float | None = None
    """A number to compare with instead."""
    margin: float = 0.0
    """By how much the comparison may be missed and still hold."""
    at: list[float] = Field(default_factory=list)
    """The rows that the claim is about; all where none is named."""

    @model_validator(mode="after")
    def _compares(self) -> Self:
        if bool(self.than) == (self.bound is not None):
            raise ValueError("a claim compares either with series (than) or with a number (bound)")
        return self


class Planner(Settings):
    """The shard planner's prices, and the paper's advice."""

    round_benefit: float
    """What one round that is saved is worth (the paper's c1)."""
    accuracy_cost: float
    """What one point of accuracy that is lost costs (the paper's c2)."""
    expected: list[int]
    """The numbers of shards that the paper recommends."""


class Quick(Settings):
    """How ``--quick`` shrinks the preset."""

    x: list[float] = Field(default_factory=list)
    """The rows that are left; all where none is named."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Settings that make it small, by their full names."""


class Preset(Settings):
    """One table or figure of the paper."""

    name: str
    title: str
    shows: str
    """What it shows, and how the paper is read where it is silent."""
    seeds: Count
    base: dict[str, Any]
    """The configuration, as in docs/configuration.md."""
    x: Axis
    series: list[Series]
    metrics: list[str]
    error: str = ""
    """The metric that is drawn as error bars; empty: the standard deviation over the seeds."""
    claims: list[Claim] = Field(default_factory=list)
    planner: Planner | None = None
    paper: str = ""
    """The file with the paper's values; empty where the paper has a figure and no numbers."""
    quick: Quick = Quick()

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        for metric in self.metrics:
            if metric not in {*OWN, *BY_KEY, *Measures.model_fields}:
                raise ValueError(f"there is no metric {metric!r}")
        names = [series.name for series in self.series]
        for claim in self.claims:
            for name in {claim.subject, *claim.than} - {"paper"}:
                if name not in names or claim.metric not in self.metrics:
                    raise ValueError(f"the claim {claim.text!r} is not about what is measured")
        return self


class Value(NamedTuple):
    """One number: of a row, a series, a metric, and the seed of the run (None: the paper's)."""

    x: float
    series: str
    metric: str
    seed: int | None
    value: float


class About(Part):
    """What was run, for the page: ``run.json``."""

    command: str
    date: str
    """When the last of its runs ended."""
    machines: list[str]
    seeds: list[int]
    complete: bool
    """Whether it is the preset as it stands, and not a smaller or changed one."""
    notes: list[str]
    settings: str = ""
    """A digest of all settings of the runs but their seeds; values of others are not added."""


def preset_names() -> list[str]:
    """Return the names of all presets, tables first, in the paper's order."""
    names = [path.stem for path in PRESETS.glob("*.toml") if path.stem != "demo"]
    return sorted(names, key=lambda name: (name[0] != "t", len(name.rstrip("abcde")), name))


def load_preset(name: str) -> Preset:
    """Read a preset of this package."""
    if name not in preset_names():
        raise ConfigError(
            unknown("preset", name, preset_names(), "'goldfish presets' lists all of them.")
        )
    return Preset.parse({**_read(name), "name": name}, name)


def _read(name: str) -> dict[str, Any]:
    """Read a preset's file over the one that it is ``like``.

    Settings of ``[base]`` and ``[quick]`` are added to the other's, all else replaces it.
    """
    values = tomllib.loads((PRESETS / f"{name}.toml").read_text("utf-8"))
    if "like" not in values:
        return values
    below = _read(values.pop("like"))
    parts = ("base", "quick")
    merged = {part: _merged(below.get(part, {}), values.get(part, {})) for part in parts}
    return {**below, **values, **merged}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(below)
    for name, value in above.items():
        nested = name != "set" and isinstance(value, dict) and name in both
        both[name] = _merged(both[name], value) if nested else value
    return both


def quickened(preset: Preset) -> Preset:
    """Return the preset as ``--quick`` runs it: one seed, few rows, small settings."""
    rows = preset.quick.x or preset.x.values
    claims = [
        claim.model_copy(update={"at": [at for at in claim.at if at in rows]}) if rows else claim
        for claim in preset.claims
        if not (rows and claim.at) or set(claim.at) & set(rows)
    ]
    changed = {"seeds": 1, "claims": claims, "x": preset.x.model_copy(update={"values": rows})}
    return preset.model_copy(update=changed)


@dataclass(frozen=True)
class Cell:
    """One run of a preset: a configuration with its seed, and where it is kept."""

    config: Config
    place: Path

    @property
    def finished(self) -> bool:
        """Whether it has been run."""
        return (self.place / RESULT).exists()

    def run(self, machine: Machine) -> Iterator[Progress]:
        """Yield the progress of the run, which goes on where it was interrupted."""
        if not self.place.exists():
            self._adopt_training()
        yield from run_experiment(self.config, self.place, machine, resume=True)

    def _adopt_training(self) -> None:
        """Begin with the training of another cell, if one has the same that is finished."""
        donors = self.place.parent.parent.glob(f"*/{self.place.name}")
        donor = next((place for place in donors if _is_trained(place)), None)
        if donor is None or any(self.config.kept_rounds.values()):
            return
        new = self.place.parent / f".{self.place.name}.part"
        shutil.rmtree(new, ignore_errors=True)
        for name in (PARTITION, REQUESTS, f"{CHECKPOINTS}/{ORIGIN}.safetensors"):
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(donor / name, new / name)
        pinned = json.loads((donor / PINNED).read_bytes())
        write_whole(new / PINNED, json.dumps({**pinned, "run": uuid.uuid4().hex}))
        lines = (donor / METRICS).read_text("utf-8").splitlines(keepends=True)
        own = [
            line for line in lines if line.endswith("\n") and json.loads(line)["phase"] == ORIGIN
        ]
        write_whole(new / METRICS, "".join(own))
        write_whole(new / CONFIG, self.config.to_toml())
        new.rename(self.place)


def _is_trained(place: Path) -> bool:
    """Tell whether a run has finished its original training."""
    path = place / CHECKPOINTS / f"{ORIGIN}.safetensors"
    return (place / PINNED).exists() and path.exists() and load_checkpoint(path).final


@dataclass(frozen=True)
class Reproduction:
    """A preset as it is to be run: how many seeds, how small, with which settings changed."""

    preset: Preset
    out: Path
    """The folder of all cells, and of a folder of results for each preset."""
    seeds: int
    quick: bool = False
    overrides: Sequence[str] = ()
    at: Sequence[float] = ()
    """The rows that are run; all where none is named."""

    @classmethod
    def of(
        cls,
        name: str,
        out: Path,
        *,
        seeds: int | None = None,
        quick: bool = False,
        overrides: Sequence[str] = (),
        at: Sequence[float] = (),
    ) -> Reproduction:
        """Return the reproduction of a preset by its name."""
        preset = load_preset(name)
        if any(read_override(override)[0] == "seed" for override in overrides):
            raise ConfigError("A preset runs with the seeds 0, 1, ...: --seeds says how many.")
        if quick:
            preset = quickened(preset)
        if at and preset.x.setting is None:
            raise ConfigError(f"--at: the rows of {name} are the rounds of one run.")
        if wrong := [x for x in at if x not in preset.x.values]:
            rows = ", ".join(f"{x:g}" for x in preset.x.values)
            raise ConfigError(f"--at {wrong[0]:g} is no row of {name}, which has {rows}.")
        return cls(preset, out, seeds or preset.seeds, quick, overrides, at)

    @property
    def folder(self) -> Path:
        """Where the results go; those of ``--quick`` stay apart."""
        return self.out / (f"{self.preset.name}-quick" if self.quick else self.preset.name)

    def cells(self) -> list[Cell]:
        """Return all runs that are needed and whose values are not known yet, each once."""
        known = {part_of(self.preset, value) for value in self.known()[1]}
        cells = [cell for part, cells in self._parts() if part not in known for cell in cells]
        return list({cell.place: cell for cell in cells}.values())

    def known(self) -> tuple[About | None, list[Value]]:
        """Return what earlier runs with the same settings left, on this machine or another.

        Values of the preset as it stands are not overwritten by those of other settings.
        """
        if not (self.folder / VALUES).exists():
            return None, []
        about = About.read(self.folder / ABOUT)
        if about.settings == self._settings():
            return about, from_csv(self.folder / VALUES)
        if about.complete:
            raise StoreError(
                f"{self.folder / VALUES} has values of other settings, or of a version of Goldfish "
                f"with other defaults: new ones cannot stand beside them. Move {self.folder} away, "
                "or give another --out."
            )
        return None, []

    def _parts(self) -> Iterator[tuple[PartOf, list[Cell]]]:
        """Yield each seed and row that is asked for, and its runs in the order of the series."""
        for seed, row in parts(self.preset, self.seeds):
            if not self.at or row in self.at:
                yield (seed, row), [self._cell(seed, row, s) for s in self.preset.series]

    def _settings(self) -> str:
        """Return the digest of all that the values depend on, but the seeds."""
        runs = [
            [self._cell(0, row, series).config.to_dict(), series.model_dump()]
            for row in rows_of(self.preset)
            for series in self.preset.series
        ]
        return _digest({"runs": runs, "metrics": self.preset.metrics})

    def _cell(self, seed: int, row: float | None, series: Series) -> Cell:
        x, values = self.preset.x, deepcopy(self.preset.base)
        changes = dict(series.set)
        if x.setting is not None and row is not None:
            at = row * x.factor
            changes[x.setting] = round(at, 9) if x.factor != 1 else int(at) if at % 1 == 0 else at
        for key, value in {**changes, **(self.preset.quick.set if self.quick else {})}.items():
            set_value(values, key, value)
        for override in self.overrides:
            set_value(values, *read_override(override))
        config = parse_config(values).model_copy(update={"seed": seed})
        whole = config.to_dict()
        own = {"unlearning": whole.pop("unlearning")}
        del whole["seed"]
        name = f"{config.data.name}-{config.model.name.replace(':', '.')}-{_digest(whole)}"
        return Cell(config, self.out / "cells" / name / _digest(own) / f"seed-{seed}")

    def finish(self) -> Path:
        """Write the values that are known, and what is known of them; return the folder.

        Values of a seed and row are there once all of their cells are finished; they stand in the
        order of seeds, rows and series.
        """
        before, values = self.known()
        done = {part_of(self.preset, value) for value in values}
        results: dict[Path, Result] = {}
        for part, cells in self._parts():
            if part in done or not all(cell.finished for cell in cells):
                continue
            for cell, series in zip(cells, self.preset.series, strict=True):
                if cell.place not in results:
                    results[cell.place] = Result.read(cell.place / RESULT)
                found = _measured(self.preset, results[cell.place], series, part[1])
                values += [Value(x, series.name, m, part[0], value) for x, m, value in found]
        if not values:
            raise StoreError(f"No run of {self.preset.name} is finished yet in {self.out}.")
        write_whole(self.folder / ABOUT, self._about(before, values, results))
        order = list(parts(self.preset, 1 + max(value.seed or 0 for value in values)))
        values.sort(key=lambda value: order.index(part_of(self.preset, value)))
        write_whole(self.folder / VALUES, to_csv(values))
        return self.folder

    def _about(
        self, before: About | None, values: Sequence[Value], results: Mapping[Path, Result]
    ) -> str:
        """Return the facts of all values as JSON: those from before, and those of new results."""
        seeds = sorted({value.seed for value in values if value.seed is not None})
        command = ["goldfish", "reproduce", self.preset.name, "--seeds", str(seeds[-1] + 1)]
        command += ["--quick"] if self.quick else []
        command += [word for override in self.overrides for word in ("--set", override)]
        compiled = any(result.environment.compiled for result in results.values())
        if compiled or (before is not None and COMPILED in shlex.split(before.command)):
            command.append(COMPILED)
        diverged = [
            f"{name} diverged: {method.diverged}"
            for result in results.values()
            for name, method in result.methods.items()
            if method.diverged
        ]
        ended = [(place / RESULT).stat().st_mtime for place in results]
        dates = [datetime.fromtimestamp(at, UTC).date().isoformat() for at in ended]
        machines = [_machine(result) for result in results.values()]
        if before is not None:
            dates.append(before.date)
            machines, diverged = before.machines + machines, before.notes + diverged
        return (
            About(
                command=shlex.join(command),
                date=max(dates),
                machines=list(dict.fromkeys(machines)),
                seeds=seeds,
                complete=not (self.quick or self.overrides),
                notes=list(dict.fromkeys(diverged)),
                settings=self._settings(),
            ).model_dump_json(indent=1)
            + "\n"
        )


def rows_of(preset: Preset) -> Sequence[float | None]:
    """Return the rows that have runs of their own; None for those that are rounds of one run."""
    return preset.x.values if preset.x.setting else [None]


def parts(preset: Preset, seeds: int) -> Iterator[PartOf]:
    """Yield each seed with each row that it is run with."""
    for seed in range(seeds):
        for row in rows_of(preset):
            if seed == 0 or row not in preset.x.one_seed:
                yield seed, row


def part_of(preset: Preset, value: Value) -> PartOf:
    """Return the seed and the row that a value is of."""
    return value.seed or 0, value.x if preset.x.setting else None


def _machine(result: Result) -> str:
    where = result.environment
    cores = f"{where.cpu_count} cores" if where.device == "cpu" else ""
    system = where.platform.split("-")[0]
    known = (where.device, cores, f"PyTorch {where.torch}", system)
    return ", ".join(part for part in known if part)


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def _of_clients(
    reduce: Callable[[Sequence[float]], float], _result: Result, record: Record
) -> float | None:
    return reduce(record.client_accuracies) if record.client_accuracies else None


OWN: Mapping[str, Callable[[Result, Record], float | None]] = {
    "size_variance": lambda result, _record: statistics.pvariance(result.partition.sizes.values()),
    "client_min": partial(_of_clients, min),
    "client_max": partial(_of_clients, max),
    "client_range": partial(_of_clients, lambda found: max(found) - min(found)),
    "client_std": partial(_of_clients, statistics.pstdev),
}
"""What is read of a run beside ``METRICS``: the sizes of the clients' data, and how the accuracies
of their own models scatter."""


def _measured(
    preset: Preset, result: Result, series: Series, row: float | None
) -> Iterator[tuple[float, str, float]]:
    """Yield row, metric and value of all that a series has in one run."""
    method = result.methods[series.method]
    records = list(method.rounds)
    if preset.x.training and series.method != ORIGIN:
        before = result.methods[ORIGIN].rounds
        later = [r.model_copy(update={"round": r.round + len(before)}) for r in records]
        records = [*before, *later]
    if row is not None:
        records = records[-1:]
    elif preset.x.values:
        records = [record for record in records if record.round in preset.x.values]
    for record in records:
        for metric in preset.metrics:
            if metric in OWN:
                value = OWN[metric](result, record)
            elif row is None:
                value = getattr(record, metric)
            else:
                value = method.get(metric)
            if value is not None:
                yield (record.round if row is None else row), metric, float(value)


def paper_values(preset: Preset) -> list[Value]:
    """Return what the paper's table says; nothing where it has a figure alone."""
    return from_csv(PRESETS / preset.paper) if preset.paper else []


def to_csv(values: Sequence[Value]) -> str:
    """Return values as CSV, with every digit."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(Value._fields)
    for value in values:
        rows.writerow([f"{value.x:g}", *value[1:4], repr(value.value)])
    return text.getvalue()


def from_csv(path: Path) -> list[Value]:
    """Read values that :func:`to_csv` wrote; those of the paper have no seed."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [
                Value(
                    float(row["x"]),
                    row["series"],
                    row["metric"],
                    int(row["seed"]) if row["seed"] else None,
                    float(row["value"]),
                )
                for row in csv.DictReader(file)
            ]
    except (OSError, KeyError, ValueError) as error:
        raise StoreError(f"{path} cannot be read as values of a preset ({error}).") from error
