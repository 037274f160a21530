"""Running a preset: its cells, and the values that stay of them.

Each distinct configuration of a preset is a *cell*, an ordinary run directory whose name comes from
its settings: presets that need the same run find it, and cells that differ in their unlearning
alone share one trained federation. Values of seeds and rows that were measured before stay, so that
a preset can be run in parts, on several machines.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from goldfish.errors import ConfigError, StoreError
from goldfish.experiments.config import Config, parse_config, read_override, set_value
from goldfish.experiments.preset import (
    OWN,
    PartOf,
    Preset,
    Series,
    Value,
    from_csv,
    load_preset,
    part_of,
    parts,
    quickened,
    rows_of,
    to_csv,
)
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import PARTITION, REQUESTS, Machine
from goldfish.files import write_whole
from goldfish.results import ORIGIN, Part, Progress, Result
from goldfish.store import CONFIG, RESULT, load_checkpoint
from goldfish.store.runs import CHECKPOINTS, METRICS, PINNED

VALUES, ABOUT = "values.csv", "run.json"
COMPILED = "--compile"


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


def _machine(result: Result) -> str:
    where = result.environment
    cores = f"{where.cpu_count} cores" if where.device == "cpu" else ""
    system = where.platform.split("-")[0]
    known = (where.device, cores, f"PyTorch {where.torch}", system)
    return ", ".join(part for part in known if part)


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


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
