"""Numbers as people read them; the page and the command line share these."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from goldfish.results import Unit

Form: TypeAlias = Callable[[float | None, float | None], str]
"""Writes a number and its standard deviation."""

NOTHING = "–"
"""Stands where there is no number."""


def percent(value: float | None, std: float | None = None) -> str:
    """Format a percentage from 0 to 100, with its standard deviation where it has one.

    >>> percent(99.6), percent(95.52, 0.31)
    ('99.6 %', '95.5 ± 0.3 %')
    """
    if value is None:
        return NOTHING
    return f"{value:.1f} %" if std is None else f"{value:.1f} ± {std:.1f} %"


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


def decimal(value: float | None, std: float | None = None) -> str:
    """Format a plain number with three figures, at most four of them after the point.

    >>> decimal(0.01234), decimal(-1.5), decimal(0.00002), decimal(0.1234, 0.02)
    ('0.0123', '−1.50', '<0.0001', '0.123 ± 0.020')
    """
    if value is None:
        return NOTHING
    if 0 < abs(value) < 0.00005:
        return "<0.0001" if value > 0 else ">−0.0001"
    digits = 2 if abs(value) >= 1 else 3 if abs(value) >= 0.1 else 4
    spread = "" if std is None else f" ± {std:.{digits}f}"
    return f"{value:.{digits}f}{spread}".replace("-", "−")


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


def signed(value: float, digits: int) -> str:
    """Format a number with its sign.

    >>> signed(0.123, 2), signed(-1.04, 1), signed(-0.001, 2)
    ('+0.12', '−1.0', '0.00')
    >>> signed(0.42, 1), signed(-1, 1), signed(-0.01, 1), signed(0.5, 3)
    ('+0.4', '−1.0', '0.0', '+0.500')
    """
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def times(factor: float | None, _std: float | None = None) -> str:
    """Format how many times one thing is another.

    >>> times(3.214), times(0.2906), times(1234.5), times(0.001)
    ('3.2×', '0.29×', '1,234×', '<0.01×')
    """
    if factor is None:
        return NOTHING
    if factor < 0.005:
        return "<0.01×"
    return f"{factor:,.{2 if factor < 0.995 else 1 if factor < 99.95 else 0}f}×"


def p_value(value: float | None, _std: float | None = None) -> str:
    """Format a probability; never as 0, which no test can find.

    >>> p_value(0.0), p_value(0.0421)
    ('<0.001', '0.042')
    """
    return NOTHING if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def count(value: float | None, _std: float | None = None) -> str:
    """Format a whole number.

    >>> count(14370)
    '14,370'
    """
    return NOTHING if value is None else f"{value:,.0f}"


def seconds(value: float | None, std: float | None = None) -> str:
    """Format a duration, with its standard deviation where it has one.

    >>> seconds(0.0421), seconds(0.42), seconds(12.34), seconds(192), seconds(3900)
    ('42 ms', '0.42 s', '12.3 s', '3 min 12 s', '1 h 05 min')
    >>> seconds(5.891, 0.02), seconds(192, 4), seconds(0.042, 0.001)
    ('5.89 ± 0.02 s', '3 min 12 s ± 4.00 s', '42 ± 1 ms')
    """
    if value is None:
        return NOTHING
    if value >= 59.95:
        whole, minutes = round(value), round(value / 60)
        text = f"{whole // 60} min {whole % 60:02d} s"
        text = text if whole < 3600 else f"{minutes // 60} h {minutes % 60:02d} min"
        return f"{text} ± {seconds(std)}" if std else text
    scale, digits, unit = 1, 2 if value < 9.995 else 1, "s"
    if value < 0.0995:
        scale, digits, unit = 1000, 0, "ms"
    spread = "" if std is None else f" ± {scale * std:.{digits}f}"
    return f"{scale * value:.{digits}f}{spread} {unit}"


def size(value: float | None, _std: float | None = None) -> str:
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


FORMS: Mapping[Unit, Form] = {
    "percent": percent,
    "gap": gap,
    "seconds": seconds,
    "bytes": size,
    "count": count,
    "factor": times,
    "probability": p_value,
    "number": decimal,
}
"""How the numbers of each unit are written."""


def brief_gap(value: float | None, std: float | None = None) -> str:
    """Format a memory gap in at most six characters, with its deviation in at most ten.

    >>> brief_gap(-0.0581), brief_gap(-123.4), brief_gap(0.012, 0.004)
    ('−0.058', '−123.4', '.012±.004')
    """
    texts = [gap(value, std, digits).replace(" ± ", "±") for digits in (3, 2, 1, 0)]
    if std is not None:
        texts = [re.sub(r"\b0\.", ".", text) for text in texts]
    return next((text for text in texts if len(text) <= (6 if std is None else 10)), texts[-1])


def brief_seconds(value: float | None, _std: float | None = None) -> str:
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


def brief_size(value: float | None, _std: float | None = None) -> str:
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


BRIEF: Mapping[Unit, Form] = {
    **FORMS,
    "percent": lambda value, std: percent(value, std).replace(" ± ", "±").removesuffix(" %"),
    "gap": brief_gap,
    "seconds": brief_seconds,
    "bytes": brief_size,
}
"""The same for the narrow columns of a terminal."""


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
