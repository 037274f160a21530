"""The commands of a project: what they print, and what they say of wrong words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.project.conftest import MACHINE
from typer.testing import CliRunner

from goldfish.cli import app
from goldfish.project.evidence import case_of, findings
from goldfish.project.project import Project

Command = Callable[..., str]


@pytest.fixture
def goldfish(trained: Project, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command on a trained project, and return what it prints as one line."""
    monkeypatch.setattr("goldfish.terminal.console.width", 300)

    def run(*words: object) -> str:
        place = () if words[0] == "verify" else ("--project", trained.folder)
        done = CliRunner().invoke(app, [str(word) for word in (*words, *place)])
        return " ".join(f"{done.output} {done.exception or ''}".split())

    return run


def test_an_accuracy_without_the_removed_class_says_so(trained: Project, goldfish: Command) -> None:
    """A third of the test samples is left out, and no number may seem to be of all."""
    for client in ("client-1", "client-2", "client-3"):
        trained.forget(client, label=1, machine=MACHINE)
    printed = goldfish("unlearn", "--method", "retrain")
    now = trained.current().facts["measures"]["accuracy"]
    before = trained.current().facts["before"]["accuracy"]
    assert f"v2 (retrain): accuracy {now:.1f} % on the remaining classes" in printed
    assert f"The model before: accuracy {before:.1f} % on the remaining classes" in printed
    assert f"{now:.1f} on the remaining classes" in goldfish("status")
    assert findings(case_of(trained.ledger, "R-0001"))[0] == (
        f"The new model is right on {now:.1f} % of the test samples of the remaining classes "
        f"(before: {before:.1f} %)."
    )
