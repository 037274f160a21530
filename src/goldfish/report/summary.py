"""The methods of a run side by side: tables of text, and bars of what they cost.

Each walks ``METRICS``; the page and the command line show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from goldfish.report.formatting import BRIEF, FORMS, NOTHING, count, gap, p_value, signed, wilson
from goldfish.report.top import by_seed, reached, tested
from goldfish.report.verdict import verdicts
from goldfish.results import (
    ACCURACY,
    METRICS,
    ORIGIN,
    YARDSTICK,
    MethodResult,
    Metric,
    Result,
    follow,
)

Table: TypeAlias = tuple[list[str], list[list[str]]]
"""Headings, and rows of cells."""


def main_table(result: Result) -> Table:
    """Return the methods with their verdicts and main numbers, for the page."""
    judged = {name: verdict.short for name, verdict in verdicts(result).items()}
    main = [_column(metric, result) for metric in METRICS if metric.main]
    scores = sum(metric.unit == "percent" for metric in METRICS if metric.main)
    versus = ("vs retrain, points", [_changes(name, result) for name in result.methods])
    verdict = ("verdict", [judged.get(name, NOTHING) for name in result.methods])
    return table_of(result.methods, [verdict, *main[:scores], versus, *main[scores:]])


def more_table(result: Result) -> Table:
    """Return the other numbers of the methods, for the page."""
    rest = [metric for metric in METRICS if not metric.main and is_shown(metric, result)]
    return table_of(result.methods, [_column(metric, result) for metric in rest])


def is_shown(metric: Metric, result: Result) -> bool:
    """Tell whether the run has the number: not None for all methods, nor a count that is all 0."""
    values = [metric.of(method) for method in result.methods.values()]
    return any(values) if metric.unit == "count" else any(value is not None for value in values)


def short_table(result: Result) -> Table:
    """Return what a terminal of 80 characters has room for, with headings on two lines."""
    shown = [metric for metric in METRICS if metric.short]
    own = result.methods.values()
    columns = [
        (metric.short, [_brief(metric, method, result) for method in own]) for metric in shown
    ]
    return table_of(result.methods, columns)


def seeds_table(result: Result) -> Table:
    """Return each method's mean differences to retrain over the seeds, with paired p-values."""
    others = [name for name in result.methods if name != YARDSTICK and result.methods[name].spread]
    headings, columns = ["method"], [others]
    for metric in METRICS:
        differences = [_change(metric, name, result) for name in others]
        if metric.spread == "paired" and any(text != NOTHING for text in differences):
            spreads = [result.methods[name].spread[metric.key] for name in others]
            unit = ", points" if metric.unit == "percent" else ""
            headings += [f"{metric.label}{unit}", "p"]
            columns += [differences, [p_value(spread.p_vs_retrain) for spread in spreads]]
    return (
        (headings, [list(row) for row in zip(*columns, strict=True)]) if columns[1:] else ([], [])
    )


def table_of(names: Iterable[str], columns: Iterable[tuple[str, Sequence[str]]]) -> Table:
    """Return the methods and the columns that have something to show."""
    filled = [(heading, cells) for heading, cells in columns if set(cells) - {NOTHING, ""}]
    rows = [[name, *(cells[i] for _, cells in filled)] for i, name in enumerate(names)]
    return ["method", *(heading for heading, _ in filled)], rows


def _column(metric: Metric, result: Result) -> tuple[str, list[str]]:
    images = getattr(result.test_images, metric.images) if metric.images else 0
    heading = f"{metric.label} ({count(images)} images)" if images else metric.label
    return heading, [_cell(metric, method, result) for method in result.methods.values()]


def _cell(metric: Metric, method: MethodResult, result: Result) -> str:
    if method.diverged and metric is ACCURACY:
        return "diverged"
    if method.missed and metric.key == "seconds_to_quality":
        return f"in {text} seeds" if (text := reached(method, result)) else "not reached"
    value = metric.of(method)
    text = FORMS[metric.unit](value, method.std(metric.key))
    if value is not None and metric.key == "seconds_to_quality" and (some := tested(result)):
        return f"{text}\nof {some} seeds"
    if value is None or method.spread:  # with several seeds the spread stands there instead
        each = by_seed(metric, method) if metric.unit == "percent" else ""
        return f"{text}\n{each.removesuffix(' %').replace(' and ', ', ')}" if each else text
    if metric.interval:
        found = follow(method, metric.interval)
        return text if found is None else f"{text}\n{gap(found.low)} to {gap(found.high)}"
    images = getattr(result.test_images, metric.images) if metric.images else 0
    if 0 < images < result.margins.few_images:
        low, high = wilson(value, images)
        return f"{text}\n{low:.1f} to {high:.1f}"
    return text


def _brief(metric: Metric, method: MethodResult, result: Result) -> str:
    if method.diverged and metric is ACCURACY:
        return "diverged"
    if method.missed and metric.key == "seconds_to_quality":
        return reached(method, result) or "not met"
    if method.spread and metric.unit == "bytes":  # standard deviations take its room
        return NOTHING
    return BRIEF[metric.unit](metric.of(method), method.std(metric.key))


def _change(metric: Metric, name: str, result: Result) -> str:
    """Format a method's difference to retrain; none for retrain, to which it says nothing."""
    ours, theirs = metric.of(result.methods[name]), metric.of(result.retrain)
    if ours is None or theirs is None or name == YARDSTICK:
        return NOTHING
    return signed(ours - theirs, 1 if metric.unit == "percent" else 3)


def _changes(name: str, result: Result) -> str:
    points = [m for m in METRICS if m.spread == "paired" and m.unit == "percent"]
    texts = [_change(metric, name, result) for metric in points]
    return " / ".join(text for text in texts if text != NOTHING) or NOTHING


@dataclass(frozen=True)
class Bar:
    """One method's bar: its length in percent of the longest, and what it says."""

    method: str
    width: float
    text: str
    ratio: str


@dataclass(frozen=True)
class Bars:
    """One measure of cost over the methods; what was spent before the deletion is only named."""

    title: str
    bars: Sequence[Bar]
    beforehand: Sequence[str]


def cost_bars(result: Result) -> list[Bars]:
    """Return the bars of each measure of cost that is not 0 for all methods."""
    found = []
    methods = {name: m for name, m in result.methods.items() if name != ORIGIN and m.cost}
    for metric in METRICS:
        values = {name: metric.of(method) or 0.0 for name, method in methods.items()}
        longest, base = max(values.values(), default=0.0), values.get(YARDSTICK)
        if not metric.bars or longest <= 0:
            continue
        form = FORMS[metric.unit]
        bars = [
            Bar(
                method=name,
                width=round(100 * value / longest, 2),
                text=form(value, methods[name].std(metric.key)),
                ratio=f"{value / base:.2f}×" if base and name != YARDSTICK else "",
            )
            for name, value in values.items()
        ]
        before = [("training origin", metric.of(result.origin))]
        before += [
            (f"{name}’s own training", follow(method.training, metric.path))
            for name, method in methods.items()
            if method.training is not None
        ]
        said = [f"{what}: {form(value, None)}" for what, value in before if value]
        found.append(Bars(metric.name, bars, said))
    return found
