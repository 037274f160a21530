"""What a client keeps on its own disk: SQLite for the facts, safetensors for the arrays.

Every task is one transaction: its answer and the change of the client's state appear together or
not at all, so that a task which is repeated, because its answer was lost on the way, is answered
from here and changes nothing. Arrays are files named by their digest; they are written whole before
the transaction that names them, and those that nothing names any more are deleted after it. The
table ``done`` lists every step that was carried out, and when.

A state entry is kept with the phase and the round that wrote it. A task of round r finds what was
there before round r of its phase: after the server was killed it may ask for that round once more,
with other replies to start from, and must not find what the first attempt left. For that, of every
key the entry before the last task is kept too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import secrets
import sqlite3
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from goldfish.errors import StoreError
from goldfish.files import sync_folder, write_whole
from goldfish.flower.wire import Answer, Order, Received, pack
from goldfish.params import digest, num_bytes
from goldfish.types import ClientState, Constant, Params, Update

DATABASE = "client.sqlite"
HIDDEN = "sha256:"
"""How a tombstone begins that does not tell the id."""
SCHEMA = 1
CONSTANTS_KEPT = 6
"""So many constants and setups stay on disk, those used last; others are asked for again."""
RUNS_KEPT = 3
"""Answers and cached values stay for so many runs, those used last; shard models for all."""

_TABLES = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS kept (digest TEXT PRIMARY KEY, text TEXT, used REAL NOT NULL);
CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, used REAL NOT NULL);
CREATE TABLE IF NOT EXISTS done (
    at REAL, run TEXT, client TEXT, phase TEXT, round INTEGER, step TEXT, task TEXT);
CREATE TABLE IF NOT EXISTS answers (
    run TEXT, client TEXT, phase TEXT, task TEXT, digest TEXT NOT NULL, content TEXT NOT NULL,
    reads TEXT NOT NULL, PRIMARY KEY (run, client, phase));
CREATE TABLE IF NOT EXISTS state (
    number INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT, client TEXT, key TEXT,
    phase TEXT, round INTEGER, digest TEXT, bytes INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS state_of ON state (run, client, key);
CREATE TABLE IF NOT EXISTS tombstones (
    client TEXT, sample TEXT, at REAL NOT NULL, PRIMARY KEY (client, sample));
CREATE TABLE IF NOT EXISTS cache (
    run TEXT, client TEXT, key TEXT, fingerprint TEXT NOT NULL, digest TEXT NOT NULL,
    PRIMARY KEY (run, client, key));
"""

_CACHED = "value"


def store_id(path: Path) -> str:
    """Return a name that a state-dir was given once: two nodes with one name are one client."""
    with contextlib.closing(_connect(path)) as db:
        return _about(db, "id", uuid.uuid4().hex)


def _private(path: Path, *, folder: bool = False) -> Path:
    """Return a file or folder that exists and is its owner's alone, whoever made it before."""
    if folder:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    else:
        path.touch(mode=0o600)
    if path.stat().st_mode & 0o077:  # of an earlier version, or of a service manager
        path.chmod(0o700 if folder else 0o600)
    return path


def _connect(path: Path) -> sqlite3.Connection:
    try:
        _private(path, folder=True)
        _private(path / DATABASE)  # what SQLite writes beside it takes after it
        db = sqlite3.connect(path / DATABASE, timeout=60, isolation_level=None)
        db.executescript(f"PRAGMA synchronous = EXTRA; {_TABLES}")
        schema = _about(db, "schema", str(SCHEMA))
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"The state-dir {path} cannot be used: {error}.") from error
    if schema != str(SCHEMA):
        raise StoreError(
            f"The state-dir {path} was written by another version of Goldfish (format {schema}, "
            f"here {SCHEMA}). Use that version, or another state-dir."
        )
    return db


def _about(db: sqlite3.Connection, name: str, first: str) -> str:
    db.execute("INSERT OR IGNORE INTO about VALUES (?, ?)", [name, first])
    return str(db.execute("SELECT value FROM about WHERE name = ?", [name]).fetchone()[0])


class ClientStore:
    """A client's state directory; one task at a time uses it, others wait for their turn."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = path / "arrays"

    def __enter__(self) -> Self:
        try:
            _private(self.path, folder=True)
            _private(self._files, folder=True)
            self._lock = _private(self.path / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise StoreError(f"The state-dir {self.path} cannot be used: {error}.") from error
        self._db = _connect(self.path)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        self._db.close()
        self._lock.close()
        if isinstance(error, sqlite3.Error):  # such as a full disk
            raise StoreError(f"The state-dir {self.path} cannot be used: {error}.") from error

    def keep(self, received: Received) -> list[str]:
        """Keep the constants that came with an order; return the digests of those still missing."""
        now, order = self._now(), received.order
        rows: list[tuple[str, str | None, float]] = []
        for name in received.models.keys() & set(order.constants.values()):
            write_whole(self._file(name), pack(received.models[name]))
            rows.append((name, None, now))
        if received.setup is not None:
            rows.append((order.setup, received.setup, now))
        with self._transaction():
            self._db.executemany("REPLACE INTO kept VALUES (?, ?, ?)", rows)
        there = {row[0] for row in self._db.execute("SELECT digest FROM kept")}
        lost = {name for name in order.constants.values() if not self._readable(name)}
        return sorted((order.kept - there) | lost)

    def constants(self, order: Order) -> dict[str, Constant]:
        """Return the constants of an order, by name."""
        return {name: Constant(self._read(d), d) for name, d in order.constants.items()}

    def setup(self, order: Order) -> str:
        """Return the setup that an order names."""
        query = "SELECT text FROM kept WHERE digest = ?"
        return str(self._db.execute(query, [order.setup]).fetchone()[0])

    def answered(self, order: Order) -> Answer | None:
        """Return the answer to an order that was carried out before.

        It holds only as long as what the step had read of the client's state is as it was then.
        """
        row = self._db.execute(
            "SELECT digest, content, reads FROM answers "
            "WHERE run = ? AND client = ? AND phase = ? AND task = ?",
            [order.run, order.client_id, order.context.phase, order.id],
        ).fetchone()
        if row is None or not self._readable(row[0]):
            return None
        if json.loads(row[2]) != StoredArrays(self, self._visible(order)).again(row[2]):
            return None
        return Answer.read(row[1], lambda: self._read(row[0]))

    def state(self, order: Order) -> StoredState:
        """Return what the client kept before this round, read from disk where it is looked at."""
        query = "SELECT key, fingerprint, digest FROM cache WHERE run = ? AND client = ?"
        rows = self._db.execute(query, [order.run, order.client_id])
        cached = {key: (print_, name) for key, print_, name in rows if self._readable(name)}
        return StoredState(
            StoredArrays(self, self._visible(order)),
            StoredCache(self, cached),
            {s for s in self.tombstones(order.client_id) if not s.startswith(HIDDEN)},
        )

    def tombstones(self, client_id: str) -> list[str]:
        """Return the samples that the client was asked to remove: oldest first, then by name.

        Those that a project removed are there as :meth:`hidden` names them.
        """
        query = "SELECT sample FROM tombstones WHERE client = ? ORDER BY at, sample"
        return [sample for (sample,) in self._db.execute(query, [client_id])]

    def buried(self, client_id: str, samples: Iterable[str]) -> set[str]:
        """Return those of these samples that the client was asked to remove."""
        known = set(self.tombstones(client_id))
        secret = any(name.startswith(HIDDEN) for name in known)
        return {s for s in samples if s in known or (secret and self.hidden(s) in known)}

    def hidden(self, sample: str) -> str:
        """Return a name by which a sample is known again, and that does not tell its id."""
        salt = _about(self._db, "salt", secrets.token_hex(32))
        return HIDDEN + hmac.digest(bytes.fromhex(salt), sample.encode(), "sha256").hex()

    def bury(self, client_id: str, samples: Iterable[str]) -> None:
        """Remember samples that the client was asked to remove, whatever becomes of the task."""
        now = time.time()
        rows = [(client_id, sample, now) for sample in samples]
        if not rows:
            return
        with self._transaction():
            self._db.executemany("INSERT OR IGNORE INTO tombstones VALUES (?, ?, ?)", rows)

    def lift(self, client_id: str, samples: Iterable[str]) -> None:
        """Let the client use samples again."""
        named = [name for sample in samples for name in (sample, self.hidden(sample))]
        with self._transaction():
            self._db.executemany(
                "DELETE FROM tombstones WHERE client = ? AND sample = ?",
                [(client_id, name) for name in named],
            )

    def purge(self, order: Order, keep: Collection[str]) -> None:
        """Delete what the client keeps of a run, and every model that it was sent, for good.

        The shard models of the phases in ``keep`` stay, and so do tombstones.
        """
        own = [order.run, order.client_id]
        with self._transaction():
            for table in ("answers", "cache"):
                self._db.execute(f"DELETE FROM {table} WHERE run = ? AND client = ?", own)  # noqa: S608
            query = "SELECT number, key FROM state WHERE run = ? AND client = ?"
            for number, key in self._db.execute(query, own).fetchall():
                if key.partition("/")[0] not in keep:
                    self._db.execute("DELETE FROM state WHERE number = ?", [number])
            self._db.execute("DELETE FROM kept WHERE digest != ?", [order.setup])
        self._sweep()
        self._db.execute("VACUUM")  # no byte of a deleted row stays

    def commit(self, order: Order, update: Update, state: StoredState) -> Answer:
        """Keep the answer to an order and the change of the state, both or neither."""
        own, context = [order.run, order.client_id], order.context
        changed = {
            key: (None, 0) if params is None else (self._put(params), num_bytes(params))
            for key, params in state.arrays.changed.items()
        }
        cached = [
            (*own, key, fingerprint, self._put({_CACHED: value}))
            for key, (fingerprint, value) in state.cache.changed.items()
        ]
        result = self._put(update.params)
        with self._transaction():
            self._change_state(order, changed)
            self._db.executemany("REPLACE INTO cache VALUES (?, ?, ?, ?, ?)", cached)
            answer = Answer(order.id, update, self._bytes_kept(order))
            said, read = answer.message.model_dump_json(), state.arrays.reads()
            row = [*own, context.phase, order.id, result, said, read]
            self._db.execute("REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            done = [time.time(), *own, context.phase, context.round, order.step, order.id]
            self._db.execute("INSERT INTO done VALUES (?, ?, ?, ?, ?, ?, ?)", done)
            self._prune(order)
        self._sweep()
        return answer

    def _change_state(self, order: Order, changed: Mapping[str, tuple[str | None, int]]) -> None:
        """Replace what earlier attempts at this round, or at later ones, had written."""
        own, place = [order.run, order.client_id], [order.context.phase, order.context.round]
        self._db.execute(
            "DELETE FROM state WHERE run = ? AND client = ? AND phase = ? AND round >= ?",
            [*own, *place],
        )
        # Nothing goes back further than to before this round.
        self._db.execute(
            "DELETE FROM state WHERE run = ? AND client = ? AND number NOT IN "
            "(SELECT MAX(number) FROM state WHERE run = ? AND client = ? GROUP BY key)",
            own * 2,
        )
        self._db.executemany(
            "INSERT INTO state (run, client, key, phase, round, digest, bytes) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(*own, key, *place, name, size) for key, (name, size) in changed.items()],
        )

    def _visible(self, order: Order) -> dict[str, str]:
        """Return the digest of every state entry as it was before the order's round."""
        found: dict[str, str] = {}
        rows = self._db.execute(
            "SELECT key, digest FROM state WHERE run = ? AND client = ? "
            "AND NOT (phase = ? AND round >= ?) ORDER BY number",
            [order.run, order.client_id, order.context.phase, order.context.round],
        )
        for key, name in rows:
            if name is None:
                found.pop(key, None)
            else:
                found[key] = name
        return found

    def _bytes_kept(self, order: Order) -> int:
        """Return the bytes of all entries whose key begins with the order's phase."""
        query = "SELECT key, bytes FROM state WHERE run = ? AND client = ? ORDER BY number"
        sizes = dict(self._db.execute(query, [order.run, order.client_id]).fetchall())
        return sum(size for key, size in sizes.items() if key.startswith(f"{order.context.phase}/"))

    def _prune(self, order: Order) -> None:
        """Forget what nobody will ask for: disks do not fill."""
        now = self._now()
        self._db.execute("REPLACE INTO runs VALUES (?, ?)", [order.run, now])
        for table in ("answers", "cache"):
            self._db.execute(
                f"DELETE FROM {table} WHERE run NOT IN "  # noqa: S608
                "(SELECT run FROM runs ORDER BY used DESC LIMIT ?)",
                [RUNS_KEPT],
            )
        used = [(now, name) for name in order.kept]
        self._db.executemany("UPDATE kept SET used = ? WHERE digest = ?", used)
        self._db.execute(
            "DELETE FROM kept WHERE digest NOT IN "
            "(SELECT digest FROM kept ORDER BY used DESC LIMIT ?)",
            [CONSTANTS_KEPT],
        )

    def _sweep(self) -> None:
        """Delete the files that nothing names any more, and those that were never finished."""
        named = set()
        for table in ("kept", "answers", "state", "cache"):
            named |= {row[0] for row in self._db.execute(f"SELECT digest FROM {table}")}  # noqa: S608
        for path in self._files.iterdir():
            if path.stem not in named:
                path.unlink()

    def _now(self) -> float:
        """Return the time; after a clock was set back, a moment after all that was used before."""
        query = "SELECT MAX(used) FROM (SELECT used FROM runs UNION ALL SELECT used FROM kept)"
        (last,) = self._db.execute(query).fetchone()
        return max(time.time(), (last or 0.0) + 0.001)

    def _file(self, name: str) -> Path:
        return self._files / f"{name}.safetensors"

    def _put(self, params: Params) -> str:
        """Write a file unless there is one already that is not damaged; return its name."""
        name = digest(params)
        if self._readable(name):
            sync_folder(self._files)  # whoever wrote it may have been killed before he did that
        else:
            write_whole(self._file(name), pack(params))
        return name

    def _readable(self, name: str) -> bool:
        """Tell whether a file is there and whole; what it holds is not read."""
        try:
            with safe_open(self._file(name), "pt"):
                return True
        except (SafetensorError, OSError):
            return False

    def _read(self, name: str) -> Params:
        try:
            return load_file(self._file(name))
        except (SafetensorError, OSError) as error:
            raise StoreError(
                f"{self._file(name)} cannot be read: {error}. The client's state is damaged: put "
                "the state-dir back from a backup, or start the run anew."
            ) from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # SQLite goes back by itself when the disk is full
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


class StoredArrays(MutableMapping[str, Params]):
    """State entries on disk, read when looked at; remembers what was read and what was changed."""

    def __init__(self, store: ClientStore, digests: Mapping[str, str]) -> None:
        self._store = store
        self._digests = digests
        self._read: dict[str, str | None] = {}
        self._listed = False
        self.changed: dict[str, Params | None] = {}
        """New entries, and None for those that were deleted."""

    def __getitem__(self, key: str) -> Params:
        if key not in self:
            raise KeyError(key)
        changed = self.changed.get(key)
        return self._store._read(self._digests[key]) if changed is None else changed

    def __setitem__(self, key: str, params: Params) -> None:
        self.changed[key] = params

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self.changed[key] = None

    def __contains__(self, key: object) -> bool:
        if key in self.changed:
            return self.changed[str(key)] is not None
        self._read[str(key)] = self._digests.get(str(key))
        return key in self._digests

    def __iter__(self) -> Iterator[str]:
        self._listed = True
        keys = dict.fromkeys([*self._digests, *self.changed])
        return (key for key in keys if self.changed.get(key, ()) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def reads(self) -> str:
        """Return as text what was read: the digest of each entry, and all keys if listed."""
        keys = sorted(self._digests) if self._listed else None
        return json.dumps({"entries": self._read, "keys": keys}, sort_keys=True)

    def again(self, reads: str) -> Any:
        """Return what the same reading would find now."""
        before = json.loads(reads)
        entries = {key: self._digests.get(key) for key in before["entries"]}
        keys = None if before["keys"] is None else sorted(self._digests)
        return {"entries": entries, "keys": keys}


class StoredCache(MutableMapping[str, tuple[str, Tensor]]):
    """Values that can be computed again, on disk with the fingerprints of their inputs."""

    def __init__(self, store: ClientStore, known: Mapping[str, tuple[str, str]]) -> None:
        self._store = store
        self._known = known
        self.changed: dict[str, tuple[str, Tensor]] = {}

    def __getitem__(self, key: str) -> tuple[str, Tensor]:
        if key in self.changed:
            return self.changed[key]
        fingerprint, name = self._known[key]
        return fingerprint, self._store._read(name)[_CACHED]

    def __setitem__(self, key: str, value: tuple[str, Tensor]) -> None:
        self.changed[key] = value

    def __delitem__(self, key: str) -> None:
        raise StoreError("A cached value is replaced, not deleted.")

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._known, *self.changed]))

    def __len__(self) -> int:
        return len(list(iter(self)))


@dataclass(eq=False)
class StoredState(ClientState):
    """A client's state on disk, as a step sees it."""

    arrays: StoredArrays
    cache: StoredCache
    tombstones: set[str]
