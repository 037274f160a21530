"""Whether a new version still knows what it should have forgotten, by what was measured of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from goldfish.results import MARGINS, Memory

OF_CLASS = "it still recognises the removed class"
OF_SAMPLES = "a test still finds traces of the removed samples in it"


def traces(facts: Mapping[str, Any], audit: Mapping[str, Any] | None = None) -> str:
    """Say what a version with these facts still knows; empty where nothing was found.

    A version of an exact method has never seen the removed samples: to it they can only be easy.
    To others they can be easy, too. Only an audit tells that from memory, and so its word counts
    more than the test that was made with the version.
    """
    if facts.get("guarantee") == "exact":
        return ""
    if class_is_known(facts):
        return OF_CLASS
    if audit is not None and audit["word"] != "not enough evidence":
        return OF_SAMPLES if audit["word"] == "remembers" else ""
    memory = memory_of(facts["measures"])
    return OF_SAMPLES if memory is not None and memory.gap.finding == "remembers" else ""


def class_is_known(facts: Mapping[str, Any]) -> bool:
    """Say whether a removed class, which the old model recognised, is still recognised."""
    before, now = (_class_known(facts.get(which) or {}) for which in ("before", "measures"))
    return before >= MARGINS.signal and now > MARGINS.gone * before


def _class_known(measures: Mapping[str, Any]) -> float:
    known = measures.get("removed_class_accuracy") or 0.0
    return float(known - (measures.get("mistaken_for_removed") or 0.0))


def memory_of(measures: Mapping[str, Any]) -> Memory | None:
    """Return what the membership test found in a model."""
    found = measures.get("memory")
    return None if found is None else Memory.model_validate(found)
