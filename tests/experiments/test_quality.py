"""Time to quality: as accurate as retrain, and as forgetful; by hand."""

from __future__ import annotations

from typing import Any

import pytest

from goldfish.experiments.evidence import has_forgotten, time_to_quality
from goldfish.results import MARGINS, Measures, Record, Spent


def record(number: int, accuracy: float, backdoor: float | None = None, **more: Any) -> Record:
    spent: dict[str, Any] = {"seconds": 2.0, "steps": 10, "samples": 100, "loss": 0.1, "mse": 0.1}
    return Record(round=number, accuracy=accuracy, backdoor_success=backdoor, **spent, **more)


def measures(**more: float) -> Measures:
    return Measures(accuracy=95.0, loss=0.1, mse=0.1, **more)


def test_time_to_quality() -> None:
    """Retrain ends at 95 % and 2 %: a round counts from 94.5 % on with at most 3 % backdoor.

    Round 1 is too inaccurate, round 2 keeps the backdoor, round 3 has both: 3 rounds of 2 s. Where
    the last request arrived after round 2, only round 3 counts: 2 s.
    """
    retrained = measures(backdoor_success=2.0)
    rounds = [
        record(1, 94.4, 0.0),
        record(2, 96.0, 3.1),
        record(3, 94.5, 3.0),
        record(4, 99.0, 0.0),
    ]
    expected = Spent(round=3, seconds=6.0, steps=30, samples=300)
    assert time_to_quality(rounds, retrained) == expected
    assert time_to_quality(rounds[:2], retrained) is None
    later = [r.model_copy(update={"stage": 1 if r.round < 3 else 2}) for r in rounds]
    found = time_to_quality(later, retrained)
    assert found is not None
    assert (found.round, found.seconds) == (3, 2.0)


def test_only_what_the_trigger_adds_counts() -> None:
    """9 % with the trigger, 7 % without: it adds 2 points. Retrain: 2 % and 1 %, 1 point."""
    retrained = measures(backdoor_success=2.0, without_trigger=1.0)
    assert has_forgotten(record(1, 95.0, 9.0, without_trigger=7.0), retrained)
    assert not has_forgotten(record(1, 95.0, 9.0, without_trigger=6.9), retrained)


def test_a_removed_class_must_be_as_unknown_as_to_retrain() -> None:
    retrained = measures(removed_class_accuracy=1.0)
    assert has_forgotten(measures(removed_class_accuracy=2.0), retrained)
    assert not has_forgotten(measures(removed_class_accuracy=2.1), retrained)
    taken = measures(removed_class_accuracy=2.1, mistaken_for_removed=0.2)
    assert has_forgotten(taken, retrained)


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
    assert has_forgotten(measures(**gap), measures()) is expected


@pytest.mark.parametrize(("images", "factor"), [(999, 2), (1000, 1)])
def test_few_images_double_the_margins_of_points_alone(images: int, factor: int) -> None:
    """The memory gap is a mean loss over other samples: its margin stays."""
    margins = MARGINS.for_images(images)
    doubled = {"accuracy": 0.5 * factor, "backdoor": 1.0 * factor}
    assert margins == MARGINS.model_copy(update=doubled)
