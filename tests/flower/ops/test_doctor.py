"""The doctor finds what is wrong, and says what to do."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from goldfish.cli import app
from goldfish.flower.ops import doctor, keys, processes
from goldfish.flower.ops.doctor import Finding, examine
from goldfish.flower.ops.keys import Keys, make_keys


def problems(*what: Any, **more: Any) -> dict[str, str]:
    found = examine(*what, **more)
    return {finding.check: finding.detail for finding in found if not finding.ok}


@pytest.fixture
def made(tmp_path: Path) -> Keys:
    return make_keys(tmp_path / "keys", 2)


def test_a_sound_installation_is_told_so(made: Keys, tmp_path: Path) -> None:
    found: list[Finding] = list(examine(tmp_path / "new" / "state", made.folder))
    assert [f for f in found if not f.ok] == []
    assert {"flwr", "commands", "state-dir", "server key", "node-2.key", "key permissions"} <= {
        f.check for f in found
    }
    assert not (tmp_path / "new").exists()


def spoil_permissions(made: Keys) -> None:
    made.node_key(2).chmod(0o644)


def spoil_authority(made: Keys) -> None:
    made.authority.unlink()


def spoil_certificate(made: Keys) -> None:
    made.server.write_text("nonsense")


def spoil_node_key(made: Keys) -> None:
    made.node_key(1).write_bytes(made.server_key.read_bytes())


def spoil_pair(made: Keys) -> None:
    other = make_keys(made.folder.parent / "other", 1)
    made.server.write_bytes(other.server.read_bytes())


@pytest.mark.parametrize(
    ("spoil", "check", "words"),
    [
        (spoil_permissions, "key permissions", r"chmod 600 .*node-2\.key$"),
        (spoil_authority, "certificates", r"ca\.crt is missing\. Copy it"),
        (spoil_certificate, "server.crt", "not a readable certificate"),
        (spoil_node_key, "node-1.key", "not a readable OpenSSH private key"),
        (spoil_pair, "server key", "Take both from one key folder"),
    ],
)
def test_a_spoiled_key_folder_is_noticed(
    made: Keys, tmp_path: Path, spoil: Callable[[Keys], None], check: str, words: str
) -> None:
    spoil(made)
    assert re.search(words, problems(tmp_path, made.folder)[check])


class LateClock(datetime):
    """A clock that is two days late."""

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        return datetime.now(UTC) - timedelta(days=2)


@pytest.mark.parametrize(
    ("clock", "days", "words"), [(LateClock, 1, "expired on"), (datetime, 5, "expires on")]
)
def test_an_old_certificate_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: type[datetime], days: int, words: str
) -> None:
    monkeypatch.setattr(keys, "datetime", clock)
    monkeypatch.setattr(keys, "SERVER_DAYS", days)
    made = make_keys(tmp_path / "keys", 1)
    found = problems(tmp_path, made.folder)
    assert list(found) == ["server.crt", "runtime-1.crt"]
    assert words in found["server.crt"]


def test_ports_and_superlink_are_tried(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = int(busy.getsockname()[1])
        found = problems(tmp_path, ports=(port,))
    assert found == {
        f"port {port}": "somebody listens on it. End that process, or choose another port."
    }
    found = problems(tmp_path, superlink=f"127.0.0.1:{port}", ports=(port,))
    assert list(found) == ["SuperLink"]
    assert "does not answer" in found["SuperLink"]


def test_missing_commands_and_another_flower_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "FLOWER", (1, 7))
    found = problems(tmp_path)
    assert set(found) == {"flwr", "commands"}
    assert "made for 1.7" in found["flwr"]
    assert all(name in found["commands"] for name in processes.EXECUTABLES)


@pytest.mark.parametrize("content", ["[superlink\n", "superlink = 3\n", 'superlink = "a"\n'])
def test_a_broken_flower_home_and_a_state_dir_that_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    (tmp_path / "config.toml").write_text(content)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    found = problems(tmp_path / "config.toml")
    assert set(found) == {"FLWR_HOME", "state-dir"}
    assert "is not writable" in found["state-dir"]


def test_the_command_says_it_by_its_exit_status(made: Keys, tmp_path: Path) -> None:
    command = ["flower", "doctor", "--secure", str(made.folder), "--state-dir", str(tmp_path)]
    assert CliRunner().invoke(app, command).exit_code == 0
    made.node_key(1).chmod(0o604)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "problem key permissions" in done.stdout


def test_a_state_dir_that_others_can_look_into_is_noticed(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    assert problems(state) == {}
    state.chmod(0o750)
    found = problems(state)
    assert list(found) == ["state-dir permissions"]
    assert f"chmod 700 {state}" in found["state-dir permissions"]


def test_what_the_doctor_may_not_look_at_is_a_finding(
    made: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists

    def refuse(path: Path) -> bool:
        if path.parent == made.folder or path.name == "config.toml":
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse)
    found = problems(tmp_path, made.folder)
    assert set(found) == {"FLWR_HOME", "certificates"}
    for words in found.values():
        assert re.search(r"cannot be looked at: .*Permission denied.* Run the doctor as", words)
