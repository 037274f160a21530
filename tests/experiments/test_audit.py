"""Audits of real runs whose answers are known: a memory, retraining, and too little to tell."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from goldfish.audits import AUDIT, Audit, AuditVerdict, ClientHarm, Harm
from goldfish.cli import app
from goldfish.errors import ConfigError, StoreError
from goldfish.evaluation.harm import with_places
from goldfish.experiments.audit import audit_run, forecast
from goldfish.experiments.audit_models import FOLDER
from goldfish.experiments.client_setup import ClientSetup, shared_examples
from goldfish.experiments.config import Config, parse_config
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine, build_scenario, load_data
from goldfish.report import audit_counts
from goldfish.results import Final, MethodResult, read_run

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
    assert origin.attack is not None
    assert origin.distances is not None
    assert origin.attack.at_1_percent.rate > 0.1
    assert found.noise is not None
    assert origin.distances.removed > 4 * found.noise.removed
    assert retrain.word == "indistinguishable"
    assert retrain.memory is not None
    assert retrain.memory.value != 0, "an oracle is another model than any that is audited"
    assert retrain.before == origin.memory
    assert retrain.attack is not None
    assert retrain.attack.at_1_percent.rate < 0.1


def test_weights_by_the_test_set_one_sample_and_a_class_that_nobody_else_has(
    tmp_path: Path,
) -> None:
    """Three things that an audit meets: adaptive weights, one removed sample, a class of its own.

    The weights of equation (12) measure the clients of oracles too. One sample is not learned
    again. The removed sample's class is gone with it, and in no test: oracles alone are compared.
    """
    draw = np.random.default_rng(0)
    labels = np.arange(40) % 2
    labels[0] = 2
    images = draw.integers(0, 255, (60, 4, 4, 1)).astype(np.uint8)
    parts: dict[str, Any] = {"x_train": images[:40], "y_train": labels}
    parts |= {"x_test": images[40:], "y_test": np.arange(20) % 2}
    np.savez(tmp_path / "data.npz", **parts)
    (tmp_path / "ids.txt").write_text("0\n")
    config = parse_config(
        {
            "data": {"name": "npz", "path": str(tmp_path / "data.npz"), "clients": 2},
            "model": {"name": "mlp", "options": {"hidden": 4}},
            "training": {"rounds": 1, "aggregation": "adaptive", "batch_size": 10},
            "deletion": {"samples": str(tmp_path / "ids.txt")},
            "unlearning": {"methods": ["retrain"], "rounds": 1},
        }
    )
    run = tmp_path / "run"
    list(run_experiment(config, run, MACHINE))
    list(audit_run(run, MACHINE, models=4))
    found = Audit.read(run / AUDIT)
    assert found.quick["retrain"].relearning is None
    assert found.methods["retrain"].word == "not enough evidence"
    assert "Even origin" in found.methods["retrain"].sentence
    assert found.notes == []


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


def test_the_quick_tier_tells_origin_from_retraining(audited: Path) -> None:
    """Origin has the removed samples by heart; retraining has to learn them again.

    It is part of the standard tier, whose verdicts a quick audit after it leaves alone.
    """
    before = Audit.read(audited / AUDIT)
    assert list(audit_run(audited, MACHINE, tier="quick"))[-1].phase == "quick"
    found = Audit.read(audited / AUDIT)
    assert found == before, "it gives the same numbers again"
    origin, retrain = found.quick["origin"], found.quick["retrain"]
    assert origin.membership is not None
    assert retrain.membership is not None
    assert origin.membership.low > 0.8
    assert retrain.membership.low < 0.5 < retrain.membership.high
    assert origin.relearning is not None
    assert retrain.relearning is not None
    assert origin.relearning.steps == [0, 0, 0]
    assert all(step is None or step > 5 for step in retrain.relearning.steps)
    assert retrain.relearning.curve[-1] < retrain.relearning.curve[0] / 2
    assert found.relearned == 30


def test_harm_to_those_who_remain(audited: Path) -> None:
    """90 samples of three clients remain; the one that asked has 10 of its 40."""
    found = Audit.read(audited / AUDIT).quick["retrain"].harm
    assert found is not None
    sizes = {name: client.samples for name, client in found.clients.items()}
    assert sizes == {"client-1": 10, "client-2": 40, "client-3": 40}
    changed = sum(
        (client.after - client.before) / 100 * client.samples for client in found.clients.values()
    )
    assert round(changed) == found.gained - found.lost
    falls = [one.after - one.before for one in found.most_affected]
    assert falls == sorted(falls)
    assert len(falls) == 5


def test_damage_is_told_by_class_and_client(audited: Path) -> None:
    """Class 0 falls from 90 to 85, class 2 from 80 to 40; a from 90 to 80, b from 90 to 85."""
    rows = {"origin": [90.0, None, 80.0], "retrain": [85.0, 70.0, 40.0]}
    methods = {
        name: MethodResult(final=Final(accuracy=80, loss=0, mse=0, per_class=row))
        for name, row in rows.items()
    }
    result = read_run(audited).result.model_copy(update={"methods": methods})
    clients = {
        name: ClientHarm(before=90, after=after, samples=9)
        for name, after in (("a", 80), ("b", 85))
    }
    harmed = Harm(clients=clients, lost=2, gained=0, samples=18, most_affected=[])
    verdict = AuditVerdict(word="damaged", sentence="Accuracy is lost.")
    assert with_places(verdict, "retrain", result, harmed).sentence == (
        "Accuracy is lost. The run's model lost most, against origin, on class 2 (-40.0 points) "
        "and for a (-10.0 points)."
    )


def test_the_full_tier_and_the_forecast(audited: Path) -> None:
    """Six models are kept already: only two of each kind are left to make, and forecast."""
    all_of_it, rest = (forecast(audited, tier="full", models=n) for n in (14, 8))
    quick = forecast(audited, tier="quick")
    assert 0 < quick < rest < all_of_it
    assert (all_of_it - quick) / (rest - quick) == pytest.approx(4)
    list(audit_run(audited, MACHINE, tier="full", models=8))
    found = Audit.read(audited / AUDIT)
    assert (found.tier, found.models) == ("full", 8)
    attack = found.methods["origin"].attack
    assert attack is not None
    assert attack.epsilon is not None
    assert attack.epsilon.samples == attack.at_01_percent.count / 8 == 30
    assert attack.epsilon.median is None or attack.epsilon.median > 1
    assert attack.roc[-1] == (1.0, 1.0)
    assert found.methods["retrain"].klom is None, "it needs 200 models"
    list(audit_run(audited, MACHINE, models=6))


def test_the_forecast_measures_relearning_where_the_run_tells_nothing_of_it(
    config: Config, audited: Path, tmp_path: Path
) -> None:
    """As after a training that took no time: on a GPU it is that much faster than single steps."""
    run = tmp_path / "run"
    shutil.copytree(audited, run)
    result = json.loads((run / "result.json").read_text())
    for method in result["methods"].values():
        method["cost"] = {**(method["cost"] or {}), "seconds": 0.0}
    (run / "result.json").write_text(json.dumps(result))
    assert forecast(run, tier="quick") == 0
    scenario = build_scenario(config, MACHINE, run)
    expected = forecast(run, lambda: scenario, tier="quick")
    begin = time.perf_counter()
    list(audit_run(run, MACHINE, tier="quick", scenario=lambda: scenario))
    took = time.perf_counter() - begin
    assert took / 10 < expected < 10 * took


def test_the_command_builds_the_scenario_once(
    audited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its forecast and for the audit."""
    shutil.copytree(audited, tmp_path / "run")
    loaded = []

    def load(*wanted: Any) -> Any:
        loaded.append(wanted)
        return load_data(*wanted)

    monkeypatch.setattr("goldfish.experiments.scenario.load_data", load)
    command = ["audit", str(tmp_path / "run"), "--tier", "quick", "--device", "cpu"]
    said = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "Forecast:" in said.output
    assert len(loaded) == 1


def test_one_method_is_added_to_the_others_and_later_requests_count(
    config: Config, tmp_path: Path
) -> None:
    """30 of 120 samples go at once, 12 more later: 42 are compared, 78 remain.

    SISA and the training both have a setting named shards: each keeps its own.
    """
    values = config.to_dict()
    values["training"] |= {"rounds": 1, "local_epochs": 1}
    values["deletion"] = {"rate": 0.25, "then": [{"rate": 0.1, "after": 1}]}
    values["unlearning"] = {"methods": ["sisa", "retrain"], "rounds": 1, "sisa": {"shards": 2}}
    run = tmp_path / "run"
    for _ in run_experiment(parse_config(values), run, MACHINE):
        pass
    (run / AUDIT).write_text("{")  # damaged: it is written anew
    list(audit_run(run, MACHINE, models=4, methods=["retrain"]))
    first = Audit.read(run / AUDIT)
    assert list(first.methods) == list(first.quick) == ["origin", "retrain"]
    assert first.removed == first.relearned == 42
    assert first.quick["retrain"].harm is not None
    assert first.quick["retrain"].harm.samples == 78
    list(audit_run(run, MACHINE, models=5, methods=["sisa"]))
    both = Audit.read(run / AUDIT)
    assert list(both.methods) == list(both.quick) == ["origin", "sisa", "retrain"]
    assert both.methods["retrain"] == first.methods["retrain"]
    assert "4 or 5 models of each method and as many oracles" in audit_counts(both)


def test_canaries_are_a_known_signal(tmp_path: Path) -> None:
    """Samples with a wrong label: origin has learned it, retraining has no reason to give it.

    A run that goes on finds them in its files, and a client elsewhere is told of them.
    """
    values = {
        "data": {"name": "digits", "clients": 2, "limit_train": 80},
        "model": {"name": "mlp"},
        "training": {"rounds": 3, "local_epochs": 10, "learning_rate": 0.02, "batch_size": 10},
        "deletion": {"rate": 0.3, "canaries": 12},
        "unlearning": {"methods": ["retrain"], "rounds": 3},
    }
    run, config = tmp_path / "run", parse_config(values)
    for _ in run_experiment(config, run, MACHINE):
        pass
    list(audit_run(run, MACHINE, tier="quick"))
    found = Audit.read(run / AUDIT)
    assert (found.removed, found.relearned) == (12, 24), "canaries are not like unseen samples"
    origin, retrain = (own.canaries for own in found.quick.values())
    assert origin is not None
    assert retrain is not None
    assert origin.count == 12
    assert origin.low > retrain.high
    scenario = build_scenario(config, MACHINE, run)
    assert scenario.removed is not None
    wrong = scenario.removed.labels != torch.tensor(scenario.true_labels)
    assert torch.equal(wrong, scenario.canaries)
    for client in scenario.clients:
        setup = ClientSetup.from_json(scenario.setups[client.id].to_json())
        assert torch.equal(shared_examples(setup).labels, client.retained.labels)
    values["deletion"] = {"rate": 0.3, "canaries": 24}
    with pytest.raises(ConfigError, match="24 of 24 removed samples without a trigger"):
        build_scenario(parse_config(values), MACHINE)
    values["deletion"] = {"class_label": 3, "canaries": 2}
    with pytest.raises(ConfigError, match="names samples by their label"):
        build_scenario(parse_config(values), MACHINE)


def test_what_is_refused(audited: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 4 models of each kind, not 1"):
        list(audit_run(audited, MACHINE, models=1))
    with pytest.raises(ConfigError, match="A quick audit makes no models"):
        list(audit_run(audited, MACHINE, tier="quick", models=8))
    with pytest.raises(ConfigError, match="The run has retrain"):
        list(audit_run(audited, MACHINE, methods=["goldfish"]))
    (tmp_path / "config.toml").write_text((audited / "config.toml").read_text())
    with pytest.raises(StoreError, match="has not finished"):
        list(audit_run(tmp_path, MACHINE))
