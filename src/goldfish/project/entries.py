"""What the events of a ledger tell: requests, versions and artefacts, and where they may go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from goldfish.project.chain import Event

Kind = Literal["samples", "class", "all"]
State = Literal[
    "received", "planned", "running", "unlearned", "measured", "closed", "failed", "withdrawn"
]
ArtefactState = Literal["current", "quarantined", "purged"]

NEXT: Mapping[str, tuple[str, ...]] = {
    "received": ("planned", "failed", "withdrawn"),
    "planned": ("running", "failed", "withdrawn"),
    "running": ("unlearned", "failed", "withdrawn"),
    "unlearned": ("measured", "failed"),
    "measured": ("closed", "failed"),
    "closed": (),
    "failed": ("received", "withdrawn"),
    "withdrawn": (),
}
"""Where a request may go from each state."""
WAY: tuple[State, ...] = ("received", "planned", "running", "unlearned", "measured", "closed")
"""The states of a request that nothing goes wrong with, in order."""
PENDING: tuple[State, ...] = ("received", "planned", "running", "failed")
"""Requests in these states are still to be handled; one that failed is tried again."""
FORMERLY: Mapping[str, str] = {"audited": "measured"}
"""States that had another name in earlier ledgers, whose events stay as they are."""
NEXT_ARTEFACT: Mapping[str, tuple[str, ...]] = {
    "current": ("quarantined", "purged"),
    "quarantined": ("current", "purged"),
    "purged": (),
}
"""Where an artefact may go from each state: a quarantined one comes back if it was a mistake."""
CLIENT_STATE = "client state"
"""The kind of an artefact that lies on a client's own disk: ``clients/ID/vN``."""
CLIENTS = "clients"
"""What the paths of these begin with."""


@dataclass(frozen=True)
class Request:
    """A deletion request, as its events tell it."""

    id: str
    client: str
    kind: Kind
    count: int | None
    """How many samples it is about, where that is known."""
    digests: Sequence[str]
    """A salted digest of each sample id, or of the class: :func:`salted_digest`."""
    reason: str
    requested_at: datetime
    filed_at: datetime
    due_at: datetime
    state: str = "received"
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was recorded on its way; a later value of a name replaces an earlier one."""
    failure: str | None = None
    """Why it failed, or was withdrawn; None again once it is tried anew."""

    def overdue(self, now: datetime | None = None) -> bool:
        """Say whether the request is still open after its due date."""
        return (
            self.state not in ("closed", "withdrawn") and (now or datetime.now(UTC)) > self.due_at
        )


@dataclass(frozen=True)
class Content:
    """What a request names, in plain: only there until :meth:`Ledger.forget_ids`."""

    ids: Sequence[str]
    """Sample ids in order; the label alone for a class; empty for all of a client."""
    salt: str
    """Of this request alone. Who has it can check an id against the request's digests."""


@dataclass(frozen=True)
class Version:
    """A numbered model version."""

    number: int
    at: datetime
    made_by: str
    """"train", "import", or the unlearning method."""
    sha256: str
    """Of the model file."""
    parent: int | None
    requests: Sequence[str]
    """The requests that it was made for."""
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Artefact:
    """A file or folder that was made of clients' data."""

    path: str
    kind: str
    version: int | None
    sha256: str | None
    parents: Sequence[str]
    """The paths of the artefacts that it was made from."""
    manifests: Mapping[str, Sequence[str]]
    """The data that it descends from: of each client, the digests of its manifests."""
    state: str = "current"

    @property
    def client(self) -> str:
        """The client that keeps it on its own disk; empty for what lies in the project."""
        own = self.path.removeprefix(f"{CLIENTS}/").rpartition("/")[0]
        return own if self.kind == CLIENT_STATE else ""


def request_of(events: Sequence[Event]) -> Request:
    """Read a request from its events, of which the first filed it."""
    first, *moves = (event for event in events if event.kind in ("filed", *NEXT, *FORMERLY))
    state, failure = "received", None
    facts: dict[str, Any] = {}
    for event in moves:
        state = FORMERLY.get(event.kind, event.kind)
        failure = str(event.facts["reason"]) if state in ("failed", "withdrawn") else None
        facts.update(event.facts)
    facts.pop("reason", None)
    times = {n: datetime.fromisoformat(first.facts[n]) for n in ("requested_at", "due_at")}
    return Request(
        **{**first.facts, **times},
        id=first.subject,
        filed_at=datetime.fromisoformat(first.at),
        state=state,
        facts=facts,
        failure=failure,
    )


def version_of(event: Event) -> Version:
    """Read a version from the event that it was made."""
    number, at = int(event.subject.removeprefix("v")), datetime.fromisoformat(event.at)
    return Version(number=number, at=at, **event.facts)


def artefact_of(events: Sequence[Event]) -> Artefact:
    """Read an artefact from its events, since it was made for the last time."""
    made = max(place for place, event in enumerate(events) if event.kind == "artefact")
    about = {**events[made].facts, "parents": tuple(events[made].facts["parents"])}
    moved = [event.kind for event in events[made + 1 :] if event.kind in NEXT_ARTEFACT]
    return Artefact(path=events[made].subject, **about, state=moved[-1] if moved else "current")


def wrong_moves(events: Iterable[Event]) -> Iterator[str]:
    """Say which events bring a request or an artefact where it cannot go."""
    states: dict[str, str] = {}
    begins, moves = {"filed": "received", "artefact": "current"}, {**NEXT, **NEXT_ARTEFACT}
    for event in events:
        before = states.get(event.subject, "unknown")
        kind = FORMERLY.get(event.kind, event.kind)
        if kind in moves and kind not in moves.get(before, ()):
            yield (
                f"Event {event.number} of the ledger cannot be true: {event.subject} was "
                f"{before} and cannot become {kind}."
            )
        if kind in (*begins, *moves):
            states[event.subject] = begins.get(kind, kind)
