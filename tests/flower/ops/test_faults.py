"""Faults of a real deployment: processes are killed, and the result is what it must be."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.deployment

ProcessesOf = Callable[[Path], dict[int, str]]
GONE = {"Timeout", "NodeUnavailable", "MessageLost"}
"""How a node that does not answer any more is reported: it depends on who notices first."""

FETCHED = 5.0
"""Seconds after which the server app has fetched an answer. One that a SuperLink was handing out
when it was killed is lost, and the run waits for it until the timeout."""


def test_a_run_survives_what_is_killed_and_says_who_did_not_answer(
    trial: Callable[..., Any], processes_of: ProcessesOf
) -> None:
    """A node dies, its client raises, then the server app dies, then the SuperLink: one run.

    In both rounds of the training one client is left; the other is reported, and is back in the
    next. In the second the server app is killed, and the run goes on from the clients' stores. The
    SuperLink is killed while unlearning. There nothing is missing, and nothing is done twice.
    """
    case = trial(nodes=2, rounds=2)
    later = ("goldfish", 1)
    with case.deployment as deployment:
        case.flag(2, "hold").touch()
        run = case.start("--set", "flower.timeout=45")
        try:
            case.wait_until(case.flag(2, "held").exists, run)
            deployment.children["node-2"].kill()
            case.wait_until(lambda: case.rounds("origin"), run)
            case.flag(1, "hold").touch()
            case.flag(2, "fail").touch()
            deployment.start_child("node-2")
            case.wait_until(case.flag(1, "held").exists, run)
            servers = [
                pid for pid, words in processes_of(case.folder).items() if "flwr-serverapp" in words
            ]
            assert len(servers) == 1
            os.kill(servers[0], signal.SIGKILL)
            case.flag(1, "hold").unlink()
            assert run.wait(120) != 0
            assert "--resume" in case.said
            case.flag(2, "held").unlink()
            run = case.start("--set", "flower.timeout=600")
            case.wait_until(lambda: len(case.rounds("origin")) == 2, run)
            case.flag(2, "fail").unlink()  # it is held from here on
            case.wait_until(case.flag(2, "held").exists, run)
            case.wait_until(lambda: later in case.carried_out(1), run)
            time.sleep(FETCHED)
            deployment.children["superlink"].kill()
            deployment.start_superlink()
            case.flag(2, "hold").unlink()
            case.finish(run)
        finally:
            run.kill()
    rounds: list[dict[str, Any]] = case.rounds("origin") + case.rounds("goldfish")
    failures = [[(f["client_id"], f["error"]) for f in r["failures"]] for r in rounds]
    first, second, third = failures
    assert first in [[("client-2", error)] for error in GONE]
    assert second == [("client-2", "RuntimeError")]
    assert third == []
    assert "the disk is on fire" in rounds[1]["failures"][0]["cause"]
    assert "client-2 did not answer: the disk is on fire" in case.said
    assert case.carried_out(1) == [("origin", 1), ("origin", 2), later]
    assert case.carried_out(2) == [later]
    expected = case.undisturbed(lost={("origin", n): {"client-2"} for n in (1, 2)})
    models = case.models()
    assert models.keys() == expected.keys() == {"origin", "goldfish"}
    for phase, model in expected.items():
        for name, value in model.items():
            torch.testing.assert_close(models[phase][name], value, rtol=0, atol=1e-6)
