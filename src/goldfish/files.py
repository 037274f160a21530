"""Files that appear whole and last: written under a temporary name, renamed, and synced."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from pathlib import Path
from typing import IO

from goldfish.errors import StoreError


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file so that, even after a crash, a reader sees the old one or all of the new.

    Once this returns, a power loss does not take the new one back.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    data = content.encode() if isinstance(content, str) else content
    try:
        make_folder(path.parent)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreError(f"{path} cannot be written: {error}.") from error


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, which is on the disk when this returns."""
    try:
        new = not path.exists()
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}.") from error


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that a power loss does not take them back."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Let the names of the files in a folder outlive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def claim(path: Path, instead: str = "choose another --out") -> IO[bytes]:
    """Take a lock file for this process; closing it, or the end of the process, frees it.

    Whoever comes meanwhile is told which process holds it, and what to do ``instead`` of waiting.
    """
    try:
        make_folder(path.parent)
        lock = path.open("a+b", buffering=0)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.truncate(0)
        lock.write(str(os.getpid()).encode())
    except BlockingIOError:
        with lock:
            lock.seek(0)
            owner = lock.read(20).decode(errors="replace") or "unknown"
        raise StoreError(
            f"{path.parent} is in use by another command (process {owner}). Wait until it has "
            f"ended, or {instead}."
        ) from None
    except OSError as error:
        lock.close()
        raise StoreError(f"{path} cannot be locked: {error}.") from error
    return lock


def claimed(path: Path) -> bool:
    """Tell whether a process has a lock file, as :func:`claim` takes it."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # also where it cannot be read: then nobody here knows
        return True
    return False


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
