"""Deletion requests: what each client removes, and ways for an experiment to choose it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from goldfish.data.examples import Subset
from goldfish.data.partition import Partition
from goldfish.errors import ConfigError, DataError, unknown
from goldfish.randomness import generator
from goldfish.types import Client, DeletionRequest, Examples

_LARGEST_SHARE = 3, 4  # of a client's data that a deletion rate may take before the next one joins


def split(client: Client, requests: Sequence[DeletionRequest]) -> Client:
    """Return the client with its data split into retained and removed, for all its requests.

    Requests to other clients are passed over, and so is a class that this client does not hold
    (:func:`refuse_unmatched` sees that another one does). Call it on the client as it was before
    any deletion, with all requests so far: a client that is already split is refused.
    """
    own = [request for request in requests if request.client_id == client.id]
    if not own:
        return client
    if client.removed is not None:
        raise ConfigError(
            f"Client {client.id!r} is split already. Split the original client by all requests."
        )
    removed = torch.zeros(len(client.retained), dtype=torch.bool)
    for request in own:
        removed |= _matches(client, request)
    if not bool(removed.any()):
        return client
    return replace(
        client,
        retained=Subset(client.retained, (~removed).nonzero().flatten()),
        removed=Subset(client.retained, removed.nonzero().flatten()),
    )


def refuse_unmatched(clients: Iterable[Client], requests: Sequence[DeletionRequest]) -> None:
    """Raise where a request names nothing that is there: nothing would be removed.

    Samples must all be held by the client that is asked. A class may be asked of several clients,
    as by :func:`requests_for_class`: one of them must hold a sample of it, the others need not.
    """
    by_id = {client.id: client for client in clients}
    asked: dict[int, list[Client]] = {}
    for request in requests:
        client = by_id[request.client_id]
        if request.class_label is not None:
            asked.setdefault(request.class_label, []).append(client)
        elif not bool(_matches(client, request).any()):
            raise ConfigError(f"Client {client.id!r} has no samples: there is nothing to remove.")
    for label, holders in asked.items():
        held = sorted({int(i) for client in holders for i in client.retained.labels.unique()})
        if label not in held:
            classes = ", ".join(map(str, held)) or "none"
            raise no_such_class(label, [c.id for c in holders], f" Held are the classes {classes}.")


def no_such_class(label: int, asked: Sequence[str], more: str = "") -> ConfigError:
    """Return the error of a class that no client holds that was asked to remove it."""
    who = f"Client {asked[0]!r}" if len(asked) == 1 else f"None of the {len(asked)} clients"
    holds = "holds no sample" if len(asked) == 1 else "that were asked holds a sample"
    return ConfigError(f"{who} {holds} of class {label}: nothing would be removed.{more}")


def held_metric(label: int) -> str:
    """Return the name under which a client answers how much it holds of a class asked for."""
    return f"held_of_class_{label}"


def held_of_classes(examples: Examples, requests: Sequence[DeletionRequest]) -> dict[str, float]:
    """Return how many of a client's samples are of each class that the requests name."""
    labels = [r.class_label for r in requests if r.class_label is not None]
    return {held_metric(label): int((examples.labels == label).sum()) for label in labels}


def choose_rate(
    partition: Partition,
    examples: Examples,
    rate: float,
    seed: int,
    eligible: Tensor | None = None,
) -> list[DeletionRequest]:
    """Choose samples at random: ``rate`` (0.06 is 6 %) of all samples of the federation.

    The first client asks for all of them; when they do not fit in 3/4 of its data, the next one
    joins. ``eligible``, one bool a sample of ``examples``, limits what can be chosen.
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
        part, whole = _LARGEST_SHARE
        count = min(left, len(sample_ids) * part // whole, len(candidates))
        if count:
            draw = torch.randperm(len(candidates), generator=generator(seed, "removal", client_id))
            chosen = tuple(candidates[i] for i in draw[:count].tolist())
            requests.append(DeletionRequest(client_id, sample_ids=chosen))
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
    requests = []
    found: set[str] = set()
    for client_id, held in partition.clients.items():
        own = tuple(id_ for id_ in held if id_ in wanted)
        if own:
            requests.append(DeletionRequest(client_id, sample_ids=own))
            found.update(own)
    missing = [id_ for id_ in wanted if id_ not in found]
    if missing:
        raise DataError(f"No client holds {_some(missing)}. Check the sample ids.")
    return requests


def _matches(client: Client, request: DeletionRequest) -> Tensor:
    """Return a mask of the client's samples that one request names."""
    examples = client.retained
    if request.class_label is not None:
        return (examples.labels == request.class_label).cpu()
    if request.sample_ids is None:
        return torch.ones(len(examples), dtype=torch.bool)
    wanted = set(request.sample_ids)
    missing = wanted.difference(examples.ids)
    if missing:
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
