"""Writes ``report.html``: one page that needs nothing else, the same bytes for the same run.

``page.html`` lays out what is collected here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from goldfish.audits import Audit, read_audit
from goldfish.files import write_whole
from goldfish.report.audit import affected_table, audit_counts, evidence
from goldfish.report.charts import PALETTE_SIZE, charts, colours, course, draw, moments
from goldfish.report.formatting import count, listing, percent, plural
from goldfish.report.summary import cost_bars, is_shown, main_table, more_table, seeds_table
from goldfish.report.top import asked_sentence, headline, image_counts
from goldfish.report.verdict import AUDIT_STATUS, exceeding, removed_class_name, unhonoured
from goldfish.results import ACCURACY, METRICS, ORIGIN, YARDSTICK, Result, Run, read_run

MAX_CLASSES = 20
"""The heat table shows at most so many classes: those with the lowest accuracy."""
HEAT_SPAN = 20.0
"""The heat table's shades span at least so many points of accuracy: noise looks like noise."""
MAX_NAMED_CLIENTS = 12
UNBROKEN = "\N{NO-BREAK SPACE}"
TOLD = {
    "training": (
        *("rounds", "local_epochs", "batch_size", "learning_rate", "schedule"),
        *("momentum", "aggregation", "shards"),
    ),
    "unlearning": ("learning_rate", "local_epochs", "schedule"),
    "unlearning.goldfish": (
        *("temperature", "mu_c", "mu_d", "hard_loss", "removed_term", "round_stop"),
    ),
    "unlearning.goldfish-sprint": (
        *("sprint_steps", "sprint_step", "sprint_gain", "anneal_rounds", "anneal_share"),
        *("anneal_step", "removed_weight", "neighbours"),
    ),
}
"""The settings that are told at the top of the page; the configuration has them all."""


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into ``run_dir``, whole or not at all, and return its path."""
    path = Path(run_dir) / "report.html"
    write_whole(path, render(read_run(Path(run_dir)), read_audit(Path(run_dir))))
    return path


def render(run: Run, audit: Audit | None = None) -> str:
    """Return the page as HTML, with the audit of the run where there was one."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here, result = files("goldfish.report"), run.result
    page = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page.filters["percent"] = percent
    page.filters["unbroken"] = lambda text: text.replace(" %", f"{UNBROKEN}%")
    config, colour = dict(flat(result.config)), colours(list(result.methods))
    # Ours, with every text in it escaped by Matplotlib: beside the style, the only markup let in.
    page.filters["drawn"] = lambda chart: Markup(draw(chart, colour))  # noqa: S704
    lines = {line.method for line in course(result, ACCURACY)}
    diverged = [name for name, method in result.methods.items() if method.diverged]
    template = page.from_string(here.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        css=Markup(here.joinpath("page.css").read_text(encoding="utf-8")),  # noqa: S704
        charts=list(charts(result)),
        result=result,
        subject=", ".join(config[key] for key in ("data.name", "model.name") if key in config),
        headline=headline(result, audit),
        audit=audit,
        evidence=evidence,
        audit_counts=audit_counts,
        affected_table=affected_table,
        audit_status=AUDIT_STATUS,
        facts=facts(result, config),
        table=main_table(result),
        more=more_table(result),
        seeds_table=seeds_table(result),
        own=own_trainings(result),
        costs=cost_bars(result),
        heat=heat(result, run.samples.class_names),
        samples=run.samples.samples,
        name=partial(label_name, names=run.samples.class_names),
        relabelled=any(sample.label != sample.true_label for sample in run.samples.samples),
        failures=failures(result),
        notes=notes(result),
        config=config,
        environment=dict(flat(result.environment.model_dump(exclude_defaults=True))),
        colour=colour,
        images=image_counts(result),
        small=result.test_images.accuracy < result.margins.few_images and not result.seeds,
        removed_class=removed_class_name(result),
        meanings=[
            (metric.name, metric.meaning.format(margins=result.margins))
            for metric in METRICS
            if metric.meaning and is_shown(metric, result)
        ],
        name_width=min(22, max((len(name) for name in result.methods), default=0)),
        palette_size=PALETTE_SIZE,
        backdoor=result.has("backdoor_success"),
        memory=result.has("memory_gap"),
        quality=any(method.quality_tested for method in result.methods.values()),
        moments=moments(result),
        undrawn=listing([name for name in diverged if name not in lines]),
        origin=ORIGIN,
        yardstick=YARDSTICK,
    )


def facts(result: Result, config: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return what was done, as terms and descriptions."""
    total = result.deletion.training_samples
    samples = f", {count(total)} training samples" if total else ""
    seeds = f"{', '.join(map(str, result.seeds))}; every number is the mean over them"
    found = [
        ("Data", config.get("data.name", "") + samples),
        ("Federation", _federation(result, config)),
        ("Model", config.get("model.name", "")),
        ("Training", _settings("training", config)),
        ("Deletion", _deletion(result)),
        ("Backdoor", _backdoor(result)),
        ("Methods", _methods(result, config)),
        ("goldfish", _settings("unlearning.goldfish", config)),
        ("goldfish-sprint", _settings("unlearning.goldfish-sprint", config)),
        ("Seeds", seeds) if result.seeds else ("Seed", config.get("seed", "")),
    ]
    return [(term, text) for term, text in found if text]


def _settings(table: str, config: Mapping[str, str]) -> str:
    known = {key: config[f"{table}.{key}"] for key in TOLD[table] if f"{table}.{key}" in config}
    return ", ".join(f"{key} = {value}".replace(" ", UNBROKEN) for key, value in known.items())


def _methods(result: Result, config: Mapping[str, str]) -> str:
    names = ", ".join(name for name in result.methods if name != ORIGIN)
    last = " after the last deletion" if moments(result) else ""
    limit = f"at most {plural(int(config.get('unlearning.rounds', 0)), 'round')} each{last}"
    more = _settings("unlearning", config)
    return f"{names}; {limit}{more and f', {more}'}" if names else ""


def _federation(result: Result, config: Mapping[str, str]) -> str:
    sizes = result.partition.sizes
    if "data.members" in config:
        clients = config["data.members"].split(", ")
        return f"{plural(len(clients), 'client')} with data of their own"
    how = config.get("data.partition", "")
    skew = f", alpha {config['data.alpha']}" if how == "dirichlet" else ""
    head = f"{plural(len(sizes), 'client')}, partition {how}{skew}"
    if len(sizes) > MAX_NAMED_CLIENTS:
        return f"{head}; {min(sizes.values())} to {max(sizes.values())} samples each"
    return f"{head}; " + ", ".join(f"{client}: {n}" for client, n in sizes.items())


def _deletion(result: Result) -> str:
    asked = asked_sentence(result).removeprefix("Asked: ").removesuffix(".")
    requests = result.deletion.requests
    if 1 < len(requests) <= MAX_NAMED_CLIENTS:
        asked += "; " + ", ".join(f"{r.client_id}: {r.samples}" for r in requests)
    later = [f"the {text} after round {int(at)}" for at, text in moments(result).items() if text]
    return f"{asked}; {listing(later)}" if later else asked


def _backdoor(result: Result) -> str:
    backdoor = result.deletion.backdoor
    if backdoor is None:
        return "none"
    origin = "any class" if backdoor.source is None else f"class {backdoor.source}"
    some = "some of " if result.has("memory_gap") else ""
    return (
        f"{backdoor.size} × {backdoor.size} pixel trigger on {some}the removed samples, {origin} "
        f"labelled as {backdoor.target}"
    )


def own_trainings(result: Result) -> dict[str, str]:
    """Return the methods that train a model of their own, and how good it was."""
    found = {}
    for name, method in result.methods.items():
        if method.training is not None:
            final = method.training.final
            found[name] = f"accuracy {percent(final.accuracy)}"
            if final.backdoor_success is not None:
                found[name] += f", backdoor success {percent(final.backdoor_success)}"
    return found


@dataclass(frozen=True)
class Heat:
    """Accuracy by class: the classes, and for each method its cells as (text, shade)."""

    classes: Sequence[str]
    rows: Mapping[str, Sequence[tuple[str, float]]]
    all_classes: int
    images: str
    """How many test images a class has."""


def heat(result: Result, class_names: Sequence[str]) -> Heat | None:
    """Return the table of accuracy by class; the lower, the stronger the shade (0 to 1)."""
    table = {name: m.final.per_class for name, m in result.methods.items() if m.final is not None}
    known = [value for row in table.values() for value in row if value is not None]
    if not known:
        return None
    lows = [
        min((value for value in values if value is not None), default=math.inf)
        for values in zip(*table.values(), strict=True)
    ]
    shown = sorted(sorted(range(len(lows)), key=lows.__getitem__)[:MAX_CLASSES])
    top = max(known)
    span = max(top - min(known), HEAT_SPAN)
    rows = {
        name: [
            (percent(v).removesuffix(" %"), 0.0 if v is None else round((top - v) / span, 3))
            for v in (row[i] for i in shown)
        ]
        for name, row in table.items()
    }
    amounts = [n for i, n in enumerate(result.test_images.per_class) if i in shown]
    ends = dict.fromkeys((count(min(amounts)), count(max(amounts)))) if amounts else ()
    return Heat([label_name(i, class_names) for i in shown], rows, len(lows), " to ".join(ends))


def label_name(label: int, names: Sequence[str]) -> str:
    """Return what a label is called; its number where it has no name."""
    return names[label] if 0 <= label < len(names) else str(label)


def failures(result: Result) -> dict[tuple[str, str, str, str], str]:
    """Return method, client, error and cause of each failure, and the rounds that it was in."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for name, method in result.methods.items():
        for record in method.rounds:
            for one in record.failures:
                key = (name, one.client_id, one.error, one.cause)
                groups.setdefault(key, []).append(str(record.round))
    return {key: ", ".join(dict.fromkeys(rounds)) for key, rounds in groups.items()}


def notes(result: Result) -> list[tuple[str, str]]:
    """Return what a reader must know of each method, and what it has to say of itself."""
    return [
        (name, text)
        for name, method in result.methods.items()
        for text in (
            *([f"diverged: {method.diverged}"] if method.diverged else ()),
            *unhonoured(name, result),
            *exceeding(name, result),
            *method.notes,
        )
    ]


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Return nested settings as dotted names and texts.

    >>> dict(flat({"data": {"name": "digits"}, "seed": 0, "then": [{"after": 3}, {"after": 2}]}))
    {'data.name': 'digits', 'seed': '0', 'then.1.after': '3', 'then.2.after': '2'}
    """
    for key, value in values.items():
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            value = {str(i): item for i, item in enumerate(value, 1)}
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", ", ".join(map(str, value))
        elif isinstance(value, bool):
            yield f"{prefix}{key}", "yes" if value else "no"
        else:
            yield f"{prefix}{key}", "not set" if value is None else str(value)
