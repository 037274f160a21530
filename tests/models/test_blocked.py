from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from goldfish.models.pooling import MaxPool2x2


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(2, 9),
    st.integers(2, 9),
    st.sampled_from([1, 3, 1000]),
    st.integers(0, 10_000),
)
def test_outputs_and_gradients_are_those_of_pytorch_bit_for_bit(
    batch: int, channels: int, height: int, width: int, levels: int, seed: int
) -> None:
    """Few levels give many ties, whose gradient must go to the same place of the window."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, channels, height, width)
    values = (torch.randn(shape, generator=generator) * levels).round() / levels
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    pooled, expected = MaxPool2x2()(ours), F.max_pool2d(theirs, 2)
    assert torch.equal(pooled, expected)
    gradient = torch.randn(pooled.shape, generator=generator)
    pooled.backward(gradient)
    expected.backward(gradient)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)
    with torch.no_grad():
        assert torch.equal(MaxPool2x2()(values), expected)


def test_the_gradient_of_a_tie_goes_to_the_first_maximum_row_by_row() -> None:
    """Of the window [[0, 7], [7, 7]] the first maximum, read row by row, is the upper right."""
    window = torch.tensor([[[[0.0, 7.0], [7.0, 7.0]]]], requires_grad=True)
    MaxPool2x2()(window).sum().backward()
    assert window.grad is not None
    assert window.grad.tolist() == [[[[0.0, 1.0], [0.0, 0.0]]]]


def test_not_a_number_stays_visible() -> None:
    window = torch.tensor([[[[0.0, float("nan")], [7.0, 7.0]]]])
    assert MaxPool2x2()(window).isnan().item()


@pytest.mark.parametrize("name", ["lenet5", "lenet5-cifar"])
def test_the_lenets_use_it(name: str) -> None:
    from goldfish.models import model_factory

    shape = (1, 28, 28) if name == "lenet5" else (3, 32, 32)
    model = model_factory(name, num_classes=10, image_shape=shape)()
    assert sum(isinstance(module, MaxPool2x2) for module in model.modules()) == 2


def test_torch_func_can_look_into_it() -> None:
    """The gradient of each of two images by itself is that of both at once, row by row."""
    images = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))

    def pooled_sum(image: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = MaxPool2x2()(image)
        return pooled.square().sum()

    both = images.clone().requires_grad_()
    pooled_sum(both).backward()
    each = torch.func.vmap(torch.func.grad(pooled_sum))(images)
    assert both.grad is not None
    assert torch.equal(each, both.grad)
