"""What holds for the losses of equations (1) to (5), whatever the logits are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from goldfish.unlearning.loss_function import (
    HARD_LOSSES,
    confusion_loss,
    distillation_loss,
    hard_loss,
    removed_loss,
    soften,
)

KINDS = list(HARD_LOSSES)
temperatures = st.floats(1, 20, exclude_min=True)


@st.composite
def predictions(
    draw: st.DrawFn, bound: float = 1e4, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Draw logits of up to 4 samples and 2 to 8 classes, and labels."""
    samples, classes = draw(st.integers(1, 4)), draw(st.integers(2, 8))
    values = st.floats(-bound, bound, width=32)
    rows = st.lists(values, min_size=classes, max_size=classes)
    logits = draw(st.lists(rows, min_size=samples, max_size=samples))
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=samples, max_size=samples))
    return torch.tensor(logits, dtype=dtype), torch.tensor(labels)


def gradient_of(loss: Tensor, logits: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, logits)
    return gradient


# The removed data's part of equation (1).


@given(predictions(), st.sampled_from(KINDS))
def test_the_capped_term_never_rewards_more_than_a_uniform_guess(
    case: tuple[Tensor, Tensor], kind: str
) -> None:
    """What the total subtracts lies in [0, ln K], so the term is bounded below by -ln K."""
    logits, labels = case
    lost = removed_loss(logits.requires_grad_(), labels, kind, "capped")
    assert -1e-6 <= lost.item() <= hard_loss(kind).of_a_uniform_guess(logits.shape[1]) + 1e-5
    assert lost.item() <= math.log(logits.shape[1]) + 1e-5
    assert gradient_of(lost, logits).isfinite().all()


@given(predictions(), st.sampled_from(KINDS))
def test_the_cap_changes_nothing_below_itself(case: tuple[Tensor, Tensor], kind: str) -> None:
    """One sample at a time: the smaller of the literal loss and that of a uniform guess."""
    logits, labels = case[0][:1], case[1][:1]
    literal = removed_loss(logits, labels, kind, "literal").item()
    capped = removed_loss(logits, labels, kind, "capped").item()
    expected = min(literal, hard_loss(kind).of_a_uniform_guess(logits.shape[1]))
    assert capped == pytest.approx(expected, rel=1e-6)


@given(predictions(), st.sampled_from(KINDS))
def test_the_smooth_term_is_bounded_on_both_sides(case: tuple[Tensor, Tensor], kind: str) -> None:
    logits, labels = case
    lost = removed_loss(logits.requires_grad_(), labels, kind, "smooth")
    assert -math.log(2) - 1e-6 <= lost.item() <= 0
    assert gradient_of(lost, logits).isfinite().all()


@given(st.sampled_from(KINDS), st.floats(10, 1e6), st.integers(2, 8))
def test_the_literal_term_has_no_bound(kind: str, bound: float, classes: int) -> None:
    """A label whose logit is ``bound`` below another one loses at least about ``bound``."""
    logits = torch.zeros(1, classes)
    logits[0, 0] = -bound
    lost = removed_loss(logits, torch.tensor([0]), kind, "literal").item()
    assert lost >= 0.99 * bound
    assert math.isfinite(lost)


@given(predictions(bound=20, dtype=torch.float64), st.sampled_from(KINDS))
def test_every_term_rewards_a_lower_probability_of_the_label(
    case: tuple[Tensor, Tensor], kind: str
) -> None:
    """Lowering the label's logit never lowers what the total subtracts."""
    logits, labels = case
    lower = logits.clone()
    lower[torch.arange(len(labels)), labels] -= 1
    for term in ("capped", "smooth", "literal"):
        before = removed_loss(logits, labels, kind, term).item()
        after = removed_loss(lower, labels, kind, term).item()
        assert after >= before - 1e-12
        if term == "smooth":
            assert after > before or before == pytest.approx(0, abs=1e-8)


# Equation (2).


@given(st.floats(-1e4, 1e4, width=32), st.integers(1, 4), st.integers(2, 100))
def test_confusion_is_0_at_the_uniform_prediction_with_a_finite_gradient(
    value: float, samples: int, classes: int
) -> None:
    logits = torch.full((samples, classes), value, requires_grad=True)
    loss = confusion_loss(logits)
    assert loss.item() == pytest.approx(0, abs=1e-7)
    assert gradient_of(loss, logits).abs().max() <= 1e-6


@given(predictions())
def test_confusion_lies_between_0_and_that_of_a_certain_prediction(
    case: tuple[Tensor, Tensor],
) -> None:
    """A one-hot vector has variance (1 - 1/K) / K, so its deviation is sqrt(K - 1) / K."""
    logits, _ = case
    classes = logits.shape[1]
    loss = confusion_loss(logits.requires_grad_())
    one_hot = confusion_loss(torch.eye(classes)[:1] * 1e4).item()
    assert one_hot == pytest.approx(math.sqrt(classes - 1) / classes, rel=1e-5)
    assert 0 <= loss.item() <= one_hot * (1 + 1e-5)
    assert gradient_of(loss, logits).isfinite().all()


@given(predictions(bound=5), st.floats(1e-30, 1e-6))
def test_the_gradient_of_confusion_stays_bounded_close_to_the_uniform_prediction(
    case: tuple[Tensor, Tensor], size: float
) -> None:
    """A plain square root of the variance would have a gradient without bound there."""
    logits = (case[0] * size).requires_grad_()
    assert gradient_of(confusion_loss(logits), logits).abs().max() <= 1


@given(predictions(bound=20))
def test_confusion_of_a_batch_is_the_mean_over_its_samples(case: tuple[Tensor, Tensor]) -> None:
    """Against the definition: the population standard deviation of each softmax, in double."""
    logits, _ = case
    each = [torch.softmax(row.double(), 0).std(correction=0).item() for row in logits]
    assert confusion_loss(logits).item() == pytest.approx(sum(each) / len(each), abs=1e-6)


# Equations (3) to (5).


@given(predictions(), temperatures)
def test_softened_probabilities_are_probabilities(
    case: tuple[Tensor, Tensor], temperature: float
) -> None:
    softened = soften(case[0], temperature)
    assert (softened >= 0).all()
    assert torch.allclose(softened.sum(dim=1), torch.ones(len(softened)), atol=1e-5)


@given(predictions(bound=100, dtype=torch.float64), st.floats(1, 20), st.floats(1.01, 3))
def test_a_higher_temperature_is_softer(
    case: tuple[Tensor, Tensor], temperature: float, factor: float
) -> None:
    """The largest probability does not grow with the temperature."""
    low = soften(case[0], temperature).max(dim=1).values
    high = soften(case[0], temperature * factor).max(dim=1).values
    assert (high <= low + 1e-12).all()


@given(predictions(bound=30, dtype=torch.float64), temperatures, st.data())
def test_distillation_is_least_where_the_student_is_the_teacher(
    case: tuple[Tensor, Tensor], temperature: float, data: st.DataObject
) -> None:
    """There it is the entropy of the teacher's softened prediction, and its gradient is 0."""
    teacher, _ = case
    shift = data.draw(
        st.lists(st.floats(-30, 30, width=32), min_size=teacher.numel(), max_size=teacher.numel())
    )
    other = teacher + torch.tensor(shift, dtype=torch.float64).view_as(teacher)
    student = teacher.clone().requires_grad_()
    least = distillation_loss(student, teacher, temperature)
    assert distillation_loss(other, teacher, temperature).item() >= least.item() - 1e-12
    assert gradient_of(least, student).abs().max() <= 1e-12
    probabilities = soften(teacher, temperature)
    entropy = torch.special.entr(probabilities).sum(dim=1).mean()
    assert least.item() == pytest.approx(entropy.item(), abs=1e-9)


@given(predictions(bound=30, dtype=torch.float64), temperatures)
def test_square_scaling_multiplies_by_the_square_of_the_temperature(
    case: tuple[Tensor, Tensor], temperature: float
) -> None:
    student, teacher = case[0], case[0].flip(1)
    plain = distillation_loss(student, teacher, temperature).item()
    scaled = distillation_loss(student, teacher, temperature, square_scaling=True).item()
    assert scaled == pytest.approx(temperature**2 * plain, rel=1e-9)
