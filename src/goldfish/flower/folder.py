"""A small app folder to begin with: the app that Flower loads, and an experiment."""

from __future__ import annotations

from pathlib import Path

from goldfish.errors import StoreError
from goldfish.files import write_whole
from goldfish.flower.app_folder import write_app_folder

STARTER = Path(__file__).parent / "starter.toml"
CONFIG = "config.toml"


def write_app(folder: Path) -> list[Path]:
    """Write the app folder and return its files; a folder that holds anything is refused."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(f"{folder} exists and is not empty. Nothing was written: choose another.")
    write_app_folder(folder, {"config": CONFIG})
    write_whole(folder / CONFIG, STARTER.read_text())
    return sorted(folder.iterdir())
