"""Projected gradient ascent with two weights, each value derived by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn, tensor

from goldfish.data import TensorExamples
from goldfish.methods.gradient_ascent import (
    ASCEND,
    AscentSettings,
    ascend_step,
    ascent_objective,
    clipping,
    project,
)
from goldfish.params import params_of
from goldfish.settings import TrainingSettings
from goldfish.training.batches import Batch
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import Client, Context, Task, Update

LN2 = math.log(2)
EXACT = 1e-6


class Logits(nn.Module):
    """A model of two weights that are its logits, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight.expand(len(inputs), 2)


def test_a_point_outside_the_ball_moves_to_its_surface() -> None:
    """(1, 2, 2) lies 3 from the origin; radius 1.5 halves it. Over two tensors as over one."""
    weights = [tensor([1.0]), tensor([2.0, 2.0])]
    project(weights, [torch.zeros(1), torch.zeros(2)], 1.5)
    assert [w.tolist() for w in weights] == [[0.5], [1.0, 1.0]]


def test_the_ball_has_a_centre() -> None:
    """(4, 6) lies (3, 4), 5 long, from (1, 2); radius 1 leaves (3, 4) / 5: (1.6, 2.8)."""
    weights = [tensor([4.0, 6.0])]
    project(weights, [tensor([1.0, 2.0])], 1.0)
    assert weights[0].tolist() == pytest.approx([1.6, 2.8], abs=EXACT)


def test_a_point_inside_stays_where_it_is() -> None:
    """(0.3, 0.4) is 1/2 long, radius 1/2."""
    weights = [tensor([0.3, 0.4])]
    project(weights, [torch.zeros(2)], 0.5 + EXACT)
    assert torch.equal(weights[0], tensor([0.3, 0.4]))


def test_the_objective_is_minus_the_loss() -> None:
    """Logits (0, 0), two classes: the loss is ln 2, and the risk ln 2 / ln 2 = 1."""
    loss = ascent_objective(Logits(), Batch(torch.ones(3, 1), tensor([0, 1, 1])))
    assert loss.total.item() == pytest.approx(-LN2, abs=EXACT)
    assert loss.risk.item() == pytest.approx(1, abs=EXACT)


def test_clipping_shortens_long_gradients_only() -> None:
    """(3, 4) is 5 long: to 1 it becomes (0.6, 0.8), to 10 it stays."""
    model = Logits()
    batch = Batch(torch.ones(1, 1), tensor([0]))
    for longest, expected in ((10.0, [3.0, 4.0]), (1.0, [0.6, 0.8])):
        model.weight.grad = tensor([3.0, 4.0])
        clipping(longest)(model, batch, model)
        assert model.weight.grad.tolist() == pytest.approx(expected, abs=1e-5)


def ascend(*, radius: float, clip: float = 100.0, stop: float = 100.0, epochs: int = 1) -> Update:
    """Ascend from logits (0, 0) on one sample of class 0 with step size 1, without momentum."""
    kept = TensorExamples(torch.ones(4, 1), tensor([1, 1, 1, 1]))
    gone = TensorExamples(torch.ones(1, 1), tensor([0]))
    training = TrainingSettings(learning_rate=1.0, momentum=0.0)
    settings = AscentSettings(ascent_epochs=epochs, ascent_stop=stop, clip=clip, distance=radius)
    context = Context(phase="gradient-ascent", learning_rate=1.0)
    task = Task("client-1", ASCEND, {"model": params_of(Logits())}, settings, context, training)
    return ascend_step(task, Client("client-1", kept, gone), LocalWorkspace(Logits))


def test_one_ascent_step() -> None:
    """The loss of class 0 is -ln softmax(w)_0; its gradient at (0, 0) is (1/2, 1/2) - (1, 0) =
    (-1/2, 1/2). A step of 1 up the gradient leads to (-1/2, 1/2): the class got less likely.
    """
    update = ascend(radius=100)
    assert update.params["weight"].tolist() == pytest.approx([-0.5, 0.5], abs=EXACT)
    assert (update.metrics["steps"], update.metrics["samples"]) == (1, 1)
    assert (update.num_examples, update.metrics["retained"]) == (1, 4)


def test_one_ascent_step_is_projected() -> None:
    """(-1/2, 1/2) is sqrt(1/2) long; a radius of sqrt(1/8) is half of that: (-1/4, 1/4)."""
    update = ascend(radius=math.sqrt(1 / 8))
    assert update.params["weight"].tolist() == pytest.approx([-0.25, 0.25], abs=EXACT)


def test_one_ascent_step_is_clipped() -> None:
    """The gradient (-1/2, 1/2), sqrt(1/2) long, clipped to sqrt(1/8): half a step."""
    update = ascend(radius=100, clip=math.sqrt(1 / 8))
    assert update.params["weight"].tolist() == pytest.approx([-0.25, 0.25], abs=1e-5)


def test_the_ascent_ends_after_the_step_whose_loss_was_above_the_threshold() -> None:
    """The losses before the steps over ln 2: 1, then ln(1 + e) / ln 2 = 1.89. With a threshold of
    1.5 the second step is the last of five; with 0.5 the first.
    """
    assert ascend(radius=100, stop=1.5, epochs=5).metrics["steps"] == 2
    assert ascend(radius=100, stop=0.5, epochs=5).metrics["steps"] == 1
    assert ascend(radius=100, epochs=5).metrics["steps"] == 5
