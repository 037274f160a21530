"""The loss that a GPU computes at once against the functions of the loss module."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from goldfish.training.batches import Batch
from goldfish.training.sgd import Loss
from goldfish.unlearning.basic_model import GoldfishSettings, goldfish_losses
from goldfish.unlearning.fused_loss import fused_losses, implements
from goldfish.unlearning.loss_function import HARD_LOSSES, RemovedTermName


def made(
    logits: Tensor, labels: Tensor, removed: Tensor, teacher: Tensor, temperature: float | Tensor
) -> Batch:
    kept = len(labels)
    return Batch(logits[:kept], labels, teacher, (logits[kept:], removed), temperature)


def obvious(logits: Tensor, batch: Batch, own: GoldfishSettings) -> Loss:
    kept = len(batch.labels)
    return goldfish_losses(batch, logits[:kept], logits[kept:], own)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(2, 7),
    st.sampled_from([0.0, 0.1, 1.0, 20.0]),
    st.floats(0, 3),
    st.floats(0, 3),
    st.floats(0, 3),
    st.floats(1, 9, exclude_min=True),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_losses_and_gradient_are_those_of_the_loss_module(
    kept: int,
    lost: int,
    classes: int,
    spread: float,
    removed_weight: float,
    mu_c: float,
    mu_d: float,
    temperature: float,
    as_tensor: bool,
    square: bool,
    with_targets: bool,
    seed: int,
) -> None:
    """Logits that are all 0 have a deviation of 0; those of spread 20 are far above the cap.

    A loss of logits that are all 0 is at the cap, and rounding decides on which side of it.
    """
    removed_weight = removed_weight if spread else 0.0
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(kept + lost, classes, generator=generator, dtype=torch.float64) * spread
    teacher = torch.randn(kept, classes, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(0, classes, (kept,), generator=generator)
    removed = torch.randint(0, classes, (lost,), generator=generator)
    heat = torch.tensor(temperature, dtype=torch.float64) if as_tensor else temperature
    own = GoldfishSettings(
        removed_weight=removed_weight, mu_c=mu_c, mu_d=mu_d, square_scaling=square
    )
    batch = made(logits, labels, removed, teacher, heat)
    if with_targets:
        targets = torch.rand(lost, generator=generator, dtype=torch.float64) * 3
        batch = replace(batch, removed_targets=targets)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found, expected = fused_losses(ours, batch, own), obvious(theirs, batch, own)
    assert found.total.item() == pytest.approx(expected.total.item(), rel=1e-9, abs=1e-9)
    assert found.risk.item() == pytest.approx(expected.risk.item(), rel=1e-9, abs=1e-9)
    (2 * found.total).backward()
    (2 * expected.total).backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("hard_loss", HARD_LOSSES)
@pytest.mark.parametrize("removed_term", get_args(RemovedTermName))
def test_it_takes_what_it_implements_and_nothing_else(
    hard_loss: str, removed_term: RemovedTermName
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 4, generator=generator, dtype=torch.float64) * 4
    teacher = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    labels, removed = torch.tensor([0, 1, 2, 3, 0]), torch.tensor([1, 2, 3, 0])
    own = GoldfishSettings(hard_loss=hard_loss, removed_term=removed_term)
    batch = made(logits, labels, removed, teacher, 3.0)
    expected = obvious(logits, batch, own).total.item()
    equal = fused_losses(logits, batch, own).total.item() == pytest.approx(expected, rel=1e-9)
    assert equal == implements(own)


def test_by_hand() -> None:
    """One remaining and one removed sample, two classes, T = 2, all weights 1.

    Remaining: logits (0, 0), label 0, teacher (0, 0): L_r = ln 2, L_d = ln 2. Removed: logits
    (ln 3, 0), so p = (3/4, 1/4), label 0: L_f = ln(4/3), below the cap ln 2. The deviation of p is
    sqrt(((1/4)^2 + (1/4)^2) / 2) = 1/4. Total: 2 ln 2 - ln(4/3) + 1/4 = ln 3 + 1/4.

    Gradient, remaining: softmax - one-hot = (-1/2, 1/2); distillation adds 0, as student and
    teacher agree. Removed: -(p - one-hot) = (1/4, -1/4); the deviation is |p_0 - 1/2|, whose
    derivative by z_0 is p_0 p_1 = 3/16, by z_1 its negative: (7/16, -7/16).
    """
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]], requires_grad=True)
    batch = made(logits, torch.tensor([0]), torch.tensor([0]), torch.zeros(1, 2), 2.0)
    loss = fused_losses(logits, batch, GoldfishSettings(mu_c=1.0))
    loss.total.backward()
    assert loss.total.item() == pytest.approx(math.log(3) + 0.25)
    assert loss.risk.item() == pytest.approx(2 * math.log(2))
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([-0.5, 0.5])
    assert logits.grad[1].tolist() == pytest.approx([7 / 16, -7 / 16])
