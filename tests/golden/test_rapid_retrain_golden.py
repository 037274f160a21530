"""One preconditioned step, derived by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from goldfish.data import TensorExamples
from goldfish.methods.rapid_retrain import (
    FisherPreconditioner,
    RapidRetrainSettings,
    fisher_scales,
)
from goldfish.settings import TrainingSettings
from goldfish.training.batches import plain_batches
from goldfish.training.fisher import diagonal_fisher
from goldfish.training.fit import cross_entropy_objective, fit
from goldfish.training.workspace import LoadedModel

INPUTS = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
LABELS = torch.zeros(4, dtype=torch.long)


class TwoParameters(nn.Module):
    """The logits are (a x1 + b x2, 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.ab = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        logit = inputs @ self.ab
        return torch.stack([logit, torch.zeros_like(logit)], dim=-1)


def test_fisher_and_scales() -> None:
    """At a = b = 0 class 0 has p = 1/2, so a sample's gradient is -(1 - p) x = -x/2.

    Three samples with x = (2, 0) have the gradient (-1, 0), one with x = (0, 2) has (0, -1). Their
    mean squares are F = (3/4, 1/4), with mean 1/2: in units of it, (3/2, 1/2). With damping 1/2
    the inverses are (1/2, 1). Their gain, the mean of (3/2 * 1/2, 1/2 * 1), is 5/8; divided by it
    they are (4/5, 8/5). Check: 3/4 * 4/5 + 1/4 * 8/5 = 1 = 3/4 + 1/4.
    """
    fisher = diagonal_fisher(TwoParameters(), INPUTS, LABELS)["ab"]
    assert fisher.tolist() == pytest.approx([0.75, 0.25])
    assert fisher_scales(fisher, 0.5, 5.0).tolist() == pytest.approx([0.8, 1.6])


def test_the_largest_scale_is_bounded() -> None:
    """The same, with at most 1.2: the scales (0.8, 1.6) keep their ratio and become (0.6, 1.2)."""
    scales = fisher_scales(torch.tensor([0.75, 0.25]), 0.5, 1.2)
    assert scales.tolist() == pytest.approx([0.6, 1.2])


def test_the_gain_of_a_step() -> None:
    """Twice the gain of a plain step is twice the scales: (8/5, 16/5), whose sum with F is 2."""
    scales = fisher_scales(torch.tensor([0.75, 0.25]), 0.5, 5.0, gain=2.0)
    assert scales.tolist() == pytest.approx([1.6, 3.2])


def test_one_step() -> None:
    """The mean gradient is (-3/4, -1/4); times the scales (4/5, 8/5) it is (-3/5, -2/5).

    A step of size 0.1 from 0 ends at (0.06, 0.04), where a plain one ends at (0.075, 0.025).
    Four samples trained on and four measured.
    """
    ends = []
    for warmup_steps in (0, 1):
        model = TwoParameters()
        settings = RapidRetrainSettings(damping=0.5, gain=1.0, warmup_steps=warmup_steps)
        precondition = FisherPreconditioner(model, settings)
        order = torch.Generator().manual_seed(0)
        data = TensorExamples(INPUTS, LABELS, list("abcd"))
        fitted = fit(
            LoadedModel(model),
            4,
            plain_batches(data, torch.device("cpu"), order),
            cross_entropy_objective,
            TrainingSettings(batch_size=4),
            learning_rate=0.1,
            generator=order,
            precondition=precondition,
        )
        assert (fitted.steps, fitted.samples, precondition.samples) == (1, 4, 4)
        ends.append(model.ab.tolist())
    assert ends[0] == pytest.approx([0.06, 0.04])
    assert ends[1] == pytest.approx([0.075, 0.025])
