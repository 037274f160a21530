from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sqlite3
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from tests.project.conftest import MACHINE, make_project
from typer.testing import CliRunner

from goldfish.cli import app
from goldfish.errors import ConfigError, GoldfishError, StoreError
from goldfish.experiments.client_setup import key_of
from goldfish.methods.sisa import SisaSettings, place_of
from goldfish.project.entries import CLIENT_STATE
from goldfish.project.evidence import (
    Pack,
    case_of,
    files_or_folders,
    findings,
    headline,
    write_evidence,
)
from goldfish.project.ledger import Ledger
from goldfish.project.project import Project
from goldfish.project.signing import is_signed, new_key, read_key, read_public
from goldfish.project.traces import OF_CLASS
from goldfish.project.verification import verify_evidence

IDS = ["patient-0001", "patient-0002"]
GAP = {"value": 0.005, "low": -0.005, "high": 0.015}
MEMORY = {"gap": GAP, "removed": 2, "unseen": 90, "removed_right": 50.0, "unseen_right": 51.0}
MEASURES = {"accuracy": 96.5, "loss": 0.1, "mse": 0.01, "memory": MEMORY}


def measured(**gap: float) -> dict[str, Any]:
    return {**MEASURES, "memory": {**MEMORY, "gap": {**GAP, **gap}}}


class Made:
    """A project as its commands leave it: a removed model, a new one, a ledger, a key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger.open(folder / "ledger.db")
        self.key = folder / "signing.key"
        self.public = new_key(self.key)
        self.add_version(1, ["patient-0003", *IDS], "train")
        self.ledger.file("clinic", "samples", IDS, reason="article 17 <script>")
        self.ledger.file("other", "samples", ["somebody-else"], reason="a private matter")

    def add_version(self, number: int, ids: list[str], by: str, **about: Any) -> None:
        model = self.folder / f"v{number}" / "model"
        model.parent.mkdir()
        model.write_bytes(b"weights %d" % number)
        sha256 = hashlib.sha256(model.read_bytes()).hexdigest()
        self.ledger.add_version(by, sha256, **about)
        manifests = {c: self.ledger.manifest_digest(c, ids) for c in ("clinic", "other")}
        path = str(model.relative_to(self.folder))
        self.ledger.add_artefact(path, "model", version=number, sha256=sha256, manifests=manifests)

    def unlearn(
        self,
        measures: dict[str, Any] = MEASURES,
        guarantee: str = "approximate",
        before: dict[str, Any] | None = None,
    ) -> None:
        self.ledger.move("R-0001", "planned")
        self.ledger.move("R-0001", "running", method="goldfish-sprint")
        self.ledger.move_artefact("v1/model", "quarantined")
        about = {"guarantee": guarantee, "measures": measures}
        about["before"] = {"accuracy": 97.0, **(before or {})}
        named = ["R-0001"]
        self.add_version(2, IDS[:0], "goldfish-sprint", parent=1, requests=named, **about)
        self.ledger.move("R-0001", "unlearned", version=2)
        self.ledger.move("R-0001", "measured", measures=measures)

    def purge(self) -> None:
        shutil.rmtree(self.folder / "v1")
        self.ledger.move_artefact("v1/model", "purged")
        self.ledger.move("R-0001", "closed")
        self.ledger.forget_ids("R-0001")

    def pack(self, request: str = "R-0001") -> Pack:
        out = self.folder / "evidence"
        return write_evidence(self.ledger, request, out, self.key, {"training": {"rounds": 3}})

    def verify(self, pack: Path, **more: Any) -> dict[str, str]:
        checks = verify_evidence(pack, **more)
        return {f"{c.what}: {c.detail}": c.state for c in checks if c.state != "right"}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    project = Made(tmp_path)
    with project.ledger:
        yield project


def text_of(pack: Pack) -> str:
    return "".join(path.read_text() for path in pack.folder.iterdir())


def test_a_finished_request(made: Made) -> None:
    """The page tells all four things, and everything that can be checked is right."""
    made.unlearn()
    made.purge()
    pack = made.pack()
    page = (pack.folder / "index.html").read_text()
    for words in (
        "Done: the model was replaced",
        "clinic asked that 2 samples of its data be removed",
        "article 17 &lt;script&gt;",
        "version 2, which replaces version 1",
        "approximate",
        "right on 96.5 % of the test (before: 97.0 %)",
        "with 2 removed samples beside 90 that no model has seen",
        "No trace of them was found. (Memory gap, 0 where there is no trace: +0.005, 95 % interval "
        "-0.005 to +0.015.)",
        "a strong trace only",
        "1 file or folder made from the data: deleted.",
        "in time",
    ):
        assert words in " ".join(page.split()), words
    facts = json.loads((pack.folder / "evidence.json").read_text())
    assert facts["models"]["before"]["sha256"] == hashlib.sha256(b"weights 1").hexdigest()
    assert facts["purged"] == ["v1/model"]
    assert facts["measurements"]["after"] == MEASURES
    assert facts["configuration"] == {"training": {"rounds": 3}}
    assert set(facts["software"]) > {"goldfish", "python", "torch"}
    everything = {"key": made.public, "project": made.folder, "ledger": made.folder / "ledger.db"}
    for path in (pack.folder, pack.archive):
        checks = verify_evidence(path, **everything)
        assert [c.state for c in checks] == ["right"] * len(checks)
        assert {c.what for c in checks} >= {"signature", "files", "model v2", "deleted files"}
    last = made.ledger.events()[-1]
    signed = (pack.folder / "manifest.json").read_bytes()
    assert (last.kind, last.subject) == ("evidence", "R-0001")
    assert last.facts["manifest"] == hashlib.sha256(signed).hexdigest()


def test_a_request_that_others_had_answered_before(made: Made) -> None:
    made.unlearn()
    made.ledger.file("clinic", "samples", IDS[:1])
    for state in ("planned", "running", "unlearned", "measured"):
        made.ledger.move("R-0003", state)
    page = (made.pack("R-0003").folder / "index.html").read_text()
    assert "Version 2 was free of this data already: there was nothing left to remove." in page


def test_a_later_model_takes_the_place_of_the_one_that_was_made(made: Made) -> None:
    """Version 3 is as free of the data as version 2 was, and is the one at hand."""
    made.unlearn()
    made.purge()
    made.ledger.move_artefact("v2/model", "quarantined")
    made.add_version(3, [], "retrain", parent=2)
    made.ledger.move_artefact("v2/model", "purged")
    pack = made.pack()
    checks = verify_evidence(pack.folder, project=made.folder)
    assert [c.state for c in checks if c.what == "model v3"] == ["right"]
    assert "version 2, which replaces version 1" in (pack.folder / "index.html").read_text()


def test_a_rejected_model_is_none(made: Made) -> None:
    made.unlearn()
    made.ledger.move("R-0001", "failed", reason="v2 was rejected")
    page = (made.pack().folder / "index.html").read_text()
    assert "Not done: v2 was rejected." in page
    assert "No new model was made yet" in page


def test_a_pack_of_a_version_that_was_rejected_since_is_wrong(made: Made) -> None:
    made.unlearn()
    pack = made.pack()
    assert "wrong" not in made.verify(pack.folder, ledger=made.folder / "ledger.db").values()
    made.ledger.move("R-0001", "failed", reason="v2 was rejected")
    found = made.verify(pack.folder, ledger=made.folder / "ledger.db")
    (wrong,) = (told for told, state in found.items() if state == "wrong")
    assert wrong.startswith("request: It was opened again on 20")
    assert wrong.endswith(": v2 was rejected. Ask for a new pack.")


def test_what_clients_deleted_on_their_own_disks_cannot_be_checked(made: Made) -> None:
    held = {"clinic": made.ledger.manifest_digest("clinic", ["patient-0003", *IDS])}
    made.ledger.add_artefact("clients/clinic/v1", CLIENT_STATE, version=1, manifests=held)
    made.unlearn()
    made.ledger.move_artefact("clients/clinic/v1", "purged")
    made.purge()
    found = made.verify(made.pack().folder, project=made.folder)
    assert found["deleted by clients: On their own disks: 1 file or folder."] == "not checked"


def test_a_pack_says_what_it_could_not_check(made: Made) -> None:
    made.unlearn()
    made.purge()
    found = made.verify(made.pack().archive)
    assert set(found.values()) == {"not checked"}
    assert [text.split(":")[0] for text in found] == [
        "whose key",
        "model v2",
        "project's ledger",
        "deleted files",
    ]


def test_a_pack_names_nobody_and_nothing(made: Made) -> None:
    """Not before a purge, when the ledger still has the ids, and nothing about others."""
    made.unlearn()
    for pack in (made.pack(), made.pack("R-0002")):
        text = text_of(pack)
        salts = [made.ledger.content(name).salt for name in ("R-0001", "R-0002")]
        assert not [word for word in (*IDS, "somebody-else", *salts) if word in text]
    assert "private matter" not in text_of(made.pack())
    assert "private matter" in text
    paths = [made.folder / "evidence", *(made.folder / "evidence").rglob("*")]
    for path in paths:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda made: None, "Not done yet."),
        (
            lambda made: made.ledger.move("R-0001", "failed", reason="clinic did not answer"),
            "Not done: clinic did not answer.",
        ),
        (lambda made: made.unlearn(), "not all deleted yet"),
        (lambda made: made.unlearn({**MEASURES, "accuracy": 80.0}), "lost much of its accuracy"),
        (
            lambda made: (made.unlearn(measured(value=0.3, low=0.1, high=0.5)), made.purge()),
            "still finds traces",
        ),
    ],
)
def test_the_headline_is_honest(made: Made, prepare: Callable[[Made], Any], words: str) -> None:
    prepare(made)
    assert words in headline(case_of(made.ledger, "R-0001"))
    assert words in (made.pack().folder / "index.html").read_text()


@pytest.mark.parametrize(
    ("prepare", "headline_says", "found"),
    [
        pytest.param(
            lambda made: made.unlearn(measured(value=0.1, low=-0.2, high=0.4)),
            "not all deleted yet",
            "could not tell whether the new model still knows",
            id="too few samples",
        ),
        pytest.param(
            lambda made: made.unlearn(
                measured(value=0.1, low=-0.1, high=0.3),
                before=measured(value=1.2, low=0.8, high=1.6),
            ),
            "not all deleted yet",
            "No trace of them was found. (Memory gap, 0 where there is no trace: +0.100, 95 % "
            "interval -0.100 to +0.300; of the old model: +1.200.)",
            id="small beside the old model's",
        ),
        pytest.param(
            lambda made: made.unlearn(measured(value=0.3, low=0.1, high=0.5), "exact"),
            "not all deleted yet",
            "It has never seen them: they are easier.",
            id="exact",
        ),
        pytest.param(
            lambda made: made.unlearn(
                {**MEASURES, "removed_class_accuracy": 90.0, "mistaken_for_removed": 1.0},
                before={"removed_class_accuracy": 97.0, "mistaken_for_removed": 1.0},
            ),
            f"A new model was made, but {OF_CLASS}.",
            "It should not recognise the removed class any more.",
            id="a class",
        ),
        pytest.param(
            lambda made: (
                made.unlearn(measured(value=0.3, low=0.1, high=0.5)),
                made.ledger.record("audit", {"word": "indistinguishable", "oracles": 16}, "v2"),
            ),
            "not all deleted yet",
            "no more than they do among themselves",
            id="an audit knows better",
        ),
        pytest.param(
            lambda made: made.ledger.withdraw("R-0001", "a mistake"),
            "Withdrawn, and nothing was removed: a mistake.",
            "Nothing was measured yet.",
            id="withdrawn",
        ),
    ],
)
def test_what_was_found_is_told_as_far_as_it_can_be_told(
    made: Made, prepare: Callable[[Made], Any], headline_says: str, found: str
) -> None:
    prepare(made)
    case = case_of(made.ledger, "R-0001")
    assert headline_says in headline(case)
    assert found in " ".join(findings(case))
    assert "wrong" not in made.verify(made.pack().folder).values()


def test_a_changed_byte_is_found_and_named(made: Made) -> None:
    """One byte of each file of the pack, of the model and of the ledger."""
    made.unlearn()
    pack = made.pack()
    for path in sorted(pack.folder.iterdir()):
        whole = path.read_bytes()
        place = len(whole) // 2
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        wrong = [c for c in verify_evidence(pack.folder) if c.state == "wrong"]
        assert wrong, path.name
        told = " ".join(f"{c.what} {c.detail}" for c in wrong)
        assert path.name in told
        path.write_bytes(whole)
    assert not [c for c in verify_evidence(pack.folder) if c.state == "wrong"]
    model = made.folder / "v2" / "model"
    model.write_bytes(b"weights 3")
    for where in ({"project": made.folder}, {"model": model}):
        found = made.verify(pack.folder, **where)
        assert any(t.startswith("model v2") and s == "wrong" for t, s in found.items())
    with closing(sqlite3.connect(made.folder / "ledger.db")) as db, db:
        db.execute("DROP TRIGGER events_no_update")
        db.execute("UPDATE events SET facts = replace(facts, '17', '18') WHERE kind = 'filed'")
    found = made.verify(pack.folder, ledger=made.folder / "ledger.db")
    assert "project's ledger: Event 4 of the ledger was changed: its digest is another." in found


def test_any_byte_of_the_archive(made: Made) -> None:
    """200 bytes of the zip, one at a time: it is told, or every file is read as it was."""
    made.unlearn()
    archive = made.pack().archive
    whole = archive.read_bytes()
    with zipfile.ZipFile(archive) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}
    told = 0
    for place in random.Random(1).sample(range(len(whole)), 200):
        archive.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            wrong = any(check.state == "wrong" for check in verify_evidence(archive))
        except StoreError:
            wrong = True
        told += wrong
        if not wrong:
            with zipfile.ZipFile(archive) as opened:
                assert [opened.read(m) for m in opened.namelist()] == list(files.values())
    assert told > 100
    empty = whole.rfind(b"PK\x05\x06") + 12  # the size of its list of files
    archive.write_bytes(whole[:empty] + bytes(4) + whole[empty + 4 :])
    assert any(check.state == "wrong" for check in verify_evidence(archive))


def test_a_pack_of_another_key_is_refused(made: Made, tmp_path: Path) -> None:
    """Also where the forger changes the page, signs anew and puts the key beside it."""
    pack = made.pack()
    other = new_key(tmp_path / "forger.key")
    found = made.verify(pack.folder, key=other)
    assert [state for text, state in found.items() if text.startswith("whose key")] == ["wrong"]
    manifest = json.loads((pack.folder / "manifest.json").read_text())
    (pack.folder / "index.html").write_text("All is well.")
    manifest["files"]["index.html"] = hashlib.sha256(b"All is well.").hexdigest()
    manifest["files"]["key.pub"] = hashlib.sha256(other.read_bytes()).hexdigest()
    signed = json.dumps(manifest).encode()
    (pack.folder / "manifest.json").write_bytes(signed)
    (pack.folder / "key.pub").write_bytes(other.read_bytes())
    signature = read_key(tmp_path / "forger.key").sign(signed).hex()
    (pack.folder / "manifest.sig").write_text(signature)
    assert set(made.verify(pack.folder).values()) == {"not checked"}
    found = made.verify(pack.folder, key=made.public)
    assert [state for text, state in found.items() if text.startswith("whose key")] == ["wrong"]


def test_a_ledger_that_was_cut_or_written_anew_is_found(made: Made, tmp_path: Path) -> None:
    made.unlearn()
    pack = made.pack()
    anew = tmp_path / "anew" / "ledger.db"
    found = made.verify(pack.folder, ledger=anew)
    assert found[f"project's ledger: There is no ledger {anew}."] == "wrong"
    with Ledger.open(anew) as ledger:
        assert ledger.verify() == []
    found = made.verify(pack.folder, ledger=anew)
    assert any("events were cut off, or the ledger was written anew" in text for text in found)
    anew.write_bytes(b"no database " * 99)
    found = made.verify(pack.folder, ledger=anew)
    assert any("file is not a database" in text for text in found)


def test_files_that_come_back_and_files_that_do_not_belong(made: Made) -> None:
    made.unlearn()
    made.purge()
    pack = made.pack()
    (made.folder / "v1").mkdir()
    (made.folder / "v1" / "model").write_bytes(b"weights 1")
    (pack.folder / "notes.txt").write_text("see also")
    (pack.folder / "evidence.json").unlink()
    found = made.verify(pack.folder, project=made.folder)
    assert found["deleted files: v1/model is there again."] == "wrong"
    assert found["notes.txt: It does not belong to the pack."] == "wrong"
    assert found["evidence.json: It is missing from the pack."] == "wrong"


def test_the_commands(url: str, tmp_path: Path) -> None:
    """A real project: keys, evidence and verify; a changed model and another key are refused."""
    home = tmp_path / "project"
    make_project(home).ledger.close()
    settings = home / "goldfish.toml"
    settings.write_text(f'ledger = "{url}"\n{settings.read_text()}')
    with Project.open(home) as project:
        list(project.train(MACHINE))
        ids = project.samples(MACHINE)["client-1"][:3]
        project.forget("client-1", samples=ids, machine=MACHINE)
        list(project.unlearn(MACHINE))
        project.purge()

    def goldfish(*arguments: str | Path, status: int = 0) -> str:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert done.exit_code == status, (done.output, done.exception)
        return " ".join(done.output.split())

    goldfish("keys", "new", home / "signing.key")
    assert "index.html" in goldfish("evidence", "R-0001", "--project", home)
    (archive,) = (home / "evidence").glob("*.zip")
    public = home / "signing.key.pub"
    said = goldfish("verify", archive, "--key", public)
    assert "Nothing is wrong with this pack." in said
    for what in ("whose key", "signature", "files", "ledger entries", "model v2", "deleted files"):
        assert f"right {what}:" in said
    everything = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    assert not [name for name in ids if name.encode() in everything]
    goldfish("evidence", "R-0001", "--project", home)
    both = sorted((home / "evidence").glob("R-0001-*.zip"))
    said = goldfish("verify", *both, "--key", public)
    assert said.count("Nothing is wrong with this pack.") == len(both) == 2
    assert f"{both[1]}: right" in said
    away = shutil.copy(archive, tmp_path / "away.zip")
    assert "as far as it could be checked" in goldfish("verify", away)
    model = home / "versions" / "v2" / "model.safetensors"
    whole = model.read_bytes()
    model.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    said = goldfish("verify", away, "--key", public, "--project", home, status=1)
    assert "wrong model v2:" in said
    assert said.endswith("Do not rely on this pack.")
    assert "Nothing is wrong" in goldfish("verify", archive, away, status=1)
    goldfish("keys", "new", tmp_path / "other.key")
    assert "wrong whose key:" in goldfish(
        "verify", away, "--key", tmp_path / "other.key.pub", status=1
    )


def test_a_signature_by_the_standard() -> None:
    """RFC 8032, section 7.1, test 1: this key and this signature of the empty message."""
    key = Ed25519PublicKey.from_public_bytes(
        bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    )
    signature = bytes.fromhex(
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9"
        "b46bd25bf5f0595bbe24655141438e7a100b"
    )
    assert is_signed(key, signature, b"")
    assert not is_signed(key, signature, b"x")


def test_a_key_is_its_owners_and_is_never_replaced(tmp_path: Path) -> None:
    public = read_public(new_key(tmp_path / "k" / "signing.key").read_bytes(), "it")
    key = tmp_path / "k" / "signing.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert is_signed(public, read_key(key).sign(b"x"), b"x")
    assert {path.name for path in (tmp_path / "k").iterdir()} == {"signing.key", "signing.key.pub"}
    with pytest.raises(StoreError, match="never replaced"):
        new_key(key)
    key.chmod(0o640)
    with pytest.raises(StoreError, match="chmod 600"):
        read_key(key)


def cut(archive: Path) -> Path:
    """Leave half of a zip."""
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    return archive


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda made: verify_evidence(made.folder / "none"), "no evidence pack"),
        (lambda made: verify_evidence(made.public), "signing.key.pub is no evidence pack"),
        (lambda made: verify_evidence(made.folder), "'goldfish evidence' wrote"),
        (lambda made: verify_evidence(cut(made.pack().archive)), "damaged and cannot be read"),
        (lambda made: verify_evidence(made.pack().folder, key=made.key), "as a public key"),
        (lambda made: read_key(made.folder / "none"), "'goldfish keys new' makes one"),
        (lambda made: read_key(made.folder / "ledger.db"), "as a private key"),
        (lambda made: made.pack("R-0009"), "Unknown request 'R-0009'"),
        (
            lambda made: (made.unlearn(), verify_evidence(made.pack().folder, model=Path("no"))),
            "no cannot be read",
        ),
    ],
)
def test_bad_input(made: Made, call: Callable[[Made], object], message: str) -> None:
    with pytest.raises(GoldfishError, match=message):
        call(made)


def test_a_pack_without_its_manifest_is_wrong_and_an_empty_folder_is_none(made: Made) -> None:
    """So is a project, which has a manifest too; a folder in a pack does not belong to it."""
    pack = made.pack().folder
    (pack / "more").mkdir()
    wrong = [check for check in verify_evidence(pack) if check.state == "wrong"]
    assert [(c.what, c.detail) for c in wrong] == [("more", "It does not belong to the pack.")]
    (pack / "more").rmdir()
    (pack / "more" / "versions").mkdir(parents=True)
    (pack / "more" / "manifest.json").touch()
    with pytest.raises(ConfigError, match=r"more is no evidence pack: manifest\.json, "):
        verify_evidence(pack / "more")
    shutil.rmtree(pack / "more")
    (pack / "manifest.json").unlink()
    (check,) = verify_evidence(pack)
    assert (check.state, check.detail) == ("wrong", "manifest.json is not in it.")
    for path in pack.iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match=r"no evidence pack: manifest\.json, .* are not in it"):
        verify_evidence(pack)


def test_a_pack_of_another_project_is_not_replaced(made: Made, tmp_path: Path) -> None:
    """Requests and events have the same numbers there; an attempt that was killed is made anew."""
    out = tmp_path / "packs of all projects"
    (tmp_path / "other").mkdir()
    other = Made(tmp_path / "other")
    theirs = write_evidence(other.ledger, "R-0001", out, other.key, {})
    kept = theirs.archive.read_bytes()
    for lost in (None, theirs.folder):
        if lost is not None:
            shutil.rmtree(lost)
        with pytest.raises(StoreError, match=r"is not of this project.*another folder with --out"):
            write_evidence(made.ledger, "R-0001", out, made.key, {})
    assert theirs.archive.read_bytes() == kept
    other.ledger.close()
    first = made.pack()
    shutil.copytree(first.folder, first.folder.with_name(f"R-0001-{len(made.ledger.events())}"))
    manifest = first.folder.with_name(f"R-0001-{len(made.ledger.events())}") / "manifest.json"
    last = made.ledger.events()[-1]
    facts = json.loads(manifest.read_bytes()) | {"head": [last.number, last.digest]}
    manifest.write_text(json.dumps(facts))
    assert made.pack().folder == manifest.parent


def test_deleted_files_are_counted_in_words() -> None:
    assert files_or_folders(1) == "1 file or folder"
    assert files_or_folders(3) == "3 files or folders"


def test_a_public_key_that_is_not_ed25519(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="as a public key"):
        read_public(b"-----BEGIN PUBLIC KEY-----\n-----END PUBLIC KEY-----\n", "it")


def test_a_pack_names_the_shards_that_were_touched(tmp_path: Path) -> None:
    """SISA gives every sample a place by itself: the same is told by plan and pack."""
    more = '[unlearning]\nmethod = "sisa"\n[unlearning.sisa]\nshards = 3\nslices = 1'
    with make_project(tmp_path / "project", more) as project:
        list(project.train(MACHINE))
        ids = project.samples(MACHINE)["client-1"][:2]
        salt = project.files.pinned().salt
        places = [
            place_of(key_of(salt, name), "client-1", 0, SisaSettings(shards=3, slices=1))[0]
            for name in ids
        ]
        touched = sorted({place + 1 for place in places})
        project.forget("client-1", samples=ids, machine=MACHINE)
        project.forget("client-2", label=1, machine=MACHINE)
        assert project.plan(MACHINE, ["sisa"]).shards["client-1"] == touched
        list(project.unlearn(MACHINE))
        key = tmp_path / "key"
        new_key(key)
        pack = write_evidence(project.ledger, "R-0001", tmp_path / "out", key, {})
        assert json.loads((pack.folder / "evidence.json").read_text())["shards"] == touched
        assert (
            f"Touched: part{'s' * (len(touched) > 1)} {touched[0]}"
            in (pack.folder / "index.html").read_text()
        )


@contextmanager
def nobody() -> Iterator[None]:
    """Be a user who may write nowhere, where this process is root's."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_pack_is_verified_against_a_ledger_that_cannot_be_written(made: Made) -> None:
    """As on a read-only disk, or in the folder of another user."""
    made.unlearn()
    pack = made.pack()
    made.ledger.close()
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        folder = Path(place)
        shutil.copytree(pack.folder, folder / "pack")
        shutil.copy(made.folder / "ledger.db", folder / "ledger.db")
        for path in (folder / "ledger.db", *(folder / "pack").iterdir()):
            path.chmod(0o444)
        (folder / "pack").chmod(0o555)
        folder.chmod(0o555)
        with nobody():
            with pytest.raises(StoreError, match="cannot be used"):
                Ledger.open(folder / "ledger.db")
            checks = verify_evidence(folder / "pack", ledger=folder / "ledger.db")
        assert sorted(path.name for path in folder.iterdir()) == ["ledger.db", "pack"]
        folder.chmod(0o755)
    (of_ledger,) = (check for check in checks if check.what == "project's ledger")
    assert (of_ledger.state, of_ledger.detail[:26]) == ("right", "Its events are one chain, ")
