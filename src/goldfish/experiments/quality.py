"""Time to quality: what a method spends until it is as good as retraining ends up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ACCURACY_MARGIN = 0.5
"""Points of accuracy that a method may stay below retrain's final accuracy."""

BACKDOOR_MARGIN = 1.0
"""Points of backdoor success that it may stay above retrain's."""

SPENT = ("seconds", "steps", "samples")


def time_to_quality(
    records: Sequence[Mapping[str, Any]], retrained: Mapping[str, Any]
) -> dict[str, float] | None:
    """Return what was spent up to the first round that is as good as ``retrained``, or None.

    As good means: accuracy within half a point of retrain's final one, and backdoor success, where
    there is a backdoor, at most one point above it.
    """
    spent = dict.fromkeys(SPENT, 0.0)
    for record in records:
        for name in SPENT:
            spent[name] += record[name]
        success, floor = record["backdoor_success"], retrained["backdoor_success"]
        accurate = record["accuracy"] >= retrained["accuracy"] - ACCURACY_MARGIN
        if accurate and (success is None or success <= floor + BACKDOOR_MARGIN):
            return {"round": record["round"], **spent}
    return None
