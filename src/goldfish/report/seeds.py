"""What several seeds add: each method against retrain, seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from goldfish.report.formatting import gap, p_value, points
from goldfish.report.reading import Result
from goldfish.report.summary import YARDSTICK, SummaryRow


def seeds(result: Result) -> list[str]:
    """Return the seeds whose means a result holds; none where it is of one run."""
    found = result.get("seeds")
    return [str(seed) for seed in found] if isinstance(found, list) and len(found) > 1 else []


def _gap_change(value: float | None) -> str:
    text = gap(value)
    return f"+{text}" if value is not None and value > 0 and text != gap(0.0) else text


COMPARED: Mapping[str, tuple[str, Callable[[float | None], str]]] = {
    "accuracy": ("accuracy, points", points),
    "backdoor_success": ("backdoor, points", points),
    "memory_gap": ("memory gap", _gap_change),
}
"""What is compared with retrain: its heading, and how a difference is written."""


def seeds_table(rows: Sequence[SummaryRow]) -> tuple[list[str], list[list[str]]]:
    """Return each method's mean differences to retrain over the seeds, with paired p-values."""
    base = next((row for row in rows if row.method == YARDSTICK), SummaryRow(YARDSTICK))
    others = [row for row in rows if row.method != YARDSTICK and row.spread]
    keys = [key for key in COMPARED if any(_change(row, base, key) is not None for row in others)]
    headings = ["method"]
    for key in keys:
        headings += [COMPARED[key][0], "p"]
    cells = []
    for row in others:
        cells.append([row.method])
        for key in keys:
            p = row.spread[key].p_value if key in row.spread else None
            cells[-1] += [COMPARED[key][1](_change(row, base, key)), p_value(p)]
    return (headings, cells) if keys else ([], [])


def _change(row: SummaryRow, base: SummaryRow, key: str) -> float | None:
    ours, theirs = getattr(row, key), getattr(base, key)
    return None if ours is None or theirs is None else ours - theirs
