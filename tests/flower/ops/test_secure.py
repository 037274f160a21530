"""A real deployment with TLS and node keys: it works for members, and for nobody else."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime.runtime_http_client import RuntimeHttpClient

from goldfish.flower.ops.keys import Keys, add_nodes, make_keys, renew_keys
from goldfish.flower.ops.processes import Child, executable, free_ports
from goldfish.flower.ops.superlink import public_bytes
from goldfish.flower.ops.up import HOST, Deployment

pytestmark = pytest.mark.deployment

NOBODY = 65534
Eventually = Callable[[Callable[[], object]], None]


def strangers(case: Any, keys: Keys, other: Keys) -> dict[str, Child]:
    """Return SuperNodes that must not get in, by what is wrong with them."""
    trust = ["--root-certificates", str(keys.authority)]
    own = ["--auth-supernode-private-key", str(keys.node_key(2))]
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


def take_work(address: str, certificate: bytes | None, said: Connection) -> None:
    """Ask a node for its work as another user of its host: the node's certificate is no secret."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    client = RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=certificate is None,
        root_certificates=certificate,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
    )
    try:
        client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        said.send("taken")
    except httpx.HTTPError as error:
        said.send(str(error))


def try_to_take_work(address: str, certificate: bytes | None) -> str:
    processes = multiprocessing.get_context("fork")
    here, there = processes.Pipe()
    thief = processes.Process(target=take_work, args=(address, certificate, there))
    thief.start()
    said = str(here.recv()) if here.poll(30) else "nothing"
    thief.join(10)
    return said


def test_members_train_and_unlearn_strangers_are_refused_and_it_outlives_its_certificates(
    trial: Callable[..., Any], tmp_path: Path, eventually: Eventually
) -> None:
    """One federation's life: strangers, a run as in one process, new certificates, a new node.

    The client is bound to the number of its key. The node that is taken out at the end stays out.
    """
    keys = make_keys(tmp_path / "keys", 1)
    other = make_keys(tmp_path / "other", 1)
    case = trial(nodes=1, rounds=1, keys=keys.folder)
    add_nodes(keys.folder, 1)
    with case.deployment as deployment:
        before = {node.public_key: node.node_id for node in deployment.superlink.nodes()}
        refused = strangers(case, keys, other)
        for child in refused.values():
            child.start()
        try:
            eventually(lambda: not any(child.running for child in refused.values()))
        finally:
            for child in refused.values():
                child.kill()
        assert len(deployment.superlink.nodes()) == 1
        runtime = f"{HOST}:{deployment._node_ports[0]}"
        assert "401 Unauthorized" in try_to_take_work(runtime, keys.runtime(1).read_bytes())
        assert try_to_take_work(runtime, None) != "taken"
        bound = before[public_bytes(keys.node_public(1))]
        case.finish(case.start("--set", f"flower.clients.client-1.node={bound}"))
    said = {name: child.said() for name, child in refused.items()}
    assert "All SuperNodes must be registered" in said["no key"]
    assert "Failed to activate SuperNode" in said["a wrong key"]
    assert "CERTIFICATE_VERIFY_FAILED" in said["no authority"]
    assert "CERTIFICATE_VERIFY_FAILED" in said["another authority"]
    assert "Failed to initialize the connection" in said["no TLS"]
    assert all(child.process.returncode for child in refused.values() if child.process)
    expected, models = case.undisturbed(), case.models()
    assert models.keys() == expected.keys() == {"origin", "goldfish"}
    for phase, model in expected.items():
        for name, value in model.items():
            torch.testing.assert_close(models[phase][name], value, rtol=0, atol=1e-6)
    assert case.rounds("goldfish")[-1]["accuracy"] > 50
    renew_keys(keys.folder)
    with Deployment(case.deployment.folder, 2, keys=keys.folder) as deployment:
        online = {node.public_key: node for node in deployment.superlink.nodes()}
        assert [node.status for node in online.values()] == ["online"] * 2
        assert {key: online[key].node_id for key in before} == before
        new = online[public_bytes(keys.node_public(2))]
        subprocess.run(
            [executable("flwr"), "supernode", "unregister", str(new.node_id)],
            cwd=tmp_path,
            env=deployment.environment,
            check=True,
        )
        assert {node.node_id for node in deployment.superlink.nodes()} == set(before.values())
        node = deployment.children["node-2"]
        node.kill()
        node.start()
        eventually(lambda: not node.running)
    assert "Failed to activate SuperNode" in node.said()
