"""Child processes that are started in groups of their own, and end with all that they started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from goldfish.errors import DeploymentError

GRACE_SECONDS = 10.0
"""How long a process may take to end when it is asked to; then it is killed."""

EXECUTABLES = (
    "flower-superlink",
    "flower-superexec",
    "flower-supernode",
    "flwr",
    "flwr-serverapp",
    "flwr-clientapp",
)
"""What a deployment starts, itself or through one of the others."""


def end_as_usual() -> None:
    """Let a new process end by the usual signals: called in it, before its program starts.

    A program that a shell runs in the background ignores Ctrl-C, and what it starts would too.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def find_executable(name: str) -> str | None:
    """Return a command of Flower: next to this Python, or wherever the PATH finds it."""
    own = Path(sys.executable).parent / name
    return str(own) if own.is_file() else shutil.which(name)


def executable(name: str) -> str:
    """Return a command of Flower, or raise."""
    found = find_executable(name)
    if found is None:
        raise DeploymentError(
            f"The command {name} is neither next to {sys.executable} nor on the PATH. "
            "'goldfish flower doctor' checks the installation."
        )
    return found


def free_ports(count: int, host: str) -> list[int]:
    """Return different ports of ``host`` that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def is_free(host: str, port: int) -> bool:
    """Tell whether a server could listen here."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


@dataclass
class Child:
    """A command that runs in a session of its own, with its output in a log file."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    _begin: int = 0
    """Where in the log its present life begins."""

    def start(self, inherited: Sequence[int] = ()) -> None:
        """Start it; the log is appended to. ``inherited`` are descriptors that it keeps open."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._begin = output.tell()
            try:
                self.process = subprocess.Popen(  # noqa: S603
                    self.command,
                    env=dict(self.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=inherited,
                    preexec_fn=end_as_usual,
                )
            except OSError as error:
                raise DeploymentError(f"{self.name} cannot be started: {error}.") from error

    @property
    def pid(self) -> int:
        """The process id, which is that of its group too."""
        if self.process is None:
            raise DeploymentError(f"{self.name} was not started.")
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def said(self) -> str:
        """Return what it has written to its log since it was started last."""
        try:
            return self.log.read_bytes()[self._begin :].decode(errors="replace")
        except OSError:
            return ""

    def last_words(self, lines: int = 8) -> str:
        """Return the end of what it said."""
        return "\n".join(self.said().splitlines()[-lines:])

    def ended(self) -> DeploymentError:
        """Return the error that says that it ended on its own."""
        code = None if self.process is None else self.process.returncode
        return DeploymentError(
            f"{self.name} ended with status {code}. Its log {self.log} ends with:\n"
            f"{self.last_words()}"
        )

    def kill(self) -> None:
        """End it and all that it started, at once."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def stop(children: Iterable[Child]) -> None:
    """Ask processes to end, all at once; kill what is left of their groups some time later.

    Whoever does not want to wait may interrupt it: then they are killed at once.
    """
    asked = [child for child in children if child.process is not None]
    try:
        for child in asked:
            if child.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)
        end = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < end and any(child.running for child in asked):
            time.sleep(0.05)
    finally:
        for child in asked:
            child.kill()
