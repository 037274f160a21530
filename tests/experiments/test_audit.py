"""Audits of real runs whose answers are known: a memory, retraining, and too little to tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from goldfish.errors import ConfigError, StoreError
from goldfish.experiments.audit import AUDIT, FOLDER, Audit, audit_run
from goldfish.experiments.config import Config, parse_config
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine

MACHINE = Machine(threads=1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return a run on images with labels by chance: whatever a model gets right it remembers."""
    folder = tmp_path_factory.mktemp("chance")
    draw = np.random.default_rng(0)
    parts: dict[str, Any] = {
        "x_train": draw.integers(0, 255, (120, 6, 6, 1)).astype(np.uint8),
        "y_train": draw.integers(0, 3, 120),
        "x_test": draw.integers(0, 255, (90, 6, 6, 1)).astype(np.uint8),
        "y_test": draw.integers(0, 3, 90),
    }
    np.savez(folder / "data.npz", **parts)
    return parse_config(
        {
            "data": {"name": "npz", "path": str(folder / "data.npz"), "clients": 3},
            "model": {"name": "mlp", "options": {"hidden": 32}},
            "training": {"rounds": 12, "local_epochs": 3, "learning_rate": 0.1, "batch_size": 10},
            "deletion": {"rate": 0.25},
            "unlearning": {"methods": ["retrain"], "rounds": 12},
        }
    )


@pytest.fixture(scope="module")
def audited(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with its audit."""
    run = tmp_path_factory.mktemp("audited") / "run"
    for machine_step in run_experiment(config, run, MACHINE):
        assert not machine_step.diverged
    steps = list(audit_run(run, MACHINE, models=6))
    assert [(s.phase, s.round) for s in steps[-2:]] == [("retrain", 5), ("retrain", 6)]
    return run


def test_origin_remembers_and_retraining_cannot_be_told_from_the_oracles(audited: Path) -> None:
    found = Audit.read(audited / AUDIT)
    assert (found.models, found.removed, found.unseen) == (6, 30, 90)
    assert list(found.methods) == ["origin", "retrain"]
    origin, retrain = found.methods.values()
    assert origin.word == "remembers"
    assert origin.memory is not None
    assert origin.memory.low > 1
    assert origin.attack.rate > 0.1
    assert origin.distances.removed > 4 * found.noise.removed
    assert retrain.word == "indistinguishable"
    assert retrain.memory is not None
    assert retrain.memory.value != 0, "an oracle is another model than any that is audited"
    assert retrain.before == origin.memory
    assert retrain.attack.rate < 0.1


def test_what_is_there_is_not_made_again(audited: Path) -> None:
    """A lost measurement is made again with the same bits; the others are read."""
    before = (audited / AUDIT).read_bytes()
    lost = audited / FOLDER / "origin-2.safetensors"
    kept = audited / FOLDER / "origin-1.safetensors"
    content, written = lost.read_bytes(), kept.stat().st_mtime_ns
    lost.unlink()
    (audited / AUDIT).unlink()
    list(audit_run(audited, MACHINE, models=6))
    assert lost.read_bytes() == content
    assert kept.stat().st_mtime_ns == written
    assert (audited / AUDIT).read_bytes() == before


def test_a_method_with_a_training_and_shards_of_its_own(config: Config, tmp_path: Path) -> None:
    """SISA and the training both have a setting named shards: each keeps its own."""
    values = config.to_dict()
    values["training"] |= {"rounds": 1, "local_epochs": 1}
    values["unlearning"] = {"methods": ["sisa"], "rounds": 1, "sisa": {"shards": 2}}
    for _ in run_experiment(parse_config(values), tmp_path / "run", MACHINE):
        pass
    list(audit_run(tmp_path / "run", MACHINE, models=4))
    assert list(Audit.read(tmp_path / "run" / AUDIT).methods) == ["origin", "sisa"]


def test_what_is_refused(audited: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 4 models of each kind, not 1"):
        list(audit_run(audited, MACHINE, models=1))
    with pytest.raises(ConfigError, match="The run has retrain"):
        list(audit_run(audited, MACHINE, methods=["goldfish"]))
    (tmp_path / "config.toml").write_text((audited / "config.toml").read_text())
    with pytest.raises(StoreError, match="is not finished"):
        list(audit_run(tmp_path, MACHINE))
