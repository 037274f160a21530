"""The Flower engine against the engine in one process: same methods, same seeds, same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from goldfish.experiments.config import Config
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine
from goldfish.flower_app.server_app import engine_on
from goldfish.methods import METHODS
from goldfish.params import digest
from goldfish.store import load_checkpoint

MakeConfig = Callable[..., Config]
MACHINE = Machine(threads=1)


def models_of(run: Path) -> dict[str, str]:
    """Return the digest of every phase's model."""
    files = sorted((run / "checkpoints").iterdir())
    return {path.stem: digest(load_checkpoint(path).params) for path in files}


def run_on(grid: Any, config: Config, out: Path, *, resume: bool = False) -> None:
    for _ in run_experiment(config, out, MACHINE, resume=resume, engine=engine_on(grid, config)):
        pass


def in_process(config: Config, out: Path) -> None:
    for _ in run_experiment(replace(config, engine="in-process"), out, MACHINE):
        pass


DELETIONS: dict[str, dict[str, Any]] = {
    "samples": {"rate": 0.1, "backdoor_target": 1, "trigger_size": 2},
    "class": {"class_label": 2},
    "client": {"clients": ["client-3"]},
}


@pytest.mark.parametrize("shards", ["one", "shared", "isolated"])
@pytest.mark.parametrize("what", DELETIONS)
def test_every_method_gives_the_same_bits_on_both_engines(
    grid: Any, make_config: MakeConfig, tmp_path: Path, what: Any, shards: str
) -> None:
    methods = [name for name, method in METHODS.items() if what in method.deletions]
    if shards == "isolated":
        methods.remove("retrain-tuned")  # which refuses them
    assert len(methods) >= 5
    training = {} if shards == "one" else {"shards": 3, "shard_mode": shards}
    config = make_config(
        deletion=DELETIONS[what], unlearning={"methods": methods}, training=training
    )
    run_on(grid, config, tmp_path / "flower")
    in_process(config, tmp_path / "here")
    here, flower = models_of(tmp_path / "here"), models_of(tmp_path / "flower")
    assert set(methods) <= set(here)
    assert flower == here
