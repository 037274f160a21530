"""Checkpoints and run directories: whole, readable, and never overwritten by another run."""

from __future__ import annotations

import json
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from goldfish.errors import StoreError
from goldfish.files import append_line, write_whole
from goldfish.params import digest
from goldfish.results import Record
from goldfish.store import (
    Checkpoint,
    RunDirectory,
    load_checkpoint,
    run_id_of,
    save_checkpoint,
)
from goldfish.types import HistoryEntry, Scalar, Update

PARAMS = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}
CONFIG = 'seed = 0\n\n[training]\nrounds = 20\nschedule = "constant"\n'


def record(number: int) -> Record:
    return Record(round=number, accuracy=90.0, loss=0.1, mse=0.01)


def opened(path: Path, config: str, *, resume: bool) -> RunDirectory:
    """Open a run, and let go of it again."""
    with RunDirectory.open(path, config, resume=resume) as run:
        return run


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    shared = {"w": PARAMS["w"]}  # the same tensor under two keys, as equation (10) leaves it
    states = {'odd "name"/|': {"origin/shard-0": shared, "origin/shard-1": shared}}
    path = tmp_path / "deep" / "goldfish.safetensors"
    save_checkpoint(path, Checkpoint(7, PARAMS, states, final=True))
    back = load_checkpoint(path)
    assert (back.round, back.final) == (7, True)
    assert digest(back.params) == digest(PARAMS)
    assert back.states.keys() == states.keys()
    assert digest(back.states['odd "name"/|']["origin/shard-1"]) == digest(shared)


def test_a_checkpoint_without_states_is_a_plain_state_dict(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, Checkpoint(1, PARAMS))
    assert digest(load_file(path)) == digest(PARAMS)


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_broken_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "origin.safetensors"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"origin\.safetensors cannot be read.*Delete it"):
        load_checkpoint(path)


def test_files_appear_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_whole(path, "old")

    def crash(_descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(StoreError, match="cannot be written: disk full"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_power_loss_takes_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is synced, then renamed, then its folder is synced; so are the folders above."""
    done: list[str] = []
    replace, sync = Path.replace, os.fsync

    def note_sync(descriptor: int) -> None:
        done.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def note_replace(path: Path, target: Path) -> Path:
        done.append(f"rename {target.name}")
        return replace(path, target)

    monkeypatch.setattr("os.fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    (tmp_path / "top").mkdir()
    write_whole(tmp_path / "top" / "a" / "b" / "file", "content")
    part = f"sync .file.{os.getpid()}.part"
    assert done == ["sync top", "sync a", part, "rename file", "sync b"]
    done.clear()
    for line in ("one", "two"):
        append_line(tmp_path / "top" / "lines", line)
    assert done == ["sync lines", "sync top", "sync lines"]


def hold(place: Path, held: Connection) -> None:
    """Open a run in a process of its own, and hold it until it is told to end."""
    with RunDirectory.open(place, CONFIG, resume=True):
        held.send(os.getpid())
        held.recv()


def test_one_process_at_a_time_and_no_lock_outlives_it(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("fork")
    for ending in ("ends", "is killed"):
        here, there = processes.Pipe()
        other = processes.Process(target=hold, args=(tmp_path / "run", there))
        other.start()
        try:
            message = rf"run is in use by another command \(process {here.recv()}\)\. Wait"
            with pytest.raises(StoreError, match=message):
                opened(tmp_path / "run", CONFIG, resume=True)
        finally:
            here.send("end") if ending == "ends" else other.kill()
            other.join(20)
        opened(tmp_path / "run", CONFIG, resume=True)


def test_another_configuration_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    run = opened(tmp_path / "run", CONFIG, resume=False)
    other = CONFIG.replace("20", "5")
    message = r"training\.rounds is 20 there and 5 here.*choose another --out"
    for resume in (False, True):
        with pytest.raises(StoreError, match=message):
            opened(run.path, other, resume=resume)
    assert (run.path / "config.toml").read_text() == CONFIG


def test_the_same_run_needs_resume(tmp_path: Path) -> None:
    run = opened(tmp_path / "run", CONFIG, resume=False)
    with pytest.raises(StoreError, match=r"was interrupted.*--resume"):
        opened(run.path, CONFIG, resume=False)
    run.write_json("result.json", {})
    with pytest.raises(StoreError, match=r"finished.*--resume"):
        opened(run.path, CONFIG, resume=False)
    assert opened(run.path, CONFIG, resume=True).path == run.path


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match="is not a run directory"):
        opened(tmp_path, CONFIG, resume=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_metrics_of_rounds_without_a_checkpoint_are_dropped(tmp_path: Path) -> None:
    """Killed after the line of round 2 and before its checkpoint, in the middle of a third line."""
    run = opened(tmp_path / "run", CONFIG, resume=False)
    run.save("origin", Checkpoint(1, PARAMS, final=True), record(1))
    run.save("goldfish", Checkpoint(1, PARAMS), record(1))
    metrics = run.path / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write(json.dumps({"phase": "goldfish", "round": 2}) + '\n{"phase": "gold')
    checkpoint, records = run.load("goldfish")
    assert checkpoint is not None
    assert checkpoint.round == 1
    assert records == [record(1)]
    phases = [json.loads(line)["phase"] for line in metrics.read_text().splitlines()]
    assert phases == ["origin", "goldfish"]


def test_nan_never_reaches_a_result(tmp_path: Path) -> None:
    run = opened(tmp_path / "run", CONFIG, resume=False)
    with pytest.raises(ValueError, match="Out of range float"):
        run.write_json("result.json", {"accuracy": float("nan")})
    assert not (run.path / "result.json").exists()


def test_a_line_of_metrics_with_other_fields_is_refused_in_words(tmp_path: Path) -> None:
    run = opened(tmp_path / "run", CONFIG, resume=False)
    run.save("origin", Checkpoint(1, PARAMS), record(1))
    metrics = run.path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"mse"', '"mean_square"'))
    with pytest.raises(StoreError, match=r"rounds of origin.*cannot read \(mse: Field required\)"):
        run.load("origin")


def test_metrics_that_lack_a_round_are_refused(tmp_path: Path) -> None:
    run = opened(tmp_path / "run", CONFIG, resume=False)
    for index in (1, 2, 3):
        run.save("origin", Checkpoint(index, PARAMS), record(index))
    metrics = run.path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(lines[0] + lines[2])
    with pytest.raises(StoreError, match="lacks rounds of origin"):
        run.load("origin")


def test_what_the_bits_depend_on_is_pinned(tmp_path: Path) -> None:
    run = opened(tmp_path / "run", CONFIG, resume=False)
    run.pin({"threads": 1, "deletion": "abc"})
    run.pin({"threads": 1, "deletion": "abc"})
    with pytest.raises(StoreError, match=r"another threads \(1, now 2\)"):
        run.pin({"threads": 2, "deletion": "abc"})


HERE = {"device": "cpu", "torch": "2.13.0"}
THERE = {"device": "cuda (NVIDIA H200)", "torch": "2.13.0"}


def test_a_run_that_goes_on_elsewhere_asks_first_and_remembers(tmp_path: Path) -> None:
    run = opened(tmp_path / "run", CONFIG, resume=False)
    run.pin({"threads": 1})
    assert run.pin_machine(HERE, elsewhere=False) == []
    assert run.pin_machine(HERE, elsewhere=True) == []
    before = (run.path / "pinned.json").read_bytes()
    message = r"device was cpu and is cuda \(NVIDIA H200\) here\).*--elsewhere goes on here"
    with pytest.raises(StoreError, match=message):
        run.pin_machine(THERE, elsewhere=False)
    assert (run.path / "pinned.json").read_bytes() == before
    assert run.pin_machine(THERE, elsewhere=True) == [HERE]
    assert run.pin_machine(THERE, elsewhere=False) == [HERE]
    assert run.pin_machine(HERE, elsewhere=True) == [HERE, THERE]
    run.pin({"threads": 1})


def test_a_run_from_before_machines_were_pinned_goes_on(tmp_path: Path) -> None:
    run = opened(tmp_path / "run", CONFIG, resume=False)
    run.pin({"threads": 1})
    assert run.pin_machine(THERE, elsewhere=False) == []
    with pytest.raises(StoreError, match="was begun elsewhere"):
        run.pin_machine(HERE, elsewhere=False)


def test_a_lost_or_strange_history_file_says_what_to_delete(tmp_path: Path) -> None:
    run = opened(tmp_path / "run", CONFIG, resume=False)
    update = Update("client-1", PARAMS, 5, {})
    run.save_history(HistoryEntry(1, PARAMS, [update]))
    assert run.load_history(1).updates[0].num_examples == 5
    path = tmp_path / "run" / "history" / "round-0003.safetensors"
    other_round = (path.parent / "round-0001.safetensors").read_bytes()
    save_checkpoint(path, Checkpoint(3, PARAMS, memo={"client-1": 5}))
    no_update = path.read_bytes()
    half = {"client-1": {"update": {"w": PARAMS["w"]}}}
    save_checkpoint(path, Checkpoint(3, PARAMS, half, memo={"client-1": 5}))
    for content in (None, b"", b"\xff" * 20, other_round, no_update, path.read_bytes()):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(StoreError, match=r"Delete .*origin\.safetensors"):
            run.load_history(3)


def test_lost_or_strange_facts_are_never_made_up(tmp_path: Path) -> None:
    """A run with a model must know what it began with: otherwise the rest has other bits."""
    run = opened(tmp_path / "run", CONFIG, resume=False)
    assert len(run_id_of(run.path)) == 32
    facts: dict[str, Scalar] = {"run": "abc", "threads": 1}
    run.pin(facts)
    run.save("origin", Checkpoint(1, PARAMS), record(1))
    assert run_id_of(run.path) == "abc"
    path = run.path / "pinned.json"
    broken = [None, "", "[]", "7", "\udcff", "{", "[" * 5000, '{"run": "abc"}', '{"run": null}']
    broken.append('{"run": "abc", "threads": 1, "machines_before": [3]}')
    broken.append('{"run": "abc", "threads": 1, "machines_before": 3}')
    for content in broken:
        path.unlink() if content is None else path.write_bytes(
            content.encode(errors="surrogateescape")
        )
        with pytest.raises(StoreError, match=r"pinned\.json.*cannot be read.*other bits"):
            run.pin(facts)
    with pytest.raises(StoreError, match="cannot be read"):
        run.pin_machine({"device": "cpu"}, elsewhere=True)


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"7", b'{"phase": "origin"}', b'{"phase": 1, "round": 1}', b"\xff", b"{"]
)
def test_metrics_that_cannot_be_read_stay_as_they_are(tmp_path: Path, line: bytes) -> None:
    """A broken line in the middle was once taken for the end: what followed it was deleted."""
    run = opened(tmp_path / "run", CONFIG, resume=False)
    for index in (1, 2, 3):
        run.save("origin", Checkpoint(index, PARAMS), record(index))
    metrics = run.path / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([lines[0], line + b"\n", *lines[1:]]))
    before = metrics.read_bytes()
    with pytest.raises(StoreError, match=r"metrics\.jsonl cannot be read: line 2 is no record"):
        run.load("origin")
    assert metrics.read_bytes() == before
    metrics.write_bytes(lines[0])
    with pytest.raises(StoreError, match="lacks rounds of origin"):
        run.load("origin")
    assert metrics.read_bytes() == lines[0]


def test_a_run_goes_on_whatever_the_text_of_its_configuration_looks_like(tmp_path: Path) -> None:
    """Values are compared: runs from before another way of writing them go on."""
    before = 'seed = 0\n\n[data]\nmembers = ["a", "b"]\n\n[deletion]\nrate = 0.1\nthen = []\n'
    now = 'seed = 0\n\n[data]\nmembers = [\n    "a",\n    "b",\n]\n\n[deletion]\nrate = 1e-1\n'
    now += "then = []\n"
    run = opened(tmp_path / "run", before, resume=False)
    opened(run.path, now, resume=True)
    assert (run.path / "config.toml").read_text() == before
    with pytest.raises(StoreError, match=r"data\.members is \['a', 'b'\] there and \['a'\] here"):
        opened(run.path, now.replace('    "b",\n', ""), resume=True)


def test_the_seeds_of_a_run_count(tmp_path: Path) -> None:
    run = opened(tmp_path / "run", f"# seeds = [0, 1]\n{CONFIG}", resume=False)
    opened(run.path, f"# seeds = [0, 1]\n{CONFIG}", resume=True)
    with pytest.raises(StoreError, match=r"seeds is \[0, 1\] there and \[0\] here"):
        opened(run.path, f"# seeds = [0]\n{CONFIG}", resume=True)
    with pytest.raises(StoreError, match=r"seeds is \[0, 1\] there and not set here"):
        opened(run.path, CONFIG, resume=True)


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = opened(tmp_path / "run", CONFIG, resume=False)
    (run.path / "config.toml").write_text('[data]\npath = "\\ud83d\\udc1f"\n')
    with pytest.raises(StoreError, match=r"config\.toml.*cannot be read.*choose another --out"):
        opened(run.path, CONFIG, resume=True)
