"""Where the ledger is kept: SQLite or PostgreSQL, its tables, and how transactions begin."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy
from sqlalchemy import Connection, Engine, make_url, text
from sqlalchemy.exc import ArgumentError

from goldfish.errors import ConfigError, StoreError

WAIT_S = 60
"""So long a process waits for its turn to write."""
ABOUT = text("SELECT value FROM about WHERE name = :name")

_TABLES = (
    "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE events (number INTEGER PRIMARY KEY, at TEXT NOT NULL, kind TEXT NOT NULL, "
    "subject TEXT NOT NULL, facts TEXT NOT NULL, previous TEXT NOT NULL, digest TEXT NOT NULL)",
    "CREATE INDEX events_of_subject ON events (subject, number)",
    "CREATE INDEX events_of_kind ON events (kind, number)",
    "CREATE TABLE contents (request TEXT PRIMARY KEY, filed INTEGER NOT NULL "
    "REFERENCES events (number), content TEXT NOT NULL, salt TEXT NOT NULL, ids TEXT NOT NULL)",
    "CREATE INDEX contents_of_content ON contents (content)",
)
_SQLITE_TRIGGERS = tuple(
    f"CREATE TRIGGER events_no_{verb} BEFORE {verb} ON events {when} "
    "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
    for verb, when in (
        ("update", ""),
        ("delete", ""),
        # INSERT OR REPLACE deletes without a delete trigger.
        ("insert", "WHEN NEW.number <= (SELECT max(number) FROM events)"),
    )
)
_POSTGRES_TRIGGERS = (
    "CREATE FUNCTION goldfish_append_only() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$",
    "CREATE TRIGGER events_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON events "
    "FOR EACH STATEMENT EXECUTE FUNCTION goldfish_append_only()",
)


@dataclass(frozen=True)
class Migration:
    """One step of the schema: for both databases, then for each alone."""

    both: Sequence[str] = ()
    sqlite: Sequence[str] = ()
    postgresql: Sequence[str] = ()


MIGRATIONS: tuple[Migration, ...] = (Migration(_TABLES, _SQLITE_TRIGGERS, _POSTGRES_TRIGGERS),)
"""Number n brings a ledger from schema n-1 to n. What is here is never changed, only added to."""


def engine_of(url: str | Path, *, read_only: bool = False) -> Engine:
    """Return SQLAlchemy's engine for the database at an address; nothing is asked of it yet.

    With ``read_only`` it must be there, and may lie where nothing can be written.
    """
    written = str(url)
    try:
        parsed = make_url(written if "://" in written else f"sqlite:///{written}")
    except ArgumentError as error:
        raise ConfigError(f"{written!r} is no address of a ledger: {error}.") from error
    backend = parsed.get_backend_name()
    if backend == "sqlite" and parsed.database not in (None, "", ":memory:"):
        path = Path(str(parsed.database))
        # In a temporary file, a VACUUM would write ids.
        pragmas = ["foreign_keys = ON", "temp_store = MEMORY"]
        if read_only:
            parsed = parsed.set(database=_reading(path), query={"uri": "true"})
        else:
            _own_file(path)
            pragmas += ["journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"]

        def prepare(connection: Any, _record: object) -> None:
            connection.isolation_level = None  # transactions begin where _begin says so
            for pragma in pragmas:
                connection.execute(f"PRAGMA {pragma}").close()

        engine = sqlalchemy.create_engine(parsed, connect_args={"timeout": WAIT_S})
        sqlalchemy.event.listen(engine, "connect", prepare)
    elif backend == "postgresql":
        try:
            engine = sqlalchemy.create_engine(parsed.set(drivername="postgresql+psycopg"))
        except ModuleNotFoundError as error:
            raise ConfigError(
                "A ledger on PostgreSQL needs psycopg. Run: pip install 'goldfish-fl[postgres]'"
            ) from error
    else:
        raise ConfigError(
            f"{parsed.render_as_string()!r} is no address of a ledger. Give the path of a file, "
            "sqlite:///PATH or postgresql://USER@HOST/DATABASE."
        )
    sqlalchemy.event.listen(engine, "begin", _begin)
    return engine


def _reading(path: Path) -> str:
    """Return how SQLite is told to read a file and to write nothing.

    It keeps a write-ahead log beside the file. Where it can make none, nobody writes: then the file
    is as it is, unless a log was left there.
    """
    if not path.exists():
        raise StoreError(f"There is no ledger {path}.")
    own = {"effective_ids": True} if os.access in os.supports_effective_ids else {}
    alone = not os.access(path.parent, os.W_OK, **own)
    log = path.with_name(f"{path.name}-wal")
    never = "&immutable=1" if alone and not (log.exists() and log.stat().st_size) else ""
    return f"file:{quote(str(path.resolve()))}?mode=ro{never}"


def _own_file(path: Path) -> None:
    """Make the database file, its owner's alone: what SQLite writes beside it takes after it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except OSError as error:
        raise StoreError(
            f"The ledger {path} cannot be used: {error}. Look whether you may write to its folder."
        ) from error


def _begin(db: Connection) -> None:
    """Begin a transaction; one that writes waits here until no other does."""
    purpose = db.get_execution_options().get("goldfish", "read")
    begins = {"read": "BEGIN", "write": "BEGIN IMMEDIATE"}
    if db.dialect.name == "postgresql":
        begins = {"write": "SELECT pg_advisory_xact_lock(hashtext('goldfish ledger'))"}
    if purpose in begins:
        db.exec_driver_sql(begins[purpose])


def migrate(db: Connection, name: str, *, read_only: bool = False) -> bool:
    """Bring the schema up to date, or refuse an old one; say whether the ledger is new."""
    there = 0
    if sqlalchemy.inspect(db).has_table("about"):
        there = int(db.execute(ABOUT, {"name": "schema"}).scalar_one())
    if there == 0 and read_only:
        raise StoreError(f"There is no ledger in {name}.")
    if there < len(MIGRATIONS) and read_only:
        raise StoreError(
            f"The ledger {name} is of an earlier version of Goldfish (schema {there}, here "
            f"{len(MIGRATIONS)}). Open its project once where it can be written."
        )
    if there > len(MIGRATIONS):
        raise StoreError(
            f"The ledger {name} was written by a later version of Goldfish (schema {there}, here "
            f"{len(MIGRATIONS)}). Use that version."
        )
    for migration in MIGRATIONS[there:]:
        of_this = migration.sqlite if db.dialect.name == "sqlite" else migration.postgresql
        for statement in (*migration.both, *of_this):
            db.exec_driver_sql(statement)
    if there < len(MIGRATIONS):
        db.execute(text("DELETE FROM about WHERE name = 'schema'"))
        tell_about(db, "schema", str(len(MIGRATIONS)))
    return there == 0


def tell_about(db: Connection, name: str, value: str) -> None:
    """Note a fact about the ledger itself."""
    db.execute(text("INSERT INTO about VALUES (:name, :value)"), {"name": name, "value": value})


def database_problems(db: Connection) -> Iterator[str]:
    """Say what is wrong with the database itself: broken pages, missing triggers."""
    if db.dialect.name == "sqlite":
        for (found,) in db.exec_driver_sql("PRAGMA integrity_check(3)").all():
            if found != "ok":
                yield f"The ledger's file is damaged: {found}."
        triggers = (
            "SELECT count(*) FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'events_no%'"
        )
        expected = len(_SQLITE_TRIGGERS)
    else:
        triggers = (
            "SELECT count(*) FROM pg_trigger WHERE tgname = 'events_append_only' "
            "AND tgrelid = 'events'::regclass AND tgenabled <> 'D'"
        )
        expected = 1
    if db.exec_driver_sql(triggers).scalar_one() != expected:
        yield "The triggers that keep the ledger append-only are gone."
