"""Bad teaching on vectors of two or three numbers, each value derived by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn, tensor

from goldfish.methods.incompetent_teacher import (
    BadTeachingObjective,
    bad_teaching_loss,
    imitation_loss,
)
from goldfish.training.batches import Batch

LN2, LN3 = math.log(2), math.log(3)
EXACT = 1e-6


def logits_of(*rows: list[float], temperature: float = 1) -> Tensor:
    """Return logits whose softmax at ``temperature`` is ``rows``; the constant must not matter."""
    return temperature * tensor(rows, dtype=torch.float64).log() + 3


def test_kl_is_of_the_teacher_against_the_student() -> None:
    """Teacher (3/4, 1/4), student (1/2, 1/2): 3/4 ln(3/2) + 1/4 ln(1/2) = 3/4 ln 3 - ln 2 = 0.1308.

    The other direction would be 1/2 ln(2/3) + 1/2 ln 2 = ln 2 - 1/2 ln 3 = 0.1438.
    """
    student, teacher = logits_of([1 / 2, 1 / 2]), logits_of([3 / 4, 1 / 4])
    assert imitation_loss(student, teacher, 1).item() == pytest.approx(3 / 4 * LN3 - LN2, abs=EXACT)
    assert imitation_loss(teacher, student, 1).item() == pytest.approx(LN2 - LN3 / 2, abs=EXACT)


def test_the_temperature_divides_the_logits_of_both() -> None:
    """At T = 2 the teacher's logits are (2 ln 3, 0): (3, 1) / 4. No factor T^2."""
    student, teacher = tensor([[0.0, 0.0]]), tensor([[2 * LN3, 0.0]])
    assert imitation_loss(student, teacher, 2).item() == pytest.approx(3 / 4 * LN3 - LN2, abs=EXACT)


def test_the_loss_is_a_mean_over_samples_and_none_for_one_who_agrees() -> None:
    """The first sample differs by 3/4 ln 3 - ln 2, the second by nothing: half of it."""
    student = logits_of([1 / 2, 1 / 2], [1 / 8, 7 / 8])
    teacher = logits_of([3 / 4, 1 / 4], [1 / 8, 7 / 8])
    assert imitation_loss(student, teacher, 1).item() == pytest.approx(
        (3 / 4 * LN3 - LN2) / 2, abs=EXACT
    )


def test_every_sample_imitates_its_own_teacher_and_counts_once() -> None:
    """Three remaining samples agree with the competent teacher: 0. One removed sample says
    (1/2, 1/2) where the incompetent teacher says (3/4, 1/4): (3 * 0 + 3/4 ln 3 - ln 2) / 4.
    """
    kept = logits_of([1 / 5, 4 / 5], [1 / 3, 2 / 3], [1 / 9, 8 / 9])
    loss = bad_teaching_loss(
        kept, kept - 1, logits_of([1 / 2, 1 / 2]), logits_of([3 / 4, 1 / 4]), 1
    )
    assert loss.item() == pytest.approx((3 / 4 * LN3 - LN2) / 4, abs=EXACT)


class Fixed(nn.Module):
    """Says its inputs: the logits are the inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


class Uniform(nn.Module):
    """Knows nothing."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.zeros_like(inputs)


def test_the_objective_asks_the_incompetent_teacher_of_removed_data_alone() -> None:
    """Remaining: student (1/2, 1/2), competent (3/4, 1/4): 3/4 ln 3 - ln 2. Removed: student
    (3/4, 1/4), incompetent (1/2, 1/2): ln 2 - 1/2 ln 3. Their mean is ln 3 / 8; the risk is the
    first. Labels are not used.
    """
    kept, gone = logits_of([1 / 2, 1 / 2]), logits_of([3 / 4, 1 / 4])
    nobody = tensor([-1])
    objective = BadTeachingObjective(Uniform(), 1)
    batch = Batch(kept, nobody, logits_of([3 / 4, 1 / 4]), removed=(gone, nobody))
    loss = objective(Fixed(), batch)
    assert loss.total.item() == pytest.approx(LN3 / 8, abs=EXACT)
    assert loss.risk.item() == pytest.approx(3 / 4 * LN3 - LN2, abs=EXACT)
    alone = objective(Fixed(), Batch(kept, nobody, logits_of([3 / 4, 1 / 4])))
    assert alone.total.item() == alone.risk.item() == pytest.approx(3 / 4 * LN3 - LN2, abs=EXACT)
