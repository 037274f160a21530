"""A ledger on each database: SQLite, and a real PostgreSQL server that the tests start."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from goldfish.project.ledger import Ledger


def _server_programs() -> Path | None:
    """Return the folder of the newest PostgreSQL server of this machine."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[Path]:
    """A PostgreSQL server on a Unix socket in a folder of its own; it refuses to run as root."""
    programs = _server_programs()
    if programs is None:
        pytest.skip("There is no PostgreSQL server here (Debian: apt-get install postgresql).")
    as_user: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="goldfish-pg-", dir="/tmp"))
    try:
        if os.geteuid() == 0:
            names = {entry.pw_name for entry in pwd.getpwall()}
            user = "postgres" if "postgres" in names else "nobody"
            if shutil.which("runuser") is None:
                pytest.skip("PostgreSQL does not run as root, and there is no runuser here.")
            as_user = ["runuser", "-u", user, "--"]
            shutil.chown(folder, user)
        data = folder / "data"

        def call(program: str, *arguments: str) -> None:
            command = [*as_user, str(programs / program), "-D", str(data), *arguments]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)

        call("initdb", "-U", "goldfish", "-A", "trust", "--no-sync", "--no-instructions")
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
        call("pg_ctl", "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield folder
        finally:
            call("pg_ctl", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a new, empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    import psycopg

    folder = request.getfixturevalue("postgres")
    name = f"t{abs(hash(str(tmp_path))):x}"
    about = f"host={folder} user=goldfish dbname=postgres"
    with contextlib.closing(psycopg.connect(about, autocommit=True)) as server:
        server.execute(f"CREATE DATABASE {name}")
    return f"postgresql://goldfish@/{name}?host={folder}"


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """A new ledger, on each database."""
    with Ledger.open(url) as opened:
        yield opened


@pytest.fixture
def sqlite_ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A new ledger where the database does not matter."""
    with Ledger.open(tmp_path / "ledger.db") as opened:
        yield opened
