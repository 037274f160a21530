"""The presets: one TOML file a table or figure of the paper, and the values that it leads to.

A preset is a configuration, what changes along its rows (``[x]``) and from series to series, which
numbers are read, and the paper's claims.
"""

from __future__ import annotations

import csv
import io
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from pydantic import Field, model_validator

from goldfish.errors import ConfigError, StoreError, unknown
from goldfish.results import BY_KEY, ORIGIN, Measures, Record, Result
from goldfish.settings import Count, Settings

PRESETS = Path(__file__).parent / "presets"
PartOf: TypeAlias = tuple[int, float | None]
"""A seed and a row; None for the row where rows are the rounds of one run."""


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
