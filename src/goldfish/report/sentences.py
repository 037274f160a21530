"""Sentences of the headline on what only some runs measure: time to quality, seeds."""

from __future__ import annotations

from collections.abc import Mapping

from goldfish.report.formatting import plural, seconds
from goldfish.report.reading import Result, section
from goldfish.report.seeds import seeds
from goldfish.report.summary import YARDSTICK, SummaryRow, reached

ABOUT = 1.05
"""Times that differ by less than this factor count as the same."""


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
    return [f"{name} reached retrain's quality {how} retrain itself ({spent})."]


def seeds_sentence(result: Result) -> list[str]:
    """Say that the numbers are means, where they are."""
    found = seeds(result)
    return [f"All numbers are means over {len(found)} seeds."] if found else []
