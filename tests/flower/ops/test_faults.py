"""Faults of a real deployment: processes are killed, and the result is what it must be."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.deployment

ProcessesOf = Callable[[Path], dict[int, str]]
GONE = {"Timeout", "NodeUnavailable", "MessageLost"}
"""How a node that does not answer any more is reported: it depends on who notices first."""


def test_a_round_survives_a_killed_node_and_a_client_that_raises(
    trial: Callable[..., Any],
) -> None:
    """The first round has one client left; the others are reported, and are back later."""
    case = trial()
    with case.deployment as deployment:
        case.flag(2, "hold").touch()
        case.flag(3, "fail").touch()
        run = case.start("--set", "flower.timeout=60", "--set", "unlearning.methods=[]")
        try:
            case.wait_until(case.flag(2, "held").exists, run)
            deployment.children["node-2"].kill()
            case.wait_until(lambda: case.rounds("origin"), run)
            case.flag(2, "hold").unlink()
            case.flag(3, "fail").unlink()
            deployment.start_child("node-2")
            case.finish(run)
        finally:
            run.kill()
    rounds = case.rounds("origin")
    failures = {f["client_id"]: f for f in rounds[0]["failures"]}
    assert set(failures) == {"client-2", "client-3"}
    assert failures["client-2"]["error"] in GONE
    assert failures["client-3"]["error"] == "RuntimeError"
    assert "the disk is on fire" in failures["client-3"]["cause"]
    assert "client-3 did not answer: the disk is on fire" in case.said
    assert rounds[-1]["failures"] == []
    assert case.carried_out(2) == [("origin", 2)]


def test_a_restarted_superlink_and_server_app_change_nothing(
    trial: Callable[..., Any], processes_of: ProcessesOf
) -> None:
    """One is killed while training, the other while unlearning; the parameters stay the same."""
    case = trial(nodes=2)
    with case.deployment as deployment:
        case.flag(1, "hold").touch()
        run = case.start("--set", "training.rounds=1")
        try:
            case.wait_until(case.flag(1, "held").exists, run)
            deployment.children["superlink"].kill()
            deployment.start_superlink()
            case.flag(1, "hold").unlink()
            case.wait_until(lambda: case.rounds("origin"), run)
            case.flag(2, "hold").touch()
            case.wait_until(case.flag(2, "held").exists, run)
            servers = [
                pid for pid, words in processes_of(case.folder).items() if "flwr-serverapp" in words
            ]
            assert len(servers) == 1
            os.kill(servers[0], signal.SIGKILL)
            case.flag(2, "hold").unlink()
            assert run.wait(120) != 0
            assert "--resume" in case.said
            case.finish(case.start())
        finally:
            run.kill()
    expected = case.undisturbed("training.rounds=1")
    models = case.models()
    assert models.keys() == expected.keys() == {"origin", "goldfish"}
    for phase, model in expected.items():
        for name, value in model.items():
            torch.testing.assert_close(models[phase][name], value, rtol=0, atol=1e-6)
    once = [("origin", 1), ("goldfish", 1)]
    for node in (1, 2):
        assert case.carried_out(node) == once
    assert all(r["failures"] == [] for phase in models for r in case.rounds(phase))
