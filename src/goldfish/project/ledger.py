"""The ledger: what was asked, what was done, and which files descend from whose data.

The ledger is one table of events that only grows. Requests, model versions and artefacts are read
from it: nothing else can say something different. Each event holds the digest of the one before it,
so that a change of any event is seen by :meth:`Ledger.verify`.

What a request names (sample ids, a class) is not in the events, only salted digests of it. The
plain ids and the salt stand in a table of their own, which :meth:`Ledger.forget_ids` empties.

The database is SQLite by default; ``postgresql://...`` is for a team.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, get_args
from urllib.parse import unquote

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from goldfish.errors import ConfigError, StoreError, unknown
from goldfish.project.chain import (
    FIRST,
    Event,
    canonical,
    chain_digest,
    chain_problems,
    salted_digest,
)
from goldfish.project.database import ABOUT, database_problems, engine_of, migrate, tell_about
from goldfish.project.entries import (
    FORMERLY,
    NEXT,
    NEXT_ARTEFACT,
    WAY,
    Artefact,
    ArtefactState,
    Content,
    Kind,
    Request,
    State,
    Version,
    artefact_of,
    request_of,
    version_of,
    wrong_moves,
)

MANIFEST_KEY, FORGOTTEN, AUDIT = "manifest key", "ids forgotten", "audit"
TOLD = "told"
"""The event that a client on Flower was told of a request: it trains without the samples now."""

_SELECT = "SELECT number, at, kind, subject, facts, previous, digest FROM events"
_INSERT = text(
    "INSERT INTO events VALUES (:number, :at, :kind, :subject, :facts, :previous, :digest)"
)
_HEAD = text("SELECT number, digest FROM events ORDER BY number DESC LIMIT 1")
_LAST_FILED = text("SELECT subject FROM events WHERE kind = 'filed' ORDER BY number DESC LIMIT 1")
_SAME = text("SELECT request FROM contents WHERE content = :key ORDER BY request LIMIT 1")
_FORGET = text("DELETE FROM contents WHERE request = :request")
_KEEP = text("INSERT INTO contents VALUES (:request, :filed, :key, :salt, :ids)")


class Ledger:
    """The ledger of a project. Use :meth:`open`; a context manager.

    Every writing call is one transaction. Those inside ``with ledger.together():`` are one
    transaction: all of them happen, or none. An object serves one thread; several processes may
    have the same ledger open.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the database."""
        self._engine.dispose()

    @classmethod
    def open(cls, url: str | Path, *, read_only: bool = False) -> Ledger:
        """Open a ledger, make it if there is none, and bring its schema up to date.

        ``url`` is the path of an SQLite file, ``sqlite:///PATH`` or ``postgresql://...``. On
        PostgreSQL every project has a database of its own. With ``read_only`` it must be there, and
        may lie where nothing can be written.
        """
        ledger = cls(engine_of(url, read_only=read_only))
        try:
            with ledger._reading() if read_only else ledger.together() as db:
                if migrate(db, ledger.name, read_only=read_only):
                    key = secrets.token_hex(32)
                    tell_about(db, MANIFEST_KEY, key)
                    ledger._append("opened", "", {"key": salted_digest(key, MANIFEST_KEY)})
        except BaseException:
            ledger.close()
            raise
        return ledger

    @property
    def name(self) -> str:
        """The database in words, without its password."""
        url = self._engine.url
        if url.get_backend_name() != "sqlite":
            return str(url)
        return unquote(str(url.database).removeprefix("file:").partition("?mode=ro")[0])

    # Requests

    def file(
        self,
        client: str,
        kind: Kind,
        content: Sequence[str] | str = (),
        *,
        count: int | None = None,
        reason: str = "",
        requested_at: datetime | None = None,
        due_days: int = 30,
    ) -> Request:
        """File a deletion request, or return the one that asks for the same already.

        ``content`` is the sample ids, the label of the class, or nothing for all that a client has.
        ``count`` says how many samples a class or a client has. ``reason`` stays readable: it must
        not name a sample. The same client and content give a new request only where the ids of the
        earlier one are forgotten: one that failed is tried again.
        """
        ids = _checked_content(kind, content)
        now = datetime.now(UTC)
        asked = requested_at or now
        if asked.tzinfo is None:
            asked = asked.replace(tzinfo=UTC)
        if asked > now:
            raise ConfigError(
                f"The request is dated {asked.isoformat()}, which is in the future: here it is "
                f"{stamp(now)}. Nothing was filed."
            )
        key = _key(client, kind, ids)
        with self.together() as db:
            earlier = db.execute(_SAME, {"key": key}).scalar()
            if earlier is not None:
                return self.request(earlier)
            last = db.execute(_LAST_FILED).scalar()
            request_id = f"R-{1 if last is None else int(last.removeprefix('R-')) + 1:04d}"
            salt = secrets.token_hex(32)
            event = self._append(
                "filed",
                request_id,
                {
                    "client": client,
                    "kind": kind,
                    "count": len(ids) if kind == "samples" else count,
                    "digests": sorted(salted_digest(salt, value) for value in ids),
                    "reason": reason,
                    "requested_at": stamp(asked),
                    "due_at": stamp(asked + timedelta(days=due_days)),
                },
            )
            row = {"request": request_id, "filed": event.number, "key": key, "salt": salt}
            db.execute(_KEEP, {**row, "ids": canonical(ids)})
            return request_of([event])

    def request(self, request_id: str) -> Request:
        """Return one request."""
        events = self.events(request_id)
        if not events or events[0].kind != "filed":
            known = [request.id for request in self.requests()]
            hint = "'goldfish status' lists all." if known else "None was filed yet."
            raise ConfigError(unknown("request", request_id, known, hint))
        return request_of(events)

    def requests(self, *states: State) -> list[Request]:
        """Return the requests that are in one of these states, or all; oldest first."""
        found = (request_of(events) for events in self._by_subject("filed", *NEXT, *FORMERLY))
        return [request for request in found if not states or request.state in states]

    def measured_since(self, version: str) -> list[str]:
        """Return the requests that were measured when this version was made, or later."""
        made = self.events(version)[0].number
        names = ("measured", *(old for old, now in FORMERLY.items() if now == "measured"))
        since = {event.subject for event in self._of_kinds(*names) if event.number > made}
        return [request.id for request in self.requests("measured") if request.id in since]

    def move(self, request_id: str, state: State, **facts: Any) -> Request:
        """Bring a request to its next state (:data:`NEXT`), with what is to be known of it.

        ``failed`` and ``withdrawn`` need the fact ``reason``. Facts are JSON values, and name no
        sample.
        """
        if state not in NEXT:
            raise ConfigError(unknown("state", state, NEXT, f"States are {', '.join(NEXT)}."))
        if state in ("failed", "withdrawn") and not facts.get("reason"):
            raise ConfigError(f"Request {request_id} cannot become {state} without a reason.")
        with self.together():
            before = self.request(request_id).state
            if state not in NEXT[before]:
                allowed = " or ".join(NEXT[before]) or "nowhere: it is done"
                raise StoreError(
                    f"Request {request_id} is {before} and cannot become {state}. "
                    f"From {before} it goes to {allowed}."
                )
            self._append(state, request_id, facts)
            return self.request(request_id)

    def advance(self, request_id: str, state: State, **facts: Any) -> None:
        """Bring a request forward to a state, through those between; never back.

        One that failed begins anew. The facts are those of the last step.
        """
        with self.together():
            now = self.request(request_id).state
            if now == "failed":
                now = self.move(request_id, "received").state
            for between in WAY[WAY.index(now) + 1 : WAY.index(state) + 1]:
                self.move(request_id, between, **(facts if between == state else {}))

    def fail(self, request_ids: Iterable[str], reason: str) -> None:
        """Note why requests failed; those that have failed already stay as they are."""
        with self.together():
            for request_id in request_ids:
                if self.request(request_id).state != "failed":
                    self.move(request_id, "failed", reason=reason)

    def withdraw(self, request_id: str, reason: str) -> None:
        """Take a request back, and forget what it names; the same may then be filed anew.

        After a kill, call it once more.
        """
        with self.together() as db:
            if self.request(request_id).state != "withdrawn":
                self.move(request_id, "withdrawn", reason=reason)
            db.execute(_FORGET, {"request": request_id})
        self.forget_ids(request_id)

    def content(self, request_id: str) -> Content:
        """Return what a request names, in plain, until it is forgotten."""
        with self._reading() as db:
            row = db.execute(
                text("SELECT ids, salt FROM contents WHERE request = :request"),
                {"request": self.request(request_id).id},
            ).one_or_none()
        if row is None:
            raise StoreError(
                f"What request {request_id} names was forgotten when it was purged or withdrawn."
            )
        return Content(tuple(json.loads(row.ids)), row.salt)

    def forget_ids(self, *request_ids: str) -> None:
        """Delete what requests name, and their salts, so that no byte of it stays on the disk.

        After a kill, call it once more. On PostgreSQL the server's write-ahead log and backups keep
        the ids for as long as they are kept.
        """
        with self.together() as db:
            for request_id in request_ids:
                db.execute(_FORGET, {"request": self.request(request_id).id})
        self._sweep()
        with self.together():  # only now: a process that is killed before this sweeps again
            for request_id in request_ids:
                if not any(event.kind == FORGOTTEN for event in self.events(request_id)):
                    self._append(FORGOTTEN, request_id, {})

    # Versions and artefacts

    def add_version(
        self,
        made_by: str,
        sha256: str,
        *,
        parent: int | None = None,
        requests: Sequence[str] = (),
        **facts: Any,
    ) -> Version:
        """Record a new model version and return it with its number; the first is 1."""
        with self.together():
            known = {version.number for version in self.versions()}
            if parent is not None and parent not in known:
                raise StoreError(f"There is no version {parent} that a new one could come from.")
            number = max(known, default=0) + 1
            named = [self.request(request_id).id for request_id in requests]
            about = {"made_by": made_by, "sha256": sha256, "parent": parent, "requests": named}
            return version_of(self._append("version", f"v{number}", {**about, "facts": facts}))

    def versions(self) -> list[Version]:
        """Return all model versions, the first one first."""
        return [version_of(event) for event in self._of_kinds("version")]

    def add_artefact(
        self,
        path: str,
        kind: str,
        *,
        version: int | None = None,
        sha256: str | None = None,
        parents: Sequence[str] = (),
        manifests: Mapping[str, Sequence[str] | str] | None = None,
    ) -> Artefact:
        """Record a file or folder that was made of clients' data; ``path`` is in the project.

        ``manifests`` are the digests (:meth:`manifest_digest`) of the data that it descends from,
        by client; without them they are those of its parents. The same again changes nothing. A
        path may be used anew once what was there is purged.
        """
        with self.together():
            known = {artefact.path: artefact for artefact in self.artefacts()}
            for parent in parents:
                if parent not in known:
                    raise StoreError(f"{path}: its parent {parent} is not in the ledger.")
            given = [known[p].manifests for p in parents] if manifests is None else [manifests]
            new = Artefact(path, kind, version, sha256, tuple(parents), _joined(given))
            old = known.get(path)
            if old == new:
                return old
            if old is not None and old.state != "purged":
                raise StoreError(
                    f"{path} is in the ledger already, as {old.state} and not the same. Purge it "
                    "first, or use another path."
                )
            about = {k: v for k, v in vars(new).items() if k not in ("path", "state")}
            self._append("artefact", path, {**about, "parents": list(parents)})
            return new

    def artefacts(self, *states: ArtefactState) -> list[Artefact]:
        """Return the artefacts that are in one of these states, or all; oldest first."""
        found = (artefact_of(events) for events in self._by_subject("artefact", *NEXT_ARTEFACT))
        return [artefact for artefact in found if not states or artefact.state in states]

    def move_artefact(self, path: str, state: ArtefactState, **facts: Any) -> Artefact:
        """Quarantine an artefact, bring it back, or note that it was purged."""
        with self.together():
            known = {artefact.path: artefact for artefact in self.artefacts()}
            if path not in known:
                raise ConfigError(unknown("artefact", path, known, "'goldfish lineage' lists all."))
            before = known[path].state
            if state not in NEXT_ARTEFACT[before]:
                raise StoreError(f"{path} is {before} and cannot become {state}.")
            self._append(state, path, facts)
            return artefact_of(self.events(path))

    def descends_from(self, client: str, manifest: str | None = None) -> list[Artefact]:
        """Return the artefacts that descend from a client's data, or from one manifest of it."""
        return [
            artefact
            for artefact in self.artefacts()
            if client in artefact.manifests
            and (manifest is None or manifest in artefact.manifests[client])
        ]

    def manifest_digest(self, client: str, ids: Iterable[str]) -> str:
        """Return a digest of the samples that a client has.

        It is keyed with a secret of this ledger. A plain digest would tell anybody who knows the
        other samples which one is gone: a guess is enough to try it.
        """
        with self._reading() as db:
            key = str(db.execute(ABOUT, {"name": MANIFEST_KEY}).scalar_one())
        return salted_digest(key, canonical([client, sorted(ids)]))

    def audits(self) -> dict[int, Mapping[str, Any]]:
        """Return what the last audit of each audited version found."""
        events = self._of_kinds(AUDIT)
        return {int(event.subject.removeprefix("v")): event.facts for event in events}

    # Events

    def record(self, kind: str, facts: Mapping[str, Any], subject: str = "") -> Event:
        """Append any other event: trained, purged, imported. Facts name no sample."""
        taken = {"opened", "filed", "version", "artefact", FORGOTTEN}
        taken |= {*NEXT, *FORMERLY, *NEXT_ARTEFACT}
        if kind in taken:
            raise ConfigError(f"Events of kind {kind!r} are written by a call of their own.")
        with self.together():
            return self._append(kind, subject, facts)

    def events(self, subject: str | None = None) -> list[Event]:
        """Return all events, or those about one subject, in their order."""
        where = "" if subject is None else " WHERE subject = :subject"
        return self._select(where, {"subject": subject})

    @contextlib.contextmanager
    def together(self) -> Iterator[Connection]:
        """Make everything inside one transaction, which no other process can come between."""
        if self._open is not None:
            yield self._open
            return
        with self._asking(), self._engine.connect() as connection:
            db = connection.execution_options(goldfish="write")
            with db.begin():
                self._open = db
                try:
                    yield db
                finally:
                    self._open = None

    def verify(self, head: tuple[int, str] | None = None) -> list[str]:
        """Check every event, the chain, and what is derived; return the problems in words.

        ``head`` is the number and digest of an event as it was written down elsewhere, such as in
        an evidence pack: a ledger whose end was cut off, or that was written anew, is a whole
        chain, and only this shows it.
        """
        try:
            with self._reading() as db:
                return [*database_problems(db), *_problems(db, head)]
        except StoreError as error:
            return [str(error)]

    # The database

    def _append(self, kind: str, subject: str, facts: Mapping[str, Any]) -> Event:
        if self._open is None:
            raise RuntimeError("Events are appended inside together().")
        try:
            written = canonical(facts)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"The facts of {kind!r} are not plain JSON: {error}.") from error
        last = self._open.execute(_HEAD).one_or_none()
        number, previous = (1, FIRST) if last is None else (last.number + 1, last.digest)
        at = stamp(datetime.now(UTC))
        event = Event(number, at, kind, subject, json.loads(written), previous, digest="")
        event = replace(event, digest=chain_digest(previous, event.body))
        self._open.execute(_INSERT, {**vars(event), "facts": written})
        return event

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Connection]:
        if self._open is not None:
            yield self._open
            return
        with self._asking(), self._engine.connect() as db:
            yield db

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Say in words what the database cannot do."""
        try:
            yield
        except SQLAlchemyError as error:
            cause = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
            look = "its server runs, and 'ledger' in goldfish.toml is right"
            if self._engine.dialect.name == "sqlite":
                look = "the file is whole, its disk has space, and you may write to its folder"
            raise StoreError(
                f"The ledger {self.name} cannot be used: {cause}. Look whether {look}; then run "
                "the command again."
            ) from error

    def _select(self, where: str, values: Mapping[str, Any]) -> list[Event]:
        """Return events, each as it was written: one that was changed is not used."""
        with self._reading() as db:
            rows = db.execute(text(f"{_SELECT}{where} ORDER BY number"), dict(values)).all()
        events = []
        for row in rows:
            event = _event(row)
            if event is None or chain_digest(event.previous, event.body) != event.digest:
                raise StoreError(
                    f"Event {row.number} of the ledger {self.name} was changed after it was "
                    "written. Restore the ledger from a backup."
                )
            events.append(event)
        return events

    def _of_kinds(self, *kinds: str) -> list[Event]:
        names = {f"kind{place}": kind for place, kind in enumerate(kinds)}
        return self._select(f" WHERE kind IN ({', '.join(f':{n}' for n in names)})", names)

    def _by_subject(self, first: str, *later: str) -> list[list[Event]]:
        """Return the events of each subject of one sort: the one that begins it, and the moves."""
        found: dict[str, list[Event]] = {}
        for event in self._of_kinds(first, *later):
            if event.kind == first or event.subject in found:
                found.setdefault(event.subject, []).append(event)
        return list(found.values())

    def _sweep(self) -> None:
        """Let the database rewrite its files without what was deleted."""
        on_sqlite = self._engine.dialect.name == "sqlite"
        options = {"goldfish": "sweep"} if on_sqlite else {"isolation_level": "AUTOCOMMIT"}
        with self._asking(), self._engine.connect() as connection:
            db = connection.execution_options(**options)
            db.exec_driver_sql("VACUUM" if on_sqlite else "VACUUM FULL contents")
            if on_sqlite and db.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()[0]:
                raise StoreError(
                    f"{self.name}: another process reads the ledger, so deleted ids may still be "
                    "in its write-ahead log. End that process, and purge again."
                )


def _event(row: Any) -> Event | None:
    """Read an event; None if it is not as it was once written."""
    try:
        facts = json.loads(row.facts)
        whole = isinstance(facts, dict) and canonical(facts) == row.facts
    except (ValueError, TypeError):
        return None
    texts = (row.at, row.kind, row.subject, row.previous, row.digest)
    if not whole or not all(isinstance(value, str) for value in texts):
        return None
    return Event(**{**row._mapping, "facts": facts})


def _joined(all_manifests: Iterable[Mapping[str, Sequence[str] | str]]) -> dict[str, list[str]]:
    """Return of each client all digests, in order."""
    found: dict[str, set[str]] = {}
    for manifests in all_manifests:
        for client, given in manifests.items():
            found.setdefault(client, set()).update([given] if isinstance(given, str) else given)
    return {client: sorted(digests) for client, digests in found.items()}


def _problems(db: Connection, head: tuple[int, str] | None) -> Iterator[str]:
    """Say what is wrong with the events, and with what stands beside them."""
    events: list[Event] = []
    for row in db.execute(text(f"{_SELECT} ORDER BY number")):
        event = _event(row)
        if event is None:
            yield f"Event {row.number} of the ledger was changed: it cannot be read."
        else:
            events.append(event)
    yield from chain_problems([(e.number, e.body, e.previous, e.digest) for e in events])
    if head is not None and head not in {(e.number, e.digest) for e in events}:
        yield (
            f"Event {head[0]} of the ledger is not the one that was written down: events were "
            "cut off, or the ledger was written anew."
        )
    yield from wrong_moves(events)
    key = str(db.execute(ABOUT, {"name": MANIFEST_KEY}).scalar_one_or_none())
    if not events or events[0].facts.get("key") != salted_digest(key, MANIFEST_KEY):
        yield "The key of the ledger's manifests is not the one that it was opened with."
    filed = {e.subject: e.facts for e in events if e.kind == "filed"}
    for row in db.execute(text("SELECT request, content, salt, ids FROM contents")):
        if not _fits(row, filed.get(row.request)):
            yield f"The sample ids of request {row.request} are not those that were filed."


def _key(client: str, kind: str, ids: Sequence[str]) -> str:
    """Return the digest by which equal requests are found."""
    return hashlib.sha256(canonical([client, kind, ids]).encode()).hexdigest()


def _fits(row: Any, filed: Mapping[str, Any] | None) -> bool:
    """Say whether the plain content of a request is what its event has digests of."""
    try:
        ids = json.loads(row.ids)
        digests = sorted(salted_digest(row.salt, value) for value in ids)
    except (ValueError, TypeError, AttributeError):
        return False
    if filed is None or digests != filed.get("digests"):
        return False
    return bool(row.content == _key(filed.get("client", ""), filed.get("kind", ""), ids))


def _checked_content(kind: Kind, content: Sequence[str] | str) -> list[str]:
    ids = [content] if isinstance(content, str) else sorted(set(content))
    if kind not in get_args(Kind):
        raise ConfigError(unknown("kind", kind, get_args(Kind), "A request has one of three."))
    wanted = {"samples": len(ids) > 0, "class": len(ids) == 1, "all": not ids}
    if not wanted[kind]:
        what = {"samples": "at least one sample id", "class": "one label", "all": "no ids"}
        raise ConfigError(f"A request of kind {kind!r} names {what[kind]}, not {len(ids)}.")
    return ids


def stamp(time: datetime) -> str:
    """Return a time as events have it."""
    return time.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
