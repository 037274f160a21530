"""The ledger, on SQLite and on a real PostgreSQL server that these tests start."""

from __future__ import annotations

import contextlib
import os
import random
import re
import sqlite3
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from goldfish.errors import ConfigError, GoldfishError, StoreError
from goldfish.project import database
from goldfish.project.chain import FIRST, body_digest, chain_digest, salted_digest
from goldfish.project.entries import NEXT, State
from goldfish.project.ledger import FORGOTTEN, Ledger

WAY: tuple[State, ...] = ("planned", "running", "unlearned", "measured", "closed")


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


def test_the_chain_by_hand() -> None:
    """The digest of the first event, computed with coreutils alone.

    The body is the line

        {"at":"2026-11-16T10:00:00Z","facts":{"rounds":2},"kind":"trained","number":1,"subject":"v1"}

    and ``printf %s LINE | sha256sum`` gives f75f... (BODY). The event's digest is that of 64
    zeros, the place of the event before, followed by BODY: ``printf %s%s ZEROS BODY | sha256sum``.
    """
    body = body_digest(1, "2026-11-16T10:00:00Z", "trained", "v1", {"rounds": 2})
    assert body == "f75f9d2c8179adaa38b41aee02be13a8a2a47ecf68653e297ab00b6a3ce6d153"
    assert (
        chain_digest(FIRST, body)
        == "0839958395c89c111b787f3c8b1a795e3d48d60fe589c352f845757c4f78fc8d"
    )


def test_a_salted_digest_by_hand() -> None:
    """HMAC-SHA-256, test case 2 of RFC 4231: key "Jefe", data "what do ya want for nothing?"."""
    assert salted_digest("Jefe", "what do ya want for nothing?") == (
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    )


def test_a_request_goes_its_way(ledger: Ledger) -> None:
    asked = datetime(2026, 11, 1, 12, tzinfo=UTC)
    filed = ledger.file("clinic", "samples", ["b", "a", "b"], reason="art. 17", requested_at=asked)
    assert (filed.id, filed.state, filed.count) == ("R-0001", "received", 2)
    assert filed.due_at == asked + timedelta(days=30)
    assert filed.overdue(datetime(2026, 12, 2, tzinfo=UTC))
    assert not filed.overdue(datetime(2026, 11, 30, tzinfo=UTC))
    content = ledger.content(filed.id)
    assert content.ids == ("a", "b")
    assert list(filed.digests) == sorted(salted_digest(content.salt, i) for i in "ab")
    for state in WAY:
        moved = ledger.move(filed.id, state, **{f"in {state}": 1})
        assert moved.state == state
    assert moved == ledger.request(filed.id) == ledger.requests("closed")[0]
    assert moved.facts == {f"in {state}": 1 for state in WAY}
    assert not moved.overdue(datetime(2027, 1, 1, tzinfo=UTC))
    assert ledger.requests("received", "failed") == []
    assert ledger.verify() == []


def test_a_failed_request_says_why_and_is_tried_again(sqlite_ledger: Ledger) -> None:
    request = sqlite_ledger.file("clinic", "all")
    with pytest.raises(ConfigError, match="cannot become failed without a reason"):
        sqlite_ledger.move(request.id, "failed")
    failed = sqlite_ledger.move(request.id, "failed", reason="clinic did not answer")
    assert failed.failure == "clinic did not answer"
    again = sqlite_ledger.move(request.id, "received")
    assert (again.state, again.failure) == ("received", None)


def test_a_request_is_brought_forward_through_the_states_between(sqlite_ledger: Ledger) -> None:
    """Never back; one that failed begins anew, and one that has failed does not fail again."""
    request = sqlite_ledger.file("clinic", "all")
    sqlite_ledger.fail([request.id], "clinic did not answer")
    sqlite_ledger.fail([request.id], "nobody did")
    assert sqlite_ledger.request(request.id).failure == "clinic did not answer"
    sqlite_ledger.advance(request.id, "unlearned", version=2)
    sqlite_ledger.advance(request.id, "running", version=3)
    moves = sqlite_ledger.events(request.id)[2:]
    assert [event.kind for event in moves] == ["received", "planned", "running", "unlearned"]
    assert [event.facts for event in moves] == [{}, {}, {}, {"version": 2}]
    assert sqlite_ledger.verify() == []


def test_a_state_of_an_earlier_ledger_is_read_by_its_name_of_today(sqlite_ledger: Ledger) -> None:
    """A measured request was called audited, though nobody had audited anything."""
    request = sqlite_ledger.file("clinic", "all")
    for state in WAY[:3]:
        sqlite_ledger.move(request.id, state)
    with sqlite_ledger.together():
        sqlite_ledger._append("audited", request.id, {"note": "x"})
    (read,) = sqlite_ledger.requests("measured")
    assert read == sqlite_ledger.request(request.id)
    assert read.facts["note"] == "x"
    assert sqlite_ledger.move(request.id, "closed").state == "closed"
    assert sqlite_ledger.verify() == []


def test_every_other_move_is_refused(sqlite_ledger: Ledger) -> None:
    request = sqlite_ledger.file("clinic", "class", "7", count=3)
    for state in ("received", *WAY):
        if state != "received":
            sqlite_ledger.move(request.id, state)
        for wrong in set(NEXT) - set(NEXT[state]):
            with pytest.raises(StoreError, match=f"is {state} and cannot become {wrong}"):
                sqlite_ledger.move(request.id, wrong, reason="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Did you mean 'closed'"):
        sqlite_ledger.move(request.id, "close")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Unknown request 'R-0009'"):
        sqlite_ledger.move("R-0009", "planned")
    assert sqlite_ledger.verify() == []


def test_the_same_is_filed_once(ledger: Ledger) -> None:
    first = ledger.file("clinic", "samples", ["1", "2"])
    assert ledger.file("clinic", "samples", ["2", "1", "1"], reason="again") == first
    others = [
        ledger.file("clinic", "samples", ["1"]),
        ledger.file("other", "samples", ["1", "2"]),
        ledger.file("clinic", "class", "1"),
        ledger.file("clinic", "all"),
    ]
    assert [r.id for r in others] == ["R-0002", "R-0003", "R-0004", "R-0005"]
    failed = ledger.move(first.id, "failed", reason="no quorum")
    assert ledger.file("clinic", "samples", ["1", "2"]) == failed
    ledger.forget_ids(first.id)
    assert ledger.file("clinic", "samples", ["1", "2"]).id == "R-0006"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (lambda led: led.file("c", "samples", []), "at least one sample id"),
        (lambda led: led.file("c", "class", ["1", "2"]), "one label, not 2"),
        (lambda led: led.file("c", "all", ["1"]), "no ids, not 1"),
        (lambda led: led.file("c", "sample", ["1"]), "Did you mean 'samples'"),
        (
            lambda led: led.file("c", "all", requested_at=datetime.now(UTC) + timedelta(1)),
            "in the future",
        ),
        (lambda led: led.record("closed", {}), "a call of their own"),
        (lambda led: led.record("trained", {"loss": float("nan")}), "not plain JSON"),
        (lambda led: led.move_artefact("x", "purged"), "Unknown artefact 'x'"),
        (lambda led: led.add_artefact("y", "logits", parents=["x"]), "its parent x is not"),
        (lambda led: led.add_version("retrain", "ab", parent=4), "no version 4"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(
    sqlite_ledger: Ledger, file: Callable[[Ledger], object], message: str
) -> None:
    with pytest.raises(GoldfishError, match=message):
        file(sqlite_ledger)
    assert [event.kind for event in sqlite_ledger.events()] == ["opened"]


def test_lineage(ledger: Ledger) -> None:
    """v1 is made of two clients; what is made from it is theirs too, unless said otherwise."""
    before = {c: ledger.manifest_digest(c, ["1", "2"]) for c in ("a", "b")}
    after = ledger.manifest_digest("a", ["2"])
    assert after != before["a"] == ledger.manifest_digest("a", ["2", "1"]) != before["b"]
    first = ledger.add_version("train", "11" * 32, rounds=3)
    ledger.add_artefact("v1/model", "model", version=1, sha256="11" * 32, manifests=before)
    logits = ledger.add_artefact("v1/logits", "logits", version=1, parents=["v1/model"])
    assert ledger.add_artefact("v1/logits", "logits", version=1, parents=["v1/model"]) == logits
    with pytest.raises(StoreError, match="already, as current and not the same"):
        ledger.add_artefact("v1/logits", "picture", version=1)
    second = ledger.add_version("retrain", "22" * 32, parent=1, requests=[])
    assert ledger.versions() == [first, second]
    assert (first.number, first.facts, second.parent) == (1, {"rounds": 3}, 1)
    ledger.add_artefact(
        "v2/model",
        "model",
        version=2,
        parents=["v1/model"],
        manifests={"a": after, "b": before["b"]},
    )
    mixed = ledger.add_artefact("difference", "picture", parents=["v1/model", "v2/model"])
    assert mixed.manifests["a"] == sorted([before["a"], after])
    old = ledger.descends_from("a", before["a"])
    assert [artefact.path for artefact in old] == ["v1/model", "v1/logits", "difference"]
    assert len(ledger.descends_from("a")) == 4
    for artefact in old:
        ledger.move_artefact(artefact.path, "quarantined")
        ledger.move_artefact(artefact.path, "purged")
    assert [artefact.path for artefact in ledger.artefacts("current")] == ["v2/model"]
    with pytest.raises(StoreError, match="is purged and cannot become current"):
        ledger.move_artefact("v1/model", "current")
    assert ledger.add_artefact("v1/model", "model", version=2).state == "current"
    assert ledger.verify() == []


def test_together_is_all_or_nothing(ledger: Ledger) -> None:
    request = ledger.file("clinic", "all")
    before = ledger.events()

    def half() -> None:
        with ledger.together():
            ledger.add_version("train", "11" * 32)
            ledger.move(request.id, "closed")

    with pytest.raises(StoreError, match="cannot become"):
        half()
    assert ledger.events() == before


def test_forgotten_ids_are_in_no_file(tmp_path: Path) -> None:
    """Plain ids and labels are found before, and nowhere after; other requests keep theirs."""
    ids = [f"patient-{number:05d}" for number in range(500)]

    def found() -> set[str]:
        files = b"".join(path.read_bytes() for path in (tmp_path / "p").iterdir())
        return {name for name in (*ids, "label-secret") if name.encode() in files}

    with Ledger.open(tmp_path / "p" / "ledger.db") as ledger:
        for start in range(0, 500, 50):
            ledger.file("clinic", "samples", ids[start : start + 50])
        ledger.file("clinic", "class", "label-secret")
        assert found() == {*ids, "label-secret"}
        ledger.forget_ids(*(r.id for r in ledger.requests() if r.id != "R-0002"))
        assert found() == set(ids[50:100]) == set(ledger.content("R-0002").ids)
        with pytest.raises(StoreError, match="R-0001 names was forgotten"):
            ledger.content("R-0001")
        ledger.forget_ids("R-0001", "R-0002")
        assert found() == set()
        assert ledger.verify() == []
        forgotten = [event.subject for event in ledger.events() if event.kind == FORGOTTEN]
        assert len(forgotten) == len(set(forgotten)) == 11
        modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "p").iterdir()}
        assert modes == {0o600}
        assert (tmp_path / "p").stat().st_mode & 0o777 == 0o700


def test_forgetting_says_when_a_reader_holds_the_ids_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WAIT_S", 0.1)
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.file("clinic", "samples", ["secret"])
        with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM contents").fetchall()
            with pytest.raises(StoreError, match="another process reads the ledger"):
                ledger.forget_ids("R-0001")
        assert FORGOTTEN not in [event.kind for event in ledger.events()]
        for _ in range(2):
            ledger.forget_ids("R-0001")
        assert [event.kind for event in ledger.events()].count(FORGOTTEN) == 1
        assert not any(b"secret" in path.read_bytes() for path in tmp_path.iterdir())


def test_events_cannot_be_changed_or_deleted(ledger: Ledger) -> None:
    ledger.record("trained", {"rounds": 1})
    for statement in (
        "UPDATE events SET facts = '{}' WHERE number = 2",
        "DELETE FROM events WHERE number = 2",
        "TRUNCATE events CASCADE",
        "INSERT OR REPLACE INTO events VALUES (2, '', '', '', '{}', '', '')",
    ):
        own = {"TRUNCATE": "postgresql", "INSERT": "sqlite"}.get(statement.split()[0])
        with ledger.together() as db:
            name = db.dialect.name
        if own in (None, name):
            with (
                pytest.raises((StoreError, DBAPIError), match="append-only"),
                ledger.together() as db,
            ):
                db.execute(text(statement))
    assert len(ledger.events()) == 2
    assert ledger.verify() == []


def _filled(path: Path) -> Ledger:
    ledger = Ledger.open(path)
    ledger.file("clinic", "samples", ["17", "18"], reason="art. 17")
    ledger.add_version("train", "11" * 32)
    ledger.move("R-0001", "planned", method="retrain")
    ledger.record("trained", {"rounds": 1})
    return ledger


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE events SET facts = replace(facts, 'art', 'act')", "Event 2 .* was changed"),
        ("UPDATE events SET facts = facts || ' ' WHERE number = 3", "Event 3 .* cannot be read"),
        ("UPDATE events SET at = '2020' WHERE number = 4", "Event 4 .* was changed"),
        ("DELETE FROM events WHERE number = 4", "Event 4 .* is missing"),
        ("DELETE FROM events WHERE number = 5", "Event 5 .* were cut off|Event 5 .* written down"),
        ("UPDATE contents SET ids = '[\"17\"]'", "ids of request R-0001 are not those"),
        ("UPDATE about SET value = 'x' WHERE name = 'manifest key'", "key of the .* manifests"),
        ("UPDATE events SET kind = 'closed' WHERE number = 4", "was received and cannot become"),
    ],
)
def test_tampering_is_told(tmp_path: Path, statement: str, problem: str) -> None:
    with _filled(tmp_path / "ledger.db") as ledger:
        head = (ledger.events()[-1].number, ledger.events()[-1].digest)
        assert ledger.verify(head) == []
        with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as db, db:
            found = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
            triggers = dict(found.fetchall())
            for name in triggers:
                db.execute(f"DROP TRIGGER {name}")
            db.execute(statement)
        problems = ledger.verify(head)
        assert "The triggers that keep the ledger append-only are gone." in problems
        assert any(re.search(problem, found) for found in problems), problems


def test_a_changed_event_is_not_used(tmp_path: Path) -> None:
    with _filled(tmp_path / "ledger.db") as ledger:
        with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as db, db:
            db.execute("DROP TRIGGER events_no_update")
            db.execute("UPDATE events SET kind = 'closed' WHERE kind = 'planned'")
        with pytest.raises(StoreError, match=r"Event 4 of the ledger .* was changed after"):
            ledger.requests()


def test_a_flipped_byte_is_told_or_changes_nothing(tmp_path: Path) -> None:
    """One byte of the file, 150 times: verify says so, or all that can be read is as before."""
    path = tmp_path / "ledger.db"
    with _filled(path) as ledger:
        ledger.forget_ids("R-0001")
        ledger.file("clinic", "samples", ["17", "18"])
    with Ledger.open(path) as ledger:
        events, content = ledger.events(), ledger.content("R-0002")
    whole = path.read_bytes()
    assert not path.with_name("ledger.db-wal").exists()
    places = random.Random(3).sample(range(len(whole)), 150)
    told = 0
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            with Ledger.open(path) as ledger:
                if ledger.verify():
                    told += 1
                else:
                    assert ledger.events() == events
                    assert ledger.content("R-0002") == content
        except StoreError:
            told += 1
    assert told > 10


def _file_many(url: str, me: int) -> None:
    with Ledger.open(url) as ledger:
        for number in range(125):
            ledger.file(f"client-{me}", "samples", [f"{me}-{number}"])
            if number % 25 == 0:
                ledger.file("shared", "samples", [str(number)])


def test_eight_processes_file_a_thousand_requests_at_once(url: str) -> None:
    """1,000 of their own, and 5 that all eight file: each is there once, with an id of its own."""
    processes = get_context("fork")  # they need not wait until all is imported again
    running = [processes.Process(target=_file_many, args=(url, me)) for me in range(8)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0] * 8
    with Ledger.open(url) as ledger:
        requests = ledger.requests()
        assert [request.id for request in requests] == [f"R-{n:04d}" for n in range(1, 1006)]
        with ledger.together() as db:
            rows = db.execute(text("SELECT request, ids FROM contents"))
            contents = {row.request: row.ids for row in rows}
        named = [f"{request.client} {contents[request.id]}" for request in requests]
        own = [f'client-{me} ["{me}-{n}"]' for me in range(8) for n in range(125)]
        shared = [f'shared ["{n}"]' for n in range(0, 125, 25)]
        assert sorted(named) == sorted(own + shared)
        assert ledger.verify() == []


def _file_and_tell(path: Path, told: Connection) -> None:
    with Ledger.open(path) as ledger:
        for number in range(10_000):
            told.send(ledger.file("clinic", "samples", [f"{os.getpid()}-{number}"]).id)


def test_what_was_acknowledged_outlives_a_kill(tmp_path: Path) -> None:
    """A process that files is killed six times, at any moment: nothing is lost or half-written."""
    path, told, processes = tmp_path / "ledger.db", list[str](), get_context("fork")
    for seed in range(6):
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=_file_and_tell, args=(path, theirs))
        process.start()
        theirs.close()
        told.append(ours.recv())
        process.join(random.Random(seed).uniform(0.0, 0.1))
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while True:
                told.append(ours.recv())
        ours.close()
        process.close()
    with Ledger.open(path) as ledger:
        assert ledger.verify() == []
        filed = [request.id for request in ledger.requests()]
        assert len(filed) == len(set(filed)) <= len(told) + 6
        assert set(told) <= set(filed)


def test_a_ledger_of_schema_1_is_brought_up_to_date(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second schema has a further table here; a program that knows only the first refuses."""
    first, added = database.MIGRATIONS[:1], "CREATE TABLE added (name TEXT PRIMARY KEY)"
    monkeypatch.setattr(database, "MIGRATIONS", first)
    with Ledger.open(url) as ledger:
        ledger.file("clinic", "samples", ["1"])
        events = ledger.events()
    monkeypatch.setattr(database, "MIGRATIONS", (*first, database.Migration([added])))
    for _ in range(2):
        with Ledger.open(url) as ledger:
            assert ledger.events() == events
            assert ledger.content("R-0001").ids == ("1",)
            assert ledger.verify() == []
            with ledger.together() as db:
                assert db.execute(text("SELECT count(*) FROM added")).scalar() == 0
    monkeypatch.setattr(database, "MIGRATIONS", first)
    with pytest.raises(StoreError, match="later version of Goldfish \\(schema 2, here 1\\)"):
        Ledger.open(url)


def test_addresses_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no database at all " * 100)
    for address, message in (
        ("mysql://host/db", "is no address of a ledger"),
        ("sqlite://", "is no address of a ledger"),
        ("postgresql://user:secret@127.0.0.1:1/none", "used: .*refused.* whether its server runs"),
        (str(tmp_path / "text.db"), "used: file is not a database. Look whether the file is whole"),
        ("/dev/null/ledger.db", "cannot be used: .* Look whether you may write to its folder"),
    ):
        with pytest.raises(GoldfishError, match=message) as caught:
            Ledger.open(address)
        assert "secret" not in str(caught.value)
