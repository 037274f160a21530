"""The charts: numbers over the rounds and over time, and those of an audit, as inline SVG.

Matplotlib draws in stand-in colours; :func:`_inline` swaps them for the page's CSS variables, so
that one chart is right on a light page, on a dark one and on paper.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, cycle, pairwise
from typing import TYPE_CHECKING, Any, Literal

from goldfish.report.formatting import count, gap, wilson
from goldfish.results import ACCURACY, METRICS, ORIGIN, YARDSTICK, Metric, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = "#f1f1f1", "#f2f2f2"
LABEL = 20
"""A longer name is cut in a chart; the tables have it whole."""
MARKERS = "osD^vPX*hp<>"
KNOWN = (
    *(ORIGIN, "goldfish", YARDSTICK, "sisa", "incompetent-teacher", "retrain-tuned"),
    *("fed-eraser", "fed-recovery", "rapid-retrain", "goldfish-warm", "gradient-ascent"),
    "goldfish-sprint",
)
"""The methods that keep their colours in every report: ``page.css`` names one for each, --m0 on."""
PALETTE_SIZE = len(KNOWN)
PLACES = {name: place for place, name in enumerate(KNOWN)}
MANY = 6
"""A chart of more lines than this has a panel for each, with the others pale behind it."""
COLUMNS = 3
"""Panels side by side."""
WIDTH = 5.6
"""Of a chart, in inches."""
LATE = 0.5
"""The axis of accuracies holds this share of each line, its end: there the methods differ."""
FULL = (0.0, 100.0)
"""The whole axis of percentages."""
CLOSE = 50.0
"""Values that lie within so many points get an axis of their own part of 0 to 100."""
LEAST = 10.0
"""No axis of percentages shows fewer points than this, so that noise looks like noise."""
LEAST_GAP = 0.05
"""Nor one of memory gaps less than this."""
WIDE = 20.0
"""Times whose longest is more than so many times the shortest stand on a logarithmic axis."""


def plain(value: float) -> str:
    """Write a number on an axis."""
    return f"{value:g}".replace("-", "−")


@dataclass(frozen=True)
class Scale:
    """One axis."""

    low: float
    high: float
    label: str
    mark: Callable[[float], str] = plain
    """How a mark on the axis is written."""
    value: Callable[[float], str] = plain
    """How a value is written at the end of its line."""
    log: bool = False
    whole: bool = False
    """Whether only whole numbers get a mark."""


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
    said: str = ""
    """What is written beside its name, if not its last value."""


@dataclass(frozen=True)
class Chart:
    """What one chart shows."""

    title: str
    lines: Sequence[Line]
    x: Scale
    y: Scale
    reference: float | None = None
    """A dashed line: where origin ended."""
    moments: Mapping[float, str] = field(default_factory=dict)
    """Where on the horizontal axis something happened, and what."""
    leading: Sequence[str] = ()
    """The methods that are drawn over the others, and thicker."""
    interval: tuple[float, float] | None = None
    """The 95 % interval of retrain's last value, which is shaded."""
    chance: bool = False
    """Whether a dashed diagonal shows what guessing gives; each line has a panel of its own."""
    reference_name: str = ORIGIN

    @property
    def panels(self) -> bool:
        """Whether each line has a panel of its own."""
        return self.chance or len(self.lines) > MANY

    @property
    def remark(self) -> str:
        """What a reader of the vertical axis must know."""
        low, high = self.y.low, self.y.high
        if not self.y.mark(low).endswith("%") or (low, high) == FULL:
            return ""
        below = any(value < low for line in self.lines for value in line.values)
        told = f"axis from {low:.0f} to {high:.0f} %{'; earlier rounds below' if below else ''}"
        return f"{told}; shaded: 95 % interval of {YARDSTICK}" if self.interval else told


@dataclass(frozen=True)
class Strips:
    """A chart with a row for each name, and in it a dot for each of several numbers."""

    title: str
    rows: Mapping[str, Sequence[float]]
    x: Scale
    band: float = 0.0
    """How far the shaded noise reaches to both sides of 0."""
    means: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """The mean of a row, and its interval."""


def charts(result: Result) -> Iterator[Chart]:
    """Return every chart that the run has numbers for."""
    later = moments(result)
    leading = [name for name in (result.subject, YARDSTICK) if name is not None]
    for metric in METRICS:
        lines = course(result, metric) if metric.chart else []
        if not lines:
            continue
        first = metric is ACCURACY
        images = getattr(result.test_images, metric.images) if metric.images else 0
        of = f" ({count(images)} images)" if images else ""
        reference, ends = metric.of(result.origin), metric.of(result.retrain)
        x = rounds_axis([at for line in lines for at in line.at])
        y = value_axis(metric, _heights(lines, reference, LATE if first else 1.0))
        interval = None if ends is None or not images or result.seeds else wilson(ends, images)
        yield Chart(f"{metric.name}{of}", lines, x, y, reference, later, leading, interval)
        if first:
            lines = course_of_time(result)
            length, unit = time_unit(max(line.at[-1] for line in lines))
            lines = [replace(line, at=[at / length for at in line.at]) for line in lines]
            x = time_axis([at for line in lines for at in line.at], unit)
            title = f"Accuracy over time{of}"
            yield Chart(title, lines, x, y, reference, leading=leading, interval=interval)


def _heights(lines: Sequence[Line], reference: float | None, late: float) -> list[float]:
    """Return the values that an axis must hold: of the ``late`` share of each line, with bands."""
    found = [] if reference is None else [reference]
    for line in lines:
        start = int(len(line.values) * (1 - late))
        found += line.values[start:]
        for value, std in list(zip(line.values, line.deviations, strict=False))[start:]:
            found += [value - std, value + std]
    return found


def course(result: Result, metric: Metric) -> list[Line]:
    """Return each unlearning method's number over its rounds, where it has one."""
    lines = []
    for name, method in result.methods.items():
        known = [r for r in method.rounds if getattr(r, metric.key) is not None]
        if name != ORIGIN and known:
            stds = [r.std.get(metric.key, 0.0) for r in known]
            at, values = [r.round for r in known], [getattr(r, metric.key) for r in known]
            diverged = method.diverged is not None
            lines.append(Line(name, at, values, diverged, stds if any(stds) else ()))
    return lines


def course_of_time(result: Result) -> list[Line]:
    """Return each unlearning method's accuracy over the seconds it had spent by then.

    A ring marks where it was as good as retrain ended up. Means over seeds have none: the mean
    time to quality need not lie on the mean course.
    """
    lines = []
    for line in course(result, ACCURACY):
        method = result.methods[line.method]
        at = list(accumulate(record.seconds for record in method.rounds))
        done = method.time_to_quality
        ring = None if done is None or result.seeds else list(line.at).index(done.round)
        lines.append(replace(line, at=at, deviations=(), ring=ring))
    return lines


def moments(result: Result) -> dict[float, str]:
    """Return between which rounds later deletions arrived, and what a chart writes there.

    Methods that stop early were asked after fewer rounds: the moment that most methods share is
    named, the others are not.
    """
    places: dict[int, Counter[float]] = {}
    for method in result.methods.values():
        for before, after in pairwise(method.rounds):
            if after.stage > before.stage:
                middle = (before.round + after.round) / 2
                places.setdefault(after.stage, Counter())[middle] += 1
    found = {place: "" for counted in places.values() for place in counted}
    for stage, counted in places.items():
        found[counted.most_common(1)[0][0]] = f"{ordinal(stage)} deletion"
    return found


def ordinal(place: int) -> str:
    """Format a place in a row.

    >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 21)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '21st']
    """
    teens = place % 100 in (11, 12, 13)
    return f"{place}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(place % 10, 'th')}"


def value_axis(metric: Metric, values: Sequence[float]) -> Scale:
    """Return the vertical axis of a metric that holds all of ``values``."""
    if metric.unit == "percent":
        low, high = limits([min(max(value, FULL[0]), FULL[1]) for value in values])
        return Scale(low, high, "", lambda v: f"{v:.0f} %", lambda v: f"{v:.1f}", whole=True)
    return Scale(*gap_limits(values), "", value=gap)


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Return where an axis of percentages begins and ends: at 0 and 100, or near close values.

    >>> limits([3.0, 96.0]), limits([93.4, 97.1, 96.9])
    ((0.0, 100.0), (88.0, 98.0))
    """
    low, high = min(values), max(values)
    if high - low > CLOSE:
        return FULL
    step = next(step for step in (1.0, 2.0, 5.0, 10.0) if high - low <= 5 * step)
    top = min(FULL[1], math.ceil(high / step) * step)
    bottom = max(FULL[0], min(math.floor(low / step) * step, top - LEAST))
    return bottom, max(top, bottom + LEAST)


def gap_limits(values: Sequence[float]) -> tuple[float, float]:
    """Return where an axis of other numbers begins and ends: 0 is always on it.

    >>> [round(end, 3) for end in gap_limits([0.004, -0.012])]
    [-0.029, 0.021]
    """
    low, high = min(0.0, *values), max(0.0, *values)
    missing = max(0.0, LEAST_GAP - (high - low)) / 2
    return low - missing, high + missing


def rounds_axis(values: Sequence[float]) -> Scale:
    """Return the axis of the rounds, with a margin."""
    low, high = min(values), max(values)
    pad = max(0.25, 0.02 * (high - low))
    return Scale(low - pad, high + pad, "round", "{:.0f}".format, whole=True)


def time_unit(longest: float) -> tuple[float, str]:
    """Return how many seconds the unit has in which times up to ``longest`` are read, and its name.

    >>> time_unit(42.0), time_unit(4000.0), time_unit(40_000.0)
    ((1.0, 'seconds'), (60.0, 'minutes'), (3600.0, 'hours'))
    """
    if longest <= 900.0:
        return 1.0, "seconds"
    return (60.0, "minutes") if longest <= 14_400.0 else (3600.0, "hours")


def time_axis(values: Sequence[float], unit: str) -> Scale:
    """Return the axis of times: from 0 on, or logarithmic where they differ widely.

    >>> time_axis([2.0, 5.0], "seconds").log, time_axis([0.1, 5.0], "seconds").log
    (False, True)
    """
    low, high = min(values), max(values)
    log = 0 < low < high / WIDE
    ends = (low / 1.2, high * 1.2) if log else (0.0, 1.04 * high or 1.0)
    return Scale(*ends, f"{unit}, logarithmic" if log else unit, log=log)


def colours(methods: Sequence[str]) -> dict[str, int]:
    """Return each method's place in the palette; a method we do not know gets a free one.

    >>> colours(["origin", "mine", "goldfish", "retrain"])
    {'origin': 0, 'mine': 3, 'goldfish': 1, 'retrain': 2}
    """
    taken = {PLACES[name] for name in (ORIGIN, "goldfish", YARDSTICK, *methods) if name in PLACES}
    free = cycle([place for place in range(PALETTE_SIZE) if place not in taken])
    return {name: PLACES[name] if name in PLACES else next(free, 0) for name in methods}


def draw(chart: Chart | Strips, colour: Mapping[str, int]) -> str:
    """Draw a chart: its lines together or in panels, or its rows of dots."""

    def paint(figure: Figure) -> None:
        if isinstance(chart, Strips):
            _draw_strips(figure, chart, colour)
        elif chart.panels:
            _draw_panels(figure, chart, colour)
        else:
            _draw_together(figure, chart, colour)

    return _inline(svg(paint, f"{chart.title} {chart.x.label}", 10.0, transparent=True))


def svg(
    paint: Callable[[Figure], None],
    name: str,
    size: float,
    *,
    transparent: bool = False,
    cropped: bool = False,
) -> str:
    """Return what ``paint`` draws as SVG, the same bytes for the same figure and ``name``."""
    import matplotlib.style
    from matplotlib.figure import Figure

    look = {"svg.fonttype": "none", "svg.hashsalt": f"goldfish {name}", "font.size": size}
    with matplotlib.style.context(look, after_reset=True):
        figure, buffer = Figure(), io.StringIO()
        paint(figure)
        nothing = {"Creator": None, "Date": None, "Format": None, "Type": None}
        box = "tight" if cropped else None
        figure.savefig(
            buffer, format="svg", transparent=transparent, metadata=nothing, bbox_inches=box
        )
    return buffer.getvalue()


def _draw_together(figure: Figure, chart: Chart, colour: Mapping[str, int]) -> None:
    """Draw one line a method, labelled right of the axes, and a dashed line as a reference."""
    height, size = 3.4, 10.0
    figure.set_size_inches(WIDTH, height)
    ends = [
        (line.at[-1], line.values[-1], _label(line, chart), colour[line.method])
        for line in chart.lines
    ]
    if chart.reference is not None:
        text = f"{chart.reference_name} {chart.y.value(chart.reference)}"
        ends.insert(0, (chart.x.high, chart.reference, text, 0))
    longest = max(len(label) for _, _, label, _ in ends)
    room = 0.84 - 0.0085 * size / WIDTH * longest
    axes = figure.add_axes((0.1, 0.46 / height, room, 1 - 0.74 / height))
    _set_scales(axes, chart)
    _draw(axes, chart, colour)
    for moment, label in chart.moments.items():
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
    places = [axes.transData.transform((x, y)) for x, y, _, _ in ends]
    shares = [axes.transAxes.inverted().transform(place)[1] for place in places]
    heights = apart(shares, 0.0165 * size / (height - 0.74), 0.0, 1.0)
    look: dict[str, Any] = {"linewidth": 0.7, "linestyle": ":", "clip_on": False}
    beside: dict[str, Any] = {"transform": axes.transAxes}
    for (x, y, text, place), share, at in zip(ends, shares, heights, strict=True):
        tone = _stand_in(place)
        axes.plot([x, chart.x.high], [y, y], color=tone, **look)
        axes.plot([1, 1.035], [share, at], color=tone, **look, **beside)
        axes.text(1.045, at, text, color=tone, va="center", parse_math=False, **beside)


def _draw_panels(figure: Figure, chart: Chart, colour: Mapping[str, int]) -> None:
    """Draw a panel for each line, all on the same axes, with the other lines pale behind it."""
    from matplotlib.collections import LineCollection

    courses = [list(zip(line.at, line.values, strict=True)) for line in chart.lines]
    rows, one, foot = math.ceil(len(chart.lines) / COLUMNS), 1.45, 0.5
    height = one * rows + foot
    figure.set_size_inches(WIDTH, height)
    room = 0.9 / COLUMNS
    for place, line in enumerate(chart.lines):
        row, column = divmod(place, COLUMNS)
        bottom = (foot + one * (rows - 1 - row)) / height
        axes = figure.add_axes((0.1 + room * column, bottom, room - 0.04, (one - 0.3) / height))
        _set_scales(axes, chart, close=True)
        axes.add_collection(LineCollection(courses, colors=GRID, linewidths=1.0), autolim=False)
        _draw(axes, replace(chart, lines=[line], leading=[line.method]), colour)
        tone = _stand_in(colour[line.method])
        look: dict[str, Any] = {"transform": axes.transAxes, "parse_math": False}
        axes.text(0, 1.05, _label(line, chart), color=tone, fontsize=8.8, **look)
        last = place + COLUMNS >= len(chart.lines)
        axes.tick_params(labelsize=8.8, labelleft=column == 0, labelbottom=last)
        axes.set_xlabel("")
    figure.text(0.55, 0.02, chart.x.label, color=INK, ha="center")


def _draw_strips(figure: Figure, chart: Strips, colour: Mapping[str, int]) -> None:
    """Draw a row of dots for each name: its numbers, their mean and its interval."""
    names = [_short(name) for name in chart.rows]
    height = 0.75 + 0.3 * len(names)
    left = 0.02 + 0.085 / WIDTH * max(map(len, names))
    figure.set_size_inches(WIDTH, height)
    axes = figure.add_axes((left, 0.5 / height, 0.97 - left, 1 - 0.6 / height))
    _set_axis(axes, "x", chart.x)
    _set_look(axes, chart.x.label, "x")
    axes.set_yticks([])
    axes.set_ylim(len(names) - 0.4, -0.6)
    if chart.band:
        axes.axvspan(-chart.band, chart.band, color=INK, alpha=0.15, linewidth=0)
    axes.axvline(0, color=INK, linewidth=0.9)
    beside = axes.get_yaxis_transform()  # x counts widths of the axes
    for place, (name, values) in enumerate(chart.rows.items()):
        tone = _stand_in(colour.get(name, 0))
        text: dict[str, Any] = {"ha": "right", "va": "center", "parse_math": False}
        axes.text(-0.02, place, names[place], color=tone, transform=beside, **text)
        dots: dict[str, Any] = {"linestyle": "none", "markeredgewidth": 0, "alpha": 0.5}
        above, below = (place - 0.16, place + 0.18) if name in chart.means else (place, place)
        axes.plot(values, [above] * len(values), color=tone, marker="o", markersize=5, **dots)
        if name in chart.means:
            mean, low, high = chart.means[name]
            axes.plot([low, high], [below, below], color=tone, linewidth=1.6)
            axes.plot([mean], [below], color=tone, marker="|", markersize=8, mew=2.0)


def _set_scales(axes: Axes, chart: Chart, *, close: bool = False) -> None:
    """Set both axes; ``close`` for a small panel, which has room for few marks."""
    _set_axis(axes, "x", chart.x, bins=4 if close else 8)
    _set_axis(axes, "y", chart.y, bins=5 if close else 7)
    _set_look(axes, chart.x.label, "y")


def _set_axis(axes: Axes, which: Literal["x", "y"], scale: Scale, bins: int = 8) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    margin = 0.0 if which == "x" or scale.log else 0.02 * (scale.high - scale.low)
    if scale.log:
        axes.set(**{f"{which}scale": "log"})
        close = scale.high / scale.low < 200 and bins > 4
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if close else (1,), numticks=12))
        axis.set_minor_locator(NullLocator())
    else:
        steps = None if which == "x" else [1, 2, 5, 10]
        axis.set_major_locator(MaxNLocator(integer=scale.whole, nbins=bins, steps=steps))
    axes.set(**{f"{which}lim": (scale.low - margin, scale.high + margin)})
    axis.set_major_formatter(FuncFormatter(lambda value, _: scale.mark(value)))


def _set_look(axes: Axes, label: str, grid: Literal["x", "y"]) -> None:
    axes.set_xlabel(label, color=INK)
    axes.tick_params(which="both", colors=INK, length=0)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)


def _draw(axes: Axes, chart: Chart, colour: Mapping[str, int]) -> None:
    if chart.y.low < 0 < chart.y.high:
        axes.axhline(0, color=INK, linewidth=0.9)
    for moment, label in chart.moments.items():
        axes.axvline(moment, color=INK, linewidth=0.8, linestyle="-" if label else ":")
    if chart.interval is not None:
        axes.axhspan(*chart.interval, color=_stand_in(PLACES[YARDSTICK]), alpha=0.1, linewidth=0)
    if chart.chance:
        ends = (chart.x.low, chart.x.high)
        axes.plot(ends, ends, color=INK, linestyle=(0, (2, 2)), linewidth=1.0)
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
            markersize=(4.5 if len(line.at) > 1 else 6.5) - chart.panels,
            markevery=max(1, len(line.at) // 10),
            **look,
        )
        if line.ring is not None:
            at = [line.at[line.ring]], [line.values[line.ring]]
            axes.plot(*at, marker="o", markersize=10, mew=1.2, fillstyle="none", **look)
        if line.diverged:
            axes.plot(line.at[-1:], line.values[-1:], marker="x", markersize=10, mew=2, **look)


def _short(name: str) -> str:
    return name if len(name) <= LABEL else f"{name[: LABEL - 1]}…"


def _label(line: Line, chart: Chart) -> str:
    name = _short(line.method)
    if line.diverged:
        return f"{name}, diverged"
    return f"{name} {line.said or chart.y.value(line.values[-1])}"


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
