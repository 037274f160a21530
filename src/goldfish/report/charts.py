"""Which charts a run has: scores over the rounds, and accuracy over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from goldfish.report import scales
from goldfish.report.figures import Chart, Line, colours, line_chart
from goldfish.report.formatting import count, number, ordinal
from goldfish.report.reading import Result, section
from goldfish.report.scales import FULL, Scale
from goldfish.report.seeds import seeds
from goldfish.report.summary import ORIGIN, YARDSTICK, subject

OVER_ROUNDS: Sequence[tuple[str, str, str, Callable[[Sequence[float]], Scale]]] = (
    ("accuracy", "Accuracy on clean test images", "accuracy", scales.percentages),
    (
        "removed_class_accuracy",
        "Accuracy on the removed class",
        "removed_class",
        scales.percentages,
    ),
    ("backdoor_success", "Backdoor success", "backdoor", scales.percentages),
    ("memory_gap", "Memory gap", "", scales.gaps),
)
"""The scores that are drawn over the rounds: key, title, which test images they are of, and the
axis that fits their values."""

LATE = 0.5
"""The axis of accuracies holds this share of each line, its end: there the methods differ."""


@dataclass(frozen=True)
class Figure:
    """A drawn chart."""

    title: str
    over: str
    """What its horizontal axis counts: rounds, or seconds."""
    remark: str
    svg: str


def figures(result: Result) -> list[Figure]:
    """Draw every chart that the run has numbers for."""
    colour = colours(list(section(result, "methods")))
    return [
        Figure(chart.title, over, _remark(chart), line_chart(chart, colour))
        for over, chart in _charts(result)
    ]


def _charts(result: Result) -> Iterator[tuple[str, Chart]]:
    origin = section(section(section(result, "methods"), ORIGIN), "final")
    later = moments(result)
    leading = [name for name in (subject(result), YARDSTICK) if name is not None]
    for key, title, counted, fit in OVER_ROUNDS:
        reference = number(origin.get(key))
        images = number(section(result, "test_images").get(counted))
        of = f" ({count(images)} images)" if images else ""
        late = LATE if key == "accuracy" else 1.0
        if lines := course(result, key):
            x = scales.rounds([at for line in lines for at in line.at])
            y = fit(_heights(lines, reference, late))
            yield "rounds", Chart(f"{title}{of}", lines, x, y, reference, later, leading)
        if key == "accuracy" and (lines := course_of_time(result)):
            length, unit = scales.time_unit(max(line.at[-1] for line in lines))
            lines = [replace(line, at=[at / length for at in line.at]) for line in lines]
            x = scales.times([at for line in lines for at in line.at], unit)
            y = fit(_heights(lines, reference, late))
            title = f"Accuracy over time{of}"
            yield unit, Chart(title, lines, x, y, reference, leading=leading)


def _remark(chart: Chart) -> str:
    low, high = chart.y.low, chart.y.high
    if not chart.y.mark(low).endswith("%") or (low, high) == FULL:
        return ""
    below = any(value < low for line in chart.lines for value in line.values)
    return f"axis from {low:.0f} to {high:.0f} %{'; earlier rounds below' if below else ''}"


def _heights(lines: Sequence[Line], reference: float | None, late: float) -> list[float]:
    """Return the values that an axis must hold: of the ``late`` share of each line, with bands."""
    found = [] if reference is None else [reference]
    for line in lines:
        start = int(len(line.values) * (1 - late))
        found += line.values[start:]
        for value, std in list(zip(line.values, line.deviations, strict=False))[start:]:
            found += [value - std, value + std]
    return found


def course(result: Result, key: str) -> list[Line]:
    """Return each unlearning method's ``key`` over its rounds, where it has one."""
    lines = []
    for name, method, known in _known(result, key):
        stds = [number(entry.get(f"{key}_std")) for entry in known]
        lines.append(
            Line(
                name,
                [entry["round"] for entry in known],
                [entry[key] for entry in known],
                bool(method.get("diverged")),
                [std or 0.0 for std in stds] if any(stds) else (),
            )
        )
    return lines


def course_of_time(result: Result) -> list[Line]:
    """Return each unlearning method's accuracy over the seconds it had spent by then.

    A ring marks where it was as good as retrain ended up. Means over seeds have none: the mean
    time to quality need not lie on the mean course.
    """
    lines = []
    for name, method, _ in _known(result, "seconds"):
        entries = method["rounds"]
        spent = accumulate(number(entry.get("seconds")) or 0.0 for entry in entries)
        known = [
            (at, value, entry.get("round"))
            for at, entry in zip(spent, entries, strict=True)
            if (value := number(entry.get("accuracy"))) is not None
        ]
        if known:
            at, values, rounds = zip(*known, strict=True)
            reached = section(method, "time_to_quality").get("round")
            ring = rounds.index(reached) if reached in rounds and not seeds(result) else None
            lines.append(Line(name, at, values, bool(method.get("diverged")), ring=ring))
    return lines


def _known(
    result: Result, key: str
) -> Iterator[tuple[str, Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Return each unlearning method with those of its rounds that have a number for ``key``."""
    for name, method in section(result, "methods").items():
        known = [
            entry
            for entry in method.get("rounds") or []
            if number(entry.get(key)) is not None and number(entry.get("round")) is not None
        ]
        if name != ORIGIN and known:
            yield name, method, known


def moments(result: Result) -> dict[float, str]:
    """Return between which rounds later deletions arrived, and what a chart writes there.

    Methods that stop early were asked after fewer rounds: the moment that most methods share is
    named, the others are not.
    """
    places: dict[int, Counter[float]] = {}
    for _, _, known in _known(result, "stage"):
        for before, after in pairwise(known):
            if after["stage"] > before["stage"]:
                middle = (before["round"] + after["round"]) / 2
                places.setdefault(int(after["stage"]), Counter())[middle] += 1
    found = {place: "" for counted in places.values() for place in counted}
    for stage, counted in places.items():
        found[counted.most_common(1)[0][0]] = f"{ordinal(stage)} deletion"
    return found
