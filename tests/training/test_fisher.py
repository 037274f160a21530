"""The Fisher information layer by layer, against that of single samples and a slow loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from goldfish.hardware.layers import has_hooks
from goldfish.models import build_model
from goldfish.models.resnet import ResNet
from goldfish.params import digest, params_of
from goldfish.training import fisher
from goldfish.training.batches import Batch
from goldfish.training.fisher import diagonal_fisher, known_layers
from goldfish.training.fit import cross_entropy_objective
from goldfish.training.sgd import HalfCopy

Named = dict[str, Tensor]


def slow_fisher(model: nn.Module, inputs: Tensor, labels: Tensor) -> Named:
    """Return the mean squared gradient, one sample at a time: the oracle."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in trained.items()}
    for image, label in zip(inputs, labels, strict=True):
        loss = F.cross_entropy(model(image[None]), label[None])
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        for name, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                total[name] += gradient.square() / len(labels)
    return total


def one_way(
    way: Callable[..., dict[Tensor, Tensor] | None],
) -> Callable[[nn.Module, Tensor, Tensor], Named | None]:
    def measure(model: nn.Module, inputs: Tensor, labels: Tensor) -> Named | None:
        with fisher._measured(model) as norms:
            total = way(model, inputs, labels, norms)
        if total is None:
            return None
        return {n: total[p] / len(labels) for n, p in model.named_parameters() if p.requires_grad}

    return measure


by_layer = one_way(fisher._by_layer)
by_sample = one_way(fisher._by_sample)


def assert_close(one: Named | None, other: Named | None) -> None:
    assert one is not None
    assert other is not None
    assert list(one) == list(other)
    for name, t in one.items():
        torch.testing.assert_close(t, other[name], rtol=1e-4, atol=1e-7, msg=name)


def draw(count: int, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    return torch.randn(count, *shape, generator=generator), labels


# Derived by hand.


def frozen(weight: list[list[float]]) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), bias=False).requires_grad_(requires_grad=False)
    layer.weight.copy_(torch.tensor(weight))
    return layer


def zeroed(layer: nn.Linear | nn.Conv2d) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def test_a_linear_layer() -> None:
    """With weights 0 both classes have p = 1/2: dy = (-1/2, 1/2) for class 0.

    x = (2, 0) has the gradient ((-1, 0), (1, 0)), x = (0, 2) has ((0, -1), (0, 1)). Three of the
    first and one of the second: the mean squares are ((3/4, 1/4), (3/4, 1/4)); of dy, 1/4 each.
    """
    inputs = torch.tensor([[2.0, 0.0]] * 3 + [[0.0, 2.0]])
    found = by_layer(zeroed(nn.Linear(2, 2)), inputs, torch.zeros(4, dtype=torch.long))
    assert found is not None
    assert found["weight"].tolist() == [[0.75, 0.25], [0.75, 0.25]]
    assert found["bias"].tolist() == [0.25, 0.25]


def test_a_convolution() -> None:
    """The image (1, 2, 3) has the patches (1, 2) and (2, 3), whose outputs add up to a logit.

    With weights 0 it has p = 1/2, so dy = (-1/2, -1/2). The gradient is -1/2 (1 + 2, 2 + 3), whose
    square is (9/4, 25/4); that of the bias is -1, whose square is 1. An image of zeros has only the
    latter, and the mean over both is (9/8, 25/8) and 1.
    """
    model = nn.Sequential(zeroed(nn.Conv2d(1, 1, (1, 2))), nn.Flatten(), frozen([[1, 1], [0, 0]]))
    inputs = torch.stack([torch.tensor([[[1.0, 2.0, 3.0]]]), torch.zeros(1, 1, 3)])
    found = by_layer(model, inputs, torch.zeros(2, dtype=torch.long))
    assert found is not None
    assert found["0.weight"].flatten().tolist() == [9 / 8, 25 / 8]
    assert found["0.bias"].tolist() == [1.0]


def test_a_batch_norm_layer() -> None:
    """The inputs 0 and 2 have mean 1 and variance 1: xhat = -1 and 1 is the logit of class 0.

    With s the sigmoid, dy = s(xhat) - 1: -s(1) and -s(-1). The gradients of the weight, dy xhat,
    are s(1) and -s(-1), and have the squares of those of the bias.
    """
    model = nn.Sequential(nn.BatchNorm1d(1, eps=0), frozen([[1], [0]])).train()
    inputs, labels = torch.tensor([[0.0], [2.0]]), torch.zeros(2, dtype=torch.long)
    expected = sum(1 / (1 + math.exp(x)) ** 2 for x in (-1, 1)) / 2
    for found in (by_layer(model, inputs, labels), by_sample(model, inputs, labels)):
        assert found is not None
        assert found["0.weight"].tolist() == found["0.bias"].tolist() == pytest.approx([expected])


# Against the oracles.


@given(
    count=st.integers(1, 7),
    features=st.integers(1, 5),
    hidden=st.integers(1, 4),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear_models_against_the_oracle(
    count: int, features: int, hidden: int, *, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(features, hidden, bias=bias), nn.Tanh(), nn.Linear(hidden, 3, bias=bias)
    )
    inputs, labels = draw(count, features, seed=seed)
    expected = slow_fisher(model, inputs, labels)
    assert_close(by_layer(model, inputs, labels), expected)
    assert_close(by_sample(model, inputs, labels), expected)


@given(
    count=st.integers(1, 5),
    channels=st.integers(1, 3),
    side=st.integers(4, 7),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_convolutions_against_the_oracle(
    count: int, channels: int, side: int, kernel: int, stride: int, *, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(channels, 4, kernel, stride, padding=1, bias=bias),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(3, bias=bias),
    )
    inputs, labels = draw(count, channels, side, side, seed=seed)
    model(inputs)  # makes the lazy layer
    expected = slow_fisher(model, inputs, labels)
    assert_close(by_layer(model, inputs, labels), expected)
    assert_close(by_sample(model, inputs, labels), expected)


@pytest.mark.parametrize("held", [1, 40, 80, 10**6])
def test_parts_make_the_whole(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    """20 parameters, 18 values in a sample's patches, 7 samples: in parts, and all at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, (1, 2)), nn.Flatten(), nn.Linear(4, 3, bias=False))
    inputs, labels = draw(7, 1, 1, 3)
    expected = slow_fisher(model, inputs, labels)
    monkeypatch.setattr(fisher, "GRADIENTS_AT_ONCE", held)
    monkeypatch.setattr(fisher, "_IN_CACHE", held)
    assert_close(by_layer(model, inputs, labels), expected)
    assert_close(by_sample(model, inputs, labels), expected)


def batch_norm_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5),
        nn.Linear(64, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3),
    )  # fmt: skip


def test_batch_norm_in_training_has_the_batchs_statistics_held_fixed() -> None:
    """The oracle: a model in evaluation mode whose running statistics are those of the batch.

    A step in training mode divides by the variance with 1/n, and keeps that with 1/(n - 1).
    """
    model, (inputs, labels) = batch_norm_model().train(), draw(9, 1, 6, 6)
    oracle = copy.deepcopy(model).eval()
    for module, n in ((oracle[1], 9 * 16), (oracle[6], 9)):  # type: ignore[index]
        module.train()
        module.momentum = 1.0
        oracle(inputs)
        module.eval()
        module.running_var *= (n - 1) / n
    expected = slow_fisher(oracle, inputs, labels)
    assert_close(by_layer(model, inputs, labels), expected)
    assert_close(by_sample(model, inputs, labels), expected)


def test_batch_norm_in_evaluation_has_its_running_statistics() -> None:
    model, (inputs, labels) = batch_norm_model().train(), draw(9, 1, 6, 6)
    model(inputs)
    model.eval()
    expected = slow_fisher(model, inputs, labels)
    assert_close(by_layer(model, inputs, labels), expected)
    assert_close(by_sample(model, inputs, labels), expected)


@pytest.mark.parametrize("measure", [by_layer, by_sample])
def test_buffers_gradients_modes_and_random_numbers_are_left_alone(
    measure: Callable[[nn.Module, Tensor, Tensor], Named | None],
) -> None:
    model, (inputs, labels) = batch_norm_model().train(), draw(9, 1, 6, 6)
    model[1].eval()  # type: ignore[index]
    before, modes = digest(params_of(model)), [m.training for m in model.modules()]
    places = [id(t) for t in model.buffers()]
    random = torch.random.get_rng_state()
    assert measure(model, inputs, labels) is not None
    assert digest(params_of(model)) == before
    assert [id(t) for t in model.buffers()] == places
    assert [m.training for m in model.modules()] == modes
    assert not any(has_hooks(m) for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), random)


class Counting(nn.Module):
    """Counts how often it was called, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        return inputs


def test_what_a_model_counts_is_left_alone() -> None:
    model, (inputs, labels) = nn.Sequential(Counting(), nn.Linear(6, 3)), draw(4, 6)
    diagonal_fisher(model, inputs, labels)
    assert [t.item() for t in model.buffers()] == [0]


def test_a_compiled_model_is_called_uncompiled() -> None:
    model, (inputs, labels) = nn.Linear(6, 3), draw(4, 6)
    model._compiled_call_impl = lambda *_args: pytest.fail("called")
    compiled = model._compiled_call_impl
    assert by_layer(model, inputs, labels) is not None
    assert by_sample(model, inputs, labels) is not None
    assert model._compiled_call_impl is compiled


def test_frozen_parameters_have_no_fisher_information() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3))
    model[0].requires_grad_(requires_grad=False)
    inputs, labels = draw(3, 4)
    fisher = diagonal_fisher(model, inputs, labels)
    assert list(fisher) == ["1.weight", "1.bias"]
    assert_close(fisher, slow_fisher(model, inputs, labels))


@pytest.mark.parametrize("name", ["lenet5", "lenet5-cifar", "mlp", "resnet20"])
def test_the_models_layer_by_layer_and_sample_by_sample(name: str) -> None:
    """BatchNorm in training mode; resnet20 is deep, so that its last bits differ by more."""
    side = 28 if name == "lenet5" else 16
    shape = (1 if name == "lenet5" else 3, side, side)
    torch.manual_seed(0)
    model = build_model(name, num_classes=10, image_shape=shape).train()
    inputs, labels = draw(7, *shape)
    ours, theirs = by_layer(model, inputs, labels), by_sample(model, inputs, labels)
    assert ours is not None
    assert theirs is not None
    for parameter, t in theirs.items():
        scale = t.max().item()
        assert torch.allclose(ours[parameter], t, rtol=1e-3, atol=1e-5 * scale), parameter
        assert scale > 0


class Own(nn.Module):
    """A model of two layers that are used as ``way`` says."""

    def __init__(self, way: Callable[[nn.Linear, nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.way = way

    def forward(self, inputs: Tensor) -> Tensor:
        return self.way(self.first, self.last, inputs)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    model[1].weight = model[0].weight
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3))
    model[0].register_forward_hook(lambda layer, args, output: 2 * output)
    return model


def rerouted() -> nn.Module:
    layer = nn.Linear(6, 3)
    layer.forward = lambda x: 2 * F.linear(x, layer.weight)  # type: ignore
    return layer


class TwoNames(nn.Module):
    """A model that has its first layer under two names, and another layer than the plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.whole = nn.Sequential(self.first, self.norm, nn.Linear(6, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.whole(inputs)
        return logits


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 3, 1)), *layers, nn.Flatten(), nn.Linear(6, 3))


OTHERS: dict[str, nn.Module] = {
    "a layer twice": Own(lambda a, b, x: b(a(a(x)))),
    "weights used once more": Own(lambda a, b, x: b(a(x)) + F.linear(x, b.weight)),
    "weights used as such": Own(lambda a, b, x: F.linear(a(x), b.weight, b.bias)),
    "called for nothing": Own(lambda a, b, x: F.linear(a(x), b.weight, b.bias) + 0 * len(b(x))),
    "a layer that is not used": Own(lambda a, b, x: b(x)),
    "rows of samples": Own(lambda a, b, x: b(a(x.view(-1, 1, 6).expand(-1, 2, 6)).mean(1))),
    "by name": Own(lambda a, b, x: b(input=a(input=x))),
    "shared weights": tied(),
    "a hook": hooked(),
    "a forward of its own": rerouted(),
    "a parametrization": nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 3))),
    "a layer under two names": TwoNames(),
    "another layer": nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
    "groups": images(nn.Conv2d(2, 2, 1, groups=2)),
    "other padding": images(nn.Conv2d(2, 2, (3, 1), padding=(1, 0), padding_mode="reflect")),
    "padding in words": images(nn.Conv2d(2, 2, (3, 1), padding="same")),
}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_other_models_are_measured_sample_by_sample(name: str) -> None:
    model, (inputs, labels) = OTHERS[name], draw(5, 6)
    assert by_layer(model, inputs, labels) is None
    assert_close(diagonal_fisher(model, inputs, labels), slow_fisher(model, inputs, labels))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
        images(nn.Conv2d(2, 2, 3, (1, 2), padding=2, dilation=(1, 2))),
        Own(lambda a, b, x: b(a(x) + x)),
    ],
)
def test_usual_models_are_measured_layer_by_layer(model: nn.Module) -> None:
    inputs, labels = draw(5, 6)
    assert known_layers(model) is not None
    if isinstance(model[0] if isinstance(model, nn.Sequential) else None, nn.Unflatten):
        model[-1] = nn.LazyLinear(3)  # type: ignore[operator]
        model(inputs)
    assert_close(by_layer(model, inputs, labels), slow_fisher(model, inputs, labels))


@pytest.mark.parametrize("way", [by_layer, by_sample])
def test_double_precision(way: Callable[..., Named | None]) -> None:
    """As in evaluation, after a batch whose statistics the layer takes over as they are."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5, momentum=1.0)
    model = nn.Sequential(nn.Linear(6, 5), norm, nn.Linear(5, 3)).double().train()
    inputs, labels = draw(9, 6)
    measured = way(model, inputs.double(), labels)
    assert measured is not None
    model(inputs.double())
    assert norm.running_var is not None
    norm.running_var *= 8 / 9  # it keeps the variance of a sample of nine
    expected = slow_fisher(model.eval(), inputs.double(), labels)
    assert_close({n: t.double() for n, t in measured.items()}, expected)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_copy_in_half_precision() -> None:
    """The squares of numbers of eight bits: each is off by a few percent, and so is their sum."""
    torch.manual_seed(0)
    model = ResNet(8, num_classes=3).train()
    inputs, labels = draw(9, 3, 16, 16)
    exact = diagonal_fisher(model, inputs, labels)
    half = HalfCopy(model)
    half.backward(  # the weights are copied
        lambda: Batch(inputs, labels), cross_entropy_objective
    )
    rough = diagonal_fisher(model, inputs, labels, half)
    for name, t in exact.items():
        assert rough[name].dtype == torch.float32
        assert rough[name].shape == t.shape
        off = (rough[name] - t).abs().sum() / t.sum()
        assert 0 < off < 0.15, name
