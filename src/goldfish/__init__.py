"""Goldfish: remove data from a federated model, fast, and show that it is gone.

The names below are the library's public surface. They are imported when first used, as are its
modules (``goldfish.data``), so that ``import goldfish`` and the command line's help do not wait for
PyTorch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from goldfish import data as data
    from goldfish.errors import (
        ConfigError,
        DataError,
        DeploymentError,
        DivergenceError,
        GoldfishError,
        QuorumError,
        StoreError,
        WireError,
    )
    from goldfish.federation import InProcess
    from goldfish.methods import METHODS, Method, Trained, load
    from goldfish.planning import plan
    from goldfish.types import Client, DeletionRequest, NotHonoured
    from goldfish.workflow import Unlearned, train, unlearn

_HOMES = ("errors", "types", "federation", "methods", "workflow", "planning")
"""The modules of the names below, in the order in which they import each other."""

__all__ = [
    "METHODS",
    "Client",
    "ConfigError",
    "DataError",
    "DeletionRequest",
    "DeploymentError",
    "DivergenceError",
    "GoldfishError",
    "InProcess",
    "Method",
    "NotHonoured",
    "QuorumError",
    "StoreError",
    "Trained",
    "Unlearned",
    "WireError",
    "load",
    "plan",
    "train",
    "unlearn",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        homes = (importlib.import_module(f"goldfish.{home}") for home in _HOMES)
        return next(getattr(home, name) for home in homes if hasattr(home, name))
    if not name.startswith("_") and importlib.util.find_spec(f"goldfish.{name}"):
        return importlib.import_module(f"goldfish.{name}")
    raise AttributeError(f"module 'goldfish' has no attribute {name!r}")
