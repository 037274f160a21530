from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from goldfish.hardware.blocked import BlockedFeatures, _blocks_suit
from goldfish.models import model_factory

either = pytest.mark.parametrize("compiled", [False, True])


def lenet(name: str = "lenet5", side: int | None = None, compiled: bool = False) -> BlockedFeatures:
    shape = {"lenet5": (1, 28, 28), "lenet5-cifar": (3, 32, 32)}[name]
    if side is not None:
        shape = (shape[0], side, side)
    torch.manual_seed(0)
    model = model_factory(name, num_classes=10, image_shape=shape)()
    assert isinstance(model, BlockedFeatures)
    if compiled:
        model.compile()
    return model


def in_pytorchs_layers(model: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(*model)


def images(count: int, side: int, channels: int = 1, seed: int = 0, levels: int = 1000) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, channels, side, side, generator=generator) * levels).round() / levels


def gradients(model: nn.Module, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    inputs = inputs.clone().requires_grad_()
    logits = model(inputs)
    weights = [inputs, *model.parameters()]
    loss = F.cross_entropy(logits, torch.arange(len(inputs)) % 10)
    return logits.detach(), list(torch.autograd.grad(loss, weights))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["lenet5", "lenet5-cifar"]),
    st.integers(1, 101),
    st.integers(16, 33),
    st.sampled_from([1, 3, 1000]),
    st.integers(0, 10_000),
)
def test_outputs_and_gradients_are_those_of_pytorch_bit_for_bit(
    name: str, count: int, side: int, levels: int, seed: int
) -> None:
    """Few levels give many ties, whose gradient must go to the same place of the window."""
    model = lenet(name, side)
    inputs = images(count, side, 1 if name == "lenet5" else 3, seed, levels)
    logits, ours = gradients(model, inputs)
    expected, theirs = gradients(in_pytorchs_layers(model), inputs)
    assert torch.equal(logits, expected)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    with torch.no_grad():
        assert torch.equal(model(inputs), expected)


def test_images_stay_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the comparison above would compare PyTorch's layers with themselves."""
    model = lenet()
    if not _blocks_suit(images(2, 28), [model[0], model[3]]):  # type: ignore[list-item]
        pytest.skip("not on this machine")

    def refuse(*_: object) -> None:
        raise AssertionError("PyTorch's own layers were used")

    monkeypatch.setattr(nn.Sequential, "forward", refuse)
    assert model(images(2, 28)).shape == (2, 10)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_what_is_no_number_stays_visible(value: float) -> None:
    """OneDNN's pooling would take the largest of the other values of the window."""
    model, inputs = lenet(), images(3, 28)
    inputs[1, 0, 14, 14] = value
    expected = in_pytorchs_layers(model)(inputs)
    assert torch.equal(model(inputs).isfinite(), expected.isfinite())
    assert not expected[1].isfinite().all() or value == 3e38


def test_weights_that_are_no_numbers_stay_visible() -> None:
    model = lenet()
    with torch.no_grad():
        next(model.parameters())[0, 0, 2, 2] = float("nan")
    assert model(images(2, 28)).isnan().all()


@either
def test_torch_func_can_look_into_it(compiled: bool) -> None:
    """The mean of the gradients of single images is that of both at once."""
    model, inputs = lenet(compiled=compiled), images(2, 28)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    labels = torch.tensor([0, 1])

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        said = torch.func.functional_call(model, weights, (image[None],))
        return F.cross_entropy(said, label[None])

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, inputs, labels)
    _, both = gradients(model, inputs)
    for gradient, expected in zip(each.values(), both[1:], strict=True):
        assert torch.allclose(gradient.mean(0), expected, atol=1e-6)


@either
def test_gradients_of_gradients_with_pytorchs_layers(compiled: bool) -> None:
    model, inputs = lenet(compiled=compiled), images(2, 28)
    with torch.backends.mkldnn.flags(enabled=False):
        first = torch.autograd.grad(
            model(inputs).square().mean(), list(model.parameters()), create_graph=True
        )
        second = torch.autograd.grad(first[0].square().sum(), list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in second)


@either
def test_other_numbers_are_computed_by_pytorchs_layers(compiled: bool) -> None:
    model, inputs = lenet(compiled=compiled).double(), images(2, 28).double()
    assert torch.equal(model(inputs), in_pytorchs_layers(model)(inputs))


def test_elsewhere_pytorch_compiles() -> None:
    model = lenet().double()
    model.compile()
    assert model._compiled_call_impl is not None


@pytest.mark.parametrize(
    ("place", "layer"),
    [
        (1, nn.Tanh()),
        (2, nn.MaxPool2d(2, ceil_mode=True)),
        (2, nn.AvgPool2d(2)),
        (0, nn.Conv2d(1, 6, 5, padding="same")),
        (0, nn.Conv2d(1, 6, 5, padding=2, padding_mode="reflect")),
    ],
)
def test_layers_of_a_user_are_used(place: int, layer: nn.Module) -> None:
    model = lenet()
    model[place] = layer
    assert torch.equal(model(images(3, 28)), in_pytorchs_layers(model)(images(3, 28)))


@either
def test_a_layer_of_a_user_may_have_a_forward_of_its_own(compiled: bool) -> None:
    model = lenet(compiled=compiled)
    said, usual = model(images(3, 28)), model[1].forward
    model[1].forward = lambda inputs: 2 * usual(inputs)
    assert torch.equal(model(images(3, 28)), in_pytorchs_layers(model)(images(3, 28)))
    assert not torch.allclose(model(images(3, 28)), said)


@either
@pytest.mark.parametrize("left", [1, 2, 4, 5])
def test_a_model_that_a_user_cut_off_is_computed_as_it_is(compiled: bool, left: int) -> None:
    model = lenet(compiled=compiled)
    del model[left:]
    assert torch.equal(model(images(3, 28)), in_pytorchs_layers(model)(images(3, 28)))


@either
def test_hooks_are_called(compiled: bool) -> None:
    model, called = lenet(compiled=compiled), []
    model[1].register_forward_hook(lambda *_: called.append("after"))
    model[3].register_forward_pre_hook(lambda *_: called.append("before"))
    model[4].register_full_backward_hook(lambda *_: called.append("back"))
    model(images(2, 28)).sum().backward()
    assert called == ["after", "before", "back"]


def export(model: nn.Module, inputs: Tensor) -> str:
    return str(torch.export.export(model, (inputs,), strict=True).graph)


def trace(model: nn.Module, inputs: Tensor) -> str:
    return str(torch.jit.trace(model, inputs).inlined_graph)


def symbolic(model: nn.Module, _inputs: Tensor) -> str:
    return str(torch.fx.symbolic_trace(model).graph)


def functional(model: nn.Module, inputs: Tensor) -> str:
    return str(make_fx(model)(inputs).graph)


@either
@pytest.mark.parametrize("written_down", [export, trace, symbolic, functional])
def test_what_is_exported_has_pytorchs_layers(
    written_down: Callable[[nn.Module, Tensor], str], compiled: bool
) -> None:
    graph = written_down(lenet(compiled=compiled).eval(), images(2, 28))
    assert "mkldnn" not in graph
    if written_down is not symbolic:
        assert graph.count("relu") >= 3
        assert "max_pool2d" in graph
