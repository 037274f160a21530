"""The unlearning methods: one file each, all values of one type."""

from __future__ import annotations

from goldfish.errors import ConfigError, unknown
from goldfish.methods.goldfish import GOLDFISH
from goldfish.methods.method import (
    Method,
    Plan,
    count_kept_models,
    deletion_kind,
    refuse_unhandled,
)
from goldfish.methods.retrain import RETRAIN

METHODS: dict[str, Method] = {"goldfish": GOLDFISH, "retrain": RETRAIN}


def method_named(name: str) -> Method:
    """Return the method of this name, or say which one was probably meant."""
    if name not in METHODS:
        raise ConfigError(unknown("method", name, METHODS, "'goldfish methods' lists all."))
    return METHODS[name]


__all__ = ["METHODS", "Method", "Plan", "count_kept_models", "deletion_kind", "method_named", "refuse_unhandled"]
