"""What the methods cost, as bars, and what was spent before the deletion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from goldfish.report.formatting import count, durations, number, percent, size
from goldfish.report.reading import Result, section
from goldfish.report.summary import ORIGIN, YARDSTICK, SummaryRow


@dataclass(frozen=True)
class Bar:
    """One method's bar: its length in percent of the longest, and what it says."""

    method: str
    width: float
    text: str
    ratio: str


@dataclass(frozen=True)
class Cost:
    """One measure of cost over the methods; what was spent before the deletion is only named."""

    title: str
    bars: Sequence[Bar]
    beforehand: Sequence[str]


def costs(rows: Sequence[SummaryRow], own: Sequence[OwnTraining] = ()) -> list[Cost]:
    """Return the bars of each measure that the run has."""
    measures: list[tuple[str, str, Callable[[float, float | None], str]]] = [
        ("Time", "seconds", durations),
        ("Gradient steps", "steps", _plain(count)),
        ("Samples in gradient steps", "samples", _plain(count)),
        ("Bytes sent", "bytes_sent", _plain(size)),
        ("Bytes kept", "bytes_kept", _plain(size)),
    ]
    found = []
    for title, key, form in measures:
        known = {row.method: row for row in rows if getattr(row, key) is not None}
        trained = known.pop(ORIGIN, None)
        values = {name: float(getattr(row, key)) for name, row in known.items()}
        longest = max(values.values(), default=0.0)
        base = values.get(YARDSTICK)
        if longest > 0:
            bars = [
                Bar(
                    method=name,
                    width=round(100 * value / longest, 2),
                    text=form(value, known[name].std(key)),
                    ratio=f"{value / base:.2f}×" if base and name != YARDSTICK else "",
                )
                for name, value in values.items()
            ]
            before = [("training origin", getattr(trained, key, None))]
            before += [(f"{one.method}’s own training", number(one.cost.get(key))) for one in own]
            said = [f"{what}: {form(value, None)}" for what, value in before if value]
            found.append(Cost(title, bars, said))
    return found


def _plain(form: Callable[[float], str]) -> Callable[[float, float | None], str]:
    return lambda value, _: form(value)


@dataclass(frozen=True)
class OwnTraining:
    """The training that a method does before the deletion, instead of taking origin."""

    method: str
    scores: str
    cost: Mapping[str, Any]


def own_trainings(result: Result) -> list[OwnTraining]:
    """Return the methods that train a model of their own, and how good it was."""
    found = []
    for name, method in section(result, "methods").items():
        if training := section(method, "training"):
            final = section(training, "final")
            scores = ", ".join(
                f"{what} {percent(value)}"
                for what, key in (
                    ("accuracy", "accuracy"),
                    ("backdoor success", "backdoor_success"),
                )
                if (value := number(final.get(key))) is not None
            )
            found.append(OwnTraining(name, scores, section(training, "cost")))
    return found
