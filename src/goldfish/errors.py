"""Every error that Goldfish raises on purpose, so that a caller can catch one name.

GoldfishError
├── ConfigError        a setting or an argument is wrong
├── DataError          a dataset, a file or a sample id is missing or broken
├── DeploymentError    a process of a Flower deployment does not start, answer or go on
├── DivergenceError    training diverged: numbers are no longer finite
├── QuorumError        too few clients answered a round
├── StoreError         a run directory or a checkpoint cannot be used
└── WireError          a message between server and client is broken

Messages say what is wrong, where, and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GoldfishError(Exception):
    """The base class of all errors that Goldfish raises on purpose."""


class ConfigError(GoldfishError):
    """A setting or an argument is wrong."""


class DataError(GoldfishError):
    """A dataset, a file or a sample id is missing or broken."""


class DeploymentError(GoldfishError):
    """A process of a Flower deployment does not start, answer or go on."""


class DivergenceError(GoldfishError):
    """Training diverged: a loss or a weight is no finite number any more."""


class QuorumError(GoldfishError):
    """Too few clients answered a round.

    ``said`` is the message without the clients' own words, the ``causes``: these may name a sample.
    """

    def __init__(self, said: str, causes: str = "") -> None:
        super().__init__(f"{said} First causes: {causes}" if causes else said)
        self.said = said


class StoreError(GoldfishError):
    """A run directory or a checkpoint cannot be used."""


class WireError(GoldfishError):
    """A message between server and client is broken or not what was asked for."""


def plain(text: str, most: int = 4000) -> str:
    r"""Return a stranger's text for a terminal or a page: cut, without control characters.

    >>> plain("all is well\x1b[2J\nroot:", 17)
    'all is well [2J r'
    """
    return "".join(c if c.isprintable() else " " for c in text[:most])


def unknown(kind: str, name: str, known: Iterable[str], hint: str) -> str:
    """Return the message for a name that is not in a registry, with the nearest one that is.

    >>> unknown("method", "goldfsh", ["goldfish", "retrain"], "'goldfish methods' lists all.")
    "Unknown method 'goldfsh'. Did you mean 'goldfish'? 'goldfish methods' lists all."
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return f"Unknown {kind} {name!r}.{guess} {hint}"
