"""The axes of the charts: where each begins and ends, its marks, and how it writes numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from goldfish.report.formatting import gap

FULL = (0.0, 100.0)
"""The whole axis of percentages."""
CLOSE = 50.0
"""Values that lie within so many points get an axis of their own part of 0 to 100."""
LEAST = 5.0
"""No axis of percentages shows fewer points than this, so that noise looks like noise."""
LEAST_GAP = 0.05
"""Nor one of memory gaps less than this."""
WIDE = 20.0
"""Times whose longest is more than so many times the shortest stand on a logarithmic axis."""


@dataclass(frozen=True)
class Scale:
    """One axis."""

    low: float
    high: float
    label: str
    mark: Callable[[float], str]
    """How a mark on the axis is written."""
    value: Callable[[float], str]
    """How a value is written at the end of its line."""
    log: bool = False
    whole: bool = False
    """Whether only whole numbers get a mark."""


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Return where the axis begins and ends: at 0 and 100, or nearer where all values are near.

    >>> limits([3.0, 96.0])
    (0.0, 100.0)
    >>> limits([93.4, 97.1, 96.9])
    (93.0, 98.0)
    """
    low, high = min(values), max(values)
    if high - low > CLOSE:
        return FULL
    step = next(step for step in (1.0, 2.0, 5.0, 10.0) if high - low <= 5 * step)
    top = min(FULL[1], math.ceil(high / step) * step)
    bottom = max(FULL[0], min(math.floor(low / step) * step, top - LEAST))
    return bottom, max(top, bottom + LEAST)


def percentages(values: Sequence[float]) -> Scale:
    """Return the axis of an accuracy or a success that holds all of ``values``."""
    low, high = limits([min(max(value, FULL[0]), FULL[1]) for value in values])
    return Scale(low, high, "", lambda v: f"{v:.0f} %", lambda v: f"{v:.1f}", whole=True)


def gaps(values: Sequence[float]) -> Scale:
    """Return the axis of memory gaps: 0 is always on it.

    >>> scale = gaps([0.004, -0.012])
    >>> round(scale.low, 3), round(scale.high, 3)
    (-0.029, 0.021)
    """
    low, high = min(0.0, *values), max(0.0, *values)
    missing = max(0.0, LEAST_GAP - (high - low)) / 2
    return Scale(low - missing, high + missing, "", lambda v: f"{v:g}".replace("-", "−"), gap)


def rounds(values: Sequence[float]) -> Scale:
    """Return the axis of the rounds, with a margin."""
    low, high = min(values), max(values)
    pad = max(0.25, 0.02 * (high - low))
    return Scale(low - pad, high + pad, "round", "{:.0f}".format, "{:.0f}".format, whole=True)


def time_unit(longest: float) -> tuple[float, str]:
    """Return how many seconds the unit has in which times up to ``longest`` are read, and its name.

    >>> time_unit(42.0), time_unit(4000.0), time_unit(40_000.0)
    ((1.0, 'seconds'), (60.0, 'minutes'), (3600.0, 'hours'))
    """
    return next(
        (length, name)
        for length, name, limit in (
            (1.0, "seconds", 900.0),
            (60.0, "minutes", 14_400.0),
            (3600.0, "hours", math.inf),
        )
        if longest <= limit
    )


def times(values: Sequence[float], unit: str) -> Scale:
    """Return the axis of times: from 0 on, or logarithmic where they differ widely.

    >>> times([2.0, 5.0], "seconds").log, times([0.1, 5.0], "seconds").log
    (False, True)
    """
    low, high = min(values), max(values)
    log = 0 < low < high / WIDE
    ends = (low / 1.2, high * 1.2) if log else (0.0, 1.04 * high or 1.0)
    label = f"{unit}, logarithmic" if log else unit
    return Scale(*ends, label, "{:g}".format, "{:g}".format, log)
