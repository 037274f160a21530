"""The check of an evidence pack: offline, and of each thing it says whether it is right."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from goldfish.errors import ConfigError, StoreError
from goldfish.files import sha256_of
from goldfish.project.chain import body_digest, chain_problems
from goldfish.project.entries import CLIENTS
from goldfish.project.evidence import (
    EVENTS,
    KEY,
    MANIFEST,
    SIGNATURE,
    Manifest,
    files_or_folders,
    sha256,
)
from goldfish.project.ledger import Ledger
from goldfish.project.signing import fingerprint, is_signed, read_public
from goldfish.report.formatting import listing
from goldfish.results import in_words

LARGEST = 1 << 28
"""A pack of more bytes is not read: no honest one comes near."""
NEEDED = (MANIFEST, SIGNATURE, KEY)
"""Without these files nothing of a pack can be checked."""


@dataclass(frozen=True)
class Check:
    """One thing that a verification looked at."""

    what: str
    state: Literal["right", "wrong", "not checked"]
    detail: str


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
    missing = [name for name in NEEDED if name not in content]
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
    if pack.is_dir() and not any((pack / name).exists() for name in (SIGNATURE, KEY)):
        raise _no_pack(pack)  # a project, too, has a file with the name of the manifest
    if pack.is_file() and pack.suffix != ".zip" and not zipfile.is_zipfile(pack):
        raise _no_pack(pack)
    try:
        if pack.is_dir():
            if sum(path.stat().st_size for path in pack.iterdir()) > LARGEST:
                raise ValueError("it is too large for an evidence pack")  # noqa: TRY301
            found = list(pack.iterdir())
            return {path.name: b"" if path.is_dir() else path.read_bytes() for path in found}
        with zipfile.ZipFile(pack) as archive:
            members = {Path(member.filename).name: member for member in archive.infolist()}
            if len(members) < len(archive.infolist()):
                raise ValueError("two of its files have one name")  # noqa: TRY301
            if sum(member.file_size for member in members.values()) > LARGEST:
                raise ValueError("it is too large for an evidence pack")  # noqa: TRY301
            return {name: archive.read(member) for name, member in members.items()}
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise StoreError(f"{pack} is damaged and cannot be read: {error}.") from error


def _no_pack(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is no evidence pack: {listing(NEEDED)} are not in it. Give a folder or a zip that "
        "'goldfish evidence' wrote."
    )


def _check_signature(content: Mapping[str, bytes], key: Path | None) -> Iterator[Check]:
    try:
        own = read_public(content[KEY], KEY)
        signature = bytes.fromhex(content[SIGNATURE].decode().strip())
    except (ConfigError, ValueError) as error:
        yield Check("signature", "wrong", f"{KEY} or {SIGNATURE} cannot be read: {error}")
        return
    name = fingerprint(own)
    if key is None:
        yield Check(
            "whose key",
            "not checked",
            f"The pack brings its own key, {name}. Compare it with the one that the signer gave "
            "you, or give that one with --key.",
        )
    else:
        with _readable(key):
            expected = fingerprint(read_public(key.read_bytes(), str(key)))
        told = f"It was signed with the key {name}"
        wrong = [] if expected == name else [f"{told}, and not with {expected} of {key}."]
        yield from _checked("whose key", wrong, f"{told}.")
    signed = is_signed(own, signature, content[MANIFEST])
    wrong = [] if signed else [f"{MANIFEST}, {SIGNATURE} or {KEY} was changed after signing."]
    yield from _checked("signature", wrong, f"{MANIFEST} is as it was signed.")


def _check_files(content: Mapping[str, bytes], manifest: Manifest) -> list[Check]:
    wrong = {}
    for name, digest in manifest.files.items():
        if name not in content:
            wrong[name] = "It is missing from the pack."
        elif sha256(content[name]) != digest:
            wrong[name] = "It was changed: its SHA-256 is another."
    for name in sorted(content.keys() - manifest.files.keys() - {MANIFEST, SIGNATURE}):
        wrong[name] = "It does not belong to the pack."
    right = Check("files", "right", f"{len(manifest.files)} files have their SHA-256.")
    return [Check(name, "wrong", why) for name, why in wrong.items()] or [right]


def _check_chain(lines: bytes, manifest: Manifest) -> list[Check]:
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
        return [Check("ledger entries", "wrong", f"{EVENTS} cannot be read: {error}.")]
    end = (links[-1][0], links[-1][3]) if links else (0, "")
    if end != manifest.head:
        problems.append(f"They end with event {end[0]}, and not with {manifest.head[0]} as signed.")
    others = f"; of {len(links) - told} about other requests it has only the digests"
    whole = f"{len(links)} events are one chain{others if told < len(links) else ''}."
    return _checked("ledger entries", problems, whole)


def _check_model(manifest: Manifest, model: Path | None, project: Path | None) -> Check:
    """Check the model file, if it is at hand."""
    expected = manifest.model
    if expected is None:
        return Check("model", "not checked", "There was no new model yet when the pack was made.")
    what = f"model v{expected.version}"
    path = model or (project / expected.path if project else None)
    if path is None or (model is None and not path.is_file()):
        return Check(what, "not checked", "Its file is not at hand: give it with --model.")
    with _readable(path):
        found = sha256_of(path)
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
            with Ledger.open(ledger, read_only=True) as opened:
                problems = opened.verify(manifest.head)
                if not problems:
                    yield from _since(opened, manifest)
        except StoreError as error:
            problems = [str(error)]
        right = "Its events are one chain, and the pack's are among them."
        yield from _checked(what, problems, right)
    here = [name for name in manifest.purged if not name.startswith(f"{CLIENTS}/")]
    if len(here) < len(manifest.purged):
        theirs = files_or_folders(len(manifest.purged) - len(here))
        yield Check("deleted by clients", "not checked", f"On their own disks: {theirs}.")
    if here and project is None:
        yield Check("deleted files", "not checked", "The project is not at hand.")
    elif here and project is not None:
        back = [name for name in here if (project / name).exists()]
        gone = files_or_folders(len(here))
        again = [f"{name} is there again." for name in back]
        yield from _checked("deleted files", again, f"Not there any more: {gone}.")


def _since(ledger: Ledger, manifest: Manifest) -> Iterator[Check]:
    """Say whether a request was opened again after its pack was made: its version is rejected."""
    later = [e for e in ledger.events(manifest.request) if e.number > manifest.head[0]]
    failed = [event for event in later if event.kind == "failed"]
    if manifest.model is not None and failed:
        why = f"{failed[-1].facts['reason']}. Ask for a new pack."
        yield Check("request", "wrong", f"It was opened again on {failed[-1].at[:10]}: {why}")


def _checked(what: str, problems: Sequence[str], right: str) -> list[Check]:
    """Return each problem of a thing, or that it is right."""
    return [Check(what, "wrong", told) for told in problems] or [Check(what, "right", right)]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say in words that a file which was given cannot be read."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
