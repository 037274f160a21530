"""The charts, as inline SVG whose colours are the page's CSS variables.

Matplotlib draws in stand-in colours; :func:`_inline` swaps them for variables, so that one
figure is right on a light page, on a dark one and on paper.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from goldfish.report.scales import Scale
from goldfish.report.summary import ORIGIN, YARDSTICK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRID = "#f1f1f1", "#f2f2f2"
LABEL = 20
"""A longer name is cut in a chart; the tables have it whole."""
MARKERS = "osD^vPX*hp<>"
PLACES = {
    ORIGIN: 0,
    "goldfish": 1,
    YARDSTICK: 2,
    "sisa": 3,
    "incompetent-teacher": 4,
    "retrain-tuned": 5,
    "fed-eraser": 6,
    "fed-recovery": 7,
    "rapid-retrain": 8,
    "goldfish-warm": 9,
    "gradient-ascent": 10,
    "goldfish-sprint": 11,
}
"""The known methods keep their colours in every report."""
PALETTE_SIZE = 12
"""How many colours ``page.css`` names: --m0 to --m11."""
MANY = 6
"""A chart of more lines than this is higher, and its labels are smaller."""
WIDTH = 5.6
"""Of a chart, in inches."""


@dataclass(frozen=True)
class Line:
    """One method's course over the rounds, or over time."""

    method: str
    at: Sequence[float]
    values: Sequence[float]
    diverged: bool = False
    deviations: Sequence[float] = ()
    """The standard deviation over the seeds at each value; empty where there is none."""
    ring: int | None = None
    """Which point is the first that is as good as retrain ended up."""


@dataclass(frozen=True)
class Chart:
    """What one chart shows."""

    title: str
    lines: Sequence[Line]
    x: Scale
    y: Scale
    reference: float | None = None
    """Where origin ended."""
    moments: Mapping[float, str] = field(default_factory=dict)
    """Where on the horizontal axis something happened, and what."""
    leading: Sequence[str] = ()
    """The methods that are drawn over the others, and thicker."""


def colours(methods: Sequence[str]) -> dict[str, int]:
    """Return each method's place in the palette; a method we do not know gets a free one.

    >>> colours(["origin", "mine", "goldfish", "retrain"])
    {'origin': 0, 'mine': 3, 'goldfish': 1, 'retrain': 2}
    """
    taken = {PLACES[name] for name in (ORIGIN, "goldfish", YARDSTICK, *methods) if name in PLACES}
    free = [place for place in range(PALETTE_SIZE) if place not in taken]
    new = [name for name in methods if name not in PLACES]
    places = {name: free[i % len(free)] for i, name in enumerate(new)}
    return {name: PLACES.get(name, places.get(name, 0)) for name in methods}


def line_chart(chart: Chart, colour: Mapping[str, int]) -> str:
    """Draw one line a method, labelled at its end, and origin's final value as a dashed line."""
    import matplotlib.style
    from matplotlib.figure import Figure

    size, height = (9.0, 4.4) if len(chart.lines) > MANY else (10.0, 3.4)
    salt = f"goldfish {chart.title} {chart.x.label}"
    look = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": size}
    with matplotlib.style.context(look, after_reset=True):
        figure = Figure(figsize=(WIDTH, height))
        longest = max(len(label) for _, _, label, _ in _ends(chart, colour))
        room = 0.84 - 0.0085 * size / WIDTH * longest
        axes = figure.add_axes((0.1, 0.46 / height, room, 1 - 0.74 / height))
        _set_scales(axes, chart)
        _draw(axes, chart, colour)
        _draw_labels(axes, chart, colour, gap=0.0165 * size / (height - 0.74))
        buffer = io.StringIO()
        nothing = {"Creator": None, "Date": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _inline(buffer.getvalue())


def _set_scales(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    margin = 0.02 * (chart.y.high - chart.y.low)
    axes.set_ylim(chart.y.low - margin, chart.y.high + margin)
    if chart.x.log:
        axes.set_xscale("log")
        close = chart.x.high / chart.x.low < 200
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if close else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=chart.x.whole, nbins=8))
    steps = [1, 2, 5, 10]
    axes.yaxis.set_major_locator(MaxNLocator(integer=chart.y.whole, nbins=7, steps=steps))
    axes.set_xlim(chart.x.low, chart.x.high)
    for axis, scale in ((axes.xaxis, chart.x), (axes.yaxis, chart.y)):
        axis.set_major_formatter(FuncFormatter(lambda v, _, scale=scale: scale.mark(v)))
    axes.set_xlabel(chart.x.label, color=INK)
    axes.tick_params(which="both", colors=INK, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)


def _draw(axes: Axes, chart: Chart, colour: Mapping[str, int]) -> None:
    if chart.y.low < 0 < chart.y.high:
        axes.axhline(0, color=INK, linewidth=0.9)
    for moment, label in chart.moments.items():
        axes.axvline(moment, color=INK, linewidth=0.8, linestyle="-" if label else ":")
        axes.annotate(
            label,
            (moment, 1),
            (0, 2),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            color=INK,
            ha="center",
            fontsize=8.5,
        )
    if chart.reference is not None:
        axes.axhline(chart.reference, color=_stand_in(0), linestyle=(0, (4, 3)), linewidth=1.3)
    for line in chart.lines:
        tone, leads = _stand_in(colour[line.method]), line.method in chart.leading
        look: dict[str, Any] = {"color": tone, "zorder": 2.6 if leads else 2.4}
        if any(line.deviations):
            pairs = list(zip(line.values, line.deviations, strict=True))
            low, high = [v - std for v, std in pairs], [v + std for v, std in pairs]
            axes.fill_between(line.at, low, high, color=tone, alpha=0.13, linewidth=0)
        axes.plot(
            line.at,
            line.values,
            linewidth=2.0 if leads else 1.2,
            marker=MARKERS[colour[line.method]],
            markersize=4.5 if len(line.at) > 1 else 6.5,
            markevery=max(1, len(line.at) // 10),
            **look,
        )
        if line.ring is not None:
            at = [line.at[line.ring]], [line.values[line.ring]]
            axes.plot(*at, marker="o", markersize=10, mew=1.2, fillstyle="none", **look)
        if line.diverged:
            axes.plot(line.at[-1:], line.values[-1:], marker="x", markersize=10, mew=2, **look)


def _ends(chart: Chart, colour: Mapping[str, int]) -> list[tuple[float, float, str, int]]:
    """Return x, y, text and place in the palette of each label."""
    found = []
    if chart.reference is not None:
        text = f"{ORIGIN} {chart.y.value(chart.reference)}"
        found.append((chart.x.high, chart.reference, text, 0))
    for line in chart.lines:
        name = line.method if len(line.method) <= LABEL else f"{line.method[: LABEL - 1]}…"
        text = f"{name}, diverged" if line.diverged else f"{name} {chart.y.value(line.values[-1])}"
        found.append((line.at[-1], line.values[-1], text, colour[line.method]))
    return found


def _draw_labels(axes: Axes, chart: Chart, colour: Mapping[str, int], gap: float) -> None:
    """Write the labels right of the axes, at least ``gap`` of their height apart."""
    ends = _ends(chart, colour)
    bottom, top = axes.get_ylim()
    heights = apart([y for _, y, _, _ in ends], gap * (top - bottom), bottom, top)
    beside = axes.get_yaxis_transform()  # x counts widths of the axes
    look: dict[str, Any] = {"linewidth": 0.7, "linestyle": ":", "clip_on": False}
    for (x, y, text, place), height in zip(ends, heights, strict=True):
        tone = _stand_in(place)
        axes.plot([x, chart.x.high], [y, y], color=tone, **look)
        axes.plot([1, 1.035], [y, height], color=tone, transform=beside, **look)
        axes.text(1.045, height, text, color=tone, va="center", transform=beside, parse_math=False)


def apart(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move ``values`` apart to at least ``gap``, in their order, so that labels do not overlap.

    Those that would touch form a stack, which stands as near as it can to what it labels.

    >>> [round(v, 2) for v in apart([0.5, 0.5, 0.1], 0.1, 0.0, 1.0)]
    [0.45, 0.55, 0.1]
    """

    def base(stack: Sequence[int]) -> float:
        """Return where the lowest of a stack stands."""
        mean = sum(values[i] - k * gap for k, i in enumerate(stack)) / len(stack)
        return max(low + gap / 2, min(mean, high - gap / 2 - gap * (len(stack) - 1)))

    stacks: list[list[int]] = []
    for index in sorted(range(len(values)), key=lambda i: values[i]):
        stacks.append([index])
        while len(stacks) > 1 and base(stacks[-1]) < base(stacks[-2]) + gap * len(stacks[-2]):
            stacks[-2:] = [stacks[-2] + stacks[-1]]
    placed = {i: base(stack) + k * gap for stack in stacks for k, i in enumerate(stack)}
    return [placed[i] for i in range(len(values))]


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
