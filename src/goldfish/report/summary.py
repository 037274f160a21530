"""The methods of a run side by side, as plain data; the page and the command line show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from goldfish.report.formatting import (
    NOTHING,
    count,
    decimal,
    number,
    p_value,
    percent,
    points,
    seconds,
    size,
)
from goldfish.report.reading import Result, section

ORIGIN = "origin"
"""The model that was trained with the data in it."""

YARDSTICK = "retrain"
"""Trained from scratch without the removed data: what every method is measured against."""

TO_RETRAIN = ("jsd", "jsd_distance", "l2")
"""The measures of ``similarity`` that compare with the yardstick."""


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
    diverged: str | None = None
    """Why the method has no numbers."""


def summary_rows(result: Result) -> list[SummaryRow]:
    """Return one row a method, in the order of ``result.json``."""
    methods = section(result, "methods")
    retrain = section(section(methods, YARDSTICK), "final")
    return [_row(name, method, retrain) for name, method in methods.items()]


def _row(name: str, method: Result, retrain: Result) -> SummaryRow:
    if method.get("diverged"):
        return SummaryRow(name, diverged=str(method["diverged"]))
    final, similarity, cost = (section(method, k) for k in ("final", "similarity", "cost"))
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
    )


def _difference(final: Result, retrain: Result, key: str) -> float | None:
    ours, theirs = number(final.get(key)), number(retrain.get(key))
    return None if ours is None or theirs is None else ours - theirs


def _changes(row: SummaryRow) -> str:
    changes = [points(row.accuracy_change), points(row.backdoor_change)]
    return " / ".join(text for text in changes if text != NOTHING) or NOTHING


COLUMNS: Mapping[str, tuple[str, Callable[[SummaryRow], str]]] = {
    "method": ("method", lambda row: row.method),
    "accuracy": (
        "accuracy",
        lambda row: "diverged" if row.diverged else percent(row.accuracy),
    ),
    "backdoor_success": ("backdoor", lambda row: percent(row.backdoor_success)),
    "change": ("vs retrain, points", _changes),
    "jsd": ("JSD", lambda row: decimal(row.jsd, 4)),
    "p_value": ("p-value vs origin", lambda row: p_value(row.p_value)),
    "effect_size": ("effect vs origin", lambda row: decimal(row.effect_size, 2)),
    "seconds": ("time", lambda row: seconds(row.seconds)),
    "steps": ("steps", lambda row: count(row.steps)),
    "samples": ("samples", lambda row: count(row.samples)),
    "bytes_sent": ("sent", lambda row: size(row.bytes_sent)),
    "bytes_kept": ("kept", lambda row: size(row.bytes_kept)),
    "loss": ("test loss", lambda row: decimal(row.loss)),
    "mse": ("test MSE", lambda row: decimal(row.mse, 4)),
    "jsd_distance": ("JSD distance", lambda row: decimal(row.jsd_distance, 4)),
    "l2": ("L2 to retrain", lambda row: decimal(row.l2, 4)),
}
"""Every column by key: its heading, and how a row fills it."""

MAIN = tuple(COLUMNS)[:12]
"""The columns of the table side by side, in order."""

SHORT = ("method", "accuracy", "backdoor_success", "jsd", "seconds", "steps", "bytes_sent")
"""The columns that a terminal of 80 characters has room for."""

MORE = ("method", *tuple(COLUMNS)[12:])
"""The columns of the second, smaller table of the page."""


def table(
    rows: Sequence[SummaryRow], columns: Iterable[str] = MAIN
) -> tuple[list[str], list[list[str]]]:
    """Return headings and formatted cells, less the columns that no method has a number for."""
    drawn = [(COLUMNS[key][0], [COLUMNS[key][1](row) for row in rows]) for key in columns]
    filled = [(heading, cells) for heading, cells in drawn if any(c != NOTHING for c in cells)]
    headings = [heading for heading, _ in filled]
    return headings, [[cells[i] for _, cells in filled] for i in range(len(rows))]
