"""How a server app tells what it does: lines in its run directory that another process follows."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from goldfish.errors import StoreError

LOG = "flower.jsonl"
LOCK = "flower.lock"


@contextlib.contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Wait until no other server app writes there: one that was stopped may take its time."""
    with (run_dir / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_at_work(run_dir: Path) -> bool:
    """Tell whether a server app writes there; one that was killed does not any more."""
    try:
        with (run_dir / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False


def last_process(run_dir: Path) -> int | None:
    """Return the process id of the server app that was the last to start there."""
    entries, _ = read_lines(run_dir / LOG, 0)
    started = [entry["started"] for entry in entries if type(entry.get("started")) is int]
    return started[-1] if started else None


class ProgressLog:
    """One JSON object a line: first ``started``, then progress, last ``error`` or ``done``.

    ``token`` is the submission's own: who follows it knows by it where the lines of another server
    app, which was stopped and took its time, end and its own begin.
    """

    def __init__(self, run_dir: Path, token: str = "") -> None:
        self.path = run_dir / LOG
        self._token = token

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.write({"started": os.getpid(), "token": self._token})
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        if error is None:
            self.write({"done": True})
        else:
            self.write({"error": type(error).__name__, "message": str(error) or repr(error)})

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append an entry, as one line."""
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def read_lines(path: Path, place: int) -> tuple[list[dict[str, Any]], int]:
    """Return the entries after ``place``, a position in the file, and the position after them."""
    if not path.exists():
        return [], place
    with path.open("rb") as file:
        file.seek(place)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    entries = []
    for line in whole.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            raise StoreError(f"{path} has a line that no server app writes. Delete the file.")
        entries.append(entry)
    return entries, place + len(whole)
