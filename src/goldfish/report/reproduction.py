"""A reproduced table or figure: the claims judged, a page, a plot, and the summary of many.

All is made from the values and facts that a reproduction left, and can be made again.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from goldfish.experiments.preset import (
    Claim,
    Preset,
    Value,
    from_csv,
    load_preset,
    paper_values,
    part_of,
    parts,
    preset_names,
)
from goldfish.experiments.reproduce import ABOUT, VALUES, About
from goldfish.files import write_whole
from goldfish.report.charts import svg
from goldfish.report.formatting import NOTHING, listing, plural
from goldfish.results import BY_KEY
from goldfish.unlearning.optimization import ShardOption, plan_shards

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 120
"""Of a line of text."""
PAGE, PLOT, REMARKS = "README.md", "plot.svg", "remarks.md"
ROWS = 12
"""A table shows at most about so many rows; the CSV has them all."""
TITLES = {
    "size_variance": "Variance of the clients' numbers of samples",
    "client_min": "Lowest accuracy of a client's own model, %",
    "client_max": "Highest accuracy of a client's own model, %",
    "client_range": "Highest minus lowest accuracy, points",
    "client_std": "Standard deviation of the clients' own accuracies, points",
    "accuracy": "Accuracy on clean test images, %",
    "backdoor_success": "Backdoor success, %",
}
PANEL, HEIGHT = 4.8, 3.8
"""The size of a panel in a plot, in inches; two stand side by side."""
DASH, DOTS = (0, (4, 3)), (0, (1, 2))
MARKERS = "oxs+Dv^"
"""Hollow or of lines, so that a series which lies on another does not hide it."""
Held: TypeAlias = Literal["holds", "holds in part", "does not hold", "not measured"]
Key: TypeAlias = tuple[float, str, str]


class Mean(NamedTuple):
    """The mean over the seeds, and their standard deviation where there are several."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Numbers:
    """What was measured and what the paper says, by row, series and metric."""

    ours: Mapping[Key, Mean]
    paper: Mapping[Key, Mean]

    @classmethod
    def of(cls, values: Iterable[Value], paper: Iterable[Value]) -> Numbers:
        """Average values over their seeds."""
        return cls(_averaged(values), _averaged(paper))

    def rows(self) -> list[float]:
        """Return the rows that were measured."""
        return sorted({x for x, _, _ in self.ours})


def _averaged(values: Iterable[Value]) -> dict[Key, Mean]:
    groups: dict[Key, list[float]] = {}
    for value in values:
        groups.setdefault((value.x, value.series, value.metric), []).append(value.value)
    return {
        key: Mean(statistics.fmean(own), statistics.stdev(own) if len(own) > 1 else None)
        for key, own in groups.items()
    }


class Judged(NamedTuple):
    """A claim, whether it holds here, and where it does not."""

    claim: str
    held: Held
    detail: str


def judge(preset: Preset, numbers: Numbers) -> list[Judged]:
    """Judge every claim of a preset by the means over the seeds."""
    judged = [judge_claim(claim, numbers) for claim in preset.claims]
    if (planner := preset.planner) is not None:
        chosen = planned_shards(preset, numbers)
        expected = listing([str(shards) for shards in planner.expected])
        text = f"{expected} shards are a good balance (what the shard planner chooses)"
        prices = f"c1 = {planner.round_benefit:g}, c2 = {planner.accuracy_cost:g}"
        held: Held = "holds" if chosen in planner.expected else "does not hold"
        detail = f"the planner chooses {chosen} ({prices})"
        judged.append(Judged(text, held, detail) if chosen else Judged(text, "not measured", ""))
    return judged


def judge_claim(claim: Claim, numbers: Numbers) -> Judged:
    """Compare the subject with the others, row by row.

    A claim holds where the means are as it says, up to its margin; what is equal to another series
    is neither higher nor lower. Differences that are smaller than the spread over the seeds of both
    are counted apart.
    """
    rows = [x for x in numbers.rows() if not claim.at or x in claim.at]
    missed: dict[float, tuple[float, str]] = {}
    close = 0
    for x in rows:
        own = numbers.ours.get((x, claim.subject, claim.metric))
        for name, other in _others(claim, numbers, x).items():
            if own is None or other is None:
                missed[x] = (math.inf, f"{x:g} (no value)")
                continue
            apart = own.mean - other.mean
            # By how much it is on the side that the claim says.
            gain = {"higher": apart, "lower": -apart, "alike": -abs(apart)}[claim.holds]
            strict = name in claim.than and name != "paper" and claim.holds != "alike"
            if gain < -claim.margin or (strict and gain == claim.margin == 0):
                against = f"{number(own.mean)} against {number(other.mean)} of {name}"
                text = f"{x:g} ({against if apart else f'{number(own.mean)}, as {name} has'})"
                missed[x] = max(missed.get(x, (0.0, "")), (-gain, text))
            spread = math.hypot(own.std or 0.0, other.std or 0.0)
            close += 0 < spread >= abs(apart) and claim.holds != "alike"
    if not rows:
        return Judged(claim.text, "not measured", "")
    detail = f"at {len(rows) - len(missed)} of {len(rows)} rows"
    if missed:
        detail += f"; furthest off at {max(missed.values())[1]}"
    if close:
        detail += f"; within the spread over the seeds: {plural(close, 'difference')}"
    some: Held = "holds in part" if len(missed) < len(rows) else "does not hold"
    return Judged(claim.text, some if missed else "holds", detail)


def _others(claim: Claim, numbers: Numbers, x: float) -> dict[str, Mean | None]:
    """Return what the subject is compared with on a row, by name."""
    if claim.bound is not None:
        return {"the bound": Mean(claim.bound, None)}
    others = {name: numbers.ours.get((x, name, claim.metric)) for name in claim.than}
    if "paper" in others:
        others["paper"] = numbers.paper.get((x, claim.subject, claim.metric))
    return others


def planned_shards(preset: Preset, numbers: Numbers) -> int | None:
    """Return the shard planner's choice; None where there is no planner, or a course is missing.

    It weighs the rounds until the accuracy from before the deletion is back (one more than there
    were, if it never is) against the accuracy at the end.
    """
    if preset.planner is None or not numbers.ours:
        return None
    deletion = preset.base["training"]["rounds"]
    last, options = numbers.rows()[-1], []
    for series in preset.series:
        course = {x: n.mean for (x, name, _), n in numbers.ours.items() if name == series.name}
        if not {deletion, last} <= course.keys():
            return None
        back = [x for x, value in course.items() if x > deletion and value >= course[deletion]]
        rounds = min(back, default=last + 1) - deletion
        options.append(ShardOption(series.set["training.shards"], rounds, course[last]))
    return plan_shards(options, preset.planner.round_benefit, preset.planner.accuracy_cost).shards


def number(value: float, like: float | None = None) -> str:
    """Format a number with about three figures; percentages have two after the point.

    A deviation is written ``like`` its mean.

    >>> number(95.123), number(0.00214), number(0.0), number(18_700_000.0)
    ('95.12', '0.00214', '0', '1.87e+07')
    """
    size = abs(value if like is None else like)
    return f"{value:{'.2f' if 1 <= size < 100_000 else '.3g'}}"


def cell_text(ours: Mean | None, paper: Mean | None) -> str:
    """Format a cell: our mean and deviation, and in brackets what the paper says.

    >>> cell_text(Mean(95.123, 0.2), Mean(95.06, None)), cell_text(Mean(0.31, None), None)
    ('95.12 ± 0.20 (95.06)', '0.31')
    """
    text = NOTHING if ours is None else number(ours.mean)
    if ours is not None and ours.std is not None:
        text += f" ± {number(ours.std, like=ours.mean)}"
    return text if paper is None else f"{text} ({number(paper.mean)})"


def write_results(folder: Path, preset: Preset) -> list[Judged]:
    """Write the page and the plot of a reproduction from its values; return the judged claims."""
    values = from_csv(folder / VALUES)
    numbers = Numbers.of(values, paper_values(preset))
    judged = judge(preset, numbers)
    remarks = folder / REMARKS
    text = remarks.read_text("utf-8") if remarks.exists() else ""
    about = About.read(folder / ABOUT)
    write_whole(folder / PLOT, plot(preset, numbers))
    write_whole(folder / PAGE, page(preset, numbers, judged, about, not_run(preset, values), text))
    return judged


def not_run(preset: Preset, values: Sequence[Value]) -> str:
    """Say which seeds and rows of a preset have no values; empty where none is missing."""
    done = {part_of(preset, value) for value in values}
    begun = sorted({seed for seed, _ in done})
    missing = [
        part
        for part in parts(preset, max(preset.seeds, 1 + max(begun, default=0)))
        if part not in done
    ]
    texts = []
    for seed in begun:
        if rows := [f"{row:g}" for own, row in missing if own == seed and row is not None]:
            texts.append(f"seed {seed} at {listing(rows)}")
    if later := [str(seed) for seed in dict(missing) if seed not in begun]:
        texts.append(f"{'seed' if len(later) == 1 else 'seeds'} {listing(later)}")
    return "; ".join(texts)


def page(
    preset: Preset,
    numbers: Numbers,
    judged: Sequence[Judged],
    about: About,
    missing: str = "",
    remarks: str = "",
) -> str:
    """Return the page, in Markdown: what was run, the claims, the numbers."""
    shows = textwrap.fill(preset.shows, WIDTH)
    lines = [f"# {preset.name}: {preset.title}", "", shows, ""]
    if not about.complete:
        lines += ["**Not the preset as it stands: a smaller or changed run, and no result.**", ""]
    several = "; ± is one standard deviation over them" if len(about.seeds) > 1 else ""
    lines += [
        f"- Command: `{about.command}`",
        f"- Finished {about.date} on {'; '.join(about.machines)}",
        f"- Seeds: {', '.join(map(str, about.seeds))}{several}",
        *([f"- Not run yet: {missing}"] if missing else []),
        f"- Every value: [{VALUES}]({VALUES})",
        *(f"- {note}" for note in about.notes),
        "",
        "| claim | here | |",
        "|---|---|---|",
        *(f"| {claim} | **{held}** | {detail} |" for claim, held, detail in judged),
        "",
    ]
    if remarks:
        lines += [remarks.strip(), ""]
    lines += [f"![{preset.title}]({PLOT})", ""]
    for metric in preset.metrics:
        lines += _table(preset, numbers, metric)
    return "\n".join(lines)


def _table(preset: Preset, numbers: Numbers, metric: str) -> list[str]:
    known = numbers.rows()
    names = [series.name for series in preset.series]
    with_paper = any((x, name, metric) in numbers.paper for x in known for name in names)
    step = max(1, math.ceil(len(known) / ROWS))
    shown = known[step - 1 :: step]
    brackets = " (in brackets: the paper)" if with_paper else ""
    lines = [f"## {title_of(metric)}{brackets}", ""]
    lines += [f"| {preset.x.label} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for x in shown:
        keys = [(x, name, metric) for name in names]
        cells = [cell_text(numbers.ours.get(key), numbers.paper.get(key)) for key in keys]
        lines.append(f"| {x:g} | {' | '.join(cells)} |")
    return [*lines, ""]


def title_of(metric: str) -> str:
    """Return what a metric is called on the page."""
    return TITLES[metric] if metric in TITLES else BY_KEY[metric].name


def plot(preset: Preset, numbers: Numbers) -> str:
    """Draw a panel a metric, a line a series, the paper's values dashed; return the SVG."""
    metrics = [metric for metric in preset.metrics if metric != preset.error]
    rows, columns = math.ceil(len(metrics) / 2), min(2, len(metrics))

    def paint(figure: Figure) -> None:
        figure.set_size_inches(PANEL * columns, HEIGHT * rows)
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        figure.subplots_adjust(wspace=0.2, hspace=0.3)
        for axes, metric in zip_longest(panels, metrics):
            if metric is None:
                axes.set_axis_off()
            else:
                _draw(axes, preset, numbers, metric)
        beside = (1 + 0.15 / PANEL, 1.0)
        panels[columns - 1].legend(
            *panels[0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=beside
        )

    return svg(paint, preset.name, 9.0, cropped=True)


def _draw(axes: Any, preset: Preset, numbers: Numbers, metric: str) -> None:
    from matplotlib.ticker import EngFormatter

    chosen = planned_shards(preset, numbers)
    for place, series in enumerate(preset.series):
        tone = f"C{place}"
        marked = chosen is not None and series.set.get("training.shards") == chosen
        course = {x: n for (x, s, m), n in numbers.ours.items() if (s, m) == (series.name, metric)}
        if preset.error and metric == "accuracy":
            bars = [numbers.ours[x, series.name, preset.error].mean for x in course]
        else:
            bars = [n.std or 0.0 for n in course.values()]
        if course:
            axes.errorbar(
                list(course),
                [n.mean for n in course.values()],
                yerr=bars if any(bars) else None,
                marker=MARKERS[place % len(MARKERS)],
                markerfacecolor="none",
                elinewidth=0.8,
                linewidth=3.0 if marked else 1.5,
                label=f"{series.name} (planner's choice)" if marked else series.name,
                color=tone,
                markersize=5,
                capsize=2,
            )
        told = {x: n for (x, s, m), n in numbers.paper.items() if (s, m) == (series.name, metric)}
        if told:
            values, label = [n.mean for n in told.values()], f"{series.name}, paper"
            axes.plot(list(told), values, linestyle=DASH, color=tone, label=label)
    if preset.x.training:
        axes.axvline(preset.base["training"]["rounds"], color="red", linestyle=DOTS)
    if preset.x.setting is None:
        axes.xaxis.get_major_locator().set_params(integer=True)
    else:
        axes.set_xticks(numbers.rows())
    if axes.get_ylim()[1] > 1e5:
        axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    if metric == "backdoor_success":  # origin has most of it, the others hardly any
        axes.set_yscale("symlog", linthresh=1)
        axes.set_yticks([0, 1, 10, 100], labels=["0", "1", "10", "100"])
        axes.set_ylim(bottom=0)
    axes.set_title(title_of(metric))
    axes.set_xlabel(preset.x.label)
    axes.grid(axis="y", linewidth=0.5, alpha=0.5)


SUMMARY = """# Results

The claims of the paper, each with what was measured here. A row comes from a preset that was run
as it stands: `goldfish presets` lists them, `goldfish reproduce NAME` runs one. This page, and the
pages that it links, are made by `goldfish reproduce --summary docs/results` from the CSV files.
"""


def write_summary(folder: Path) -> Path:
    """Write all pages below ``folder`` anew, and its README: one row a claim."""
    rows, missing = [], []
    for name in preset_names():
        place, preset = folder / name, load_preset(name)
        if not (place / VALUES).exists() or not (about := About.read(place / ABOUT)).complete:
            missing.append(name)
            continue
        if part := not_run(preset, from_csv(place / VALUES)):
            missing.append(f"{name} ({part})")
        run = f"{len(about.seeds)}, {about.date}"
        rows += [
            f"| [{name}]({name}/{PAGE}) | {claim} | **{held}** | {detail} | {run} |"
            for claim, held, detail in write_results(place, preset)
        ]
    text = SUMMARY
    if rows:
        head = "| preset | claim | here | | seeds, finished |\n|---|---|---|---|---|\n"
        text += f"\n{head}" + "\n".join(rows) + "\n"
    if missing:
        text += "\n" + textwrap.fill(f"Not run yet: {', '.join(missing)}.", WIDTH) + "\n"
    write_whole(folder / PAGE, text)
    return folder / PAGE
