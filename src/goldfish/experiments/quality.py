"""Time to quality: what a method spends until it is as good as retraining ends up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from goldfish.evaluation import finding

ACCURACY_MARGIN = 0.5
"""Points of accuracy that a method may stay below retrain's final accuracy."""

BACKDOOR_MARGIN = 1.0
"""Points that it may stay above retrain in what the trigger adds, and on a removed class."""

SPENT = ("seconds", "steps", "samples")


def time_to_quality(
    records: Sequence[Mapping[str, Any]], retrained: Mapping[str, Any]
) -> dict[str, float] | None:
    """Return what was spent up to the first round that is as good as ``retrained``, or None.

    As good means: accuracy within half a point of retrain's final one, and the removed data
    forgotten (:func:`has_forgotten`).
    """
    spent = dict.fromkeys(SPENT, 0.0)
    for record in records:
        for name in SPENT:
            spent[name] += record[name]
        accurate = record["accuracy"] >= retrained["accuracy"] - ACCURACY_MARGIN
        if accurate and has_forgotten(record, retrained):
            return {"round": record["round"], **spent}
    return None


def has_forgotten(scores: Mapping[str, Any], retrained: Mapping[str, Any]) -> bool:
    """Say whether no test tells a model from retrain's final one as one that knows the data.

    The tests are those that the run has: what the trigger adds, the accuracy on a removed class,
    and the memory gap, whose difference to retrain's must not count as *remembers*. Retrain's own
    rounds have no such difference: retrain never saw the data.
    """
    for test in (_trigger_adds, _knows_class):
        ours, floor = test(scores), test(retrained)
        if ours is not None and floor is not None and ours > floor + BACKDOOR_MARGIN:
            return False
    apart = scores.get("gap_to_retrain")
    if apart is None:
        return True
    return (
        finding(apart, scores["gap_to_retrain_low"], scores["gap_to_retrain_high"]) != "remembers"
    )


def _trigger_adds(scores: Mapping[str, Any]) -> float | None:
    success = scores["backdoor_success"]
    return None if success is None else success - (scores.get("without_trigger") or 0.0)


def _knows_class(scores: Mapping[str, Any]) -> float | None:
    accuracy = scores.get("removed_class_accuracy")
    return None if accuracy is None else accuracy - (scores.get("mistaken_for_removed") or 0.0)
