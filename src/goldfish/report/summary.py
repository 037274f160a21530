"""The methods of a run side by side, as plain data; the page and the command line show it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    percent,
    percents,
    points,
    size,
    times,
    wilson,
)
from goldfish.report.reading import Result, section

ORIGIN = "origin"
"""The model that was trained with the data in it."""

YARDSTICK = "retrain"
"""Trained from scratch without the removed data: what every method is measured against."""

FEW_IMAGES = 1000
"""A percentage of fewer images is shown with its 95 % interval (Wilson's)."""

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
class Range:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Memory:
    """Removed samples without a trigger against unseen ones, in the same classes."""

    gap: Range
    """Mean loss on the unseen ones minus that on the removed ones."""
    to_retrain: Range | None
    """How far the gap lies above retrain's; None without a retrain."""
    removed: float
    unseen: float
    left_out: float
    """Removed samples whose class the test set does not have."""
    removed_right: float | None
    unseen_right: float | None
    finding: str | None
    """``remembers``, ``over-forgets`` or ``alike``."""

    @property
    def judged(self) -> Range:
        """What the finding is about: the difference to retrain, or without one the gap."""
        return self.gap if self.to_retrain is None else self.to_retrain


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
    without_trigger: float | None = None
    """Backdoor success on the same images without the trigger."""
    removed_class_accuracy: float | None = None
    """Accuracy on the classes that were removed; ``accuracy`` is on the others."""
    mistaken_for_removed: float | None = None
    """How many images of the other classes get a removed class."""
    memory: Memory | None = None
    training: SummaryRow | None = None
    """The method's own training, where it does not begin from origin."""
    not_honoured: Sequence[Mapping[str, Any]] = ()
    """The requests that were not carried out, each with its reason."""
    test_images: int = 0
    """How many test images the accuracy is of; 0 where that is not known."""
    triggered_images: int = 0
    """How many test images the backdoor success is of."""
    removed_class_images: int = 0
    """How many test images are of the removed classes."""
    verdict: str = ""
    """What the numbers say, in a word or two."""

    @property
    def trigger_adds(self) -> float | None:
        """Points of backdoor success that are due to the trigger."""
        if self.backdoor_success is None:
            return None
        return self.backdoor_success - (self.without_trigger or 0.0)

    @property
    def class_known(self) -> float | None:
        """Accuracy on the removed classes, less what others are taken for them."""
        if self.removed_class_accuracy is None:
            return None
        return self.removed_class_accuracy - (self.mistaken_for_removed or 0.0)

    def std(self, key: str) -> float | None:
        """Return the standard deviation over the seeds; None where the run had one seed."""
        return self.spread[key].std if key in self.spread else None


def summary_rows(result: Result) -> list[SummaryRow]:
    """Return one row a method, in the order of ``result.json``."""
    methods, images = section(result, "methods"), section(result, "test_images")
    retrain = section(section(methods, YARDSTICK), "final")
    return [_row(name, method, retrain, images) for name, method in methods.items()]


def subject(result: Result) -> str | None:
    """Return the method that the reader asked for: the first one that is not the yardstick."""
    ran = [name for name in section(result, "methods") if name != ORIGIN]
    asked = section(section(result, "config"), "unlearning").get("methods") or ()
    names = [name for name in (*asked, *ran) if name in ran]
    return next((name for name in names if name != YARDSTICK), YARDSTICK if names else None)


def _row(name: str, method: Result, retrain: Result, images: Result) -> SummaryRow:
    if method.get("diverged"):
        return SummaryRow(name, diverged=str(method["diverged"]))
    final, similarity, cost = (section(method, k) for k in ("final", "similarity", "cost"))
    to_quality = number(section(method, "time_to_quality").get("seconds"))
    yardstick: Result = retrain
    if name == YARDSTICK:  # its differences to itself say nothing
        yardstick, similarity = {}, {k: v for k, v in similarity.items() if k not in TO_RETRAIN}
    training = section(section(method, "training"), "final")
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
        without_trigger=number(final.get("without_trigger")),
        removed_class_accuracy=number(final.get("removed_class_accuracy")),
        mistaken_for_removed=number(final.get("mistaken_for_removed")),
        memory=_memory(section(final, "memory")),
        training=_row(f"{name}'s own training", {"final": training}, {}, images)
        if training
        else None,
        not_honoured=[r for r in method.get("not_honoured") or () if isinstance(r, Mapping)],
        test_images=int(number(images.get("accuracy")) or 0),
        triggered_images=int(number(images.get("backdoor")) or 0),
        removed_class_images=int(number(images.get("removed_class")) or 0),
    )


def _memory(memory: Result) -> Memory | None:
    gap = _range(memory, "gap")
    if gap is None:
        return None
    return Memory(
        gap=gap,
        to_retrain=_range(section(memory, "to_retrain"), "difference"),
        removed=number(memory.get("removed")) or 0.0,
        unseen=number(memory.get("unseen")) or 0.0,
        left_out=number(memory.get("left_out")) or 0.0,
        removed_right=number(memory.get("removed_right")),
        unseen_right=number(memory.get("unseen_right")),
        finding=memory.get("finding"),
    )


def _range(values: Result, key: str) -> Range | None:
    value, low, high = (number(values.get(name)) for name in (key, "low", "high"))
    return None if value is None or low is None or high is None else Range(value, low, high)


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


def _interval(row: SummaryRow, value: float | None, images: int) -> str:
    """Return a percentage's 95 % interval on a line of its own, where it is of few images.

    With several seeds the spread over them stands there instead.
    """
    if value is None or row.spread or not 0 < images < FEW_IMAGES:
        return ""
    low, high = wilson(value, images)
    return f"\n{low:.1f} to {high:.1f}"


def _accuracy_with_interval(row: SummaryRow) -> str:
    return _accuracy(row) + _interval(row, row.accuracy, row.test_images)


def _backdoor(row: SummaryRow) -> str:
    return percents(row.backdoor_success, row.std("backdoor_success"))


def _backdoor_with_interval(row: SummaryRow) -> str:
    return _backdoor(row) + _interval(row, row.backdoor_success, row.triggered_images)


def _removed_class(row: SummaryRow) -> str:
    value = row.removed_class_accuracy
    return percent(value) + _interval(row, value, row.removed_class_images)


def _gap_with_interval(row: SummaryRow) -> str:
    text = gap(row.memory_gap, row.std("memory_gap"))
    if row.memory_gap is None or row.memory is None or row.spread:
        return text
    return f"{text}\n{gap(row.memory.gap.low)} to {gap(row.memory.gap.high)}"


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
    "verdict": ("verdict", lambda row: row.verdict or NOTHING),
    "accuracy": ("accuracy", _accuracy_with_interval),
    "removed_class": ("removed class", _removed_class),
    "backdoor_success": ("backdoor", _backdoor_with_interval),
    "change": ("vs retrain, points", _changes),
    "memory_gap": ("memory gap", _gap_with_interval),
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
    "without_trigger": ("target without trigger", lambda row: percent(row.without_trigger)),
    "mse": ("test MSE", lambda row: decimal(row.mse, 4)),
    "jsd": ("JSD to retrain", lambda row: decimal(row.jsd, 4)),
    "jsd_distance": ("JSD distance", lambda row: decimal(row.jsd_distance, 4)),
    "l2": ("L2 to retrain", lambda row: decimal(row.l2, 4)),
    "short_accuracy": ("accuracy\n%", lambda row: _bare(_accuracy(row))),
    "short_class": ("removed\nclass %", lambda row: _bare(percent(row.removed_class_accuracy))),
    "short_backdoor": ("backdoor\n%", lambda row: _bare(_backdoor(row))),
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

COUNTED = {
    "accuracy": "test_images",
    "removed_class": "removed_class_images",
    "backdoor_success": "triggered_images",
}
"""The percentages whose headings say of how many test images they are."""

MAIN = tuple(COLUMNS)[: tuple(COLUMNS).index("bytes_kept") + 1]
"""The columns of the table side by side, in order."""

MORE = ("method", *(k for k in COLUMNS if k not in MAIN and not k.startswith("short_")))
"""The columns of the second, smaller table of the page."""

SHORT = ("method", *(key for key in COLUMNS if key.startswith("short_")))
"""The columns that a terminal of 80 characters has room for, with headings on two lines."""


def table(
    rows: Sequence[SummaryRow], columns: Iterable[str] = MAIN
) -> tuple[list[str], list[list[str]]]:
    """Return headings and formatted cells, less the columns that no method has a number for."""
    drawn = [(_heading(key, rows), [COLUMNS[key][1](row) for row in rows]) for key in columns]
    filled = [(heading, cells) for heading, cells in drawn if any(c != NOTHING for c in cells)]
    headings = [heading for heading, _ in filled]
    return headings, [[cells[i] for _, cells in filled] for i in range(len(rows))]


def _heading(key: str, rows: Sequence[SummaryRow]) -> str:
    images = max((getattr(row, COUNTED[key]) for row in rows), default=0) if key in COUNTED else 0
    return f"{COLUMNS[key][0]} ({count(images)} images)" if images else COLUMNS[key][0]
