"""FedEraser's calibrated update and its kept rounds, each expected value derived by hand."""

from __future__ import annotations

import pytest
import torch
from torch import tensor

from goldfish.methods.fed_eraser import FedEraserSettings, calibrated_update, kept_rounds


def test_direction_of_the_calibration_length_of_the_kept_update() -> None:
    """|(3, 4)| = 5; the direction of (0, 2) is (0, 1); 5 (0, 1) = (0, 5)."""
    result = calibrated_update({"w": tensor([3.0, 4.0])}, {"w": tensor([0.0, 2.0])}, ["w"])
    assert result["w"].tolist() == pytest.approx([0, 5])


def test_each_tensor_has_its_own_length() -> None:
    """a: |(3, 4)| = 5 along (1, 0). b: |(0, 1)| = 1 along (-6, 8) / 10 = (-0.6, 0.8).

    With one length for both (sqrt 26 over sqrt 101) b would get 10 * 0.507, five times its own.
    """
    kept = {"a": tensor([3.0, 4.0]), "b": tensor([0.0, 1.0])}
    calibration = {"a": tensor([1.0, 0.0]), "b": tensor([-6.0, 8.0])}
    result = calibrated_update(kept, calibration, ["a", "b"])
    assert result["a"].tolist() == pytest.approx([5, 0])
    assert result["b"].tolist() == pytest.approx([-0.6, 0.8])


def test_the_length_is_that_of_a_whole_tensor() -> None:
    """|((1, 1), (1, 1))| = 2; ((0, 0), (0, 3)) has the length 3; 2/3 of it: ((0, 0), (0, 2))."""
    result = calibrated_update(
        {"w": torch.ones(2, 2)}, {"w": tensor([[0.0, 0.0], [0.0, 3.0]])}, ["w"]
    )
    assert result["w"].tolist() == [[0, 0], [0, 2]]


def test_no_direction_no_update() -> None:
    """A calibration of 0 has no direction; a kept update of 0 has no length."""
    still, moved = {"w": torch.zeros(2)}, {"w": tensor([3.0, 4.0])}
    assert calibrated_update(moved, still, ["w"])["w"].tolist() == [0, 0]
    assert calibrated_update(still, moved, ["w"])["w"].tolist() == [0, 0]


def test_buffers_are_those_of_the_calibration() -> None:
    """A variance that fell by 0.5 falls by 0.5, though the kept one had fallen by 3."""
    kept = {"w": tensor([1.0]), "running_var": tensor([-3.0]), "count": tensor(7)}
    calibration = {"w": tensor([-2.0]), "running_var": tensor([-0.5]), "count": tensor(3)}
    result = calibrated_update(kept, calibration, ["w"])
    assert result["w"].tolist() == [-1]
    assert result["running_var"].tolist() == [-0.5]
    assert result["count"].item() == 3


@pytest.mark.parametrize(
    ("every", "rounds", "expected"),
    [(2, 5, [1, 3, 5]), (2, 6, [1, 3, 5]), (1, 3, [1, 2, 3]), (10, 3, [1]), (3, 7, [1, 4, 7])],
)
def test_the_first_round_is_always_kept(every: int, rounds: int, expected: list[int]) -> None:
    assert list(kept_rounds(FedEraserSettings(keep_every=every), rounds)) == expected
