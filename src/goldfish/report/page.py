"""Writes ``report.html``: one page that needs nothing else, the same bytes for the same run."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from goldfish.errors import StoreError
from goldfish.report import contents
from goldfish.report.figures import FULL, PALETTE_SIZE, colours, limits, line_chart
from goldfish.report.formatting import listing, share
from goldfish.report.reading import Run, read_run, section
from goldfish.report.summary import MORE, ORIGIN, YARDSTICK, summary_rows, table
from goldfish.report.words import GONE, KEPT, SIGNAL, WEAK, headline

CHARTS = (
    ("accuracy", "Accuracy on clean test images"),
    ("backdoor_success", "Backdoor success"),
)


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
    rows = summary_rows(result)
    config = section(result, "config")
    pictures = contents.pictures(run.samples)
    drawn = {line.method for line in contents.course(result, "accuracy")}
    subject = [str(section(config, key).get("name") or "") for key in ("data", "model")]
    return template.render(
        # Ours, with every text in it escaped by Matplotlib: the only markup let through.
        css=Markup(here.joinpath("page.css").read_text(encoding="utf-8")),  # noqa: S704
        charts=[(title, axis, Markup(svg)) for title, axis, svg in _charts(run)],  # noqa: S704
        subject=", ".join(name for name in subject if name),
        headline=headline(result),
        facts=contents.facts(result),
        rows=rows,
        table=table(rows),
        more=table(rows, MORE),
        costs=contents.costs(rows),
        heat=contents.heat(result, contents.class_names(run.samples)),
        pictures=pictures,
        relabelled=any(picture.trained != picture.true for picture in pictures),
        failures=contents.failures(result),
        notes=contents.notes(result),
        config=contents.flat(config),
        environment=contents.flat(section(result, "environment")),
        partition=str(section(result, "partition").get("digest") or ""),
        colour=colours([row.method for row in rows]),
        limits={"gone": share(GONE, 0), "kept": share(KEPT, 0), "signal": SIGNAL, "weak": WEAK},
        name_width=min(22, max((len(row.method) for row in rows), default=0)),
        palette_size=PALETTE_SIZE,
        backdoor=any(row.backdoor_success is not None for row in rows),
        undrawn=listing([row.method for row in rows if row.diverged and row.method not in drawn]),
        origin=ORIGIN,
        yardstick=YARDSTICK,
    )


def _charts(run: Run) -> list[tuple[str, str, str]]:
    """Return title, remark on the axis and SVG of each chart."""
    methods = section(run.result, "methods")
    colour = colours(list(methods))
    final = {row.method: row for row in summary_rows(run.result)}
    origin = final.get(ORIGIN)
    found = []
    for key, title in CHARTS:
        if lines := contents.course(run.result, key):
            reference = getattr(origin, key) if origin else None
            low, high = limits(lines, reference)
            axis = "" if (low, high) == FULL else f"axis from {low:.0f} to {high:.0f} %"
            found.append((title, axis, line_chart(title, lines, reference, colour)))
    return found
