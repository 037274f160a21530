"""Writes ``report.html``: one page that needs nothing else, the same bytes for the same run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from goldfish.errors import StoreError
from goldfish.report import contents
from goldfish.report.charts import course, figures, moments
from goldfish.report.costs import costs, own_trainings
from goldfish.report.figures import PALETTE_SIZE, colours
from goldfish.report.formatting import listing, number, share
from goldfish.report.reading import Result, Run, read_run, section
from goldfish.report.seeds import seeds, seeds_table
from goldfish.report.summary import FEW_IMAGES, MORE, ORIGIN, YARDSTICK, SummaryRow, table
from goldfish.report.verdicts import (
    COLLAPSE,
    GONE,
    KEPT,
    SIGNAL,
    WEAK,
    judged_rows,
    removed_class_name,
)
from goldfish.report.words import headline, image_counts


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into ``run_dir``, whole or not at all, and return its path."""
    run_dir = Path(run_dir)
    html = render(read_run(run_dir))
    path = run_dir / "report.html"
    partial = run_dir / f".report.html.{os.getpid()}.tmp"
    try:
        partial.write_text(html, encoding="utf-8", newline="\n")
        partial.replace(path)
    except OSError as error:
        raise StoreError(
            f"Cannot write {path} ({error}). Check the permissions and the space there."
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def render(run: Run) -> str:
    """Return the page as HTML."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here = files("goldfish.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["unbroken"] = lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%")
    template = environment.from_string(here.joinpath("page.html").read_text(encoding="utf-8"))
    result = run.result
    rows = judged_rows(result)
    own = own_trainings(result)
    config = section(result, "config")
    pictures = contents.pictures(run.samples)
    drawn = {line.method for line in course(result, "accuracy")}
    subject = [str(section(config, key).get("name") or "") for key in ("data", "model")]
    return template.render(
        # Ours, with every text in it escaped by Matplotlib: the only markup let through.
        css=Markup(here.joinpath("page.css").read_text(encoding="utf-8")),  # noqa: S704
        charts=[(figure, Markup(figure.svg)) for figure in figures(result)],  # noqa: S704
        subject=", ".join(name for name in subject if name),
        headline=headline(result),
        facts=contents.facts(result),
        rows=rows,
        table=table(rows),
        more=table(rows, MORE),
        seeds=seeds(result),
        seeds_table=seeds_table(rows),
        own=own,
        costs=costs(rows, own),
        heat=contents.heat(result, contents.class_names(run.samples)),
        pictures=pictures,
        relabelled=any(picture.trained != picture.true for picture in pictures),
        failures=contents.failures(result),
        notes=contents.notes(result),
        config=contents.flat(config),
        environment=contents.flat(section(result, "environment")),
        partition=str(section(result, "partition").get("digest") or ""),
        colour=colours([row.method for row in rows]),
        limits={
            "gone": share(GONE, 0),
            "kept": share(KEPT, 0),
            "signal": SIGNAL,
            "weak": WEAK,
            "collapse": COLLAPSE,
            "few": FEW_IMAGES,
        },
        margins={key: _margin(result, key) for key in ("accuracy", "memory")},
        forgotten=_forgotten(result, rows),
        images=image_counts(result),
        removed_class=removed_class_name(result),
        name_width=min(22, max((len(row.method) for row in rows), default=0)),
        palette_size=PALETTE_SIZE,
        backdoor=any(row.backdoor_success is not None for row in rows),
        memory=any(row.memory_gap is not None for row in rows),
        small=any(0 < row.test_images < FEW_IMAGES and not row.spread for row in rows),
        quality=any(row.missed or row.to_quality is not None for row in rows),
        moments=moments(result),
        undrawn=listing([row.method for row in rows if row.diverged and row.method not in drawn]),
        origin=ORIGIN,
        yardstick=YARDSTICK,
    )


def _margin(result: Result, key: str) -> str:
    value = number(section(result, "margins").get(key))
    return "some" if value is None else f"{value:g}"


def _forgotten(result: Result, rows: Sequence[SummaryRow]) -> str:
    """Say when a model counts as having forgotten as much as retrain."""
    points = f"at most {_margin(result, 'backdoor')} point above retrain’s"
    tests = []
    if any(row.backdoor_success is not None for row in rows):
        tests.append(f"what the trigger adds is {points}")
    if removed := removed_class_name(result):
        tests.append(f"the accuracy on {removed} is {points}")
    if any(row.memory_gap is not None for row in rows):
        tests.append("the memory gap does not count as “remembers”")
    return listing(tests)
