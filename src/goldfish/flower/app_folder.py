"""The app folder that Flower takes: a ``pyproject.toml`` that names Goldfish's two apps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import tomli_w

from goldfish.files import write_whole
from goldfish.types import Scalar
from goldfish.version import __version__

APP = """\
# A Flower app that runs Goldfish. Goldfish itself is installed on the server and on every node, in
# the same version; this folder only says what to run.
[project]
name = "goldfish-app"
{version}
description = "Federated unlearning with Goldfish"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "goldfish"

[tool.flwr.app.components]
{serverapp}
clientapp = "goldfish.flower.client_app:app"

[tool.flwr.app.config]
# Where the server keeps the run: an absolute path on the server. An interrupted run goes on.
{run-dir}
# The configuration of a new run: a file of this folder, or an absolute path on the server.
{config}
# Where the server finds the datasets; empty: $GOLDFISH_DATA.
{data-dir}
# Where the server's models run: cpu or cuda. Each node has a device of its own in its node-config.
{device}
# CPU threads of one client; another number may change the last bits of the result.
{threads}
# Whether a run that another machine began may go on here, where its last bits may differ.
{elsewhere}
# By this 'goldfish run' knows its own run's lines in the run directory; by hand it stays empty.
{token}
"""

SETTINGS: Mapping[str, Scalar] = {
    "run-dir": "",
    "config": "",
    "data-dir": "",
    "device": "cpu",
    "threads": 1,
    "elsewhere": False,
    "token": "",
}
"""The app's settings and their defaults."""


SERVER_APP = "goldfish.flower.server_app:app"
"""The server's side of a run."""


def write_app_folder(
    folder: Path, settings: Mapping[str, Scalar], server_app: str = SERVER_APP
) -> None:
    """Write the app's ``pyproject.toml`` into ``folder``, with these settings.

    Those that another ``server_app`` has beside :data:`SETTINGS` stand at the end.
    """
    values = {"version": __version__, "serverapp": server_app, **SETTINGS, **settings}
    lines = {name: tomli_w.dumps({name: value}).strip() for name, value in values.items()}
    text = re.sub(r"\{([\w-]+)\}", lambda found: lines[found[1]], APP)
    more = {name: value for name, value in settings.items() if name not in SETTINGS}
    write_whole(folder / "pyproject.toml", text + tomli_w.dumps(more))
