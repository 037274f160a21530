"""Evidence packs: what was asked, done, found and left of one request, signed.

A pack is a folder and a zip of the same files. ``manifest.json`` holds the digest of every other
file and is what the key signs. No sample, sample id or label is in a pack: ids are salted digests,
and of events about other requests only the digests that the chain needs.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from goldfish.errors import StoreError
from goldfish.project.chain import Event
from goldfish.project.entries import Artefact, Request, Version
from goldfish.project.ledger import FORGOTTEN, Ledger, stamp
from goldfish.project.signing import fingerprint, public_pem, read_key, write_new
from goldfish.project.traces import class_is_known, memory_of, traces
from goldfish.report.formatting import listing, percent, plural
from goldfish.results import MARGINS, Memory, Part
from goldfish.version import __version__

PAGE, FACTS, EVENTS, KEY = "index.html", "evidence.json", "ledger.jsonl", "key.pub"
MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"
SOFTWARE = ("torch", "numpy", "sqlalchemy", "cryptography", "flwr")
FEW = 30
"""Of fewer removed samples, the membership test can tell little."""


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
    audit: Mapping[str, Any] | None = None
    """What the last audit of ``after`` found, if there was one."""

    @property
    def outstanding(self) -> list[str]:
        """What descends from the removed samples and is still there, in words."""
        return [
            f"what {a.client} keeps of version {a.version} on its own disk"
            if a.client
            else f"{a.path} ({a.kind}, {a.state})"
            for a in self.descendants
            if a.state != "purged"
        ]

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
    if request.state not in ("unlearned", "measured", "closed"):
        withdrawn = request.state == "withdrawn"
        left = [a for a in of_client if a.state != "purged" and not withdrawn]
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
        ledger.audits().get(after.number) if request.id in after.requests else None,
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
    made_at = stamp(datetime.now(UTC))
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
        files={name: sha256(data) for name, data in content.items()},
    )
    content[MANIFEST] = (manifest.model_dump_json(indent=1) + "\n").encode()
    content[SIGNATURE] = (signer.sign(content[MANIFEST]).hex() + "\n").encode()
    folder = out / f"{case.request.id}-{head[0]}"
    _refuse_another(folder, head)
    pack = _write(folder, content)
    ledger.record("evidence", {"manifest": sha256(content[MANIFEST]), "key": name}, request_id)
    return pack


def _facts(case: Case) -> dict[str, Any]:
    """Return the fields of ``evidence.json``; docs/evidence.md says what each is for."""
    request, after, before = case.request, case.after, case.before
    work = dict(after.facts) if after else {}
    for name in ("shards", "kept", "deleted_before"):  # of all clients
        work.pop(name, None)
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
        "audit": case.audit,
        "work": work,
        "shards": _shards(case),
        "deleted_before": _deleted_before(case),
        "touched": [asdict(artefact) for artefact in case.descendants],
        "purged": case.purged,
        "outstanding": left_over(case),
        "software": _software(),
    }


def _shards(case: Case) -> list[int]:
    """Return the shards of the client's data that held what this version removed."""
    found: Mapping[str, list[int]] = case.after.facts.get("shards", {}) if case.after else {}
    return list(found.get(case.request.client, []))


def _deleted_before(case: Case) -> int:
    """Return how many of its samples were deleted before the new model was made and measured."""
    found: Mapping[str, int] = case.after.facts.get("deleted_before", {}) if case.after else {}
    return found.get(case.request.id, 0)


def _of_version(found: Version | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"version": found.number, "sha256": found.sha256, "made_at": found.at.isoformat()}


def _software() -> dict[str, str]:
    """Return the versions of what may matter, of those that are installed."""
    found = {"goldfish": __version__, "python": platform.python_version()}
    for name in SOFTWARE:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _line(event: Event, withheld: bool) -> bytes:
    """Return an event for the pack; of one about another request, what the chain needs."""
    written = vars(event)
    if withheld:
        linked = {name: written[name] for name in ("number", "previous", "digest")}
        written = {**linked, "body": event.body}
    return (json.dumps(written, sort_keys=True) + "\n").encode()


# The first page, in words


def headline(case: Case) -> str:
    """Say in one sentence how far a request is."""
    request = case.request
    if request.state == "failed":
        return f"Not done: {request.failure}."
    if request.state == "withdrawn":
        return f"Withdrawn, and nothing was removed: {request.failure}."
    if case.after is None:
        return "Not done yet."
    if found := _traces(case):
        return f"A new model was made, but {found}."
    if _collapsed(case):
        return "A new model was made, but it lost much of its accuracy, and so it proves little."
    if request.state != "closed" or case.outstanding:
        return "The new model is there. Files that were made from the data are not all deleted yet."
    how = "the model was replaced"
    if request.id not in case.after.requests:
        how = "the model was free of the data already"
    return f"Done: {how}, and the files that were made from the data are deleted."


def asked(case: Case) -> list[str]:
    """Say who asked for what."""
    request = case.request
    amount = "" if request.count is None else plural(request.count, "sample")
    counted = f" ({amount})" if amount else ""
    what = {
        "samples": f"{amount} of its data",
        "class": f"all of its data of one class{counted}",
        "all": f"all of its data{counted}",
    }[request.kind]
    said = [
        f"On {request.requested_at:%Y-%m-%d}, {request.client} asked that {what} be removed from "
        f"the model. The request is {request.id}, filed on {request.filed_at:%Y-%m-%d}."
    ]
    if request.reason:
        said.append(f"The reason given: {request.reason}")
    closed = next((e.at for e in case.events if e.kind == "closed"), None)
    if closed is not None:
        in_time = "in time" if datetime.fromisoformat(closed) <= request.due_at else "late"
        answered = f"; the request was closed on {closed[:10]}, {in_time}"
    else:
        answered = "; it is late" if request.overdue() else ""
    return [*said, f"The answer was due on {request.due_at:%Y-%m-%d}{answered}."]


def done(case: Case) -> list[str]:
    """Say what was done."""
    after = case.after
    if case.request.state == "withdrawn":
        return ["The request was taken back before it was handled: the model keeps the data."]
    if after is None:
        return ["No new model was made yet: the data is still in the one that is used."]
    if case.request.id not in after.requests:
        return [
            f"Version {after.number} was free of this data already: there was nothing left to "
            "remove."
        ]
    old = f", which replaces version {after.parent}" if after.parent is not None else ""
    said = [
        f"A new model was made on {after.at:%Y-%m-%d}: version {after.number}{old}. The method is "
        f'called "{after.made_by}".'
    ]
    if _is_exact(case):
        said.append(
            "This method is exact: the new model was trained without the removed data, from a "
            "start that knew nothing of it."
        )
    else:
        said.append(
            "This method is approximate: the new model was made with the help of the old one, so "
            "that only tests can show whether the data has left it."
        )
    if shards := _shards(case):
        word = "part" if len(shards) == 1 else "parts"
        said.append(
            f"The client's data is divided into parts (shards), each with models of its own. "
            f"Touched: {word} {listing(list(map(str, shards)))}."
        )
    if len(after.requests) > 1:
        number = len(after.requests)
        said.append(f"The same work answered {number} requests; what was measured is for all.")
    return said


def findings(case: Case) -> list[str]:
    """Say what was measured, in words."""
    if case.after is None:
        return ["Nothing was measured yet."]
    if case.audit is None:
        return _test(case)
    found = {
        "remembers": "the new model still knows the removed samples better than they do. They have "
        "left traces.",
        "over-forgets": "the new model does worse than they do on the removed samples, more than "
        "on others. The difference could tell an attacker that they were removed.",
        "damaged": "the new model is right less often than they are, so that the audit proves "
        "little.",
        "different": "the new model differs from them on all samples, removed or not.",
        "not enough evidence": "the audit could not tell whether the new model still knows the "
        "removed samples.",
        "indistinguishable": "the new model differs from them no more than they do among "
        "themselves.",
    }[case.audit["word"]]
    others = plural(case.audit["oracles"], "model")
    return [
        *_test(case),
        f"Audit, compared with {others} that were trained anew without the removed samples: "
        f"{found}",
    ]


def _test(case: Case) -> list[str]:
    """Say what was measured when the new model was made."""
    now, before = _measures(case, "measures"), _measures(case, "before")
    remaining = case.after is not None and of_remaining_classes(case.after.facts)
    rest = " samples of the remaining classes" if remaining else ""
    said = []
    for name, sentence in (
        ("accuracy", f"The new model is right on {{}} of the test{rest}"),
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
    if case.after and class_is_known(case.after.facts):
        said.append("It should not recognise the removed class any more.")
    if deleted := _deleted_before(case):
        said.append(
            f"{plural(deleted, 'sample')} of this request had been deleted from the data before: "
            "no test could look at them."
        )
    memory, old = memory_of(now), memory_of(before)
    if memory is None:
        return [*said, "No test for traces of the removed samples was possible."]
    gap = memory.gap
    if gap.finding == "over-forgets":
        found = (
            "the new model does worse on the removed samples than on the others. It does not know "
            "them, but the difference could tell an attacker that they were removed."
        )
    elif gap.finding == "remembers" and _is_exact(case):
        found = (
            "the new model does better on the removed samples than on the others. It has never "
            "seen them: they are easier."
        )
    elif gap.finding == "remembers":
        found = (
            "the new model still knows the removed samples better than the others. They have left "
            "traces."
        )
    elif gap.high < _small(old):
        found = (
            "the new model treats the removed samples like the others. No trace of them was found."
        )
    else:
        found = "it could not tell whether the new model still knows the removed samples."
    was = "" if old is None else f"; of the old model: {old.gap.value:+.3f}"
    said.append(
        f"Test for traces, with {plural(int(memory.removed), 'removed sample')} beside "
        f"{memory.unseen} that no model has seen: {found} (Memory gap, 0 where there is no trace: "
        f"{gap.value:+.3f}, 95 % interval {gap.low:+.3f} to {gap.high:+.3f}{was}.)"
    )
    if memory.removed < FEW:
        said.append("With so few removed samples, the test would find a strong trace only.")
    if old is not None and old.gap.finding != "remembers":
        said.append("The test found no trace in the old model either, so that it says little here.")
    return said


def _small(old: Memory | None) -> float:
    """Return below which memory gap there is no trace: too small to matter, or beside the old."""
    if old is None or old.gap.finding != "remembers":
        return MARGINS.memory
    return max(MARGINS.memory, MARGINS.kept * old.gap.value)


def _is_exact(case: Case) -> bool:
    return case.after is not None and case.after.facts.get("guarantee") == "exact"


def _traces(case: Case) -> str:
    return "" if case.after is None else traces(case.after.facts, case.audit)


def of_remaining_classes(facts: Mapping[str, Any]) -> bool:
    """Say whether the accuracies of a version leave out test samples, whose class nobody has."""
    return "removed_class_accuracy" in facts["measures"] or facts.get("left_out", 0) > 0


def _measures(case: Case, which: str) -> Mapping[str, Any]:
    return (case.after.facts.get(which) if case.after else None) or {}


def _collapsed(case: Case) -> bool:
    """Say whether the new model lost so much accuracy that no test of it counts."""
    now, before = (_measures(case, which).get("accuracy") for which in ("measures", "before"))
    return now is not None and before is not None and before - now >= MARGINS.collapse


def left_over(case: Case) -> list[str]:
    """Say what is left to do, or beyond the reach of this project."""
    said = [f"Made from the data, and still there: {name}." for name in case.outstanding]
    if not case.ids_forgotten:
        said.append("The list of what was asked for is still kept, as long as it is needed.")
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
    gone = [f"{files_or_folders(purged)} made from the data: deleted."] if purged else []
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
            "What is still to do": left_over(case),
        },
        models=[v for v in (case.before, case.after) if v is not None],
        made_at=made_at,
        key=key,
        goldfish=__version__,
    )


def files_or_folders(amount: int) -> str:
    """Format how many things lie on a disk."""
    return f"{plural(amount, 'file')} or folder{'s' * (amount != 1)}"


# Files


def sha256(content: bytes) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def _refuse_another(folder: Path, head: tuple[int, str]) -> None:
    """Raise where a pack of this name is there, and of another project.

    One of this ledger, up to the same event, was written by an attempt that was killed.
    """
    there = [path for path in (folder, _archive(folder)) if path.exists()]
    try:
        if there and json.loads((folder / MANIFEST).read_bytes())["head"] == list(head):
            return
    except (OSError, ValueError, KeyError, TypeError):
        pass  # it is no pack, or none that can be read
    if there:
        raise StoreError(
            f"{there[0]} is there already, and is not of this project. A pack is never replaced: "
            "choose another folder with --out."
        )


def _archive(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.zip")


def _write(folder: Path, content: Mapping[str, bytes]) -> Pack:
    """Write a pack whole: under another name, then renamed; for its owner alone."""
    archive = _archive(folder)
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
            write_new(part / name, data, 0o600)
        part.rename(folder)
        whole = part.with_suffix(".zip")
        whole.unlink(missing_ok=True)
        write_new(whole, zipped.getvalue(), 0o600)
        whole.rename(archive)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise StoreError(f"{folder} cannot be written: {error}.") from error
    return Pack(folder, archive)
