"""The hash chain of the ledger's events, and how ids are hidden: SHA-256 and HMAC, no database."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

FIRST = "0" * 64
"""What the first event has in the place of the digest of the one before."""


@dataclass(frozen=True)
class Event:
    """One entry of the ledger. ``subject`` is what it is about: a request, a version, a path."""

    number: int
    at: str
    kind: str
    subject: str
    facts: Mapping[str, Any]
    previous: str
    digest: str

    @property
    def body(self) -> str:
        """The digest of what the event says, without its place in the chain."""
        return body_digest(self.number, self.at, self.kind, self.subject, self.facts)


def canonical(value: object) -> str:
    """Return JSON text that is the same for equal values: sorted names, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def body_digest(number: int, at: str, kind: str, subject: str, facts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what an event says, as canonical JSON."""
    body = {"at": at, "facts": facts, "kind": kind, "number": number, "subject": subject}
    return hashlib.sha256(canonical(body).encode()).hexdigest()


def chain_digest(previous: str, body: str) -> str:
    """Return the digest of an event: SHA-256 of the one before it and of its own body's digest."""
    return hashlib.sha256((previous + body).encode()).hexdigest()


def salted_digest(salt: str, value: str) -> str:
    """Return HMAC-SHA-256 of a sample id under a salt: without the salt, no guess can be tried."""
    return hmac.digest(salt.encode(), value.encode(), "sha256").hex()


def chain_problems(links: Iterable[tuple[int, str, str, str]]) -> Iterator[str]:
    """Say what is wrong in a chain of (number, body, previous, digest)."""
    before, expected = FIRST, 1
    for number, body, previous, digest in links:
        if number != expected:
            yield f"Event {expected} of the ledger is missing: {number} comes in its place."
        elif previous != before:
            yield f"Event {number} of the ledger does not follow the one before it."
        if chain_digest(previous, body) != digest:
            yield f"Event {number} of the ledger was changed: its digest is another."
        before, expected = digest, number + 1
