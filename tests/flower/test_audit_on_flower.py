"""Audits on Flower: the federation trains the models, and clients look where their samples are."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from goldfish.audits import AUDIT, Audit
from goldfish.errors import ConfigError
from goldfish.experiments.audit import forecast
from goldfish.experiments.audit_models import AuditModels
from goldfish.experiments.config import Config
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.flower import wire
from goldfish.flower.app_folder import SETTINGS
from goldfish.flower.server_app import app, engine_on
from goldfish.methods import METHODS
from goldfish.params import digest
from goldfish.report import write_report

MakeConfig = Callable[..., Config]
MACHINE = Machine(threads=1)


def start(grid: Any, run: Path, **settings: Any) -> None:
    """Let the server app audit a run."""
    app(grid, Context(1, 1, {}, RecordDict(), {**SETTINGS, "run-dir": str(run), **settings}))


def run_on(grid: Any, config: Config, out: Path) -> None:
    for _ in run_experiment(config, out, MACHINE, engine=engine_on(grid, config.flower)):
        pass


def replies_to(grid: Any, kind: str) -> list[RecordDict]:
    """Return what clients answered to messages of a kind."""
    asked = {m.metadata.message_id for m in grid.sent if m.metadata.message_type == kind}
    return [r.content for r in grid.replies if r.metadata.reply_to_message_id in asked]


def rows_of(node: dict[str, Any], query: str) -> list[tuple[str, str]]:
    """Return what a client's own store says."""
    with closing(sqlite3.connect(Path(node["state-dir"]) / "client.sqlite")) as store:
        return store.execute(query).fetchall()


def test_clients_with_data_of_their_own_look_for_themselves(
    wards: Any, make_own: MakeConfig, tmp_path: Path
) -> None:
    """Two wards remove 24 and 20 of their 40 samples, and tell of them; one removes 4, too few.

    No ward trains on a removed sample again. Their answers hold no array, and nothing is kept of
    the audit when it is over. When no ward tells of its samples, there is not enough evidence.
    """
    removed = {"ward-a": 24, "ward-b": 20, "ward-c": 4}
    lines = [f"{name} {name}-{n}\n" for name, count in removed.items() for n in range(count)]
    (tmp_path / "ids.txt").write_text("".join(lines))
    config = make_own(
        deletion={"samples": str(tmp_path / "ids.txt")},
        training={"rounds": 1, "shards": 2},
        unlearning={"methods": ["retrain"], "rounds": 1},
    )
    run = tmp_path / "run"
    run_on(wards, config, run)
    assert forecast(run, models=4) > 0
    start(wards, run, audit="standard", models=4)
    assert forecast(run, models=4) == 0, "the oracles are kept"
    found = Audit.read(run / AUDIT)
    assert (found.removed, found.unseen, found.models) == (44, 60, 4)
    assert list(found.methods) == list(found.quick) == ["origin", "retrain"]
    for own in found.methods.values():
        assert own.memory is not None
        assert (own.memory.unlearned, own.memory.oracles) == (1, 4)
        assert own.attack is None
        assert own.distances is None
    assert found.quick["retrain"].membership is not None
    assert found.quick["retrain"].membership.count == 44
    assert found.quick["retrain"].harm is not None
    assert {c: own.samples for c, own in found.quick["retrain"].harm.clients.items()} == {
        "ward-b": 20,
        "ward-c": 36,
    }
    few = "are left out: fewer than it tells of (min-audited in its node-config)."
    assert found.notes[1:] == [
        f"The remaining samples of ward-a {few}",
        f"The removed samples of ward-c {few}",
    ]
    page = write_report(run).read_text()
    assert "they do not train on them again" in page
    assert "One model of each method and 4 oracles" in page
    looks = replies_to(wards, "train.audit_look")
    assert len(looks) == 3 * 2 + 2 * 4
    for content in looks:
        told = json.loads(str(content.config_records["Answer"]["json"]))
        assert len(told["metrics"]) <= 5 + 7 + 3 + 3
        (arrays,) = content.array_records.values()
        assert wire.unpack(arrays[wire.FORMAT].data) == {}
    for node in wards.nodes.values():
        done = rows_of(node, "SELECT DISTINCT phase, step FROM done")
        trained = {phase for phase, step in done if step == "train"}
        assert trained == {"origin", "retrain"}
        again = "SELECT run, phase FROM done WHERE run LIKE '%-%' AND phase = 'origin'"
        assert rows_of(node, again) == [], "no model is trained with the samples again"
        kept = rows_of(node, "SELECT run, key FROM state WHERE digest IS NOT NULL")
        assert {key.partition("/")[0] for _, key in kept} == {"origin", "retrain"}
        assert len({name for name, _ in kept}) == 1, "shard models of the run alone"
        node["min-audited"] = 41
    asked = len(replies_to(wards, "train.train"))
    start(wards, run, audit="full", models=4)
    assert len(replies_to(wards, "train.train")) == asked, "the oracles are not made again"
    own = Audit.read(run / AUDIT).methods["retrain"]
    assert own.word == "not enough evidence"
    assert own.sentence.startswith("No client tells of removed samples. The removed samples of war")
    assert "not enough evidence" in write_report(run).read_text()
    with pytest.raises(ConfigError, match=r"Unknown tier 'fast'.* quick, standard, full"):
        start(wards, run, audit="fast")


def test_a_shared_dataset_is_audited_with_the_same_bits(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The server has the samples too, and looks itself; the nodes train all models."""
    config = make_config(training={"rounds": 1, "shards": 2}, unlearning={"rounds": 1})
    scenario, names = build_scenario(config, MACHINE), ["goldfish"]
    on_nodes, here = (
        AuditModels(config, scenario, tmp_path, MACHINE, engine, names)
        for engine in (engine_on(grid, config.flower), None)
    )
    there, same = (
        [digest(p) for p in (own.oracle(1), own.origin(1), own.unlearned(METHODS["goldfish"], 1))]
        for own in (on_nodes, here)
    )
    assert there == same
    assert len(grid.tasks()) > 6
