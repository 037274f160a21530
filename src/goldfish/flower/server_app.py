"""The server's side on Flower: a whole run, into a run directory on the server's disk.

Its settings are those of the app's ``[tool.flwr.app.config]``: see
:mod:`goldfish.flower.app_folder`. A run directory that holds an interrupted run is gone on
with, so the app can be killed and started again at any time.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from goldfish.errors import ConfigError
from goldfish.experiments.audit import audit_run, tier_named
from goldfish.experiments.config import Config, load_config
from goldfish.experiments.engine import EngineFactory
from goldfish.experiments.runner import check_experiment, run_experiment
from goldfish.experiments.scenario import Machine, Scenario
from goldfish.federation.settings import FlowerSettings
from goldfish.flower.engine import FlowerFederation
from goldfish.flower.progress import ProgressLog, alone_in
from goldfish.store import CONFIG, RESULT, RunDirectory
from goldfish.types import Scalar

logger = logging.getLogger("flwr.goldfish")  # so that it appears in Flower's own log

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the app's settings name, or audit it."""
    settings = context.run_config
    run_dir, machine = absolute(settings, "run-dir"), machine_of(settings)
    config = _config(settings, run_dir)
    tier = str(settings.get("audit") or "")
    if not tier and not (run_dir / CONFIG).exists():
        check_experiment(config, machine)
        with RunDirectory.open(run_dir, config.to_toml(), resume=False):
            pass  # who follows it finds the directory
    # A finished run has nothing to ask of anybody, and must not wait for nodes that are gone.
    engine = engine_on(grid, config.flower, greet=bool(tier) or not (run_dir / RESULT).exists())
    token = str(settings.get("token") or "")
    with alone_in(run_dir), ProgressLog(run_dir, token) as log:
        if tier:
            steps = audit_run(
                run_dir,
                machine,
                tier=tier_named(tier),
                models=int(settings.get("models") or 0) or None,
                methods=str(settings.get("methods") or "").split(),
                engine=engine,
            )
        else:
            steps = run_experiment(config, run_dir, machine, resume=True, engine=engine)
        for step in steps:
            log.write(step.model_dump())
            logger.info("%s: round %d of %d", step.phase, step.round, step.rounds)


def machine_of(settings: Mapping[str, Scalar]) -> Machine:
    """Return the machine that an app's settings tell of."""
    return Machine(
        data_dir=_path(settings, "data-dir"),
        device=str(settings.get("device") or "cpu"),
        threads=int(settings.get("threads") or 1),
        elsewhere=bool(settings.get("elsewhere")),
    )


def engine_on(grid: Grid, settings: FlowerSettings, *, greet: bool = True) -> EngineFactory:
    """Return what makes the engine of a run whose clients are the nodes of ``grid``.

    With ``greet`` it knows them before the first round, whose time then is that of its work.
    """

    def make(scenario: Scenario, machine: Machine, run_id: str) -> FlowerFederation:
        federation = FlowerFederation(
            grid,
            {client_id: setup.to_json() for client_id, setup in scenario.setups.items()},
            scenario.model,
            run_id=run_id,
            settings=settings,
            samples={
                client_id: len(setup.ids)
                for client_id, setup in scenario.setups.items()
                if setup.dataset is not None
            },
            threads=machine.threads or 1,
        )
        if greet:
            federation.greet()
        return federation

    return make


def _config(settings: Mapping[str, Scalar], run_dir: Path) -> Config:
    """Read the configuration: that of the run directory, or for a new run the app's."""
    written = run_dir / CONFIG
    if written.exists():
        return load_config(written)
    named = _path(settings, "config")
    if named is None:
        raise ConfigError(f"There is no run in {run_dir}, and the app's setting 'config' is empty.")
    if not named.is_absolute():
        # Flower puts the app's folder on the module path.
        found = [Path(place) / named for place in sys.path if (Path(place) / named).is_file()]
        named = found[0] if found else named
    return load_config(named, ['engine="flower"'])


def absolute(settings: Mapping[str, Scalar], name: str) -> Path:
    """Return a path that an app's settings name, and that must be whole."""
    path = _path(settings, name)
    if path is None or not path.is_absolute():
        raise ConfigError(
            f"The app's setting {name!r} is {str(settings.get(name, ''))!r}; an absolute path on "
            "the server is needed."
        )
    return path


def _path(settings: Mapping[str, Scalar], name: str) -> Path | None:
    value = settings.get(name)
    return Path(str(value)) if value else None
