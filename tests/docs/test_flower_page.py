"""docs/flower.md is true: its commands run, its unit files and settings are Flower's own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tests.conftest import goldfish_here

from goldfish.flower.client_store import store_id
from goldfish.flower.node import KNOWN
from goldfish.flower.ops.processes import executable, free_ports

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flower.md").read_text()
SHORT = [
    *("--set", "training.rounds=1", "--set", "unlearning.methods=[]"),
    *("--set", "data.clients=1"),  # the other nodes have nothing to do
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def commands(beginning: str, language: str = "console") -> list[list[str]]:
    lines = [line for block in blocks(language) for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(beginning)]


def help_of(program: str, *words: str) -> str:
    """Return the help of one of Flower's programs."""
    (found,) = entry_points(group="console_scripts", name=program)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(said):
        patched.setattr(sys, "argv", [program, *words, "--help"])
        with pytest.raises(SystemExit) as end:
            found.load()()
    assert not end.value.code
    return said.getvalue()


def test_every_command_has_a_test_that_runs_it() -> None:
    known = (
        "goldfish flower init",
        "goldfish flower keys new",
        "goldfish flower up",
        "goldfish run",
    )
    assert len(commands("")) == sum(len(commands(beginning)) for beginning in known)
    said = help_of("flwr", "supernode")
    for _, _, verb, *_ in commands("flwr supernode", "sh"):
        assert verb in said


@pytest.mark.deployment
def test_the_commands_for_one_machine_run(
    tmp_path: Path, start_process: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """With TLS and keys, on a port of the test's own, and with fewer rounds."""
    (port,) = free_ports(1, "127.0.0.1")
    (init,) = commands("goldfish flower init")
    keys, _ = commands("goldfish flower keys new")
    plain, up = commands("goldfish flower up")
    unsafe, run = commands("goldfish run")
    assert up[: len(plain)] == plain
    assert run[:3] == unsafe[:3]
    for command in (init, keys):
        done = goldfish_here(tmp_path, *command[1:])
        assert done.returncode == 0, done.stderr
    output = tmp_path / "up"
    with output.open("wb") as file:
        deployment = start_process(
            [sys.executable, "-m", *up, "--port", str(port)],
            cwd=tmp_path,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    end = time.monotonic() + 60
    while "Ctrl-C" not in output.read_text() and deployment.poll() is None:
        assert time.monotonic() < end, output.read_text()
        time.sleep(0.1)
    here = ["--set", f"flower.superlink=127.0.0.1:{port}"]
    done = goldfish_here(tmp_path, *run[1:], *here, *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    doctor = ["flower", "doctor", "--secure", "trial-keys"]
    healthy = goldfish_here(tmp_path, *doctor, "--superlink", f"127.0.0.1:{port}")
    assert "3 of 3 nodes are online" in healthy.stdout, healthy.stdout
    deployment.send_signal(signal.SIGINT)
    assert deployment.wait(60) == 0
    assert (tmp_path / "runs" / "secure" / "report.html").exists()


def test_keys_and_checks_for_several_hosts(tmp_path: Path) -> None:
    _, keys = commands("goldfish flower keys new")
    done = goldfish_here(tmp_path, *keys[1:])
    assert done.returncode == 0, done.stderr
    made = {path.name for path in (tmp_path / "federation").iterdir()}
    named = re.findall(r"`(ca\.\w+|server\.\w+|superexec\.\w+|node-1\.\w+|runtime-1\.\w+)`", PAGE)
    assert {"ca.crt", "ca.key", "server.key", "superexec.secret", "node-1.key"} <= set(named)
    assert set(named) <= made


@pytest.mark.parametrize("unit", blocks("ini"))
def test_unit_files_start_commands_with_options_that_exist(unit: str, tmp_path: Path) -> None:
    (start,) = re.findall(r"^ExecStart=(.*?[^\\])$", unit, re.DOTALL | re.MULTILINE)
    program, *options = shlex.split(start.replace("\\\n", " "))
    help_text = help_of(Path(program).name)
    named = [option for option in options if option.startswith("--")]
    assert len(named) >= 3
    for option in named:
        assert f"{option} " in help_text or f"{option}\n" in help_text, option
    if shutil.which("systemd-analyze"):
        path = tmp_path / "goldfish-test.service"
        path.write_text(unit.replace("/opt/goldfish/bin/", f"{Path(executable('flwr')).parent}/"))
        done = subprocess.run(
            ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_there_are_unit_files_for_server_and_client() -> None:
    names = re.findall(r"`/etc/systemd/system/(goldfish-\w+)\.service`", PAGE)
    assert names == ["goldfish-superlink", "goldfish-superexec", "goldfish-node", "goldfish-work"]
    assert len(blocks("ini")) == 4


@pytest.mark.parametrize("unit", blocks("ini"))
def test_units_keep_their_state_to_themselves(unit: str) -> None:
    assert {"StateDirectoryMode=0700", "UMask=0077"} <= set(unit.splitlines())


def test_a_run_on_the_server_writes_where_its_unit_may() -> None:
    (command,) = commands("/opt/goldfish/bin/goldfish run", "sh")
    assert Path(command[command.index("--out") + 1]).is_relative_to("/var/lib/goldfish")
    units = [unit for unit in blocks("ini") if "flower-superexec" in unit]
    assert ["ProtectSystem=strict" in unit for unit in units] == [True, True]


def test_a_node_gives_its_work_to_its_own_superexec_alone() -> None:
    """The same secret and certificate in both units, and the node's certificate is its own root."""
    node, work = blocks("ini")[2:]
    assert "--isolation process" in node
    for unit in (node, work):
        assert "--superexec-auth-secret-file /etc/goldfish/runtime-1.secret" in unit
    assert "--ssl-certfile /etc/goldfish/runtime-1.crt" in node
    assert "--root-certificates /etc/goldfish/runtime-1.crt" in work


def test_one_run_is_forgotten_by_hand(tmp_path: Path) -> None:
    store_id(tmp_path)
    scripts = [script for _, _, script in commands("sqlite3", "sh")]
    assert len(scripts) == 3
    with contextlib.closing(sqlite3.connect(tmp_path / "client.sqlite")) as db:
        for run in ("NAME", "other"):
            db.execute("INSERT INTO state (run, key, bytes) VALUES (?, 'a', 1)", [run])
            db.execute("INSERT INTO answers VALUES (?, 'c', 'p', 't', 'd', '', '')", [run])
            db.execute("INSERT INTO cache VALUES (?, 'c', 'k', 'f', 'd')", [run])
        db.executescript(";".join(scripts))
        for table in ("state", "answers", "cache"):
            assert list(db.execute(f"SELECT run FROM {table}")) == [("other",)]


def test_the_nodes_settings_are_those_that_a_node_takes() -> None:
    section = PAGE.partition("### A node's settings")[2].partition("\n### ")[0]
    named = set(re.findall(r"^\| `([\w-]+)=", section, re.MULTILINE))
    assert named == set(KNOWN) - {"num-partitions"}


def test_flower_takes_the_app_folder(tmp_path: Path) -> None:
    """Flower itself builds the folder of ``init``, with the experiment in it."""
    assert goldfish_here(tmp_path, "flower", "init", "trial").returncode == 0
    again = goldfish_here(tmp_path, "flower", "init", "trial")
    assert again.returncode == 1
    assert "exists and is not empty" in again.stderr
    done = subprocess.run(
        [executable("flwr"), "build", "--app", "trial"],
        cwd=tmp_path,
        env={**os.environ, "FLWR_HOME": str(tmp_path / "home"), "FLWR_TELEMETRY_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (fab,) = tmp_path.glob("**/*.fab")
    assert "config.toml" in zipfile.ZipFile(fab).namelist()
