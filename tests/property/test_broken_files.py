"""Whatever became of the files of a run, or of a node's settings: a result, or a sentence."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import resource
import shutil
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from goldfish.errors import ConfigError, GoldfishError
from goldfish.experiments.config import load_config, parse_config
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine, _read_filed, _read_partition
from goldfish.flower.node import KNOWN, Node
from goldfish.flower.progress import read_lines
from goldfish.report import write_report
from goldfish.store import RunDirectory, run_id_of

MACHINE = Machine(threads=1)
FILES = (
    "config.toml",
    "pinned.json",
    "metrics.jsonl",
    "requests.json",
    "partition.json",
    "history/round-0001.safetensors",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed before its last round."""
    folder = tmp_path_factory.mktemp("whole")
    draw = np.random.default_rng(0)
    data: dict[str, Any] = {}
    for half, count in (("train", 24), ("test", 12)):
        data[f"x_{half}"] = draw.integers(0, 256, (count, 4, 4, 1)).astype(np.uint8)
        data[f"y_{half}"] = draw.integers(0, 2, count)
    np.savez(folder / "images.npz", **data)
    config = parse_config(
        {
            "data": {"name": "npz", "path": str(folder / "images.npz"), "clients": 2},
            "model": {"name": "mlp", "options": {"hidden": 2}},
            "training": {"rounds": 2, "batch_size": 6},
            "deletion": {"rate": 0.1},
            "unlearning": {"methods": ["fed-eraser"], "rounds": 1},
        }
    )
    for _ in run_experiment(config, folder / "done", MACHINE):
        pass
    killed = shutil.copytree(folder / "done", folder / "killed")
    lines = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:9])
    (killed / "checkpoints" / "fed-eraser.safetensors").unlink()
    return folder


def damaged(content: bytes, draw: st.DataObject) -> bytes | None:
    """Return what may have become of a file; None: it is lost."""
    how = draw.draw(st.sampled_from(["lost", "cut", "flip", "other", "value", "again"]))
    place = draw.draw(st.integers(0, max(len(content) - 1, 0)))
    if how == "lost":
        return None
    if how == "cut":
        return content[:place]
    if how == "flip" and content:
        other = draw.draw(st.integers(1, 255))
        return content[:place] + bytes([content[place] ^ other]) + content[place + 1 :]
    if how == "value":
        with contextlib.suppress(ValueError):
            return changed_value(content, draw)
    if how == "again":
        return content[:place] + content
    return draw.draw(st.binary(max_size=40) | st.sampled_from([b"", b"\0" * 40, b"[" * 3000]))


def changed_value(content: bytes, draw: st.DataObject) -> bytes:
    """Return JSON, or a line of it, in which one value is another, or is lost."""
    head, _, rest = content.partition(b"\n")
    table = json.loads(head if rest else content)
    if not isinstance(table, dict) or not table:
        raise ValueError("no table")
    key = draw.draw(st.sampled_from(sorted(table)))
    if draw.draw(st.booleans()):
        del table[key]
    else:
        plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
        table[key] = draw.draw(plain | st.lists(plain, max_size=2) | st.just({"a": [{}]}))
    return json.dumps(table).encode() + (b"\n" + rest if rest else b"")


@contextlib.contextmanager
def spoiled(run: Path, name: str, draw: st.DataObject) -> Iterator[bytes | None]:
    """Damage a file of a run, and put it back afterwards."""
    path = run / name
    before = path.read_bytes() if path.exists() else b""
    content = damaged(before, draw)
    try:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        yield content
    finally:
        path.write_bytes(before)


READERS: dict[str, Callable[[Path], object]] = {
    "config.toml": lambda run: load_config(run / "config.toml"),
    "pinned.json": run_id_of,
    "metrics.jsonl": lambda run: RunDirectory(run).load("origin"),
    "requests.json": _read_filed,
    "partition.json": _read_partition,
    "history/round-0001.safetensors": lambda run: RunDirectory(run).load_history(1),
    "checkpoints/origin.safetensors": lambda run: RunDirectory(run).load("origin"),
    "flower.jsonl": lambda run: read_lines(run / "flower.jsonl", 0),
}


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(READERS)), draw=st.data())
def test_a_file_is_read_or_a_sentence_says_why_not(
    whole: Path, name: str, draw: st.DataObject
) -> None:
    run = whole / "done"
    with spoiled(run, name, draw), contextlib.suppress(GoldfishError):
        READERS[name](run)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), draw=st.data())
def test_a_run_goes_on_with_the_same_bits_or_says_why_not(
    whole: Path, name: str, draw: st.DataObject
) -> None:
    shutil.rmtree(whole / "copy", ignore_errors=True)
    run = shutil.copytree(whole / "killed", whole / "copy")
    config = load_config(run / "config.toml")
    with spoiled(run, name, draw):
        try:
            for _ in run_experiment(config, run, MACHINE, resume=True):
                pass
        except GoldfishError:
            return
    if not name.startswith("history"):  # what a flipped bit does to a number is not noticed
        models = [
            place / "checkpoints" / "fed-eraser.safetensors" for place in (run, whole / "done")
        ]
        assert models[0].read_bytes() == models[1].read_bytes()


def run_on_full_disk(whole: Path, out: Path, space: int, said: Connection) -> None:
    """Run where no file can grow beyond ``space`` bytes, as on a disk that is full by then."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (space, resource.RLIM_INFINITY))
    try:
        for _ in run_experiment(load_config(whole / "done" / "config.toml"), out, MACHINE):
            pass
        write_report(out)
        said.send("done")
    except BaseException as error:
        said.send(f"{type(error).__name__}: {error}")


def test_a_full_disk_is_a_sentence_and_the_run_goes_on_later(whole: Path, tmp_path: Path) -> None:
    processes = multiprocessing.get_context("forkserver")  # this process has threads
    processes.set_forkserver_preload(["goldfish.experiments.runner", "goldfish.report"])
    config = load_config(whole / "done" / "config.toml")
    files = sorted(path for path in (whole / "done").rglob("*") if path.is_file())
    for space in sorted({max(path.stat().st_size - 1, 0) for path in files}):
        here, there = processes.Pipe()
        out = tmp_path / str(space)
        child = processes.Process(target=run_on_full_disk, args=(whole, out, space, there))
        child.start()
        there.close()  # so that a child that dies is not waited for
        words = str(here.recv())
        child.join(20)
        assert words.startswith("StoreError: "), words
        assert "File too large" in words
        assert str(out) in words
        resume = (out / "config.toml").exists()
        for _ in run_experiment(config, out, MACHINE, resume=resume):
            pass
        for model in (out / "checkpoints").iterdir():
            assert model.read_bytes() == (whole / "done" / "checkpoints" / model.name).read_bytes()


VALUES = st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("a\0b")
SETTINGS = st.fixed_dictionaries({}, optional=dict.fromkeys((*KNOWN, "min_samples", ""), VALUES))


@settings(max_examples=300)
@given(SETTINGS)
def test_a_node_config_is_taken_or_refused_in_words(config: dict[str, Any]) -> None:
    try:
        node = Node.parse(config)
    except ConfigError:
        return
    assert node.min_samples >= 0
    assert node.client_id
