"""Deletion requests: what each client removes, and ways for an experiment to choose it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from goldfish.data.examples import Subset
from goldfish.data.partition import Partition
from goldfish.errors import ConfigError, DataError, unknown
from goldfish.randomness import generator
from goldfish.types import Client, DeletionRequest, Examples


def split(
    client: Client, requests: Sequence[DeletionRequest], honoured: Sequence[DeletionRequest] = ()
) -> Client:
    """Return the client with its data split into retained, removed and gone.

    Removed is what ``requests`` name and no earlier request did. Gone is what ``honoured``, the
    earlier requests, name, and the rest of what the client has a tombstone for. Requests to other
    clients are passed over, and so is a class that this client does not hold. Missing is what
    ``requests`` name one by one, no earlier request did, and the client has deleted. Call it on the
    client as it was before any deletion: a client that is already split is refused.
    """
    own = [request for request in requests if request.client_id == client.id]
    earlier = [request for request in honoured if request.client_id == client.id]
    tombstones = client.state.tombstones
    if not own and not earlier and not tombstones:
        return client
    if client.removed is not None or client.gone:
        raise ConfigError(
            f"Client {client.id!r} is split already. Split the original client by all requests."
        )
    ids = client.retained.ids
    removed, before = (torch.zeros(len(ids), dtype=torch.bool) for _ in range(2))
    for request in own:
        removed |= _matches(client, request)
    for request in earlier:
        before |= _matches(client, request, may_be_missing=True)
    removed &= ~before
    if tombstones:
        before |= torch.tensor([id_ in tombstones for id_ in ids], dtype=torch.bool)
    gone = before & ~removed
    left_over = named_samples(own + earlier).union(tombstones).difference(ids)
    if not bool((removed | gone).any()) and not left_over:
        return client
    return replace(
        client,
        retained=Subset(client.retained, (~removed & ~gone).nonzero().flatten()),
        removed=Subset(client.retained, removed.nonzero().flatten()) if removed.any() else None,
        gone=(*(ids[place] for place in gone.nonzero().flatten().tolist()), *sorted(left_over)),
        missing=sorted(named_samples(own).difference(ids, named_samples(earlier))),
    )


def read_ids(path: Path, setting: str) -> list[str]:
    """Return the sample ids of a file with one a line, which ``setting`` names.

    Blanks around an id stay: they count where the id of the sample has them.
    """
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{setting}: {path} is no text in UTF-8. Save it as such.") from None
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error}.") from None
    return [line for line in lines if line.strip()]


def named_samples(requests: Sequence[DeletionRequest]) -> set[str]:
    """Return the ids of all samples that requests name one by one."""
    return {sample_id for request in requests for sample_id in request.sample_ids or ()}


def covered(request: DeletionRequest, earlier: Sequence[DeletionRequest]) -> bool:
    """Tell whether earlier requests are this one, or name all of its samples."""
    own = [other for other in earlier if other.client_id == request.client_id]
    return request in own or (
        request.sample_ids is not None and named_samples(own).issuperset(request.sample_ids)
    )


def to_remember(client: Client) -> set[str]:
    """Return the ids that a client that was split needs tombstones for, and has none yet."""
    asked = {*client.gone, *(() if client.removed is None else client.removed.ids)}
    return asked - client.state.tombstones


def choose_rate(
    partition: Partition,
    examples: Examples,
    rate: float,
    seed: int,
    eligible: Tensor | None = None,
    shard_of: Mapping[str, int] | None = None,
) -> list[DeletionRequest]:
    """Choose samples at random: ``rate`` (0.06 is 6 %) of all samples of the federation.

    The first client asks for all of them; when they do not fit in 3/4 of its data, the next one
    joins. ``eligible``, one bool a sample of ``examples``, limits what can be chosen. With
    ``shard_of`` the samples of a client's first shard are chosen first, then those of the next.
    """
    total = sum(len(sample_ids) for sample_ids in partition.clients.values())
    if not 0 < rate < 1:
        raise ConfigError(f"A deletion rate is a share between 0 and 1, not {rate}.")
    wanted = left = round(rate * total)
    if wanted == 0:
        raise ConfigError(f"A deletion rate of {rate} of {total} samples is less than one sample.")
    allowed = _eligible_ids(examples, eligible)
    requests: list[DeletionRequest] = []
    for client_id, sample_ids in partition.clients.items():
        candidates = [id_ for id_ in sample_ids if id_ in allowed]
        count = min(left, len(sample_ids) * 3 // 4, len(candidates))
        if count:
            draw = torch.randperm(len(candidates), generator=generator(seed, "removal", client_id))
            drawn = [candidates[i] for i in draw.tolist()]
            if shard_of is not None:
                drawn.sort(key=shard_of.__getitem__)
            requests.append(DeletionRequest(client_id, sample_ids=tuple(drawn[:count])))
            left -= count
        if left == 0:
            return requests
    raise DataError(
        f"A deletion rate of {rate} means {wanted} samples, but only {wanted - left} can be chosen"
        f"{'' if eligible is None else ' among those eligible'}: each client may lose 3/4 of its "
        "data. Lower the rate."
    )


def requests_for_class(partition: Partition, label: int) -> list[DeletionRequest]:
    """Return a request to every client to remove all of its samples of one class.

    Clients that hold none of it answer all the same; that nobody does is an error.
    """
    return [DeletionRequest(client_id, class_label=label) for client_id in partition.clients]


def requests_for_clients(partition: Partition, client_ids: Sequence[str]) -> list[DeletionRequest]:
    """Return a request to each of these clients to remove all of its data."""
    for client_id in client_ids:
        if client_id not in partition.clients:
            hint = f"The federation has {len(partition.clients)} clients."
            raise ConfigError(unknown("client", client_id, partition.clients, hint))
    return [DeletionRequest(client_id) for client_id in dict.fromkeys(client_ids)]


def requests_for_samples(partition: Partition, sample_ids: Sequence[str]) -> list[DeletionRequest]:
    """Return the requests that remove these samples, one to each client that holds some."""
    wanted = dict.fromkeys(sample_ids)
    named = {
        client_id: tuple(id_ for id_ in held if id_ in wanted)
        for client_id, held in partition.clients.items()
    }
    found = set().union(*named.values())
    missing = [id_ for id_ in wanted if id_ not in found]
    if missing:
        raise DataError(f"No client holds {_some(missing)}. Check the sample ids.")
    return [DeletionRequest(client_id, sample_ids=own) for client_id, own in named.items() if own]


def _matches(client: Client, request: DeletionRequest, *, may_be_missing: bool = False) -> Tensor:
    """Return a mask of the client's samples that one request names.

    A sample that is missing is an error, unless it was asked for before: then its owner has deleted
    it since.
    """
    examples = client.retained
    if request.class_label is not None:
        return (examples.labels == request.class_label).cpu()
    if request.sample_ids is None:
        return torch.ones(len(examples), dtype=torch.bool)
    wanted = set(request.sample_ids)
    missing = wanted.difference(examples.ids, client.state.tombstones)
    if missing and not may_be_missing:
        raise ConfigError(
            f"Client {client.id!r} does not hold {_some(sorted(missing))}. Check the sample ids."
        )
    return torch.tensor([id_ in wanted for id_ in examples.ids], dtype=torch.bool)


def _eligible_ids(examples: Examples, eligible: Tensor | None) -> set[str]:
    if eligible is None:
        return set(examples.ids)
    if eligible.dtype != torch.bool or eligible.shape != (len(examples),):
        raise ConfigError(
            f"eligible is one bool for each of the {len(examples)} samples, not {eligible.dtype} "
            f"of shape {list(eligible.shape)}."
        )
    return {examples.ids[position] for position in eligible.nonzero().flatten().tolist()}


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    return f"{'sample' if len(ids) == 1 else 'samples'} {', '.join(map(repr, ids[:3]))}{more}"
