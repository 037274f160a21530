"""The audit of a project's newest version: its oracles, its verdict, and until when it can be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.project.conftest import MACHINE, make_project, write_data
from tests.project.test_project import ids_of
from typer.testing import CliRunner

import goldfish
from goldfish.cli import app
from goldfish.errors import ConfigError
from goldfish.evaluation.attacks import margins
from goldfish.experiments.audit_models import kept_path
from goldfish.project.audit import audit, audit_forecast
from goldfish.project.evidence import case_of, findings, headline, write_evidence
from goldfish.project.project import Project
from goldfish.project.signing import new_key
from goldfish.randomness import derive_seed
from goldfish.store import load_checkpoint
from goldfish.training.fit import predict


@pytest.fixture
def by_heart(tmp_path: Path) -> Iterator[Project]:
    """A project with images and labels that were drawn: all its model knows, it knows by heart."""
    more = "local_epochs = 10\n[unlearning]\nrounds = 1"
    with make_project(tmp_path / "project", more) as made:
        path, draw = tmp_path / "data.npz", np.random.default_rng(1)
        images = draw.integers(0, 256, (180, 6, 6), dtype=np.uint8)
        data = dict(np.load(path))
        data |= {"x_train": images[:60], "x_test": images[60:], "y_test": np.arange(120) % 3}
        np.savez(path, **data)
        list(made.train(MACHINE))
        yield made


def forgotten(project: Project, method: str, count: int = 4) -> list[str]:
    """Let the newest version forget samples of client-1."""
    removed = ids_of(project, "client-1", count)
    project.forget("client-1", samples=removed, machine=MACHINE)
    list(project.unlearn(MACHINE, method))
    return removed


def test_an_oracle_is_trained_without_what_the_version_forgot(trained: Project) -> None:
    """By hand, with the library alone: the same bits.

    The second oracle has 1.25 times the step size of the training, and a seed of its own.
    """
    removed = forgotten(trained, "retrain")
    trained.forget("client-3", machine=MACHINE)
    list(trained.unlearn(MACHINE, "retrain"))  # client-3 has left, too
    list(audit(trained, MACHINE, 4))
    kept = load_checkpoint(kept_path(trained.files.version(2), "v3-oracle", 2))

    holdings = trained.files.holdings(MACHINE)
    keys = {key for key, name in holdings.ids.items() if name in removed}
    clients = holdings.clients({"client-1": keys})[:2]
    federation = goldfish.InProcess(clients, holdings.model, workers=1)
    settings = trained.settings.tables.training.model_dump() | {"learning_rate": 0.05 * 1.25}
    oracle = goldfish.train(federation, seed=derive_seed(0, "oracle", 2), **settings)
    by_hand = margins(predict(oracle.model, holdings.test), holdings.test.labels)
    assert torch.equal(kept.params["unseen"], by_hand)
    left = holdings.data["client-3"]
    assert len(kept.params["removed"]) == len(left)
    inputs, labels = left.batch(torch.arange(len(left)))
    with torch.no_grad():
        on_removed = margins(oracle.model(inputs), labels)
    assert torch.allclose(kept.params["removed"], on_removed)


def test_a_version_that_remembers_is_found_and_a_retrained_one_is_not_accused(
    by_heart: Project, tmp_path: Path
) -> None:
    """One round from the old model hardly forgets; it is rejected, and a retrained one is made.

    What is found is told by the command, the status and the evidence; margins go with a purge.
    """
    folder = by_heart.folder

    def typed(*words: str) -> str:
        return " ".join(CliRunner().invoke(app, [*words]).output.split())

    removed = ids_of(by_heart, "client-1", 15)
    by_heart.forget("client-1", samples=removed, machine=MACHINE)
    with pytest.raises(ConfigError, match="v1 forgot nothing"):
        list(audit(by_heart, MACHINE, 4))
    list(by_heart.unlearn(MACHINE, "goldfish-warm"))
    steps = audit(by_heart, MACHINE, 8)
    assert [next(steps).round for _ in range(6)] == [0, 1, 1, 2, 2, 3]
    del steps  # as a kill would end it
    third = kept_path(by_heart.files.version(1), "v2-oracle", 3)
    made_at = third.stat().st_mtime_ns
    assert audit_forecast(by_heart, 8) == pytest.approx(audit_forecast(by_heart, 13) / 2)
    said = typed("audit", str(folder), "--models", "8")
    assert (
        "v2 (goldfish-warm), compared with 8 oracles, by 15 removed and 120 unseen samples" in said
    )
    assert third.stat().st_mtime_ns == made_at
    assert audit_forecast(by_heart, 8) == 0
    said = typed("status", "--project", str(folder))
    assert "Audit of v2, compared with 8 oracles: remembers." in said
    case = case_of(by_heart.ledger, "R-0001")
    assert "still finds traces" in headline(case)
    assert "compared with 8 models that were trained anew" in findings(case)[-1]

    by_heart.reject()
    assert "Audit" not in typed("status", "--project", str(folder))
    settings = folder / "goldfish.toml"
    settings.write_text(settings.read_text().replace("[unlearning]\nrounds = 1", ""))
    with Project.open(folder) as project:
        list(project.unlearn(MACHINE, "retrain"))
        for _ in range(2):  # the second one finds all that the first one did
            list(audit(project, MACHINE, 8))
        found = project.ledger.audits()[3]
        assert found["word"] in ("indistinguishable", "not enough evidence")
        assert found["before"]["low"] > 0
        assert [e.subject for e in project.ledger.events() if e.kind == "audit"] == ["v2", "v3"]
        project.purge()
        assert not list(folder.rglob("*oracle*"))
        with pytest.raises(ConfigError, match=r"v1 is purged.* Audit a version before"):
            list(audit(project, MACHINE, 8))
        new_key(tmp_path / "key")
        pack = write_evidence(project.ledger, "R-0001", tmp_path / "out", tmp_path / "key", {})
        assert json.loads((pack.folder / "evidence.json").read_text())["audit"] == found
        assert project.ledger.verify() == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--tier", "quick"), "leave --tier and --method out"),
        (("--models", "3"), "at least 4 oracles, not 3"),
        ((), "not in the data any more"),
    ],
)
def test_what_an_audit_of_a_project_refuses(
    trained: Project, tmp_path: Path, words: Sequence[str], reason: str
) -> None:
    """Also where removed samples are deleted from the disk already."""
    removed = forgotten(trained, "retrain")
    write_data(tmp_path / "data.npz", lambda name: name not in removed)
    for place in ([str(trained.folder)], ["--project", str(trained.folder)]):
        done = CliRunner().invoke(app, ["audit", *place, *words])
        assert done.exit_code != 0
        assert reason in " ".join(str(done.exception).split())
    assert trained.ledger.audits() == {}


def test_neither_a_run_nor_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["audit"])
    assert "Say what to audit" in str(done.exception)
    done = CliRunner().invoke(app, ["audit", "one", "--project", "other"])
    assert "only one of DIR and --project DIR" in str(done.exception)
