"""Evidence packs: what was asked, done, found and left of one request, signed; and their check.

A pack is a folder and a zip of the same files. ``manifest.json`` holds the digest of every other
file and is what the key signs. No sample, sample id or label is in a pack: ids are salted digests,
and of events about other requests only the digests that the chain needs.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from goldfish.errors import ConfigError, StoreError
from goldfish.project.chain import Event, body_digest, chain_problems
from goldfish.project.ledger import FORGOTTEN, Artefact, Ledger, Request, Version
from goldfish.project.signing import fingerprint, is_signed, public_pem, read_key, read_public
from goldfish.report.formatting import listing, percent, plural
from goldfish.results import MARGINS, Memory, Part, in_words
from goldfish.version import __version__

PAGE, FACTS, EVENTS, KEY = "index.html", "evidence.json", "ledger.jsonl", "key.pub"
MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"
SOFTWARE = ("torch", "numpy", "sqlalchemy", "cryptography", "flwr")
FEW = 30
"""Of fewer removed samples, the membership test can tell little."""
LARGEST = 1 << 28
"""A pack of more bytes is not read: no honest one comes near."""


class ModelFile(Part):
    """A model version, and what its file must be."""

    version: int
    path: str
    """In the project."""
    sha256: str


class Manifest(Part):
    """The whole of ``manifest.json``: what the signature stands for."""

    schema_version: Literal[1] = 1
    request: str
    made_at: str
    goldfish: str
    key: str
    """The fingerprint of the key that signs."""
    model: ModelFile | None
    """The newest model that is free of the data; None as long as there is none."""
    purged: list[str]
    """What must not be in the project any more."""
    head: tuple[int, str]
    """The ledger's last event when the pack was made: its number and its digest."""
    files: dict[str, str]
    """The SHA-256 of every other file."""


@dataclass(frozen=True)
class Pack:
    """Where a pack was written."""

    folder: Path
    archive: Path


@dataclass(frozen=True)
class Check:
    """One thing that a verification looked at."""

    what: str
    state: Literal["right", "wrong", "not checked"]
    detail: str


@dataclass(frozen=True)
class Case:
    """All that the ledger tells about one request."""

    request: Request
    events: Sequence[Event]
    before: Version | None
    after: Version | None
    model: Artefact | None
    """The newest model that is free of the data: ``after``, or a later one."""
    descendants: Sequence[Artefact]
    """What descends from the removed samples: made before they were removed."""
    ids_forgotten: bool

    @property
    def outstanding(self) -> list[str]:
        """What descends from the removed samples and is still there, in words."""
        left = [a for a in self.descendants if a.state != "purged"]
        return [f"{a.path} ({a.kind}, {a.state})" for a in left]

    @property
    def purged(self) -> list[str]:
        """The paths of what was deleted."""
        return [a.path for a in self.descendants if a.state == "purged"]


def case_of(ledger: Ledger, request_id: str) -> Case:
    """Gather what the ledger tells about a request."""
    request, events = ledger.request(request_id), ledger.events(request_id)
    versions = {found.number: found for found in ledger.versions()}
    artefacts = ledger.artefacts()
    of_client = [a for a in artefacts if a.manifests.get(request.client)]
    forgotten = any(event.kind == FORGOTTEN for event in events)
    if request.state not in ("unlearned", "audited", "closed"):
        left = [artefact for artefact in of_client if artefact.state != "purged"]
        return Case(request, events, None, None, None, left, forgotten)
    # What other requests had removed already needed no version of its own.
    until = max(event.number for event in events if event.kind == "unlearned")
    there = (e.subject for e in ledger.events() if e.kind == "version" and e.number < until)
    known = [versions[int(name.removeprefix("v"))] for name in there]
    after = next((v for v in reversed(known) if request.id in v.requests), known[-1])
    models = [a for a in artefacts if a.kind == "model" and (a.version or 0) >= after.number]
    clean = set(models[0].manifests.get(request.client, ()))
    return Case(
        request,
        events,
        versions[after.parent] if after.parent is not None else None,
        after,
        next((model for model in reversed(models) if model.state == "current"), models[0]),
        [
            artefact
            for artefact in of_client
            if (artefact.version or 0) < after.number
            and not clean.issuperset(artefact.manifests[request.client])
        ],
        forgotten,
    )


def write_evidence(
    ledger: Ledger,
    request_id: str,
    out: Path,
    key: Path,
    configuration: Mapping[str, Any],
) -> Pack:
    """Write the evidence pack of a request into the folder ``out``, and note that in the ledger.

    ``key`` is the private key that signs; ``configuration`` is what the project was set to. A pack
    is named after the request and the ledger's last event, so that a later one is another.
    """
    signer = read_key(key)
    with ledger.together():  # the pack is of one moment
        case = case_of(ledger, request_id)
        events = ledger.events()
        others = {request.id for request in ledger.requests()} - {request_id}
    head = (events[-1].number, events[-1].digest)
    made_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    facts = {**_facts(case), "configuration": dict(configuration), "made_at": made_at}
    name = fingerprint(signer.public_key())
    content = {
        PAGE: _page(case, made_at, name).encode(),
        FACTS: (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode(),
        EVENTS: b"".join(_line(event, event.subject in others) for event in events),
        KEY: public_pem(signer),
    }
    model = None
    if (free := case.model) is not None:
        model = ModelFile(version=free.version or 0, path=free.path, sha256=free.sha256 or "")
    manifest = Manifest(
        request=case.request.id,
        made_at=made_at,
        goldfish=__version__,
        key=name,
        model=model,
        purged=case.purged,
        head=head,
        files={name: _sha256(data) for name, data in content.items()},
    )
    content[MANIFEST] = (manifest.model_dump_json(indent=1) + "\n").encode()
    content[SIGNATURE] = (signer.sign(content[MANIFEST]).hex() + "\n").encode()
    pack = _write(out / f"{case.request.id}-{head[0]}", content)
    ledger.record("evidence", {"manifest": _sha256(content[MANIFEST]), "key": name}, request_id)
    return pack


def _facts(case: Case) -> dict[str, Any]:
    """Return the fields of ``evidence.json``; docs/evidence.md says what each is for."""
    request, after, before = case.request, case.after, case.before
    work = dict(after.facts) if after else {}
    return {
        "schema_version": 1,
        "request": {
            **case.events[0].facts,
            "id": request.id,
            "filed_at": case.events[0].at,
            "state": request.state,
            "failure": request.failure,
            "ids_forgotten": case.ids_forgotten,
        },
        "method": {"name": after.made_by, "guarantee": work.get("guarantee")} if after else None,
        "models": {"before": _of_version(before), "after": _of_version(after)},
        "measurements": {"before": work.pop("before", None), "after": work.pop("measures", None)},
        "findings": findings(case),
        "work": work,
        "touched": [asdict(artefact) for artefact in case.descendants],
        "purged": case.purged,
        "outstanding": left_over(case),
        "software": _software(),
    }


def _of_version(found: Version | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"version": found.number, "sha256": found.sha256, "made_at": found.at.isoformat()}


def _software() -> dict[str, str]:
    """Return the versions of what may matter, of those that are installed."""
    found = {"goldfish": __version__, "python": platform.python_version()}
    for name in SOFTWARE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _line(event: Event, withheld: bool) -> bytes:
    """Return an event for the pack; of one about another request, what the chain needs."""
    written: dict[str, Any] = {
        "number": event.number,
        "previous": event.previous,
        "digest": event.digest,
    }
    if withheld:
        written["body"] = event.body
    else:
        written |= {"at": event.at, "kind": event.kind, "subject": event.subject}
        written["facts"] = event.facts
    return (json.dumps(written, sort_keys=True) + "\n").encode()


# The first page, in words


def headline(case: Case) -> str:
    """Say in one sentence how far a request is."""
    request = case.request
    if request.state == "failed":
        return f"Not done: {request.failure}."
    if case.after is None:
        return "Not done yet."
    memory = _memory(case)
    if memory is not None and memory.judged.finding == "remembers":
        return "A new model was made, but a test still finds traces of the data in it."
    if _collapsed(case):
        return "A new model was made, but it lost much of its accuracy, and so it proves little."
    if request.state != "closed" or case.outstanding:
        return "The new model is there. Files that were made from the data are not all deleted yet."
    return "Done: the model was replaced, and the files that were made from the data are deleted."


def asked(case: Case) -> list[str]:
    """Say who asked for what."""
    request = case.request
    amount = "" if request.count is None else plural(request.count, "sample")
    what = {
        "samples": f"{amount} of its data",
        "class": "all of its data of one class" + (f" ({amount})" if amount else ""),
        "all": "all of its data" + (f" ({amount})" if amount else ""),
    }[request.kind]
    said = [
        f"On {_day(request.requested_at)}, {request.client} asked that {what} be removed from the "
        f"model. The request is {request.id}, filed on {_day(request.filed_at)}."
    ]
    if request.reason:
        said.append(f"The reason given: {request.reason}")
    closed = next((e.at for e in case.events if e.kind == "closed"), None)
    due = f"The answer was due on {_day(request.due_at)}"
    if closed is None:
        late = "; it is late" if request.overdue() else ""
        return [*said, f"{due}{late}."]
    in_time = "in time" if datetime.fromisoformat(closed) <= request.due_at else "late"
    return [*said, f"{due}; the request was closed on {closed[:10]}, {in_time}."]


def done(case: Case) -> list[str]:
    """Say what was done."""
    after, before = case.after, case.before
    if after is None:
        return ["No new model was made yet: the data is still in the one that is used."]
    if case.request.id not in after.requests:
        return [
            f"Other requests had removed this data before: version {after.number} is free of it."
        ]
    old = "" if before is None else f", which replaces version {before.number}"
    said = [
        f"A new model was made on {_day(after.at)}: version {after.number}{old}. The method is "
        f'called "{after.made_by}".'
    ]
    if after.facts.get("guarantee") == "exact":
        said.append(
            "This method is exact: the new model was trained without the removed data, from a "
            "start that knew nothing of it."
        )
    else:
        said.append(
            "This method is approximate: the new model was made with the help of the old one, so "
            "that only tests can show whether the data has left it."
        )
    if len(after.requests) > 1:
        number = len(after.requests)
        said.append(f"The same work answered {number} requests; what was measured is for all.")
    return said


def findings(case: Case) -> list[str]:
    """Say what was measured, in words."""
    if case.after is None:
        return ["Nothing was measured yet."]
    now, before = _measures(case, "measures"), _measures(case, "before")
    said = []
    for name, sentence in (
        ("accuracy", "The new model is right on {} of the test"),
        ("removed_class_accuracy", "It recognises the removed class in {} of the cases"),
    ):
        if name in now:
            was = f" (before: {percent(before[name])})" if name in before else ""
            said.append(f"{sentence.format(percent(now[name]))}{was}.")
    if _collapsed(case):
        said.append(
            "It lost so much accuracy that the test below proves little: it may have forgotten "
            "more than it was asked to."
        )
    memory = _memory(case)
    if memory is None:
        return [*said, "No test for traces of the removed samples was possible."]
    found = {
        "alike": "the new model treats the removed samples like the others. No trace of them was "
        "found.",
        "remembers": "the new model still knows the removed samples better than the others. They "
        "have left traces.",
        "over-forgets": "the new model does worse on the removed samples than on the others. It "
        "does not know them, but the difference could tell an attacker that they were removed.",
    }[memory.judged.finding]
    said.append(
        f"Test for traces, with {plural(int(memory.removed), 'removed sample')} beside "
        f"{memory.unseen} that no model has seen: {found}"
    )
    if memory.removed < FEW:
        said.append("With so few removed samples, the test would find a strong trace only.")
    old = _memory(case, "before")
    if old is not None and old.judged.finding != "remembers":
        said.append("The test found no trace in the old model either, so that it says little here.")
    return said


def _measures(case: Case, which: str) -> Mapping[str, Any]:
    return (case.after.facts.get(which) if case.after else None) or {}


def _memory(case: Case, which: str = "measures") -> Memory | None:
    """Return what the membership test found in the new model, or in the one before."""
    found = _measures(case, which).get("memory")
    return None if found is None else Memory.model_validate(found)


def _collapsed(case: Case) -> bool:
    """Say whether the new model lost so much accuracy that no test of it counts."""
    now, before = _measures(case, "measures"), _measures(case, "before")
    if "accuracy" not in now or "accuracy" not in before:
        return False
    return bool(before["accuracy"] - now["accuracy"] >= MARGINS.collapse)


def left_over(case: Case) -> list[str]:
    """Say what is left to do, or beyond the reach of this project."""
    said = [f"Made from the data, and still there: {name}." for name in case.outstanding]
    if not case.ids_forgotten:
        said.append("The list of what was asked for is still kept, as long as it is needed.")
    said += [f"{name}." for name in case.request.facts.get("outstanding") or ()]
    said.append(
        "Copies outside of this project (backups, models that were handed on) are not covered: "
        "who received one must be told."
    )
    return said


def _page(case: Case, made_at: str, key: str) -> str:
    """Return the page for a data-protection officer, as HTML."""
    from jinja2 import Environment, StrictUndefined

    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    purged = len(case.purged)
    gone = [f"{plural(purged, 'file or folder')} made from the data: deleted."] if purged else []
    template = page.from_string(
        files("goldfish.project").joinpath("evidence.html").read_text(encoding="utf-8")
    )
    return template.render(
        request=case.request.id,
        headline=headline(case),
        parts={
            "Who asked for what": asked(case),
            "What was done": [*done(case), *gone],
            "What was found": findings(case),
            "What is left": left_over(case),
        },
        models=[v for v in (case.before, case.after) if v is not None],
        made_at=made_at,
        key=key,
        goldfish=__version__,
    )


def _day(time: datetime) -> str:
    return time.strftime("%Y-%m-%d")


# Files


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(folder: Path, content: Mapping[str, bytes]) -> Pack:
    """Write a pack whole: under another name, then renamed; for its owner alone."""
    archive = folder.with_name(f"{folder.name}.zip")
    part = folder.with_name(f".{folder.name}.part")
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in content.items():
            about = zipfile.ZipInfo(f"{folder.name}/{name}", datetime.now(UTC).timetuple()[:6])
            about.external_attr = 0o600 << 16
            about.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(about, data)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in (part, folder):  # of an attempt that was killed: the ledger does not know it
            if old.exists():
                shutil.rmtree(old)
        part.mkdir(mode=0o700)
        for name, data in content.items():
            _write_file(part / name, data)
        part.rename(folder)
        whole = part.with_suffix(".zip")
        whole.unlink(missing_ok=True)
        _write_file(whole, zipped.getvalue())
        whole.rename(archive)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise StoreError(f"{folder} cannot be written: {error}.") from error
    return Pack(folder, archive)


def _write_file(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# Verification


def verify_evidence(
    pack: Path,
    *,
    key: Path | None = None,
    model: Path | None = None,
    project: Path | None = None,
    ledger: str | Path | None = None,
) -> list[Check]:
    """Check a pack, a folder or a zip, and say of each thing whether it is right.

    Without anything else, the pack is checked in itself: signature, digests, chain. ``key`` is the
    public key that must have signed it, ``model`` the model file. A ``project`` folder and the
    ``ledger`` at an address (as of :meth:`Ledger.open`) are compared with what the pack says.
    """
    content = _read(pack)
    missing = [name for name in (MANIFEST, SIGNATURE, KEY) if name not in content]
    if missing:
        return [Check("pack", "wrong", f"{listing(missing)} is not in it.")]
    checks = list(_check_signature(content, key))
    try:
        manifest = Manifest.model_validate_json(content[MANIFEST])
    except ValidationError as error:
        return [*checks, Check(MANIFEST, "wrong", f"It cannot be read: {in_words(error)}.")]
    checks += _check_files(content, manifest)
    checks += _check_chain(content.get(EVENTS, b""), manifest)
    checks.append(_check_model(manifest, model, project))
    checks += _check_project(manifest, project, ledger)
    return checks


def _read(pack: Path) -> dict[str, bytes]:
    """Return the files of a pack by their names."""
    if not pack.exists():
        raise ConfigError(f"There is no evidence pack {pack}.")
    try:
        if pack.is_dir():
            if sum(path.stat().st_size for path in pack.iterdir()) > LARGEST:
                raise ValueError("it is too large for an evidence pack")  # noqa: TRY301
            return {path.name: path.read_bytes() for path in pack.iterdir()}
        with zipfile.ZipFile(pack) as archive:
            members = {Path(member.filename).name: member for member in archive.infolist()}
            if len(members) < len(archive.infolist()):
                raise ValueError("two of its files have one name")  # noqa: TRY301
            if sum(member.file_size for member in members.values()) > LARGEST:
                raise ValueError("it is too large for an evidence pack")  # noqa: TRY301
            return {name: archive.read(member) for name, member in members.items()}
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise StoreError(f"{pack} is damaged and cannot be read: {error}.") from error


def _check_signature(content: Mapping[str, bytes], key: Path | None) -> Iterator[Check]:
    try:
        own = read_public(content[KEY], KEY)
        signature = bytes.fromhex(content[SIGNATURE].decode().strip())
    except (ConfigError, ValueError) as error:
        yield Check("signature", "wrong", f"{KEY} or {SIGNATURE} cannot be read: {error}")
        return
    name = fingerprint(own)
    if key is None:
        whose = Check(
            "whose key",
            "not checked",
            f"The pack brings its own key, {name}. Compare it with the one that the signer gave "
            "you, or give that one with --key.",
        )
    else:
        expected = read_public(_bytes(key), str(key))
        same = fingerprint(expected) == name
        told = f"It was signed with the key {name}"
        whose = Check(
            "whose key",
            "right" if same else "wrong",
            f"{told}." if same else f"{told}, and not with {fingerprint(expected)} of {key}.",
        )
    yield whose
    if is_signed(own, signature, content[MANIFEST]):
        yield Check("signature", "right", f"{MANIFEST} is as it was signed.")
    else:
        yield Check(
            "signature", "wrong", f"{MANIFEST}, {SIGNATURE} or {KEY} was changed after signing."
        )


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


def _check_files(content: Mapping[str, bytes], manifest: Manifest) -> Iterator[Check]:
    wrong = False
    for name, digest in manifest.files.items():
        if name not in content:
            wrong = True
            yield Check(name, "wrong", "It is missing from the pack.")
        elif _sha256(content[name]) != digest:
            wrong = True
            yield Check(name, "wrong", "It was changed: its SHA-256 is another.")
    for name in sorted(content.keys() - manifest.files.keys() - {MANIFEST, SIGNATURE}):
        wrong = True
        yield Check(name, "wrong", "It does not belong to the pack.")
    if not wrong:
        yield Check("files", "right", f"{len(manifest.files)} files have their SHA-256.")


def _check_chain(lines: bytes, manifest: Manifest) -> Iterator[Check]:
    """Check that the events in the pack are one chain, up to the event that the manifest names."""
    links: list[tuple[int, str, str, str]] = []
    told = 0
    try:
        for line in lines.splitlines():
            event = json.loads(line)
            if "body" in event:
                body = str(event["body"])
            else:
                told += 1
                parts = (event[name] for name in ("number", "at", "kind", "subject", "facts"))
                body = body_digest(*parts)
            links.append((int(event["number"]), body, event["previous"], event["digest"]))
        problems = list(chain_problems(links))
    except (ValueError, KeyError, TypeError) as error:
        yield Check("ledger entries", "wrong", f"{EVENTS} cannot be read: {error}.")
        return
    end = (links[-1][0], links[-1][3]) if links else (0, "")
    if end != manifest.head:
        problems.append(f"They end with event {end[0]}, and not with {manifest.head[0]} as signed.")
    for problem in problems:
        yield Check("ledger entries", "wrong", problem)
    if not problems:
        others = f"; of {len(links) - told} about other requests it has only the digests"
        whole = f"{len(links)} events are one chain{others if told < len(links) else ''}."
        yield Check("ledger entries", "right", whole)


def _check_model(manifest: Manifest, model: Path | None, project: Path | None) -> Check:
    """Check the model file, if it is at hand."""
    expected = manifest.model
    if expected is None:
        return Check("model", "not checked", "There was no new model yet when the pack was made.")
    what = f"model v{expected.version}"
    path = model or (project / expected.path if project else None)
    if path is None or (model is None and not path.exists()):
        return Check(what, "not checked", "Its file is not at hand: give it with --model.")
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    if found == expected.sha256:
        return Check(what, "right", f"{path} has the SHA-256 of the pack.")
    return Check(what, "wrong", f"{path} is not the model of the pack: its SHA-256 is another.")


def _check_project(
    manifest: Manifest, project: Path | None, ledger: str | Path | None
) -> Iterator[Check]:
    """Check what the pack says of a project that is at hand: its ledger, what it deleted."""
    what = "project's ledger"
    if ledger is None:
        yield Check(what, "not checked", "It is not at hand: give --project.")
    else:
        try:
            with Ledger.open(ledger, create=False) as opened:
                problems = opened.verify(manifest.head)
        except StoreError as error:
            problems = [str(error)]
        for problem in problems:
            yield Check(what, "wrong", problem)
        if not problems:
            yield Check(what, "right", "Its events are one chain, and the pack's are among them.")
    if project is None:
        if manifest.purged:
            yield Check("deleted files", "not checked", "The project is not at hand.")
        return
    back = [name for name in manifest.purged if (project / name).exists()]
    for name in back:
        yield Check("deleted files", "wrong", f"{name} is there again.")
    if manifest.purged and not back:
        gone = plural(len(manifest.purged), "file or folder")
        yield Check("deleted files", "right", f"Not there any more: {gone}.")
