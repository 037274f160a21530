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


def plural(amount: int, noun: str) -> str:
    """Format an amount of things.

    >>> plural(1, "sample"), plural(1437, "sample")
    ('1 sample', '1,437 samples')
    """
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"
