"""Time to quality: as accurate as retrain, and as forgetful; by hand."""

from __future__ import annotations

from typing import Any

import pytest

from goldfish.experiments.quality import has_forgotten, time_to_quality


def record(number: int, accuracy: float, backdoor: float | None, **more: float) -> dict[str, Any]:
    spent = {"seconds": 2.0, "steps": 10, "samples": 100}
    return {"round": number, "accuracy": accuracy, "backdoor_success": backdoor, **spent, **more}


def test_time_to_quality() -> None:
    """Retrain ends at 95 % and 2 %: a round counts from 94.5 % on with at most 3 % backdoor.

    Round 1 is too inaccurate, round 2 keeps the backdoor, round 3 has both: 3 rounds of 2 s.
    """
    retrained = {"accuracy": 95.0, "backdoor_success": 2.0}
    rounds = [
        record(1, 94.4, 0.0),
        record(2, 96.0, 3.1),
        record(3, 94.5, 3.0),
        record(4, 99.0, 0.0),
    ]
    expected = {"round": 3, "seconds": 6.0, "steps": 30.0, "samples": 300.0}
    assert time_to_quality(rounds, retrained) == expected
    assert time_to_quality(rounds[:2], retrained) is None


def test_only_what_the_trigger_adds_counts() -> None:
    """9 % with the trigger, 7 % without: it adds 2 points. Retrain: 2 % and 1 %, 1 point."""
    retrained = {"accuracy": 95.0, "backdoor_success": 2.0, "without_trigger": 1.0}
    assert has_forgotten(record(1, 95.0, 9.0, without_trigger=7.0), retrained)
    assert not has_forgotten(record(1, 95.0, 9.0, without_trigger=6.9), retrained)


def test_a_removed_class_must_be_as_unknown_as_to_retrain() -> None:
    retrained = {"accuracy": 95.0, "backdoor_success": None, "removed_class_accuracy": 1.0}
    assert has_forgotten(record(1, 95.0, None, removed_class_accuracy=2.0), retrained)
    known = record(1, 95.0, None, removed_class_accuracy=2.1)
    assert not has_forgotten(known, retrained)
    assert has_forgotten({**known, "mistaken_for_removed": 0.2}, retrained)


@pytest.mark.parametrize(
    ("apart", "low", "high", "expected"),
    [
        (0.05, 0.01, 0.09, False),  # remembers
        (0.05, -0.01, 0.11, True),  # within chance
        (0.01, 0.005, 0.015, True),  # too small to matter
        (-0.05, -0.09, -0.01, True),  # over-forgets: bad, but not slow
    ],
)
def test_a_gap_above_retrains_is_not_forgotten(
    apart: float, low: float, high: float, expected: bool
) -> None:
    gap = {"gap_to_retrain": apart, "gap_to_retrain_low": low, "gap_to_retrain_high": high}
    retrained = {"accuracy": 95.0, "backdoor_success": None}
    assert has_forgotten(record(1, 95.0, None, **gap), retrained) is expected
