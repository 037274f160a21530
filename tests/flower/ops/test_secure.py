"""A real deployment with TLS and node keys: it works for members, and for nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from goldfish.flower.ops.keys import Keys, make_keys
from goldfish.flower.ops.processes import Child, executable, free_ports
from goldfish.flower.ops.up import HOST

pytestmark = pytest.mark.deployment

Eventually = Callable[[Callable[[], object]], None]


def strangers(case: Any, keys: Keys, other: Keys) -> dict[str, Child]:
    """Return SuperNodes that must not get in, by what is wrong with them."""
    trust = ["--root-certificates", str(keys.authority)]
    own = ["--auth-supernode-private-key", str(keys.node_key(4))]
    options = {
        "no key": trust,
        "a wrong key": [*trust, "--auth-supernode-private-key", str(other.node_key(1))],
        "no authority": own,
        "another authority": ["--root-certificates", str(other.authority), *own],
        "no TLS": ["--insecure"],
    }
    address = case.deployment.superlink.address
    children = {}
    for (name, wrong), port in zip(options.items(), free_ports(len(options), HOST), strict=True):
        command = [executable("flower-supernode"), "--superlink", address, "--max-retries", "0"]
        command += ["--host", HOST, "--port", str(port), *wrong]
        log = case.folder / "strangers" / f"{name}.log"
        children[name] = Child(name, command, case.deployment.environment, log)
    return children


def test_members_train_and_unlearn_and_strangers_are_refused(
    trial: Callable[..., Any], tmp_path: Path, eventually: Eventually
) -> None:
    """Train, delete samples of one client, unlearn by two methods, evaluate: as in one process."""
    keys = make_keys(tmp_path / "keys", 4)
    other = make_keys(tmp_path / "other", 1)
    case = trial(keys=keys.folder)
    both = 'unlearning.methods=["goldfish", "retrain"]'
    short = "unlearning.rounds=1"
    with case.deployment as deployment:
        refused = strangers(case, keys, other)
        for child in refused.values():
            child.start()
        try:
            eventually(lambda: not any(child.running for child in refused.values()))
        finally:
            for child in refused.values():
                child.kill()
        assert len(deployment.superlink.nodes()) == 3
        case.finish(case.start("--set", both, "--set", short))
    assert "retrain" in case.said
    said = {name: child.said() for name, child in refused.items()}
    assert "All SuperNodes must be registered" in said["no key"]
    assert "Failed to activate SuperNode" in said["a wrong key"]
    assert "CERTIFICATE_VERIFY_FAILED" in said["no authority"]
    assert "CERTIFICATE_VERIFY_FAILED" in said["another authority"]
    assert "Failed to initialize the connection" in said["no TLS"]
    assert all(child.process.returncode for child in refused.values() if child.process)
    expected, models = case.undisturbed(both, short), case.models()
    assert models.keys() == expected.keys() == {"origin", "goldfish", "retrain"}
    for phase, model in expected.items():
        for name, value in model.items():
            torch.testing.assert_close(models[phase][name], value, rtol=0, atol=1e-6)
    assert case.rounds("goldfish")[-1]["accuracy"] > 50
