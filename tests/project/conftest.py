"""A small project with data whose samples have names, and a database for each ledger."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from goldfish.experiments.scenario import Machine
from goldfish.project.project import Project

MACHINE = Machine(workers=1)
COUNT = 60
SETTINGS = """
[data]
name = "npz"
path = "data.npz"
clients = 3

[model]
name = "mlp"
options = {{ hidden = 8 }}

[training]
rounds = 2
batch_size = 5
learning_rate = 0.05
{more}
"""


def write_data(path: Path, keep: Callable[[str], bool] = lambda _id: True) -> None:
    """Write images with a bright row for their class, and ids like no other text."""
    draw = np.random.default_rng(0)
    labels = np.arange(COUNT) % 3
    images = draw.integers(0, 60, (COUNT, 6, 6), dtype=np.uint8)
    images[np.arange(COUNT), labels] += 150
    unseen = draw.integers(0, 60, (COUNT // 2, 6, 6), dtype=np.uint8)
    unseen[np.arange(COUNT // 2), labels[::2]] += 150
    ids = np.array([f"patient-{place:03}-zq" for place in range(COUNT)])
    kept = np.array([keep(str(sample_id)) for sample_id in ids])
    np.savez(
        path,
        x_train=images[kept],
        y_train=labels[kept],
        ids_train=ids[kept],
        x_test=unseen,
        y_test=labels[::2],
    )


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A project that is not trained yet; its data lies outside of it."""
    with make_project(tmp_path / "project") as made:
        yield made


def make_project(folder: Path, more: str = "") -> Project:
    write_data(folder.parent / "data.npz")
    Project.init(folder)
    settings = SETTINGS.replace("data.npz", "../data.npz").format(more=more)
    (folder / "goldfish.toml").write_text(settings)
    return Project.open(folder)


@pytest.fixture
def trained(project: Project) -> Project:
    list(project.train(MACHINE))
    return project


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
