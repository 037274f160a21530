"""What requests come to: which samples they name, and what the library is asked."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from goldfish.data import Partition
from goldfish.errors import ConfigError, DataError, unknown
from goldfish.experiments.client_setup import key_of
from goldfish.project.entries import Kind, Request
from goldfish.project.folder import ProjectFolder
from goldfish.project.holdings import Holdings
from goldfish.types import DeletionRequest

LISTED = 10
"""So many ids an error lists."""


@dataclass(frozen=True)
class Asked:
    """What requests come to: for the library, and by the keys of the samples."""

    by_request: Mapping[str, DeletionRequest]
    """What is asked of the library, by the id of the request in the ledger."""
    keys: Mapping[str, set[str]]
    """The keys that each request names, less what is gone."""
    missing: Mapping[str, int]
    """How many samples of each request are not in the data any more, where there are any."""

    @property
    def requests(self) -> list[DeletionRequest]:
        """What the library is asked: equal requests once."""
        return list(dict.fromkeys(self.by_request.values()))

    @property
    def done(self) -> list[str]:
        """Requests of which nothing is left: other requests have removed it all."""
        return [request for request in self.keys if request not in self.by_request]

    def of_clients(self, requests: Sequence[str] | None = None) -> dict[str, set[str]]:
        """Return the keys that these requests, or all, name, by client."""
        found: dict[str, set[str]] = {}
        for request in self.by_request if requests is None else requests:
            client = self.by_request[request].client_id
            found[client] = found.get(client, set()) | self.keys[request]
        return found


def in_library(request: Request, content: Sequence[str], keys: set[str]) -> DeletionRequest:
    """Return a request of the ledger as one of the library; ``keys`` are of the named samples."""
    if request.kind == "samples":
        return DeletionRequest(request.client, sample_ids=sorted(keys))
    label = int(content[0]) if request.kind == "class" else None
    return DeletionRequest(request.client, class_label=label)


def label_of(written: str, names: Sequence[str]) -> int:
    """Return the label of a class of these ``names``, which is written as its number or its name.

    Where both are possible and are two classes, ``number:...`` or ``name:...`` says which.
    """
    kind, _, rest = written.partition(":")
    if kind in ("number", "name") and written not in names:
        written = rest
    else:
        kind = ""
    number = int(written) if written.isascii() and written.isdecimal() else None
    named = names.index(written) if written in names and kind != "number" else None
    if number is not None and number < len(names) and named not in (None, number) and not kind:
        raise ConfigError(
            f"--class {written}: class {number} has the name {names[number]!r}, and the class with "
            f"the name {written!r} is class {named}. Write --class number:{written} or --class "
            f"name:{written}. Nothing was filed."
        )
    label = number if named is None else named
    if label is None:
        hint = "'goldfish clients' lists all. Nothing was filed."
        raise ConfigError(unknown("class", written, names, hint))
    return label


def refuse_named(reason: str, ids: Sequence[str]) -> None:
    """Raise where a reason, which the ledger keeps in plain, names a sample."""
    for own in ids:
        if own in reason and re.search(rf"(?<![\w-]){re.escape(own)}(?![\w-])", reason):
            raise ConfigError(
                f"--reason names the sample {own!r}. The ledger keeps the reason as it is, for "
                "ever, and of samples only digests: say it without the id. Nothing was done."
            )


@dataclass(frozen=True)
class Registry:
    """Who had which samples when the model was trained, and what is gone of them since."""

    manifest: Partition
    gone: Mapping[str, set[str]]
    salt: str
    own_data: bool
    """Sample ids are each client's own."""

    @classmethod
    def of_version(cls, files: ProjectFolder, number: int) -> Registry:
        """Return who had what, and what is gone of it in a model version."""
        gone, salt = files.gone(number), files.pinned().salt
        theirs = files.settings.own_data or files.settings.members is not None
        return cls(files.manifest(), gone, salt, theirs)

    def left(self, client: str) -> set[str]:
        """Return the keys of what a client has left; an unknown client is refused."""
        if client not in self.manifest.clients:
            hint = (
                "'goldfish clients' lists all that the model was trained with. The data of a "
                "client that came later is not in the model: there is nothing to remove."
            )
            raise ConfigError(unknown("client", client, self.manifest.clients, hint))
        return set(self.manifest.clients[client]) - self.gone[client]

    def key(self, client: str, sample_id: str) -> str:
        """Return the key of a client's sample."""
        return key_of(self.salt, sample_id, client if self.own_data else None)

    def named(self, client: str, written: Sequence[str]) -> list[str]:
        """Return the ids that were written; blanks around one count only where its id has them."""
        held = set(self.manifest.clients[client])
        return list(dict.fromkeys(w if self.key(client, w) in held else w.strip() for w in written))

    def keys(
        self,
        client: str,
        kind: Kind,
        content: Sequence[str],
        holdings: Holdings | None,
        seen: Collection[str] = (),
    ) -> set[str]:
        """Return the keys that a request names.

        For a class they are those that it was ``seen`` to name, and those that are there. Without
        ``holdings`` nobody here knows of which class a sample is.
        """
        if kind == "samples":
            return {self.key(client, sample_id) for sample_id in content}
        if kind == "class":
            there = () if holdings is None else holdings.of_class(client, int(content[0]))
            return {*seen, *there}
        return set(self.manifest.clients[client])

    def check_samples(self, client: str, ids: Sequence[str], done: Sequence[Request]) -> None:
        """Raise where a client never had some of the samples, or none of them is left.

        ``done`` are the requests that the newest model honours.
        """
        if not ids:
            raise ConfigError("The request names no sample. Nothing was filed.")
        held = set(self.manifest.clients[client])
        strange = [sample_id for sample_id in ids if self.key(client, sample_id) not in held]
        if strange:
            more = f" and {len(strange) - LISTED} more" if len(strange) > LISTED else ""
            raise ConfigError(
                f"{client} never had {len(strange)} of these samples: "
                f"{', '.join(strange[:LISTED])}{more}. Nothing was filed."
            )
        if self.gone[client] >= self.keys(client, "samples", ids, None):
            by = [request.id for request in done if request.client == client]
            handled = f" (requests of {client} that are done: {', '.join(by)})" if by else ""
            raise ConfigError(
                f"All of these samples of {client} were removed before{handled}. Nothing was filed."
            )

    def empties(self, named: Mapping[str, set[str]]) -> bool:
        """Tell whether, without these keys, no client has anything left."""
        return all(named.get(c, set()) >= self.left(c) for c in self.manifest.clients)

    def resolve(
        self,
        requests: Sequence[Request],
        contents: Mapping[str, Sequence[str]],
        holdings: Holdings,
        seen: Mapping[str, Collection[str]],
    ) -> Asked:
        """Turn requests of the ledger into those of the library.

        Requests that together take all that a client has are a leave. What is not in the data any
        more must be asked for: a model would still know it. ``seen`` is what requests for a class
        were seen to name. One that was never seen to name any waits as long as the model knows
        samples that are not there any more: they may be of the class.
        """
        missing = {c: holdings.missing(c) - self.gone[c] for c in self.manifest.clients}
        keys = {}
        for r in requests:
            own = self.keys(r.client, r.kind, contents[r.id], holdings, seen.get(r.id, ()))
            if own or r.kind != "class" or not missing[r.client]:
                keys[r.id] = own - self.gone[r.client]
        requests = [r for r in requests if r.id in keys]
        named: dict[str, set[str]] = {client: set() for client in self.manifest.clients}
        for request in requests:
            named[request.client] |= keys[request.id]
        lost = {client: len(missing[client] - own) for client, own in named.items()}
        if any(lost.values()):
            which = ", ".join(f"{count} of {client}" for client, count in lost.items() if count)
            raise DataError(
                "Samples that the model was trained with are not in the data any more, and no "
                f"request names them: {which}. Put them back, or file a request for them "
                "('goldfish forget'); nothing was done."
            )
        by_request = {}
        for r in requests:
            if keys[r.id] and named[r.client] >= self.left(r.client):
                by_request[r.id] = DeletionRequest(r.client)
            elif keys[r.id] and keys[r.id] <= missing[r.client]:  # no client finds its class
                by_request[r.id] = DeletionRequest(r.client, sample_ids=sorted(keys[r.id]))
            elif keys[r.id]:
                by_request[r.id] = in_library(r, contents[r.id], keys[r.id])
        deleted = {r.id: len(keys[r.id] & missing[r.client]) for r in requests}
        return Asked(by_request, keys, {name: count for name, count in deleted.items() if count})
