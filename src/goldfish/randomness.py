"""All randomness is derived from one seed and a purpose, and passed in as a generator."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed that depends on ``seed`` and on every part of the purpose.

    >>> derive_seed(0, "shuffle", 1, "client-1") == derive_seed(0, "shuffle", 1, "client-1")
    True
    >>> derive_seed(0, "shuffle", 1, "client-1") == derive_seed(0, "shuffle", 2, "client-1")
    False
    """
    text = "\x1f".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Return a CPU generator for one purpose, such as ``(seed, "shuffle", round, client)``."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


@contextlib.contextmanager
def seeded_globally(seed: int, *purpose: str | int) -> Iterator[None]:
    """Seed torch's global CPU generator inside the block, and put it back afterwards.

    For code that draws from it and cannot be told otherwise: the initialisers of ``torch.nn``
    and dropout. Not safe from two threads at once.
    """
    number = derive_seed(seed, *purpose)
    with torch.random.fork_rng(devices=[]):
        if torch.cuda.is_available():  # dropout on a GPU draws from that one's generator
            torch.manual_seed(number)
        else:  # the line above would note the call stack for each kind of GPU that is not there
            torch.default_generator.manual_seed(number)
        yield
