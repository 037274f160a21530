"""The step size of every round, by hand."""

from __future__ import annotations

import math

import pytest

from goldfish.settings import TrainingSettings, learning_rate_at


def rates(settings: TrainingSettings, rounds: int) -> list[float]:
    return [learning_rate_at(settings, index, rounds) for index in range(1, rounds + 1)]


def test_constant() -> None:
    assert rates(TrainingSettings(learning_rate=0.2), 3) == [0.2, 0.2, 0.2]


def test_cosine() -> None:
    """Four rounds: (1 + cos(0, pi/4, pi/2, 3 pi/4)) / 2 times 1/5.

    cos(pi/4) = sqrt(1/2), cos(pi/2) = 0, cos(3 pi/4) = -sqrt(1/2). The first round has the full
    step size and the last one is still above 0.
    """
    expected = [0.2, 0.1 * (1 + math.sqrt(0.5)), 0.1, 0.1 * (1 - math.sqrt(0.5))]
    settings = TrainingSettings(learning_rate=0.2, schedule="cosine")
    assert rates(settings, 4) == pytest.approx(expected, abs=1e-9)


def test_cosine_of_a_single_round() -> None:
    assert rates(TrainingSettings(learning_rate=0.2, schedule="cosine"), 1) == [0.2]


def test_step() -> None:
    """Halved after every 2 rounds: rounds 1, 2 at 1/5, rounds 3, 4 at 1/10, round 5 at 1/20."""
    settings = TrainingSettings(learning_rate=0.2, schedule="step", step_every=2, step_factor=0.5)
    assert rates(settings, 5) == pytest.approx([0.2, 0.2, 0.1, 0.1, 0.05], abs=1e-12)
