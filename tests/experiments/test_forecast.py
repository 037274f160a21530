"""``goldfish plan CONFIG``: what each method of a run would cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from goldfish.cli import app
from goldfish.errors import ConfigError
from goldfish.experiments.config import parse_config
from goldfish.experiments.forecast import plan_run
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.methods import Trained
from goldfish.params import digest
from goldfish.planning import Advice, plan
from goldfish.results import Result
from goldfish.store import load_checkpoint

CONFIG = parse_config(
    {
        "data": {"name": "digits", "clients": 3},
        "training": {"rounds": 2, "batch_size": 50, "learning_rate": 0.01},
        "deletion": {"rate": 0.05},
        "unlearning": {"methods": ["retrain"], "rounds": 2, "local_epochs": 2},
    }
)


def test_a_run_is_forecast_from_its_configuration_and_from_what_it_took(tmp_path: Path) -> None:
    """Retraining takes 2 rounds of 2 epochs of all that remains, as the run then did.

    The times of a finished run are scaled so that a sample takes as long as in its training. What
    it removes is in the run: the file of ids may be gone.
    """
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(build_scenario(CONFIG, Machine()).clients[0].retained.ids[:70]))
    deletion = CONFIG.deletion.model_copy(update={"rate": None, "samples": str(ids)})
    config = CONFIG.model_copy(update={"deletion": deletion})
    before = plan_run(config, Machine(), ["retrain"])
    for _ in run_experiment(config, tmp_path / "run", Machine()):
        pass
    ids.unlink()
    took = Result.read(tmp_path / "run" / "result.json").methods
    after = plan_run(config, Machine(), ["retrain"], tmp_path / "run")
    origin, cost = took["origin"].cost, took["retrain"].cost
    assert origin is not None
    assert cost is not None
    for advice in (before, after):
        retrain = next(own for own in advice.estimates if own.method == "retrain")
        assert retrain.rounds == 2
        assert retrain.cost.samples == pytest.approx(cost.samples)
    a_sample = origin.seconds / origin.samples
    assert retrain.cost.seconds == pytest.approx(a_sample * cost.samples)


def test_a_run_is_rehearsed_from_its_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with what it kept: `fed-recovery` needs the updates of its training."""
    begun: list[str] = []

    def watched(origin: Trained, *args: Any, **more: Any) -> Advice:
        begun.append(digest(origin.params))
        return plan(origin, *args, **more)

    monkeypatch.setattr("goldfish.experiments.forecast.plan", watched)
    config = parse_config({**CONFIG.to_dict(), "unlearning": {"methods": ["fed-recovery"]}})
    place = tmp_path / "run"
    (before,) = plan_run(config, Machine(), ["retrain", "fed-recovery"]).estimates[1:]
    assert before.refused
    assert "once it is trained" in before.refused
    for _ in run_experiment(config, place, Machine()):
        pass
    metrics = (place / "metrics.jsonl").read_bytes()
    after = plan_run(config, Machine(), ["retrain", "fed-recovery"], place)
    assert not any(own.refused for own in after.estimates)
    trained = load_checkpoint(place / "checkpoints" / "origin.safetensors")
    assert begun[1] == digest(trained.params) != begun[0]
    assert (place / "metrics.jsonl").read_bytes() == metrics


def test_the_command_plans_for_a_configuration(tmp_path: Path) -> None:
    """Also for that in the directory of a run."""
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.to_toml())
    for given in (path, tmp_path):
        said = CliRunner().invoke(app, ["plan", str(given), "--method", "retrain"])
        assert said.exit_code == 0, said.output
        assert "Advice: retrain" in said.output


def test_clients_with_data_of_their_own_are_refused() -> None:
    members = CONFIG.data.model_copy(update={"members": ["a", "b"]})
    changed = CONFIG.model_copy(update={"data": members, "engine": "flower"})
    with pytest.raises(ConfigError, match="where the data is"):
        plan_run(changed, Machine())
