"""Numbers as people read them; the page and the command line share these."""

from __future__ import annotations

import math
from collections.abc import Sequence

NOTHING = "–"
"""Stands where there is no number."""


def number(value: object) -> float | None:
    """Return ``value`` if it is a finite number, else None: JSON may hold null and NaN.

    >>> number(3), number(None), number(float("nan"))
    (3.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def percent(value: float | None) -> str:
    """Format a percentage from 0 to 100, such as an accuracy.

    >>> percent(99.6)
    '99.6 %'
    """
    return NOTHING if value is None else f"{value:.1f} %"


def wilson(percentage: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a percentage of ``count`` things, in percent.

    >>> [round(end, 1) for end in wilson(97.5, 360)]
    [95.3, 98.7]
    """
    share, square = percentage / 100, 1.96**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    spread = share * (1 - share) / count + square / (4 * count**2)
    half = 1.96 / (1 + square / count) * math.sqrt(max(spread, 0.0))
    return 100 * max(middle - half, 0.0), 100 * min(middle + half, 1.0)


def percents(value: float | None, std: float | None) -> str:
    """Format a mean percentage with its standard deviation, where it has one.

    >>> percents(95.52, 0.31), percents(95.52, None)
    ('95.5 ± 0.3 %', '95.5 %')
    """
    return percent(value) if value is None or std is None else f"{value:.1f} ± {std:.1f} %"


def share(value: float | None, digits: int = 1) -> str:
    """Format a share from 0 to 1, such as a confidence.

    >>> share(0.996)
    '99.6 %'
    """
    return NOTHING if value is None else f"{value:.{digits}%}".replace("%", " %")


def points(change: float | None) -> str:
    """Format a difference of two percentages.

    >>> points(0.42), points(-1), points(-0.01)
    ('+0.4', '−1.0', '0.0')
    """
    if change is None:
        return NOTHING
    text = f"{change:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


def decimal(value: float | None, digits: int = 3) -> str:
    """Format a plain number; a tiny one is not shown as 0.

    >>> decimal(0.01234), decimal(0.00002), decimal(-1.5, 2)
    ('0.012', '<0.001', '−1.50')
    """
    if value is None:
        return NOTHING
    if 0 < abs(value) < 0.5 * 10**-digits:
        return f"<{10**-digits:.{digits}f}" if value > 0 else f">−{10**-digits:.{digits}f}"
    return f"{value:.{digits}f}".replace("-", "−")


def gap(value: float | None, std: float | None = None, digits: int = 3) -> str:
    """Format a memory gap, which may be on either side of 0, and its standard deviation.

    >>> gap(0.0194), gap(-0.0031, 0.002), gap(-0.0004)
    ('0.019', '−0.003 ± 0.002', '0.000')
    """
    if value is None:
        return NOTHING
    text = f"{value:.{digits}f}"
    text = text.removeprefix("-") if float(text) == 0 else text.replace("-", "−")
    return text if std is None else f"{text} ± {std:.{digits}f}"


def times(factor: float | None) -> str:
    """Format how many times one thing is another.

    >>> times(3.214), times(0.2906), times(1234.5), times(0.001)
    ('3.2×', '0.29×', '1,234×', '<0.01×')
    """
    if factor is None:
        return NOTHING
    if factor < 0.005:
        return "<0.01×"
    return f"{factor:,.{2 if factor < 0.995 else 1 if factor < 99.95 else 0}f}×"


def p_value(value: float | None) -> str:
    """Format a probability; never as 0, which no test can find.

    >>> p_value(0.0), p_value(0.0421)
    ('<0.001', '0.042')
    """
    return "<0.001" if value is not None and value < 0.001 else decimal(value)


def count(value: float | None) -> str:
    """Format a whole number.

    >>> count(14370)
    '14,370'
    """
    return NOTHING if value is None else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """Format a duration.

    >>> seconds(0.0421), seconds(0.42), seconds(12.34), seconds(192), seconds(3900)
    ('42 ms', '0.42 s', '12.3 s', '3 min 12 s', '1 h 05 min')
    """
    if value is None:
        return NOTHING
    if value < 0.0995:
        return f"{1000 * value:.0f} ms"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 59.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def durations(value: float | None, std: float | None) -> str:
    """Format a mean duration with its standard deviation, where it has one.

    >>> durations(5.891, 0.02), durations(192, 4), durations(0.042, 0.001), durations(5.891, None)
    ('5.89 ± 0.02 s', '3 min 12 s ± 4.00 s', '42 ± 1 ms', '5.89 s')
    """
    if value is None or std is None or value >= 59.95:
        return seconds(value) + (f" ± {seconds(std)}" if value is not None and std else "")
    if value < 0.0995:
        return f"{1000 * value:.0f} ± {1000 * std:.0f} ms"
    digits = 2 if value < 9.995 else 1
    return f"{value:.{digits}f} ± {std:.{digits}f} s"


def brief_seconds(value: float | None) -> str:
    """Format a duration in at most seven characters.

    >>> [brief_seconds(v) for v in (0.042, 0.42, 12.34, 192, 3900, 90000)]
    ['42 ms', '0.42 s', '12.3 s', '192 s', '65 min', '25.0 h']
    """
    if value is None or value < 59.95:
        return seconds(value)
    if value < 999.5:
        return f"{value:.0f} s"
    if value < 599.5 * 60:
        return f"{value / 60:.0f} min"
    hours = value / 3600
    return f"{hours:.{1 if hours < 99.95 else 0}f} h"


def brief_size(value: float | None) -> str:
    """Format a number of bytes in at most four characters, as ``ls -h`` does.

    >>> [brief_size(v) for v in (0, 512, 2048, 180_000, 3.5 * 1024**2, 12e6, 1000 * 1024)]
    ['0', '512', '2.0K', '176K', '3.5M', '11M', '1.0M']
    """
    if value is None:
        return NOTHING
    if value < 999.5:
        return f"{value:.0f}"
    for unit in "KMGT":
        value /= 1024
        if value < 9.95:
            return f"{value:.1f}{unit}"
        if value < 999.5:
            break
    return f"{value:.0f}{unit}"


def size(value: float | None) -> str:
    """Format a number of bytes.

    >>> size(512), size(2048), size(3.5 * 1024**2)
    ('512 B', '2.0 KiB', '3.5 MiB')
    """
    if value is None:
        return NOTHING
    if value < 1024:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def listing(words: Sequence[str]) -> str:
    """Join words as a sentence does.

    >>> listing(["a"]), listing(["a", "b"]), listing(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def ordinal(place: int) -> str:
    """Format a place in a row.

    >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 21)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '21st']
    """
    teens = place % 100 in (11, 12, 13)
    return f"{place}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(place % 10, 'th')}"


def plural(amount: int, noun: str) -> str:
    """Format an amount of things.

    >>> plural(1, "sample"), plural(1437, "sample")
    ('1 sample', '1,437 samples')
    """
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"
