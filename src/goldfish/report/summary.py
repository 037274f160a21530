"""The methods of a run side by side, as plain data; the page and the command line show it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from goldfish.report.formatting import (
    NOTHING,
    brief_seconds,
    brief_size,
    count,
    decimal,
    durations,
    gap,
    number,
    p_value,
    percents,
    points,
    size,
    times,
)
from goldfish.report.reading import Result, section

ORIGIN = "origin"
"""The model that was trained with the data in it."""

YARDSTICK = "retrain"
"""Trained from scratch without the removed data: what every method is measured against."""

TO_RETRAIN = ("jsd", "jsd_distance", "l2")
"""The measures of ``similarity`` that compare with the yardstick."""


@dataclass(frozen=True)
class Spread:
    """How one number of a method scatters over the seeds of a run."""

    std: float | None
    """Sample standard deviation."""
    p_value: float | None
    """Of the paired t-test over the seeds against retrain."""
    values: Sequence[float | None]
    """One a seed; None where that seed has no such number."""


@dataclass(frozen=True)
class SummaryRow:
    """One method's numbers. Percentages are from 0 to 100; None where a run has no such number."""

    method: str
    accuracy: float | None = None
    backdoor_success: float | None = None
    accuracy_change: float | None = None
    """Accuracy minus retrain's."""
    backdoor_change: float | None = None
    """Backdoor success minus retrain's."""
    jsd: float | None = None
    jsd_distance: float | None = None
    l2: float | None = None
    p_value: float | None = None
    effect_size: float | None = None
    loss: float | None = None
    mse: float | None = None
    seconds: float | None = None
    steps: float | None = None
    samples: float | None = None
    bytes_sent: float | None = None
    bytes_kept: float | None = None
    teacher_samples: float | None = None
    fisher_samples: float | None = None
    measured_samples: float | None = None
    memory_gap: float | None = None
    """Mean loss on unseen samples minus that on removed ones without a trigger."""
    to_quality: float | None = None
    """Seconds until the method was as good as retrain ended up."""
    missed: bool = False
    """Whether it was never as good (with several seeds: not in every one)."""
    speed_up: float | None = None
    """Retrain's seconds to quality over this method's."""
    spread: Mapping[str, Spread] = field(default_factory=dict)
    """By the names of ``result.json``; empty where the run had one seed."""
    diverged: str | None = None
    """Why the method has no numbers."""

    def std(self, key: str) -> float | None:
        """Return the standard deviation over the seeds; None where the run had one seed."""
        return self.spread[key].std if key in self.spread else None


def summary_rows(result: Result) -> list[SummaryRow]:
    """Return one row a method, in the order of ``result.json``."""
    methods = section(result, "methods")
    retrain = section(section(methods, YARDSTICK), "final")
    return [_row(name, method, retrain) for name, method in methods.items()]


def _row(name: str, method: Result, retrain: Result) -> SummaryRow:
    if method.get("diverged"):
        return SummaryRow(name, diverged=str(method["diverged"]))
    final, similarity, cost = (section(method, k) for k in ("final", "similarity", "cost"))
    to_quality = number(section(method, "time_to_quality").get("seconds"))
    yardstick: Result = retrain
    if name == YARDSTICK:  # its differences to itself say nothing
        yardstick, similarity = {}, {k: v for k, v in similarity.items() if k not in TO_RETRAIN}
    return SummaryRow(
        method=name,
        accuracy=number(final.get("accuracy")),
        backdoor_success=number(final.get("backdoor_success")),
        accuracy_change=_difference(final, yardstick, "accuracy"),
        backdoor_change=_difference(final, yardstick, "backdoor_success"),
        jsd=number(similarity.get("jsd")),
        jsd_distance=number(similarity.get("jsd_distance")),
        l2=number(similarity.get("l2")),
        p_value=number(similarity.get("t_test_p")),
        effect_size=number(similarity.get("effect_size")),
        loss=number(final.get("loss")),
        mse=number(final.get("mse")),
        seconds=number(cost.get("seconds")),
        steps=number(cost.get("steps")),
        samples=number(cost.get("samples")),
        bytes_sent=number(cost.get("bytes_sent")),
        bytes_kept=number(cost.get("bytes_kept")),
        teacher_samples=number(cost.get("teacher_samples")),
        fisher_samples=number(cost.get("fisher_samples")),
        measured_samples=number(cost.get("measured_samples")),
        memory_gap=number(final.get("memory_gap")),
        to_quality=to_quality,
        missed="time_to_quality" in method and to_quality is None and name != ORIGIN,
        speed_up=number(method.get("speed_up")),
        spread=_spread(section(method, "spread")),
    )


def _spread(measures: Result) -> dict[str, Spread]:
    return {
        key: Spread(
            std=number(section(measures, key).get("std")),
            p_value=number(section(measures, key).get("p_vs_retrain")),
            values=[number(value) for value in section(measures, key).get("values") or []],
        )
        for key in measures
    }


def _difference(final: Result, retrain: Result, key: str) -> float | None:
    ours, theirs = number(final.get(key)), number(retrain.get(key))
    return None if ours is None or theirs is None else ours - theirs


def _changes(row: SummaryRow) -> str:
    changes = [points(row.accuracy_change), points(row.backdoor_change)]
    return " / ".join(text for text in changes if text != NOTHING) or NOTHING


def _accuracy(row: SummaryRow) -> str:
    return "diverged" if row.diverged else percents(row.accuracy, row.std("accuracy"))


def reached(row: SummaryRow) -> str:
    """Say in how many of the seeds a method that missed the quality reached it; often none."""
    values = row.spread["time_to_quality"].values if "time_to_quality" in row.spread else ()
    count = sum(value is not None for value in values)
    return f"{count} of {len(values)}" if count else ""


def _to_quality(row: SummaryRow) -> str:
    if row.missed:
        return f"in {text} seeds" if (text := reached(row)) else "not reached"
    return durations(row.to_quality, row.std("time_to_quality"))


def _bare(text: str) -> str:
    """Leave out what a narrow column has no room for: blanks and the unit."""
    return text.replace(" ± ", "±").removesuffix(" %")


def _short_gap(row: SummaryRow) -> str:
    """Leave out digits too, and, where a deviation needs the room, the zeros before the point."""
    std = row.std("memory_gap")
    texts = [_bare(gap(row.memory_gap, std, digits)) for digits in (3, 2, 1, 0)]
    if std is not None:
        texts = [re.sub(r"\b0\.", ".", text) for text in texts]
    return next((text for text in texts if len(text) <= (6 if std is None else 10)), texts[-1])


COLUMNS: Mapping[str, tuple[str, Callable[[SummaryRow], str]]] = {
    "method": ("method", lambda row: row.method),
    "accuracy": ("accuracy", _accuracy),
    "backdoor_success": (
        "backdoor",
        lambda row: percents(row.backdoor_success, row.std("backdoor_success")),
    ),
    "change": ("vs retrain, points", _changes),
    "memory_gap": ("memory gap", lambda row: gap(row.memory_gap, row.std("memory_gap"))),
    "jsd": ("JSD", lambda row: decimal(row.jsd, 4)),
    "seconds": ("time", lambda row: durations(row.seconds, row.std("seconds"))),
    "to_quality": ("to quality", _to_quality),
    "speed_up": ("speed-up", lambda row: times(row.speed_up)),
    "bytes_kept": ("kept", lambda row: size(row.bytes_kept)),
    "p_value": ("p-value vs origin", lambda row: p_value(row.p_value)),
    "effect_size": ("effect vs origin", lambda row: decimal(row.effect_size, 2)),
    "steps": ("steps", lambda row: count(row.steps)),
    "samples": ("samples", lambda row: count(row.samples)),
    "teacher_samples": ("teacher samples", lambda row: count(row.teacher_samples or None)),
    "fisher_samples": ("Fisher samples", lambda row: count(row.fisher_samples or None)),
    "measured_samples": ("measured samples", lambda row: count(row.measured_samples or None)),
    "bytes_sent": ("sent", lambda row: size(row.bytes_sent)),
    "loss": ("test loss", lambda row: decimal(row.loss)),
    "mse": ("test MSE", lambda row: decimal(row.mse, 4)),
    "jsd_distance": ("JSD distance", lambda row: decimal(row.jsd_distance, 4)),
    "l2": ("L2 to retrain", lambda row: decimal(row.l2, 4)),
    "short_accuracy": ("accuracy\n%", lambda row: _bare(_accuracy(row))),
    "short_backdoor": (
        "backdoor\n%",
        lambda row: _bare(percents(row.backdoor_success, row.std("backdoor_success"))),
    ),
    "short_gap": ("memory\ngap", _short_gap),
    "short_to_quality": (
        "time to\nquality",
        lambda row: (reached(row) or "not met") if row.missed else brief_seconds(row.to_quality),
    ),
    "short_speed_up": ("speed-\nup", lambda row: times(row.speed_up)),
    # The standard deviations of several seeds take its room.
    "short_kept": ("kept", lambda row: NOTHING if row.spread else brief_size(row.bytes_kept)),
}
"""Every column by key: its heading, and how a row fills it."""

MAIN = tuple(COLUMNS)[:10]
"""The columns of the table side by side, in order."""

MORE = ("method", *(key for key in tuple(COLUMNS)[10:] if not key.startswith("short_")))
"""The columns of the second, smaller table of the page."""

SHORT = ("method", *(key for key in COLUMNS if key.startswith("short_")))
"""The columns that a terminal of 80 characters has room for, with headings on two lines."""


def table(
    rows: Sequence[SummaryRow], columns: Iterable[str] = MAIN
) -> tuple[list[str], list[list[str]]]:
    """Return headings and formatted cells, less the columns that no method has a number for."""
    drawn = [(COLUMNS[key][0], [COLUMNS[key][1](row) for row in rows]) for key in columns]
    filled = [(heading, cells) for heading, cells in drawn if any(c != NOTHING for c in cells)]
    headings = [heading for heading, _ in filled]
    return headings, [[cells[i] for _, cells in filled] for i in range(len(rows))]
