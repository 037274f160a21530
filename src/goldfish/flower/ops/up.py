"""A whole Flower federation on one machine: SuperLink, superexec and SuperNodes as children."""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import tomli_w

from goldfish.errors import ConfigError, DeploymentError, StoreError
from goldfish.federation.settings import FlowerSettings
from goldfish.files import write_whole
from goldfish.flower.ops.keys import Keys, check_node_key, check_server
from goldfish.flower.ops.processes import Child, executable, free_ports, is_free, stop
from goldfish.flower.ops.superlink import SuperLink
from goldfish.flower.submit import QUIET, connection
from goldfish.types import Scalar

HOST = "127.0.0.1"
START_SECONDS = 90.0
"""How long a SuperLink or a node may take to come up; some seconds are usual."""
ADMITTED = re.compile(r"SuperNode ID: (\d+)")
"""What a node says when the SuperLink has let it in."""
STILL_TAKEN = "[code: 2004]"
"""What Flower says to a node whose key it believes to be online already."""

LOOK_EVERY = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}
"""Seconds between two looks for work; Flower's own is 1, which every round would wait for."""
ENDING_SECONDS = 2.0
"""How long processes that were just killed may take to let go of the folder."""


class Deployment:
    """A SuperLink with a superexec and ``nodes`` SuperNodes on loopback, as child processes.

    A context manager: inside it all nodes are online, and after it no process is left. ``folder``
    keeps the SuperLink's database, what the clients keep (``node-N``), Flower's own files and the
    logs, so that the next deployment in it goes on with the same federation. With ``keys``
    everything speaks TLS, every node shows its key, and gives its work to its own superexec alone.
    The SuperLink leaves the server app to a superexec of its own: so a run survives when the
    SuperLink is restarted. ``data_dir``, ``path`` and ``models`` are the nodes' own settings.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        *,
        keys: Path | None = None,
        data_dir: Path | None = None,
        path: Path | None = None,
        models: Sequence[str] = (),
        port: int | None = None,
    ) -> None:
        if nodes < 1:
            raise ConfigError(f"A deployment needs at least one node, not {nodes}.")
        self.folder = folder.resolve()
        self.keys = None if keys is None else _checked(Keys(keys.resolve()), nodes)
        self.nodes = nodes
        places = {"data-dir": data_dir, "path": path}
        self._own = {name: str(p.resolve()) for name, p in places.items() if p is not None}
        if models:
            self._own["models"] = " ".join(models)
        if port is not None and not is_free(HOST, port):
            raise DeploymentError(f"Port {port} of {HOST} is in use. Choose another --port.")
        own, *self._node_ports = free_ports(nodes + 1, HOST)
        self.superlink = SuperLink(
            f"{HOST}:{port or own}", None if self.keys is None else self.keys.authority
        )
        self.children = self._children()
        self._lock: int | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """What a command like ``flwr run`` must find in its environment to reach this SuperLink."""
        return self._environment(self.folder / "flwr")

    @property
    def settings(self) -> dict[str, Scalar]:
        """The [flower] table of a configuration that runs on this deployment."""
        address: dict[str, Scalar] = {"superlink": self.superlink.address}
        if self.keys is None:
            return {**address, "insecure": True}
        return {**address, "root_certificates": str(self.keys.authority)}

    @property
    def logs(self) -> Path:
        """The folder of the log files, one for each process."""
        return self.folder / "logs"

    def node_folder(self, number: int) -> Path:
        """Return where node ``number`` keeps its state; nodes count from 1."""
        return self.folder / f"node-{number}"

    def start(self) -> None:
        """Start everything, and wait until all nodes are online."""
        self._claim_folder()
        settings = FlowerSettings.parse(self.settings)
        write_whole(self.folder / "flwr" / "config.toml", connection(settings))
        self.start_superlink()
        if self.keys is not None:
            public = self.keys.node_public
            self.superlink.register([public(number) for number in range(1, self.nodes + 1)])
        self.start_child("superexec")
        for name in self.children:
            if name.startswith("node-"):
                self.start_child(name)
        self.wait_online()

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it answers."""
        child = self.start_child("superlink")
        end = time.monotonic() + START_SECONDS
        while True:
            if not child.running:
                raise child.ended()
            try:
                self.superlink.nodes()
            except DeploymentError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
            else:
                return

    def start_child(self, name: str) -> Child:
        """Start one of the processes (again)."""
        child = self.children[name]
        child.start(() if self._lock is None else (self._lock,))
        self._note_processes()
        return child

    def wait_online(self) -> None:
        """Wait until all nodes are online.

        A SuperLink takes a node that was killed for online until its heartbeat is overdue, and
        turns the same key away until then: such a node is started again.
        """
        end = time.monotonic() + START_SECONDS
        while missing := self._offline():
            waiting = time.monotonic() < end
            for child in missing:
                if child.running:
                    continue
                if STILL_TAKEN not in child.said() or not waiting:
                    raise child.ended()
                self.start_child(child.name)
            if not waiting:
                raise DeploymentError(
                    f"{', '.join(child.name for child in missing)}: not online after "
                    f"{START_SECONDS:g} seconds. The logs are in {self.logs}."
                )
            time.sleep(0.5)

    def watch(self) -> None:
        """Return never; raise when a process ends on its own."""
        while True:
            for child in self.children.values():
                if not child.running:
                    raise child.ended()
            time.sleep(0.5)

    def stop(self) -> None:
        """End all processes and what they started: the nodes first, so that they can sign off."""
        try:
            stop(child for name, child in self.children.items() if name.startswith("node-"))
        finally:
            try:
                stop([self.children["superexec"], self.children["superlink"]])
            finally:
                self._release_folder()

    def _claim_folder(self) -> None:
        """Take the folder for this deployment alone.

        The children inherit the lock: the folder stays taken as long as one of them lives, even
        when their parent was killed.
        """
        path = self.folder / "lock"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)  # one of an earlier version was open to all
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreError(f"{self.folder} cannot be used: {error}.") from error
        end = time.monotonic() + ENDING_SECONDS
        while not _locked(lock) and time.monotonic() < end:
            time.sleep(0.05)
        if not _locked(lock):
            owners = os.read(lock, 1000).decode(errors="replace").strip()
            os.close(lock)
            parent, _, children = owners.partition(" ")
            alone = f" If that is gone, end what it left with: kill {children}" if children else ""
            raise DeploymentError(
                f"{self.folder} belongs to a deployment that still runs, started by process "
                f"{parent}. End it, or choose another --state-dir.{alone}"
            )
        self._lock = lock
        self._note_processes()

    def _note_processes(self) -> None:
        """Write into the lock who holds it: this process and, should it be killed, its children."""
        if self._lock is None:
            return
        children = [child.pid for child in self.children.values() if child.running]
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, " ".join(map(str, [os.getpid(), *children])).encode(), 0)

    def _release_folder(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _offline(self) -> list[Child]:
        """Return the nodes that are not online, by the number that each was given this time."""
        online = {str(node.node_id) for node in self.superlink.nodes() if node.status == "online"}
        nodes = [self.children[f"node-{number}"] for number in range(1, self.nodes + 1)]
        given = [(child, ADMITTED.search(child.said())) for child in nodes]
        return [c for c, number in given if not (number and number[1] in online and c.running)]

    def _children(self) -> dict[str, Child]:
        keys, address = self.keys, self.superlink.address
        trusted = None if keys is None else (keys.authority, keys.superexec_secret)
        children = {
            "superlink": self._child("superlink", ["flower-superlink", *self._superlink_options()]),
            "superexec": self._child("superexec", _superexec(address, trusted)),
        }
        for number in range(1, self.nodes + 1):
            name, home = f"node-{number}", self.node_folder(number) / "flwr"
            command = ["flower-supernode", *self._node_options(number)]
            children[name] = self._child(name, command, home)
            if keys is not None:
                trusted = keys.runtime(number), keys.runtime_secret(number)
                command = _superexec(f"{HOST}:{self._node_ports[number - 1]}", trusted)
                name = f"{name}-superexec"
                children[name] = self._child(name, command, home)
        return children

    def _child(self, name: str, command: list[str], home: Path | None = None) -> Child:
        program, *options = command
        environment = self._environment(home or self.folder / "flwr")
        return Child(name, [executable(program), *options], environment, self.logs / f"{name}.log")

    def _superlink_options(self) -> list[str]:
        host, _, port = self.superlink.address.rpartition(":")
        common = ["--host", host, "--port", port, "--isolation", "process"]
        common += ["--database", str(self.folder / "superlink.db")]
        if self.keys is None:
            return [*common, "--insecure"]
        files = {
            "--ssl-ca-certfile": self.keys.authority,
            "--ssl-certfile": self.keys.server,
            "--ssl-keyfile": self.keys.server_key,
            "--superexec-auth-secret-file": self.keys.superexec_secret,
        }
        return [*common, "--enable-supernode-auth", *_options(files)]

    def _node_options(self, number: int) -> list[str]:
        port = self._node_ports[number - 1]
        common = ["--superlink", self.superlink.address, "--host", HOST, "--port", str(port)]
        common += ["--node-config", self._node_config(number)]
        if self.keys is None:
            return [*common, "--isolation", "subprocess", "--insecure"]
        files = {
            "--root-certificates": self.keys.authority,
            "--auth-supernode-private-key": self.keys.node_key(number),
            "--ssl-ca-certfile": self.keys.runtime(number),
            "--ssl-certfile": self.keys.runtime(number),
            "--ssl-keyfile": self.keys.runtime_key(number),
            "--superexec-auth-secret-file": self.keys.runtime_secret(number),
        }
        return [*common, "--isolation", "process", *_options(files)]

    def _node_config(self, number: int) -> str:
        settings: dict[str, Scalar] = {
            "partition-id": number - 1,
            "num-partitions": self.nodes,
            "state-dir": str(self.node_folder(number)),
            **self._own,
        }
        lines = tomli_w.dumps(settings).splitlines()
        return " ".join(line.replace(" = ", "=", 1) for line in lines)  # as Flower wants them

    def _environment(self, home: Path) -> dict[str, str]:
        """Return the environment of a child: a Flower home of its own, commands on the PATH."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return {**os.environ, **QUIET, **LOOK_EVERY, "FLWR_HOME": str(home), "PATH": path}


def _locked(lock: int) -> bool:
    """Take a lock if it is free, or is taken by this descriptor already; tell whether it is."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _superexec(address: str, trusted: tuple[Path, Path] | None) -> list[str]:
    """Return the command of a superexec; it trusts a certificate, and shows a secret."""
    command = ["flower-superexec", "--runtime-api-address", address]
    if trusted is None:
        return [*command, "--insecure"]
    certificate, secret = trusted
    files = {"--root-certificates": certificate, "--superexec-auth-secret-file": secret}
    return [*command, *_options(files)]


def _options(files: Mapping[str, Path]) -> list[str]:
    return [text for option, path in files.items() for text in (option, str(path))]


def _checked(keys: Keys, nodes: int) -> Keys:
    """Return the keys when all that a deployment of so many nodes needs is there and fits."""
    check_server(keys)
    if not keys.superexec_secret.exists():
        raise StoreError(
            f"{keys.superexec_secret} is missing; 'goldfish flower keys new' makes one."
        )
    for number in range(1, nodes + 1):
        own = (keys.node_key, keys.node_public, keys.runtime, keys.runtime_key, keys.runtime_secret)
        if not all(path(number).exists() for path in own):
            raise StoreError(
                f"{keys.folder} has keys for {len(keys.node_keys)} nodes, and {nodes} are to "
                f"start; all files of node {number} must be there. 'goldfish flower keys add' "
                "makes those of further nodes."
            )
        check_node_key(keys.node_key(number))
    return keys
