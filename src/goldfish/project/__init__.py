"""The operator's workflow: a project directory, its ledger, and the evidence of each deletion."""

from __future__ import annotations

from pathlib import Path

FILE, LEDGER = "goldfish.toml", "ledger.db"
"""The file that makes a folder a project, and its ledger, unless that file names another."""


def find_project(folder: Path) -> Path | None:
    """Return the project that a folder is or lies in: the nearest one."""
    start = folder.resolve()
    return next((place for place in (start, *start.parents) if (place / FILE).exists()), None)
