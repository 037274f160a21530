"""Checks of an installation: each says ok, or what is wrong and what to do."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from goldfish.errors import DeploymentError, GoldfishError
from goldfish.flower.ops.keys import Keys, check_node_key, check_server, load_certificate
from goldfish.flower.ops.processes import EXECUTABLES, find_executable, is_free
from goldfish.flower.ops.superlink import SuperLink

FLOWER = (1, 41)
"""The minor version of Flower that Goldfish is tested with."""
SOON = timedelta(days=30)


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    ok: bool
    detail: str
    """What was found or, for a problem, what is wrong and what to do."""


def examine(
    state_dir: Path,
    keys: Path | None = None,
    superlink: str | None = None,
    ports: Sequence[int] = (),
) -> Iterator[Finding]:
    """Yield what is found of the installation and of this, one after the other.

    ``superlink`` is the address of a SuperLink that must answer; with ``keys`` over TLS.
    """
    yield _look("flwr", _flower_version)
    yield _look("commands", _commands)
    yield _look("FLWR_HOME", _flower_home)
    yield _look("state-dir", _state_dir, state_dir)
    yield _look("state-dir permissions", _state_permissions, state_dir)
    for port in ports:
        yield _look(f"port {port}", _port, port)
    if keys is not None:
        yield from _examine_keys(Keys(keys))
    if superlink is not None:
        link = SuperLink(superlink, None if keys is None else Keys(keys).authority)
        yield _look("SuperLink", _superlink, link)


def _examine_keys(keys: Keys) -> Iterator[Finding]:
    """Look at those files that are there: a node's host has fewer of them than the server's."""
    try:
        certificates = [path for path in (keys.authority, keys.server) if path.exists()]
    except OSError as error:
        yield Finding("certificates", False, _unreadable(error))
        return
    yield _look("certificates", _certificates, keys, certificates)
    for path in (*certificates, *sorted(keys.folder.glob("runtime-*.crt"))):
        yield _look(path.name, _validity, path)
    if keys.server.exists() or keys.server_key.exists():
        yield _look("server key", _server, keys)
    for path in keys.node_keys:
        yield _look(path.name, _node_key, path)
    yield _look("key permissions", _permissions, keys)


def _look(name: str, check: Callable[..., str], *what: object) -> Finding:
    try:
        return Finding(name, True, check(*what))
    except GoldfishError as problem:
        return Finding(name, False, str(problem))
    except OSError as error:
        return Finding(name, False, _unreadable(error))


def _unreadable(error: OSError) -> str:
    return f"cannot be looked at: {error}. Run the doctor as the user that the service runs as."


def _flower_version() -> str:
    version = importlib.metadata.version("flwr")
    if tuple(int(part) for part in version.split(".")[:2]) != FLOWER:
        wanted = ".".join(map(str, FLOWER))
        raise DeploymentError(
            f"flwr {version} is installed, and Goldfish is made for {wanted}. Run: "
            "pip install 'goldfish-fl[flower]'"
        )
    return f"version {version}"


def _commands() -> str:
    missing = [name for name in EXECUTABLES if find_executable(name) is None]
    if missing:
        raise DeploymentError(
            f"{', '.join(missing)}: neither next to {sys.executable} nor on the PATH. Install flwr "
            "into the environment of this Python: pip install 'goldfish-fl[flower]'"
        )
    return f"all next to {sys.executable} or on the PATH"


def _flower_home() -> str:
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    config = home / "config.toml"
    if not config.exists():
        return f"{config} does not exist yet; 'goldfish flower up' writes one of its own"
    try:
        tables = tomllib.loads(config.read_text("utf-8")).get("superlink", {})
        names = [name for name in dict(tables) if name != "default"]
    except (OSError, ValueError, TypeError) as error:  # not TOML, or 'superlink' is no table
        raise DeploymentError(
            f"{config} cannot be read: {error}. Mend it, or set FLWR_HOME to another folder."
        ) from None
    return f"{config} names these SuperLinks: {', '.join(names) or 'none'}"


def _state_dir(folder: Path) -> str:
    there = folder
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            return f"{folder} is writable"
    except OSError as error:
        raise DeploymentError(
            f"{folder} is not writable: {error}. Choose another with --state-dir, or mend its "
            "permissions."
        ) from None


def _state_permissions(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} does not exist yet; it will be made for its owner alone"
    if folder.stat().st_mode & 0o077:
        raise DeploymentError(
            f"others can look into {folder}, which holds models and messages. Run: chmod 700 "
            f"{folder} (with systemd: StateDirectoryMode=0700)"
        )
    return f"{folder} is open to its owner alone"


def _port(port: int) -> str:
    if not is_free("127.0.0.1", port):
        raise DeploymentError("somebody listens on it. End that process, or choose another port.")
    return "free"


def _certificates(keys: Keys, found: list[Path]) -> str:
    if keys.authority not in found:
        raise DeploymentError(
            f"{keys.authority} is missing. Copy it from where 'goldfish flower keys new' made it; "
            "without it no host can tell the SuperLink from a stranger."
        )
    return f"{', '.join(path.name for path in found)} in {keys.folder}"


def _validity(path: Path) -> str:
    certificate, now = load_certificate(path), datetime.now(UTC)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        raise DeploymentError(
            f"valid from {begin:%Y-%m-%d %H:%M} UTC only. Is this machine's clock right?"
        )
    if now > end:
        raise DeploymentError(
            f"expired on {end:%Y-%m-%d}. Make new ones with 'goldfish flower keys renew'."
        )
    if now > end - SOON:
        raise DeploymentError(
            f"expires on {end:%Y-%m-%d}. Make new ones before, with 'goldfish flower keys renew'."
        )
    return f"valid until {end:%Y-%m-%d}"


def _server(keys: Keys) -> str:
    check_server(keys)
    return f"{keys.server.name} is signed by {keys.authority.name} and fits {keys.server_key.name}"


def _node_key(path: Path) -> str:
    check_node_key(path)
    return "a key that Flower takes"


def _permissions(keys: Keys) -> str:
    loose = [p for p in keys.secrets if p.stat().st_mode & 0o077]
    if loose:
        names = " ".join(str(path) for path in loose)
        raise DeploymentError(f"others can read private files. Run: chmod 600 {names}")
    return f"{len(keys.secrets)} private files are readable by their owner alone"


def _superlink(link: SuperLink) -> str:
    nodes = link.nodes()
    online = sum(node.status == "online" for node in nodes)
    return f"{link.address} answers; {online} of {len(nodes)} nodes are online"
