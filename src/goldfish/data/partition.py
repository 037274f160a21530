"""Which client holds which samples: evenly, unevenly, skewed by label, or as you say."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from goldfish.data.examples import Subset
from goldfish.errors import ConfigError, DataError, unknown
from goldfish.randomness import derive_seed
from goldfish.types import Examples

Kind: TypeAlias = Literal["iid", "uneven", "dirichlet"]


@dataclass(frozen=True)
class Partition:
    """Which client holds which samples, by id; no sample is held twice and no client is empty."""

    kind: str
    """How it came about: ``iid``, ``uneven``, ``dirichlet`` or ``explicit``."""
    seed: int
    clients: Mapping[str, tuple[str, ...]]
    """Sample ids by client id."""

    def __post_init__(self) -> None:
        if not self.clients:
            raise DataError("A partition needs at least one client.")
        for client_id, sample_ids in self.clients.items():
            if not sample_ids:
                raise DataError(f"Client {client_id!r} has no samples; leave it out.")
        held = Counter(id_ for sample_ids in self.clients.values() for id_ in sample_ids)
        if len(held) != held.total():
            repeated = held.most_common(1)[0][0]
            raise DataError(f"Sample {repeated!r} is held more than once in the partition.")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content: equal partitions, and only those, have equal digests."""
        text = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Return the manifest: the whole partition as JSON, with its digest."""
        return json.dumps({**self._content(), "digest": self.digest})

    @classmethod
    def from_json(cls, text: str) -> Partition:
        """Read a manifest; one that was changed after it was written is refused."""
        try:
            content = json.loads(text)
            clients = {str(name): tuple(map(str, ids)) for name, ids in content["clients"].items()}
            partition = cls(str(content["kind"]), int(content["seed"]), clients)
            digest = content["digest"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"This is not a partition manifest ({type(error).__name__}: {error}). "
                "Write one with Partition.to_json."
            ) from error
        if digest != partition.digest:
            raise DataError(
                f"The partition manifest was changed: its digest is {partition.digest}, it says "
                f"{digest}. Use the original file, or make a new partition."
            )
        return partition

    def _content(self) -> dict[str, Any]:
        return {"kind": self.kind, "seed": self.seed, "clients": dict(self.clients)}


def partition(
    examples: Examples, clients: int, *, kind: Kind = "iid", alpha: float = 0.5, seed: int = 0
) -> Partition:
    """Deal all samples out to ``clients`` clients, ``client-1`` to ``client-N``.

    ``iid``: at random, in equal numbers (they differ by at most 1). ``uneven``: at random, in
    random numbers. ``dirichlet``: each class in shares drawn from a Dirichlet distribution; the
    smaller ``alpha``, the fewer classes a client sees. Every client gets at least one sample.
    """
    kinds = get_args(Kind)
    if kind not in kinds:
        hint = f"Choose one of {', '.join(kinds)}."
        raise ConfigError(unknown("partition", kind, kinds, hint))
    if clients < 1:
        raise ConfigError(f"A federation needs at least 1 client, not {clients}.")
    if clients > len(examples):
        raise ConfigError(
            f"{len(examples)} samples are too few for {clients} clients; each needs at least one."
        )
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ConfigError(f"alpha must be a number above 0, not {alpha}.")
    rng = np.random.default_rng(derive_seed(seed, "partition", kind))
    order = rng.permutation(len(examples))
    if kind == "dirichlet":
        labels = examples.labels.cpu().numpy()[order]
        owners = _skewed_owners(labels, clients, alpha, rng)
    else:
        shares = np.ones(clients) if kind == "iid" else rng.random(clients)
        sizes = 1 + _apportion(len(examples) - clients, shares / shares.sum())
        owners = np.repeat(np.arange(clients), sizes)
    ids = examples.ids
    held = {
        f"client-{client + 1}": tuple(ids[position] for position in order[owners == client])
        for client in range(clients)
    }
    return Partition(kind, seed, held)


def explicit(source: Mapping[str, Sequence[str]] | Path) -> Partition:
    """Return the partition that a mapping of client id to sample ids says, or a JSON file.

    The file holds such a mapping, or a manifest written by :meth:`Partition.to_json`.
    """
    if isinstance(source, Mapping):
        clients = {client_id: tuple(ids) for client_id, ids in source.items()}
        return Partition("explicit", 0, clients)
    try:
        text = source.read_text(encoding="utf-8-sig")
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{source}: cannot be read as a partition ({error}).") from error
    if isinstance(content, dict) and "digest" in content:
        return Partition.from_json(text)
    if not isinstance(content, dict) or not all(isinstance(v, list) for v in content.values()):
        raise DataError(f'{source}: a partition looks like {{"client-1": ["id", ...], ...}}.')
    return explicit({name: [str(id_) for id_ in ids] for name, ids in content.items()})


def split(examples: Examples, partition: Partition) -> dict[str, Subset]:
    """Return each client's part of the examples, by client id, as views."""
    position_of = {id_: position for position, id_ in enumerate(examples.ids)}
    parts: dict[str, Subset] = {}
    for client_id, sample_ids in partition.clients.items():
        missing = [id_ for id_ in sample_ids if id_ not in position_of]
        if missing:
            raise DataError(
                f"The partition gives {client_id!r} {len(missing)} samples that the data does not "
                f"have, such as {', '.join(map(repr, missing[:3]))}. Was it made for other data?"
            )
        parts[client_id] = Subset(examples, [position_of[id_] for id_ in sample_ids])
    return parts


def _apportion(total: int, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Divide ``total`` in whole numbers by shares that sum to 1: largest remainders round up."""
    exact = shares * total
    sizes = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(sizes - exact, kind="stable")
    sizes[by_remainder[: total - int(sizes.sum())]] += 1
    return sizes


def _skewed_owners(
    labels: npt.NDArray[np.int64], clients: int, alpha: float, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Return an owner for each sample, class by class, and then a sample for each client."""
    owners = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        sizes = _apportion(len(members), _dirichlet(clients, alpha, rng))
        owners[members] = np.repeat(np.arange(clients), sizes)
    counts = np.bincount(owners, minlength=clients)
    for empty in np.flatnonzero(counts == 0):
        giver = int(counts.argmax())
        owners[np.flatnonzero(owners == giver)[-1]] = empty
        counts[giver] -= 1
        counts[empty] += 1
    return owners


def _dirichlet(clients: int, alpha: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw shares from a symmetric Dirichlet distribution, at any ``alpha``.

    Gamma variates of a small shape underflow to 0, and 0/0 is no share. So they are drawn as
    logarithms, ``Gamma(a) = Gamma(a + 1) * U**(1/a)``, and the largest is scaled to 1 first.
    """
    log_uniform = np.log1p(-rng.random(clients))
    with np.errstate(over="ignore"):  # an alpha near 0 sends all but the largest to -inf: share 0
        logs = (log_uniform - log_uniform.max()) / alpha
    logs = logs + np.log(rng.standard_gamma(alpha + 1, clients))
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)
