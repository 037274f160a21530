"""A ResNet's layers in Triton, run by its interpreter, against PyTorch's; a GPU: test_gpu.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import goldfish.hardware
from goldfish import params as P  # noqa: N812
from goldfish.hardware import residual
from goldfish.models import ResNet
from goldfish.training.workspace import LocalWorkspace
from goldfish.unlearning.basic_model import joint_logits

interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or not residual.available(),
    reason="Triton's interpreter is for machines without a GPU that have Triton",
)


class Case(NamedTuple):
    """A layer's sizes: ``first`` of its samples are those of the statistics."""

    samples: int
    inputs: int
    outputs: int
    size: int
    stride: int = 1
    first: int | None = None
    shortcut: bool = False
    usual_order: bool = True
    """Whether the weight lies in memory as PyTorch makes it, and not in the images' order."""


CASES = [
    Case(3, 3, 16, 8),
    Case(2, 1, 16, 9, first=1),
    Case(4, 16, 16, 6, shortcut=True),
    Case(3, 16, 32, 8, stride=2, shortcut=True),
    Case(3, 32, 64, 7, stride=2, first=2),
    Case(2, 64, 64, 4, first=1, shortcut=True),
    Case(3, 3, 16, 5, usual_order=False),
    Case(2, 32, 32, 5, shortcut=True, usual_order=False),
    Case(2, 16, 32, 6, stride=2, usual_order=False),
]


class Layer:
    """A layer of random values, and random gradients of what comes out."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        shape = case.samples, case.inputs, case.size, case.size
        self.images = torch.randn(shape).to(memory_format=torch.channels_last)
        self.images.requires_grad_(case.inputs in residual.CHANNELS)
        self.convolution = nn.Conv2d(
            case.inputs, case.outputs, 3, case.stride, padding=1, bias=False
        )
        if not case.usual_order:
            self.convolution.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(case.outputs)
        for values in self.norm.parameters():
            nn.init.normal_(values)
        with torch.no_grad():
            shape = self.convolution(self.images).shape
        self.shortcut = torch.randn(shape).requires_grad_() if case.shortcut else None
        self.gradient = torch.randn(shape)
        self.first = case.first or case.samples

    @property
    def leaves(self) -> list[Tensor]:
        held = (
            self.images,
            self.convolution.weight,
            self.norm.weight,
            self.norm.bias,
            self.shortcut,
        )
        return [t for t in held if t is not None and t.requires_grad]

    def in_triton(self) -> Tensor:
        added = None
        if self.shortcut is not None:
            added = self.shortcut.contiguous(memory_format=torch.channels_last)
        outputs: Tensor = residual._Layer.apply(  # type: ignore[no-untyped-call]
            *(self.images, self.convolution.weight, self.norm.weight, self.norm.bias, added),
            *(self.norm, self.convolution.stride[0], self.first),
        )[0]
        return outputs

    def in_pytorch(self) -> Tensor:
        """BatchNorm by its definition: all samples by the statistics of the first ones.

        These are divided by the root of the biased variance, the others by that of the unbiased.
        """
        values = self.convolution(self.images)
        mean = values[: self.first].mean((0, 2, 3), keepdim=True)
        centred, parts = values - mean, []
        for part, correction in ((slice(self.first), 0), (slice(self.first, None), 1)):
            variance = values[: self.first].var((0, 2, 3), keepdim=True, correction=correction)
            parts.append(centred[part] / (variance + self.norm.eps).sqrt())
        scale, shift = (t[:, None, None] for t in (self.norm.weight, self.norm.bias))
        normal = torch.cat(parts) * scale + shift
        return F.relu(normal if self.shortcut is None else normal + self.shortcut)


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_a_layer_and_its_gradients_are_pytorchs(case: Case) -> None:
    layer = Layer(case)
    ours, theirs = layer.in_triton(), layer.in_pytorch()
    assert torch.allclose(ours, theirs, atol=1e-5)
    gradients = (torch.autograd.grad(t, layer.leaves, layer.gradient) for t in (ours, theirs))
    for own, other in zip(*gradients, strict=True):
        assert torch.allclose(own, other, atol=1e-5, rtol=1e-4)


@interpreted
def test_the_running_statistics_are_those_of_the_first_samples() -> None:
    layer = Layer(CASES[4])
    twin = nn.BatchNorm2d(layer.norm.num_features)
    twin(layer.convolution(layer.images[: layer.first]))
    layer.in_triton()
    for name in ("running_mean", "running_var"):
        assert torch.allclose(getattr(layer.norm, name), getattr(twin, name), atol=1e-6)


@interpreted
def test_a_retained_graph_gives_the_same_gradients_again() -> None:
    """Although those of before were changed in place."""
    layer = Layer(CASES[2])
    outputs = layer.in_triton()
    found = []
    for _ in range(3):
        outputs.backward(layer.gradient, retain_graph=True)
        found.append([t.grad.clone() for t in layer.leaves if t.grad is not None])
        for leaf in layer.leaves:
            assert leaf.grad is not None
            leaf.grad.zero_()
    assert len(found[0]) == len(layer.leaves) == 5
    for again in found[1:]:
        for one, other in zip(found[0], again, strict=True):
            assert torch.allclose(one, other, atol=1e-6)


@interpreted
def test_saved_tensors_may_come_back_in_another_layout() -> None:
    found = []
    for unpack in (lambda t: t, torch.Tensor.contiguous):
        layer = Layer(CASES[2])
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            outputs = layer.in_triton()
        found.append(torch.autograd.grad(outputs, layer.leaves, layer.gradient))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@interpreted
def test_values_far_from_zero_keep_their_variance() -> None:
    """Mean 1000, standard deviation 1: squares have no room for both, distances have."""
    layer = Layer(Case(4, 16, 16, 6))
    with torch.no_grad():
        nn.init.dirac_(layer.convolution.weight)
        layer.images += 1000
        nn.init.constant_(layer.norm.running_mean, 1000)  # type: ignore[arg-type]
    assert torch.allclose(layer.in_triton(), layer.in_pytorch(), atol=1e-2)


@interpreted
@pytest.mark.parametrize("training", [True, False])
def test_what_is_no_number_stays_none(training: bool) -> None:
    layer = Layer(CASES[0])
    layer.norm.train(training)
    with torch.no_grad():
        layer.convolution.weight[5, 0, 1, 1] = torch.nan
        found = layer.in_triton()
    assert found[:, 5].isnan().all()
    assert not found[:, :5].isnan().any()


@interpreted
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3], CASES[7]])
def test_in_evaluation_a_layer_uses_the_running_statistics(case: Case) -> None:
    layer = Layer(case)
    nn.init.normal_(layer.norm.running_mean)  # type: ignore[arg-type]
    nn.init.uniform_(layer.norm.running_var, 0.5, 2)  # type: ignore[arg-type]
    before = {name: t.clone() for name, t in layer.norm.named_buffers()}
    layer.norm.eval()
    with torch.no_grad():
        normal = layer.norm(layer.convolution(layer.images))
        theirs = F.relu(normal if layer.shortcut is None else normal + layer.shortcut)
        assert torch.allclose(layer.in_triton(), theirs, atol=1e-5)
    assert all(torch.equal(t, before[name]) for name, t in layer.norm.named_buffers())


@interpreted
def test_a_model_in_kernels_says_what_it_says_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of remaining samples, whose statistics are used, and of removed ones in the same pass."""
    torch.manual_seed(0)
    plain, compiled = ResNet(8).train(), ResNet(8).train()
    compiled.load_state_dict(plain.state_dict())
    compiled.use_kernels()
    monkeypatch.setattr(residual, "_suits", lambda *_: True)
    images = torch.randn(7, 3, 16, 16)
    said = [(joint_logits(m, images[:5], images[5:]), m) for m in (compiled, plain)]
    (ours, _), (theirs, _) = said
    assert torch.allclose(ours, theirs, atol=1e-4)
    gradients = (torch.autograd.grad(t.square().sum(), list(m.parameters())) for t, m in said)
    for own, other in zip(*gradients, strict=True):
        assert torch.allclose(own, other, rtol=1e-3, atol=1e-3 * other.abs().max().item())

    for (name, own), other in zip(compiled.named_buffers(), plain.buffers(), strict=True):
        assert torch.allclose(own, other, atol=1e-5), name


COMPILER = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from goldfish.hardware import residual_kernels

for name, given, constants in json.load(sys.stdin):
    kernel = getattr(residual_kernels, name)
    types = dict(zip(kernel.arg_names, given))
    types |= dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    places |= {(at,): None for at, kind in enumerate(given) if kind == "constexpr"}
    made = compile(ASTSource(kernel, types, places), target=GPUTarget("cuda", 90, 32))
    print(len(made.asm["cubin"]) > 0)
"""
"""Compiles kernels for an H100 or H200, which need not be there."""


class Launches:
    """Stands for the kernels, and notes what they are launched with."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, list[str], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def launch(*given: Any, **constants: Any) -> None:
            launched = (name, [kind(value) for value in given], constants)
            if launched not in self.noted:
                self.noted.append(launched)

        return defaultdict(lambda: launch)


def kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return {torch.float32: "*fp32", torch.bfloat16: "*bf16"}[value.dtype]
    return {int: "i32", float: "fp32", type(None): "constexpr"}[type(value)]


@pytest.mark.skipif(not residual.available(), reason="Triton is not installed")
def test_all_kernels_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what they are launched with, in training, in a joint pass and in evaluation."""
    launches = Launches()
    monkeypatch.setitem(sys.modules, "goldfish.hardware.residual_kernels", launches)
    monkeypatch.setattr(goldfish.hardware, "residual_kernels", launches, raising=False)
    for case, exact in ((CASES[0], False), (CASES[4], False), (CASES[5], False), (CASES[7], True)):
        layer = Layer(case)
        if not exact:
            layer.images = layer.images.detach().bfloat16().requires_grad_(case.inputs > 3)
            layer.convolution.bfloat16()
        layer.in_triton().sum().backward()
        layer.norm.eval()
        with torch.no_grad():
            layer.in_triton()
    assert {name for name, *_ in launches.noted} == {
        *("convolve", "normalise", "sum_gradients", "normalise_backward", "of_weight")
    }
    ours = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILER],
        input=json.dumps(launches.noted),
        capture_output=True,
        text=True,
        env=ours,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["True"] * len(launches.noted)


def test_workspaces_hold_weights_in_the_order_of_the_images() -> None:
    def factory() -> nn.Module:
        model = ResNet(8)
        model.use_kernels()
        return model

    params = P.params_of(factory())
    loaded = LocalWorkspace(factory).load("student", params)
    assert loaded.module.blocks[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index, union-attr]
    assert P.digest(loaded.params()) == P.digest(params)
    assert all(t.is_contiguous() for t in loaded.params().values())


def test_elsewhere_pytorchs_layers_are_used() -> None:
    """On a CPU, for example: to the bit."""
    torch.manual_seed(0)
    plain, compiled = ResNet(8), ResNet(8)
    compiled.load_state_dict(plain.state_dict())
    compiled.use_kernels()
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(compiled(images), plain(images))


class OnGpu(Tensor):
    """A tensor that says it were on a GPU."""

    is_cuda = True


class OwnConvolution(nn.Conv2d):
    pass


class OwnNorm(nn.BatchNorm2d):
    pass


def convolution(kind: type[nn.Conv2d] = nn.Conv2d, **options: Any) -> nn.Conv2d:
    return kind(16, 32, 3, **{"padding": 1, "bias": False, **options})


LAYERS: dict[str, tuple[nn.Module, nn.Module, bool]] = {
    "usual": (convolution(), nn.BatchNorm2d(32), True),
    "a stride": (convolution(stride=2), nn.BatchNorm2d(32), True),
    "a bias": (convolution(bias=True), nn.BatchNorm2d(32), False),
    "another kind of convolution": (convolution(OwnConvolution), nn.BatchNorm2d(32), False),
    "another kind of norm": (convolution(), OwnNorm(32), False),
    "a norm of single images": (
        *(convolution(), nn.InstanceNorm2d(32, affine=True, track_running_stats=True), False),
    ),
    "a norm of groups": (convolution(), nn.GroupNorm(4, 32), False),
    "no norm": (convolution(), nn.Identity(), False),
    "two convolutions": (nn.Sequential(convolution()), nn.BatchNorm2d(32), False),
    "a norm of other channels": (convolution(), nn.BatchNorm2d(16), False),
}


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_kernels_compute_the_usual_layers_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch computes the others, and says what is wrong with those that do not fit."""
    monkeypatch.setattr(residual, "available", lambda: True)
    layer, norm, suits = LAYERS[name]
    assert residual._suits(torch.ones(4, 16, 8, 8).as_subclass(OnGpu), layer, norm) == suits  # type: ignore[arg-type]
    assert not residual._suits(torch.ones(4, 5, 8, 8).as_subclass(OnGpu), layer, norm)  # type: ignore[arg-type]
