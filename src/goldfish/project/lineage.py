"""Which model came from which, and whose data each descends from: as text, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from goldfish.errors import ConfigError
from goldfish.project.entries import Artefact
from goldfish.project.ledger import Ledger

REJECTED = "rejected"
COLOURS = {"current": "#2a9d8f", "quarantined": "#e9c46a", "purged": "#c8c8c8", REJECTED: "#c8c8c8"}


def fates(ledger: Ledger) -> dict[int | None, str]:
    """Return what became of each model version: the state of its file, or that it was rejected."""
    rejected = {event.subject for event in ledger.events() if event.facts.get("rejected")}
    return {a.version: REJECTED if a.path in rejected else a.state for a in _models(ledger)}


def lines(ledger: Ledger) -> Iterator[str]:
    """Yield the lineage as text: each model version, under the one that it was made from."""
    models, became = _models(ledger), fates(ledger)
    children: dict[str | None, list[Artefact]] = {}
    for artefact in models:
        children.setdefault(next(iter(artefact.parents), None), []).append(artefact)

    def walk(parent: str | None, depth: int) -> Iterator[str]:
        for artefact in children.get(parent, ()):
            mark = "  " * (depth - 1) + "└ " if depth else ""
            state = became[artefact.version]
            yield f"{mark}v{artefact.version}: {state}; {_words(ledger, artefact)}"
            yield from walk(artefact.path, depth + 1)

    yield from walk(None, 0)
    for artefact in ledger.artefacts():
        if artefact not in models:
            yield f"{artefact.path}: {artefact.kind}, {artefact.state}"


def draw(ledger: Ledger, path: Path) -> None:
    """Draw the lineage: versions from left to right, and what each was made from."""
    from matplotlib.backend_bases import FigureCanvasBase
    from matplotlib.figure import Figure

    known = sorted(f".{name}" for name in FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower() not in known:
        raise ConfigError(f"{path} is no name of a picture: it must end in {', '.join(known)}.")
    models, became = _models(ledger), fates(ledger)
    if not models:
        return
    figure = Figure(figsize=(2.6 * len(models) + 0.4, 2.2), layout="constrained")
    axes = figure.add_subplot()
    place = {artefact.path: x for x, artefact in enumerate(models)}
    for artefact, x in zip(models, place.values(), strict=True):
        version = ledger.versions()[(artefact.version or 1) - 1]
        asked = version.requests
        more = [f"and {len(asked) - 2} more"] if len(asked) > 2 else []
        state = became[artefact.version]
        about = [f"v{version.number}", version.made_by, *asked[:2], *more, state]
        box = {"boxstyle": "round,pad=0.5", "facecolor": COLOURS[state], "alpha": 0.7}
        axes.text(x, 0, "\n".join(about), ha="center", va="center", bbox=box, zorder=2)
        for parent in artefact.parents:
            arrow = {"arrowstyle": "->", "shrinkA": 42, "shrinkB": 42}
            axes.annotate("", (x, 0), (place[parent], 0), arrowprops=arrow, zorder=1)
    axes.set_xlim(-0.6, len(models) - 0.4)
    axes.set_ylim(-1, 1)
    axes.set_axis_off()
    axes.set_title("An arrow: made from that model. None: from newly initialised weights.", size=9)
    figure.savefig(path)


def _models(ledger: Ledger) -> list[Artefact]:
    return [artefact for artefact in ledger.artefacts() if artefact.kind == "model"]


def _words(ledger: Ledger, artefact: Artefact) -> str:
    version = ledger.versions()[(artefact.version or 1) - 1]
    made_for = f", for {', '.join(version.requests)}" if version.requests else ""
    fresh = not artefact.parents and version.made_by != "import"
    origin = ", from newly initialised weights" if fresh else ""
    clients = len(artefact.manifests)
    return (
        f"{version.made_by}{origin}{made_for}; of the data of {clients} client"
        f"{'s' * (clients != 1)}; {artefact.path}"
    )
