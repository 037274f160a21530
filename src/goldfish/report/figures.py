"""The charts, as inline SVG whose colours are the page's CSS variables.

Matplotlib draws in stand-in colours; :func:`_inline` swaps them for variables, so that one
figure is right on a light page, on a dark one and on paper.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from goldfish.report.summary import ORIGIN, YARDSTICK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRID = "#f1f1f1", "#f2f2f2"
LABEL = 20
"""A longer name is cut in a chart; the tables have it whole."""
MARKERS = "osD^vPX*hp"
PALETTE_SIZE = 10
"""How many colours ``page.css`` names: --m0 to --m9."""


FULL = (0.0, 100.0)
"""The whole axis of percentages."""
CLOSE = 50.0
"""Values that lie within so many points get an axis of their own part of 0 to 100."""
LEAST = 5.0
"""No axis shows fewer points than this, so that noise looks like noise."""


@dataclass(frozen=True)
class Line:
    """One method's course over the rounds; values are percentages."""

    method: str
    rounds: Sequence[int]
    values: Sequence[float]
    diverged: bool = False


def colours(methods: Sequence[str]) -> dict[str, int]:
    """Return each method's place in the palette: the known three keep theirs in every report.

    >>> colours(["origin", "sisa", "goldfish", "retrain"])
    {'origin': 0, 'sisa': 3, 'goldfish': 1, 'retrain': 2}
    """
    fixed = {ORIGIN: 0, "goldfish": 1, YARDSTICK: 2}
    free = [name for name in methods if name not in fixed]
    places = {name: 3 + i % (PALETTE_SIZE - 3) for i, name in enumerate(free)}
    return {name: fixed.get(name, places.get(name, 0)) for name in methods}


def limits(lines: Sequence[Line], reference: float | None) -> tuple[float, float]:
    """Return where the axis begins and ends: at 0 and 100, or nearer where all values are near.

    >>> limits([Line("a", [1, 2], [3.0, 96.0])], None)
    (0.0, 100.0)
    >>> limits([Line("a", [1, 2], [93.4, 97.1])], 96.9)
    (93.0, 98.0)
    """
    values = [value for line in lines for value in line.values]
    values += [] if reference is None else [reference]
    low, high = min(values), max(values)
    if high - low > CLOSE:
        return FULL
    step = next(step for step in (1.0, 2.0, 5.0, 10.0) if high - low <= 5 * step)
    top = min(FULL[1], math.ceil(high / step) * step)
    bottom = max(FULL[0], min(math.floor(low / step) * step, top - LEAST))
    return bottom, max(top, bottom + LEAST)


def line_chart(
    title: str, lines: Sequence[Line], reference: float | None, colour: Mapping[str, int]
) -> str:
    """Draw one line a method, labelled at its end, and origin's final value as a dashed line."""
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    look = {"svg.fonttype": "none", "svg.hashsalt": f"goldfish {title}", "font.size": 10}
    with matplotlib.style.context(look, after_reset=True):
        figure = Figure(figsize=(5.6, 3.3))
        longest = max(len(label) for label in [f"{ORIGIN} 00.0", *map(_label, lines)])
        axes = figure.add_axes((0.1, 0.14, 0.84 - 0.0152 * longest, 0.81))
        _draw(axes, lines, reference, colour)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(PercentFormatter(decimals=0, symbol=" %"))
        axes.set_xlabel("round", color=INK)
        axes.tick_params(colors=INK, length=0)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(GRID)
        buffer = io.StringIO()
        nothing = {"Creator": None, "Date": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _inline(buffer.getvalue())


def _draw(
    axes: Axes, lines: Sequence[Line], reference: float | None, colour: Mapping[str, int]
) -> None:
    ends: list[tuple[float, float, str, int]] = []  # x, y, label, place in the palette
    last = max(line.rounds[-1] for line in lines)
    first = min(line.rounds[0] for line in lines)
    pad = max(0.25, 0.02 * (last - first))
    start = last + pad
    if reference is not None:
        axes.axhline(reference, color=_stand_in(0), linestyle=(0, (4, 3)), linewidth=1.3)
        ends.append((start, reference, f"{ORIGIN} {reference:.1f}", 0))
    for line in lines:
        place = colour[line.method]
        axes.plot(
            line.rounds,
            line.values,
            color=_stand_in(place),
            linewidth=1.8,
            marker=MARKERS[place],
            markersize=4.5,
            markevery=max(1, len(line.rounds) // 10),
        )
        if line.diverged:
            axes.plot(
                line.rounds[-1:],
                line.values[-1:],
                color=_stand_in(place),
                marker="x",
                markersize=10,
                mew=2,
            )
        ends.append((line.rounds[-1], line.values[-1], _label(line), place))
    low, high = limits(lines, reference)
    margin = 0.02 * (high - low)
    bottom, top = low - margin, high + margin
    axes.set_xlim(first - pad, last + pad)
    axes.set_ylim(bottom, top)
    heights = spread([y for _, y, _, _ in ends], 0.065 * (top - bottom), bottom, top)
    stretch = 0.035 * (last - first + 2 * pad)
    for (x, y, label, place), height in zip(ends, heights, strict=True):
        axes.plot(
            [x, start, start + stretch],
            [y, y, height],
            color=_stand_in(place),
            linewidth=0.7,
            linestyle=":",
            clip_on=False,
        )
        axes.text(
            start + 1.3 * stretch,
            height,
            label,
            color=_stand_in(place),
            va="center",
            parse_math=False,
        )


def _label(line: Line) -> str:
    name = line.method if len(line.method) <= LABEL else f"{line.method[: LABEL - 1]}…"
    return f"{name}, diverged" if line.diverged else f"{name} {line.values[-1]:.1f}"


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move ``values`` apart to at least ``gap``, in their order, so that labels do not overlap.

    >>> [round(v, 2) for v in spread([0.5, 0.5, 0.1], 0.1, 0.0, 1.0)]
    [0.5, 0.6, 0.1]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    placed = list(values)
    floor = low + gap / 2
    for i in order:
        placed[i] = max(placed[i], floor)
        floor = placed[i] + gap
    ceiling = high - gap / 2
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed


def _stand_in(place: int) -> str:
    return f"#f0f0{place:02d}"


def _inline(svg: str) -> str:
    """Make a Matplotlib SVG fit to stand in a page: no prologue, no ids, the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"((?:fill|stroke): )#f0f0(\d\d)", lambda m: f"{m[1]}var(--m{int(m[2])})", svg)
    svg = re.sub(rf"((?:fill|stroke): ){INK}", r"\1var(--muted)", svg)
    return re.sub(rf"((?:fill|stroke): ){GRID}", r"\1var(--line)", svg)
