"""A run directory: configuration, manifest, metrics, checkpoints, results."""

from __future__ import annotations

import json
import tomllib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from pydantic import ValidationError

from goldfish.errors import StoreError
from goldfish.files import append_line, claim, write_whole
from goldfish.params import shapes_of
from goldfish.results import ORIGIN, Record, in_words
from goldfish.store.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from goldfish.types import HistoryEntry, Scalar, Update

CONFIG, METRICS, RESULT, PINNED = "config.toml", "metrics.jsonl", "result.json", "pinned.json"
CHECKPOINTS, LOCK = "checkpoints", "lock"
"""The folder of the models, and the file that is held by the one process that writes there."""
BEFORE = "machines_before"
"""The name under which the machines stand that a run was on earlier."""


def run_id_of(path: Path) -> str:
    """Return the name under which clients keep what belongs to the run in this directory.

    It is random, and pinned by the run when it starts: another run never finds the same.
    """
    return str(RunDirectory(path).pinned(["run"]).get("run") or uuid.uuid4().hex)


class KeptHistory(Mapping[int, HistoryEntry]):
    """The kept rounds of a training, read from disk one at a time."""

    def __init__(self, run: RunDirectory, rounds: Iterable[int]) -> None:
        self._run = run
        self._rounds = sorted(rounds)

    def __getitem__(self, index: int) -> HistoryEntry:
        if index not in self._rounds:
            raise KeyError(index)
        return self._run.load_history(index)

    def __contains__(self, index: object) -> bool:
        return index in self._rounds

    def __iter__(self) -> Iterator[int]:
        return iter(self._rounds)

    def __len__(self) -> int:
        return len(self._rounds)


class RunDirectory:
    """The files of one run. Use :meth:`open` to start one or to go on with it.

    A context manager: no other process can open the run until it ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._lock is not None:
            self._lock.close()

    @classmethod
    def open(cls, path: Path, config: str, *, resume: bool) -> RunDirectory:
        """Start a run, or go on with one that has exactly this configuration.

        ``config`` is the full resolved configuration as TOML. A directory that holds another
        configuration, or files that are not a run, is refused.
        """
        run = cls(path)
        if path.exists() and not (path / CONFIG).exists() and not _is_empty(path):
            raise StoreError(f"{path} exists and is not a run directory. Choose another --out.")
        run._lock = claim(path / LOCK)
        try:
            run._begin(config, resume=resume)
        except BaseException:
            run._lock.close()
            raise
        return run

    def _begin(self, config: str, *, resume: bool) -> None:
        written = self.path / CONFIG
        if not written.exists():
            write_whole(written, config)
            return
        try:
            there = _settings(written.read_text("utf-8-sig"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise StoreError(
                f"{written}, the configuration of a run, cannot be read: {error}. Mend it, or "
                "choose another --out."
            ) from error
        difference = first_difference(there, _settings(config))
        if difference is not None:
            raise StoreError(
                f"{self.path} belongs to another configuration ({difference}). It was left as it "
                "is: choose another --out."
            )
        if not resume:
            state = "finished" if (self.path / RESULT).exists() else "was interrupted"
            raise StoreError(
                f"{self.path} already holds this run, which {state}. Add --resume to go on with "
                "it, or choose another --out."
            )
        for left_over in self.path.rglob(".*.part"):
            left_over.unlink()  # it was being written when the run was killed

    def save(self, phase: str, checkpoint: Checkpoint, record: Record) -> None:
        """Keep a finished round: its line in the metrics, then its checkpoint."""
        line = {"phase": phase, **record.model_dump(exclude={"std"})}
        append_line(self.path / METRICS, json.dumps(line))
        save_checkpoint(self.checkpoint_path(phase), checkpoint)

    def load(self, phase: str) -> tuple[Checkpoint | None, list[Record]]:
        """Return the last checkpoint of a phase and the metrics up to it.

        Lines of rounds that have no checkpoint (the run was killed between the two) are dropped.
        """
        path = self.checkpoint_path(phase)
        checkpoint = load_checkpoint(path) if path.exists() else None
        last = checkpoint.round if checkpoint else 0
        records = [r for r in self._records() if r["phase"] != phase or r["round"] <= last]
        own = [r for r in records if r["phase"] == phase]
        if [r["round"] for r in own] != list(range(1, last + 1)):
            raise StoreError(
                f"{self.path / METRICS} lacks rounds of {phase}. Delete {path}: the run then "
                "starts this phase again."
            )
        try:
            found = [Record(**{k: v for k, v in r.items() if k != "phase"}) for r in own]
        except ValidationError as error:
            raise StoreError(
                f"{self.path / METRICS} has rounds of {phase} that this version cannot read "
                f"({in_words(error)}). Use the version that wrote it, or choose another --out."
            ) from None
        write_whole(self.path / METRICS, "".join(json.dumps(r) + "\n" for r in records))
        return checkpoint, found

    def save_history(self, entry: HistoryEntry) -> None:
        """Keep what methods need of a training round: its start and every client's update."""
        updates = {u.client_id: {"update": u.params} for u in entry.updates}
        sizes: dict[str, Scalar] = {u.client_id: u.num_examples for u in entry.updates}
        kept = Checkpoint(entry.index, entry.start, updates, memo=sizes)
        save_checkpoint(self._history_path(entry.index), kept)

    def load_history(self, index: int) -> HistoryEntry:
        """Read a kept training round back."""
        path = self._history_path(index)
        try:
            kept = load_checkpoint(path)
            updates = [
                Update(client_id, kept.states[client_id]["update"], int(size), {})
                for client_id, size in kept.memo.items()
            ]
            if kept.round != index or any(
                shapes_of(u.params) != shapes_of(kept.params) for u in updates
            ):
                raise ValueError("it holds something else")  # noqa: TRY301
        except (StoreError, KeyError, ValueError, TypeError, OverflowError) as error:
            raise StoreError(
                f"{path}, the updates of a round that are kept for a method, cannot be read "
                f"({error}). Delete {self.checkpoint_path(ORIGIN)}: the run then trains and "
                "records it again."
            ) from error
        return HistoryEntry(index, kept.params, updates)

    def _history_path(self, index: int) -> Path:
        return self.path / "history" / f"round-{index:04}.safetensors"

    def pinned(self, names: Iterable[str]) -> dict[str, Any]:
        """Return what is pinned; a run that has models, and not all of ``names``, is refused."""
        path = self.path / PINNED
        begun = any((self.path / name).exists() for name in (METRICS, CHECKPOINTS))
        if not begun and not path.exists():
            return {}
        try:
            facts: dict[str, Any] = json.loads(path.read_bytes())
            lost = [name for name in names if begun and not isinstance(facts[name], Scalar)]
            if lost or not all(isinstance(place, dict) for place in facts.get(BEFORE, [])):
                raise TypeError(f"{lost or BEFORE} is not as it was written")  # noqa: TRY301
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"{path}, which says what the run began with, cannot be read "
                f"({type(error).__name__}: {error}). Without it the rest might get other bits: "
                "put it back from a backup, or start the run anew with another --out."
            ) from error
        return facts

    def pin(self, facts: Mapping[str, Scalar]) -> None:
        """Remember what the run's bits depend on beside its configuration; refuse other facts."""
        before = self.pinned(facts)
        if not before.keys() >= facts.keys():
            before = {**facts, **before}
            self.write_json(PINNED, before)
        for name, value in facts.items():
            if before.get(name) != value:
                raise StoreError(
                    f"{self.path} was started with another {name} ({before.get(name)}, now "
                    f"{value}). Use the same, or choose another --out."
                )

    def pin_machine(
        self, facts: Mapping[str, Scalar], *, elsewhere: bool
    ) -> Sequence[Mapping[str, Scalar]]:
        """Remember the machine that the run is on; return the others that it was on before.

        ``facts`` are what the last bits depend on there. Another machine than before is refused
        unless ``elsewhere`` says that the run may go on there.
        """
        pinned = self.pinned(facts)
        last = {name: pinned[name] for name in facts if name in pinned}
        changed = [name for name in last if last[name] != facts[name]]
        before: list[Mapping[str, Scalar]] = pinned.get(BEFORE, [])
        if changed and not elsewhere:
            words = "; ".join(f"{n} was {last[n]} and is {facts[n]} here" for n in changed)
            raise StoreError(
                f"{self.path} was begun elsewhere ({words}), so the rest would not get the bits "
                "that it gets there. Go on there, or choose the same device with --device; "
                "--elsewhere goes on here, and the result says so."
            )
        if changed:
            before = [*before, last]
        if changed or len(last) < len(facts):
            self.write_json(PINNED, {**pinned, **facts, **({BEFORE: before} if before else {})})
        return before

    def checkpoint_path(self, phase: str) -> Path:
        """Return where a phase's checkpoint lies."""
        return self.path / CHECKPOINTS / f"{phase}.safetensors"

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file of the run."""
        write_whole(self.path / name, json.dumps(value, indent=1, allow_nan=False) + "\n")

    def _records(self) -> list[dict[str, Any]]:
        """Return all lines of the metrics but one at the end that was never finished."""
        path = self.path / METRICS
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error}.") from error
        records = []
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                break  # it was being written when the run was killed
            try:
                record = json.loads(line)
                if not isinstance(record["phase"], str) or type(record["round"]) is not int:
                    raise TypeError("phase and round are missing")  # noqa: TRY301
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise StoreError(
                    f"{path} cannot be read: line {number} is no record of a round ({error}). Put "
                    "the file back from a backup, or start the run anew with another --out."
                ) from error
            records.append(record)
        return records


def _is_empty(path: Path) -> bool:
    """Tell whether a folder holds nothing, or the lock of a run that had not begun."""
    return path.is_dir() and all(entry.name == LOCK for entry in path.iterdir())


def first_difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Say which setting of two configurations differs, by its full name; None if none does."""
    there, here = dict(_flat(there, "")), dict(_flat(here, ""))
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            was, now = (repr(s[name]) if name in s else "not set" for s in (there, here))
            return f"{name} is {was} there and {now} here"
    return None


def _settings(text: str) -> dict[str, Any]:
    """Return a configuration as tables.

    The seeds of a run of several stand in a comment at the top, and count.
    """
    return tomllib.loads(text.removeprefix("# "))


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
