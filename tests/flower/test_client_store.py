"""What a client keeps: answers and state together or not at all, bounded, and its own."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from goldfish.cli import app
from goldfish.errors import StoreError
from goldfish.flower import client_store as stores
from goldfish.flower import wire
from goldfish.flower.client_store import ClientStore, store_id
from goldfish.methods import fedavg
from goldfish.params import digest
from goldfish.settings import Settings
from goldfish.types import Constant, Context, Params, Task, Update


def model(value: float) -> Params:
    return {"weight": torch.full((3,), value)}


def order(
    phase: str = "origin",
    index: int = 1,
    *,
    run: str = "run-1",
    start: float = 0.0,
    teacher: float | None = None,
) -> wire.Received:
    constants = {}
    if teacher is not None:
        constants["teacher"] = Constant(model(teacher), digest(model(teacher)))
    context, arrays = Context(phase=phase, round=index), {"model": model(start)}
    task = Task("client-1", fedavg.TRAIN, arrays, Settings(), context, constants=constants)
    sent = wire.Order.of(task, run, "setup")
    return wire.decode_order(wire.encode_order(sent, task, "setup", sent.kept))


METRICS = {"loss": 0.5, "steps": 1, "samples": 3}


def work(
    path: Path,
    this: wire.Received,
    changes: dict[str, float | None],
    reads: Sequence[str] = (),
    *,
    list_all: bool = False,
) -> dict[str, float]:
    """Carry a task out that reads and changes some entries; return what it read."""
    with ClientStore(path) as store:
        assert store.keep(this) == []
        state = store.state(this.order)
        found = {k: float(state.arrays[k]["weight"][0]) for k in reads if k in state.arrays}
        if list_all:
            found = {k: float(p["weight"][0]) for k, p in state.arrays.items()}
        for key, value in changes.items():
            if value is None:
                del state.arrays[key]
            else:
                state.arrays[key] = model(value)
        store.commit(this.order, Update("client-1", model(9.0), 3, METRICS), state)
    return found


def known(path: Path, this: wire.Received) -> wire.Answer | None:
    with ClientStore(path) as store:
        return store.answered(this.order)


def test_an_answer_is_found_again_by_the_same_order_alone(tmp_path: Path) -> None:
    assert known(tmp_path, order()) is None
    work(tmp_path, order(), {})
    again = known(tmp_path, order())
    assert again is not None
    assert (again.update.num_examples, again.update.metrics) == (3, METRICS)
    assert digest(again.update.params) == digest(model(9.0))
    assert known(tmp_path, order(start=1.0)) is None
    assert known(tmp_path, order(run="run-2")) is None


def test_a_round_finds_the_state_before_it_also_when_it_is_repeated(tmp_path: Path) -> None:
    """After a kill the server may repeat a round with other replies to start from."""
    work(tmp_path, order(index=1), {"origin/a": 1.0})
    assert work(tmp_path, order(index=2), {"origin/a": 2.0}, ["origin/a"]) == {"origin/a": 1.0}
    other = order(index=2, start=5.0)
    assert work(tmp_path, other, {"origin/a": 2.5}, ["origin/a"]) == {"origin/a": 1.0}
    assert work(tmp_path, order(index=3), {}, ["origin/a"]) == {"origin/a": 2.5}
    assert work(tmp_path, order(index=1), {}, ["origin/a"]) == {}
    assert work(tmp_path, order("goldfish"), {}, ["origin/a"]) == {}


def test_other_phases_and_other_runs(tmp_path: Path) -> None:
    work(tmp_path, order(index=4), {"origin/a": 1.0})
    assert work(tmp_path, order("goldfish", 1), {"goldfish/a": 2.0}, list_all=True) == {
        "origin/a": 1.0
    }
    assert work(tmp_path, order("goldfish", 1, run="run-2"), {}, list_all=True) == {}
    assert work(tmp_path, order("sisa", 1), {}, list_all=True) == {
        "origin/a": 1.0,
        "goldfish/a": 2.0,
    }


def test_an_answer_holds_as_long_as_what_was_read_is_the_same(tmp_path: Path) -> None:
    """A step that moves entries must be done again when those entries were made again."""
    sweep, keep = order("tuned/0.1", 1), order("tuned", 1)
    work(tmp_path, sweep, {"tuned/0.1/a": 1.0})
    work(tmp_path, keep, {"tuned/0.1/a": None, "tuned/a": 1.0}, list_all=True)
    assert known(tmp_path, keep) is not None
    with ClientStore(tmp_path) as store:
        assert list(store.state(order("tuned", 2).order).arrays) == ["tuned/a"]
    work(tmp_path, order("tuned/0.1", 1, start=2.0), {"tuned/0.1/a": 3.0})
    assert known(tmp_path, keep) is None


def test_nothing_is_changed_by_a_task_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(tmp_path, order(index=1), {"origin/a": 1.0})
    with monkeypatch.context() as patched:

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        patched.setattr(ClientStore, "_prune", fail)
        with pytest.raises(KeyboardInterrupt):
            work(tmp_path, order(index=2), {"origin/a": 2.0})
    assert known(tmp_path, order(index=2)) is None
    assert work(tmp_path, order(index=2), {}, ["origin/a"]) == {"origin/a": 1.0}


def test_a_constant_that_is_gone_is_asked_for(tmp_path: Path) -> None:
    full = order(teacher=1.0)
    with ClientStore(tmp_path) as store:
        assert store.keep(full) == []
        assert digest(store.constants(full.order)["teacher"].params) == digest(model(1.0))
        assert store.setup(full.order) == "setup"
    bare = replace(full, models={}, setup=None)
    with ClientStore(tmp_path) as store:
        assert store.keep(bare) == []
    for path in (tmp_path / "arrays").iterdir():
        path.unlink()
    with ClientStore(tmp_path) as store:
        assert store.keep(bare) == [full.order.constants["teacher"]]
    with ClientStore(tmp_path / "new") as store:
        assert store.keep(bare) == sorted([full.order.setup, full.order.constants["teacher"]])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def test_a_damaged_constant_is_asked_for_and_replaced(tmp_path: Path) -> None:
    full = order(teacher=1.0)
    bare = replace(full, models={}, setup=None)
    with ClientStore(tmp_path) as store:
        store.keep(full)
        truncate(tmp_path / "arrays" / f"{full.order.constants['teacher']}.safetensors")
        assert store.keep(bare) == [full.order.constants["teacher"]]
        assert store.keep(full) == store.keep(bare) == []
        assert digest(store.constants(bare.order)["teacher"].params) == digest(model(1.0))


def test_a_damaged_answer_is_worked_out_and_written_again(tmp_path: Path) -> None:
    work(tmp_path, order(), {})
    truncate(tmp_path / "arrays" / f"{digest(model(9.0))}.safetensors")
    assert known(tmp_path, order()) is None
    work(tmp_path, order(), {})
    assert known(tmp_path, order()) is not None


def test_damaged_cached_values_are_not_there(tmp_path: Path) -> None:
    logits = torch.arange(4.0)
    for index in (1, 2):
        with ClientStore(tmp_path) as store:
            store.keep(order(index=index))
            state = store.state(order(index=index).order)
            assert "logits" not in state.cache
            state.cache["logits"] = "print", logits
            store.commit(order(index=index).order, Update("client-1", {}, 0, METRICS), state)
            assert "logits" in store.state(order(index=3).order).cache
        truncate(tmp_path / "arrays" / f"{digest({'value': logits})}.safetensors")


def test_disks_do_not_fill(tmp_path: Path) -> None:
    for number in range(20):
        this = order(index=number + 1, run=f"run-{number // 4}", teacher=float(number))
        work(tmp_path, this, {"origin/a": 100.0 + number})
    files = len(list((tmp_path / "arrays").iterdir()))
    shard_models = 5 * 2  # of every run the last entry, and the one before it
    assert files <= stores.CONSTANTS_KEPT + stores.RUNS_KEPT + shard_models
    with contextlib.closing(sqlite3.connect(tmp_path / stores.DATABASE)) as database:
        assert database.execute("SELECT COUNT(*) FROM answers").fetchone() == (stores.RUNS_KEPT,)
        assert database.execute("SELECT COUNT(*) FROM done").fetchone() == (20,)


def test_what_was_never_finished_is_cleared_away(tmp_path: Path) -> None:
    work(tmp_path, order(), {})
    (tmp_path / "arrays" / ".abc.safetensors.17.part").write_bytes(b"half")
    work(tmp_path, order(index=2), {})
    assert not [path for path in (tmp_path / "arrays").iterdir() if path.suffix == ".part"]


def test_cached_values_come_back_with_their_fingerprints(tmp_path: Path) -> None:
    with ClientStore(tmp_path) as store:
        this = order()
        store.keep(this)
        state = store.state(this.order)
        assert state.cache.get("logits", ("", None)) == ("", None)
        state.cache["logits"] = "print", torch.arange(4.0)
        store.commit(this.order, Update("client-1", {}, 0, METRICS), state)
    with ClientStore(tmp_path) as store:
        fingerprint, value = store.state(order(index=2).order).cache["logits"]
    assert (fingerprint, value.tolist()) == ("print", [0.0, 1.0, 2.0, 3.0])


def test_a_state_dir_has_a_name_of_its_own(tmp_path: Path) -> None:
    assert store_id(tmp_path / "a") == store_id(tmp_path / "a") != store_id(tmp_path / "b")


def test_a_state_dir_that_cannot_be_used_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"The state-dir .*file cannot be used"):
        store_id(tmp_path / "file")
    store_id(tmp_path / "old")
    with contextlib.closing(sqlite3.connect(tmp_path / "old" / stores.DATABASE)) as database:
        database.execute("UPDATE about SET value = '0' WHERE name = 'schema'")
        database.commit()
    with pytest.raises(StoreError, match="written by another version of Goldfish"):
        store_id(tmp_path / "old")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / stores.DATABASE).write_text("no database, " * 100)
    with pytest.raises(StoreError, match="cannot be used"):
        store_id(tmp_path / "junk")


def test_a_damaged_array_is_said_to_be_so(tmp_path: Path) -> None:
    work(tmp_path, order(index=1), {"origin/a": 1.0})
    (tmp_path / "arrays" / f"{digest(model(1.0))}.safetensors").write_bytes(b"nonsense")
    with pytest.raises(StoreError, match="The client's state is damaged"):
        work(tmp_path, order(index=2), {}, ["origin/a"])


def test_nobody_else_can_read_what_a_client_keeps(tmp_path: Path) -> None:
    """Also in a state-dir that was there before, open to all, with what an earlier version left."""
    tmp_path.chmod(0o755)
    (tmp_path / "arrays").mkdir(mode=0o755)
    (tmp_path / "client.sqlite").touch(mode=0o644)
    before = os.umask(0o022)
    try:
        store_id(tmp_path)
        work(tmp_path, order(), {"origin/shard": 1.0})
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"arrays": 0o700, "client.sqlite": 0o600, "lock": 0o600}
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    store_id(tmp_path / "new")
    assert stat.S_IMODE((tmp_path / "new" / "client.sqlite").stat().st_mode) == 0o600


def test_a_clock_set_back_loses_no_stored_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its time the run that is going on would be the oldest of all, and be forgotten."""
    for number in range(stores.RUNS_KEPT):
        work(tmp_path, order(run=f"run-{number}", teacher=float(number)), {})
    monkeypatch.setattr("time.time", lambda: 1000.0)
    for index in (1, 2):
        this = order(index=index, run="run-now", teacher=99.0)
        work(tmp_path, this, {})
        assert known(tmp_path, this) is not None
        with ClientStore(tmp_path) as store:
            assert store.keep(this) == []
    assert known(tmp_path, order(run="run-0", teacher=0.0)) is None


def test_no_transaction_names_a_file_that_a_power_loss_can_take_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is synced after the last file got its name, and before the transaction ends."""
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        done.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def note_replace(path: Path, target: Path) -> Path:
        done.append("name")
        return replace(path, target)

    monkeypatch.setattr("os.fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    with ClientStore(tmp_path) as store:
        store._db.set_trace_callback(lambda sql: done.append(sql.split()[0]))
        for this in (order(index=1), order(index=2)):  # the second finds the files of the first
            done.clear()
            store.keep(this)
            state = store.state(this.order)
            state.arrays["origin/a"] = model(1.0)
            store.commit(this.order, Update("client-1", model(9.0), 3, METRICS), state)
            ends = [number for number, what in enumerate(done) if what == "COMMIT"]
            assert len(ends) == 2
            before = done[ends[0] : ends[1]]
            assert "sync arrays" in before
            assert "name" not in before[before.index("BEGIN") :]
            names = [number for number, what in enumerate(before) if what == "name"]
            synced = [number for number, what in enumerate(before) if what == "sync arrays"]
            assert synced[-1] > max(names, default=0)
        assert store._db.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA


def fill(path: Path) -> None:
    """Write more than there is room for."""
    with ClientStore(path) as store:
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {pages}")
        store.bury("client-1", [f"{number:0500}" for number in range(100)])


def test_a_full_disk_is_a_sentence_and_changes_nothing(tmp_path: Path) -> None:
    work(tmp_path, order(index=1), {"origin/a": 1.0})
    with pytest.raises(StoreError, match=r"state-dir .* cannot be used: database or disk is full"):
        fill(tmp_path)
    assert known(tmp_path, order(index=1)) is not None


def test_a_folder_that_is_no_state_dir_stays_as_it_is(tmp_path: Path) -> None:
    """Whoever looks for tombstones in a wrong folder must not take it for a client without any."""
    tmp_path.chmod(0o755)
    command = ["flower", "tombstones", str(tmp_path), "ward-a"]
    refused = CliRunner().invoke(app, command).exception
    assert f"{tmp_path} is no state-dir of a node" in str(refused)
    assert (list(tmp_path.iterdir()), tmp_path.stat().st_mode & 0o777) == ([], 0o755)
    with ClientStore(tmp_path) as store:
        store.bury("ward-b", ["scan-1"])
    assert CliRunner().invoke(app, command).output == f"{tmp_path} has no tombstone of ward-a.\n"
