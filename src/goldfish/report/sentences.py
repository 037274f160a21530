"""Sentences of the headline on what only some runs measure: memory gap, time to quality, seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from goldfish.report.formatting import gap, listing, number, ordinal, plural, seconds
from goldfish.report.reading import Result, section
from goldfish.report.seeds import seeds
from goldfish.report.summary import ORIGIN, YARDSTICK, SummaryRow, reached

GAP_SIGNAL = 0.02
"""Origin's memory gap must exceed retrain's by so much, or it proves nothing."""

OVERDONE = -0.5
"""Below this share the removed samples do clearly worse than unseen ones, which shows too."""

ABOUT = 1.05
"""Times that differ by less than this factor count as the same."""


def gap_left(name: str, rows: Mapping[str, SummaryRow]) -> float | None:
    """Return how much of origin's memory gap is left, retrain's being none of it.

    None where the three have no numbers, or origin's exceeds retrain's too little to tell.
    """
    none = SummaryRow("")
    origin, row, retrain = (rows.get(key, none).memory_gap for key in (ORIGIN, name, YARDSTICK))
    if origin is None or row is None or retrain is None or origin - retrain < GAP_SIGNAL:
        return None
    return (row - retrain) / (origin - retrain)


def gap_sentence(name: str, rows: Mapping[str, SummaryRow]) -> list[str]:
    """Compare the loss on removed samples without a trigger with that on unseen ones."""
    known = {
        key: value
        for key in dict.fromkeys((ORIGIN, name, YARDSTICK))
        if key in rows and (value := rows[key].memory_gap) is not None
    }
    if name not in known:
        return []
    parts = [
        f"{gap(abs(value))} {'above' if value < 0 else 'below'} in {key}"
        for key, value in known.items()
    ]
    first, *rest = parts
    first = first.replace(" in ", " that of unseen ones in ", 1)
    text = f"Removed samples without a trigger: their mean loss is {listing([first, *rest])}"
    return [f"{text}{_gap_meaning(name, rows)}."]


def _gap_meaning(name: str, rows: Mapping[str, SummaryRow]) -> str:
    if name == YARDSTICK or any(
        key not in rows or rows[key].memory_gap is None for key in (ORIGIN, YARDSTICK)
    ):
        return ""
    left = gap_left(name, rows)
    if left is None:
        return "; origin's differs too little from retrain's to tell anything"
    if left < OVERDONE:
        return f"; {name}'s difference lies beyond retrain's"
    share = f"{max(left, 0.0):.0%}".replace("%", " %")
    return f"; {share} of what sets origin apart from retrain is left in {name}"


def speed_sentence(name: str, rows: Mapping[str, SummaryRow], result: Result) -> list[str]:
    """Say how soon the method was as good as retrain ended up, and whether that is sooner."""
    row, retrain = rows[name], rows.get(YARDSTICK, SummaryRow(""))
    if name == YARDSTICK or row.diverged:
        return []
    method = section(section(result, "methods"), name)
    if row.missed:
        if some := reached(row):
            return [f"{name} reached retrain's quality in {some} seeds only."]
        rounds = plural(len(method.get("rounds") or []), "round")
        return [f"{name} did not reach retrain's quality in its {rounds}."]
    if row.to_quality is None or row.speed_up is None or row.speed_up <= 0:
        return []
    factor = row.speed_up if row.speed_up >= 1 else 1 / row.speed_up
    word = "sooner" if row.speed_up >= 1 else "later"
    how = "about as soon as" if factor < ABOUT else f"{factor:.1f} times {word} than"
    spent = f"{seconds(row.to_quality)} against {seconds(retrain.to_quality)}"
    return [f"{name} reached retrain's quality {how} retrain itself ({spent}{_early(method)})."]


def _early(method: Mapping[str, Any]) -> str:
    """Say so where the quality was reached before the last deletion arrived."""
    at = number(section(method, "time_to_quality").get("round"))
    stages = {
        number(entry.get("round")): number(entry.get("stage"))
        for entry in method.get("rounds") or []
    }
    then, last = stages.get(at), max((stage or 0 for stage in stages.values()), default=0)
    if at is None or not then or then >= last:
        return ""
    return f"; in round {at:.0f}, before the {ordinal(int(then) + 1)} deletion arrived"


def seeds_sentence(result: Result) -> list[str]:
    """Say that the numbers are means, where they are."""
    found = seeds(result)
    return [f"All numbers are means over {len(found)} seeds."] if found else []
