"""The app folder that Flower takes: a ``pyproject.toml`` that names Goldfish's two apps.

``goldfish flower init`` writes one to begin with, which has an experiment too.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import tomli_w

from goldfish.errors import StoreError
from goldfish.files import write_whole
from goldfish.types import Scalar
from goldfish.version import __version__

APP, STARTER = (Path(__file__).parent / name for name in ("app.toml", "starter.toml"))
CONFIG = "config.toml"
_APP = tomllib.loads(APP.read_text())["tool"]["flwr"]["app"]
SETTINGS: Mapping[str, Scalar] = _APP["config"]
"""The app's settings and their defaults."""
SERVER_APP: str = _APP["components"]["serverapp"]
"""The server's side of a run."""


def write_app_folder(
    folder: Path, settings: Mapping[str, Scalar], server_app: str = SERVER_APP
) -> None:
    """Write the app's ``pyproject.toml`` into ``folder``, with these settings.

    Those that another ``server_app`` has beside :data:`SETTINGS` stand at the end.
    """
    values = {"version": __version__, "serverapp": server_app, **settings}
    lines = {name: tomli_w.dumps({name: value}).strip() for name, value in values.items()}
    text = re.sub(
        r"(?m)^([\w-]+) = .*$", lambda found: lines.get(found[1], found[0]), APP.read_text()
    )
    more = {name: value for name, value in settings.items() if name not in SETTINGS}
    write_whole(folder / "pyproject.toml", text + tomli_w.dumps(more))


def write_app(folder: Path) -> list[Path]:
    """Write the app folder and return its files; a folder that holds anything is refused."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(f"{folder} exists and is not empty. Nothing was written: choose another.")
    write_app_folder(folder, {"config": CONFIG})
    write_whole(folder / CONFIG, STARTER.read_text())
    return sorted(folder.iterdir())
