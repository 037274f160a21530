"""The server's side of a project on Flower: carries out one command, on the server's disk.

``goldfish train``, ``import``, ``unlearn``, ``audit`` and ``purge`` hand themselves over to it: a
process that the SuperLink's superexec starts, and that alone can reach the nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from goldfish.errors import ConfigError
from goldfish.experiments.scenario import Machine
from goldfish.flower.progress import ProgressLog, alone_in
from goldfish.flower.server_app import absolute, engine_on, machine_of
from goldfish.project.audit import audit
from goldfish.project.folder import private
from goldfish.project.ledger import AUDIT
from goldfish.project.project import Project
from goldfish.results import Progress

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry out the command that the app's settings name."""
    settings = context.run_config
    out, folder = absolute(settings, "run-dir"), absolute(settings, "project")
    with (
        private(),
        alone_in(out),
        ProgressLog(out, str(settings["token"])) as log,
        Project.open(folder) as own,
    ):
        own.engine = engine_on(grid, own.settings.tables.flower)
        command, what = str(settings["command"]), str(settings["what"])
        for step in _steps(own, machine_of(settings), command, what):
            log.write(step.model_dump())


def _steps(project: Project, machine: Machine, command: str, what: str) -> Iterable[Progress]:
    if command == "train":
        return project.train(machine)
    if command == "unlearn":
        return project.unlearn(machine, what or None)
    if command == AUDIT:
        return audit(project, machine, int(what))
    if command == "import":
        project.adopt(Path(what), machine)
    elif command == "purge":
        newest, without = json.loads(what)  # that version was looked at
        project.purge(machine, anyway=True, newest=newest, without=without)
    else:
        raise ConfigError(f"A project has no command {command!r} for its clients.")
    return ()
