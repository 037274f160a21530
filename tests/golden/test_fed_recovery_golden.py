"""FedRecovery's residuals, weights, bound and noise, each expected value derived by hand."""

from __future__ import annotations

import math

import pytest
from torch import tensor

from goldfish.methods.fed_recovery import (
    average_without,
    distance_bound,
    noise_epsilon,
    noise_sigma,
    residual,
    round_weights,
)
from goldfish.types import Params, Update

START: Params = {"w": tensor([1.0, 1.0])}


def update(client_id: str, values: tuple[float, float], num_examples: int) -> Update:
    return Update(client_id, {"w": tensor(values)}, num_examples, {})


TWO = {"a": update("a", (4.0, 0.0), 1), "b": update("b", (0.0, 8.0), 3)}
THREE = {**TWO, "c": update("c", (2.0, 6.0), 4)}


def test_residual_of_one_of_two_clients() -> None:
    """All: (1 (4, 0) + 3 (0, 8)) / 4 = (1, 6). Without a: (0, 8). Difference: (1, -2)."""
    assert residual(TWO, START, {"a"})["w"].tolist() == pytest.approx([1, -2])


def test_residual_of_one_of_three_clients() -> None:
    """All: (1 (4, 0) + 3 (0, 8) + 4 (2, 6)) / 8 = (12, 48) / 8 = (1.5, 6).

    Without b: (1 (4, 0) + 4 (2, 6)) / 5 = (12, 24) / 5 = (2.4, 4.8). Difference: (-0.9, 1.2).
    """
    assert residual(THREE, START, {"b"})["w"].tolist() == pytest.approx([-0.9, 1.2])


def test_residual_of_two_of_three_clients() -> None:
    """Without a and b: (2, 6). (1.5, 6) - (2, 6) = (-0.5, 0)."""
    assert residual(THREE, START, {"a", "b"})["w"].tolist() == pytest.approx([-0.5, 0])


def test_residual_after_an_earlier_deletion() -> None:
    """Client b went earlier: (2.4, 4.8). Without a too: (2, 6). Difference: (0.4, -1.2).

    It and that of b alone, (-0.9, 1.2), add up to that of both, (-0.5, 0).
    """
    later = residual(THREE, START, {"a", "b"}, before={"b"})
    assert later["w"].tolist() == pytest.approx([0.4, -1.2])


def test_residual_of_a_client_that_took_no_part() -> None:
    assert residual(TWO, START, {"c"})["w"].tolist() == [0, 0]


def test_without_anybody_a_round_stays_where_it_started() -> None:
    """All: (1, 6). Without a and b nobody moves the model: (1, 1). Difference: (0, 5)."""
    assert average_without(TWO, START, {"a", "b"})["w"].tolist() == [1, 1]
    assert residual(TWO, START, {"a", "b"})["w"].tolist() == pytest.approx([0, 5])


def test_weights_go_by_the_square_of_the_global_step() -> None:
    """Steps 1, 2 and 2: squares 1, 4 and 4 of 9. Three times that: 1/3, 4/3, 4/3."""
    assert round_weights([1, 2, 2]) == pytest.approx([1 / 9, 4 / 9, 4 / 9])
    assert round_weights([1, 2, 2], 3.0) == pytest.approx([1 / 3, 4 / 3, 4 / 3])
    assert round_weights([0, 0]) == [0, 0]


def test_distance_bound() -> None:
    """With g = 2, T = 3: (4 + 0.5) 1 + (2 + 0.3) 10 + (1 + 0.2) 100 = 4.5 + 23 + 120 = 147.5.

    With g = 1: 1.5 * 1 + 1.3 * 10 + 1.2 * 100 = 134.5.
    """
    norms, weights = [1.0, 10.0, 100.0], [0.5, 0.3, 0.2]
    assert distance_bound(norms, weights, 2.0) == pytest.approx(147.5)
    assert distance_bound(norms, weights, 1.0) == pytest.approx(134.5)


def test_distance_bound_of_a_deep_network_has_no_end() -> None:
    """1e4 to the power of 99 is more than a double holds."""
    assert distance_bound([1.0] * 100, [0.01] * 100, 1e4) == math.inf


def test_sigma() -> None:
    """With delta = exp(-4), ln(1/delta) = 4. With epsilon = 5, sqrt 9 - sqrt 4 = 1: d / sqrt 2.

    Back: rho = d^2 / (2 sigma^2) = 1, and 1 + 2 sqrt(1 * 4) = 5.
    """
    assert noise_sigma(3.0, 5.0, math.exp(-4)) == pytest.approx(3 / math.sqrt(2))
    assert noise_epsilon(3.0, 3 / math.sqrt(2), math.exp(-4)) == pytest.approx(5)


def test_sigma_is_close_to_the_textbook_where_that_is_proven() -> None:
    """There, epsilon = 0.1, delta = 1e-5: sqrt(2 ln 125000) / 0.1 = sqrt(23.472) / 0.1 = 48.448.

    Here: sqrt 11.61293 - sqrt 11.51293 = 3.407775 - 3.393070 = 0.014705; times sqrt 2 it is
    0.020796; 1 / 0.020796 = 48.09.
    """
    assert noise_sigma(1.0, 0.1, 1e-5) == pytest.approx(48.09, abs=0.01)
    assert noise_sigma(1.0, 0.1, 1e-5) == pytest.approx(48.448, rel=0.01)


def test_no_noise_hides_nothing() -> None:
    assert noise_epsilon(1.0, 0.0, 1e-5) == math.inf
    assert noise_epsilon(0.0, 0.0, 1e-5) == 0
