"""A small app folder: what Flower loads, and a configuration to begin with."""

from __future__ import annotations

from pathlib import Path

from goldfish.errors import StoreError
from goldfish.store import write_whole

TEMPLATES = Path(__file__).parent / "template"


def write_app(folder: Path) -> list[Path]:
    """Write the app folder and return its files; a folder that holds anything is refused."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(f"{folder} exists and is not empty. Nothing was written: choose another.")
    written = []
    for template in sorted(TEMPLATES.iterdir()):
        write_whole(folder / template.name, template.read_text())
        written.append(folder / template.name)
    return written
