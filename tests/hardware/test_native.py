"""The layers that are compiled here, against PyTorch's."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import goldfish
from goldfish import Client
from goldfish.data import Subset, TensorExamples
from goldfish.hardware import native
from goldfish.hardware.native import Layer, conv_pool
from goldfish.models import LeNet5, model_factory
from goldfish.params import digest, one_thread

compiler = (os.environ.get("CC") or "cc").split()[0]
needs_compiler = pytest.mark.skipif(shutil.which(compiler) is None, reason="there is no C compiler")

LAYERS = [
    Layer(1, 6, kernel=5, padding=2, height=28, width=28),
    Layer(6, 16, kernel=5, padding=0, height=14, width=14),
    Layer(3, 6, kernel=5, padding=0, height=32, width=32),
    Layer(2, 3, kernel=3, padding=1, height=9, width=12),
    Layer(5, 37, kernel=3, padding=0, height=8, width=7),
    Layer(4, 16, kernel=1, padding=0, height=2, width=2),
    Layer(1, 8, kernel=2, padding=2, height=3, width=33),
]
"""LeNet's, and others: rows and columns that pooling leaves over, few channels and many."""


def layer_of(sizes: Layer, levels: int | None) -> tuple[Tensor, nn.Conv2d, Tensor]:
    """Return images, a convolution and gradients; with ``levels`` all values are small integers."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        if levels is None:
            return torch.randn(shape, generator=generator)
        return torch.randint(-levels, levels + 1, shape, generator=generator).float()

    convolution = nn.Conv2d(
        sizes.channels_in, sizes.channels_out, sizes.kernel, padding=sizes.padding
    )
    with torch.no_grad():
        for p in convolution.parameters():
            p.copy_(draw(*p.shape))
    images = draw(9, sizes.channels_in, sizes.height, sizes.width).requires_grad_()
    return images, convolution, draw(9, *sizes.shape)


def in_pytorch(images: Tensor, convolution: nn.Conv2d) -> Tensor:
    return F.max_pool2d(F.relu(convolution(images)), 2)


def results(
    operation: Callable[[Tensor, nn.Conv2d], Tensor | None], sizes: Layer, levels: int | None
) -> list[Tensor]:
    images, convolution, gradients = layer_of(sizes, levels)
    outputs = operation(images, convolution)
    assert outputs is not None
    read = [images, *convolution.parameters()]
    return [outputs.detach(), *torch.autograd.grad(outputs, read, gradients)]


@needs_compiler
@pytest.mark.parametrize("sizes", LAYERS)
def test_whole_numbers_come_out_exactly(sizes: Layer) -> None:
    """Sums of small integers are exact in any order, so nothing may differ.

    Many windows hold a maximum twice, whose gradient must go to the first place.
    """
    for ours, theirs in zip(
        results(conv_pool, sizes, 2), results(in_pytorch, sizes, 2), strict=True
    ):
        assert torch.equal(ours, theirs)


@needs_compiler
@pytest.mark.parametrize("sizes", LAYERS)
def test_other_numbers_differ_in_the_last_bits_at_most(sizes: Layer) -> None:
    for ours, theirs in zip(
        results(conv_pool, sizes, None), results(in_pytorch, sizes, None), strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_visible(value: float) -> None:
    images, convolution, _ = layer_of(LAYERS[0], None)
    with torch.no_grad():
        images[1, 0, 14, 14] = value
        found, expected = conv_pool(images, convolution), in_pytorch(images, convolution)
    assert found is not None
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.equal(found.isnan(), expected.isnan())


@needs_compiler
def test_images_in_any_layout_are_read_right() -> None:
    images, convolution, _ = layer_of(LAYERS[1], 2)
    views = [
        images.contiguous(memory_format=torch.channels_last),
        images.transpose(2, 3).contiguous().transpose(2, 3),
        torch.cat([images, images])[::2],
    ]
    for view in views:
        found = conv_pool(view, convolution)
        assert found is not None
        assert torch.equal(found, in_pytorch(view, convolution))


@needs_compiler
def test_no_gradient_comes_from_a_window_that_is_off() -> None:
    images, convolution, gradients = layer_of(LAYERS[0], None)
    found = []
    for operation in (conv_pool, in_pytorch):
        outputs = operation(images, convolution)
        assert outputs is not None
        broken = gradients.masked_fill(outputs == 0, float("nan"))
        found.append(torch.autograd.grad(outputs, [images, *convolution.parameters()], broken))
    for ours, theirs in zip(*found, strict=True):
        assert theirs.isfinite().all()
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


@needs_compiler
def test_saved_tensors_may_come_back_in_another_layout() -> None:
    found = []
    for unpack in (lambda t: t, lambda t: t.contiguous(memory_format=torch.contiguous_format)):
        images, convolution, gradients = layer_of(LAYERS[1], 2)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            outputs = conv_pool(images, convolution)
            assert outputs is not None
            found.append(torch.autograd.grad(outputs, [images, convolution.weight], gradients))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_compiler
def test_the_default_type_of_numbers_does_not_matter() -> None:
    images, convolution, _ = layer_of(LAYERS[1], 2)
    expected = conv_pool(images, convolution)
    torch.set_default_dtype(torch.float64)
    try:
        outputs = conv_pool(images, convolution)
    finally:
        torch.set_default_dtype(torch.float32)
    assert outputs is not None
    assert expected is not None
    assert torch.equal(outputs, expected)


@needs_compiler
def test_a_pruned_layer_is_what_its_weights_are() -> None:
    """Its attributes still have the numbers of channels that it was built with."""
    images, convolution, gradients = layer_of(LAYERS[1], 2)
    for name in ("weight", "bias"):
        setattr(convolution, name, nn.Parameter(getattr(convolution, name)[:4].clone()))
    outputs = conv_pool(images, convolution)
    assert outputs is not None
    expected = in_pytorch(images, convolution)
    assert torch.equal(outputs, expected)
    found, theirs = (
        torch.autograd.grad(o, [images, *convolution.parameters()], gradients[:, :4])
        for o in (outputs, expected)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, theirs, strict=True))


@needs_compiler
@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"dilation": 2},
        {"bias": False},
        {"groups": 2},
        {"padding": (1, 2)},
        {"padding": -1},
        {"padding": 0, "kernel_size": (3, 5)},
        {"kernel_size": 12},
    ],
)
def test_other_convolutions_are_left_to_pytorch(options: dict[str, object]) -> None:
    chosen = {"kernel_size": 3, **options}
    convolution = nn.Conv2d(2, 4, **chosen)  # type: ignore[arg-type]
    assert conv_pool(torch.randn(3, 2, 12, 12), convolution) is None


def lenet(name: str = "lenet5") -> nn.Module:
    shape = (1, 28, 28) if name == "lenet5" else (3, 32, 32)
    torch.manual_seed(0)
    return model_factory(name, num_classes=10, image_shape=shape)()


@needs_compiler
@one_thread()
@pytest.mark.parametrize("name", ["lenet5", "lenet5-cifar"])
def test_a_compiled_lenet_says_what_it_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lenet(name)
    images = torch.randn(5, *((1, 28, 28) if name == "lenet5" else (3, 32, 32)))
    expected = model(images)
    model.compile()

    def refuse(*_: object) -> None:
        raise AssertionError("the layers were not compiled")

    monkeypatch.setattr("goldfish.hardware.blocked._in_blocks", refuse)
    monkeypatch.setattr(nn.Sequential, "forward", refuse)
    assert torch.allclose(model(images), expected, atol=1e-5)


@needs_compiler
def test_with_many_threads_those_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images, asked = lenet(), torch.randn(5, 1, 28, 28), []

    def note(inputs: Tensor, convolution: nn.Conv2d) -> Tensor | None:
        asked.append(torch.get_num_threads())
        return conv_pool(inputs, convolution)

    monkeypatch.setattr("goldfish.hardware.blocked.conv_pool", note)
    model.compile()
    usual = torch.get_num_threads()
    try:
        for threads in (1, 2, 9):
            torch.set_num_threads(threads)
            model(images)
            with torch.no_grad():
                model(images)
    finally:
        torch.set_num_threads(usual)
    assert asked == [1, 1, 1, 1, 2, 2], "two layers: trained with 1 and 2, predicted with 1"


@needs_compiler
def test_a_compiled_lenet_learns_the_same_with_any_number_of_workers() -> None:
    generator = torch.Generator().manual_seed(1)
    data = TensorExamples(torch.randn(120, 1, 28, 28, generator=generator), torch.arange(120) % 10)
    found = []
    for workers, compiled in ((1, True), (2, True), (2, False)):
        clients = [Client(str(i), Subset(data, range(40 * i, 40 * i + 40))) for i in range(3)]
        federation = goldfish.InProcess(
            clients, lenet, workers=workers, threads=1, compiled=compiled
        )
        trained = goldfish.train(federation, rounds=2, learning_rate=0.05, batch_size=20)
        found.append(trained.params)
        built = federation.model()
        assert isinstance(built, LeNet5)
        assert built._native == compiled, "the server's models are compiled as well"
    assert digest(found[0]) == digest(found[1]) != digest(found[2])
    for name, value in found[2].items():
        assert torch.allclose(found[0][name], value, atol=1e-5), name


@one_thread()
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (
            "no-such-compiler",
            "there is no C compiler 'no-such-compiler'; the variable CC names one",
        ),
        ("false", "false failed"),
        ("'", "No closing quotation"),
    ],
)
def test_without_a_compiler_it_is_said_once(
    compiler: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(native, "_compiled", native._compiled.__wrapped__)
    native._say_once.cache_clear()
    model, images = lenet(), torch.randn(2, 1, 28, 28)
    expected = model(images)
    model.compile()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(model(images), expected)
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "it trains without, which is slower" in record.getMessage()


def test_compiling_is_in_the_seconds_of_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes once in a process, with whatever is run first: here it takes a second.

    It fails in the end, since nothing but the seconds matters.
    """

    def compiled(_layer: Layer) -> None:
        time.sleep(1.0)
        raise OSError("no compiler")

    monkeypatch.setattr(native, "_compile", compiled)
    native._compiled.cache_clear()
    images = torch.rand(20, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    data = TensorExamples(images, torch.arange(20) % 10)
    federation = goldfish.InProcess([Client("a", data)], LeNet5, compiled=True, workers=1)
    begin = time.perf_counter()
    trained = goldfish.train(federation, rounds=1)
    taken = time.perf_counter() - begin
    native._compiled.cache_clear()
    assert taken > 1.0
    assert trained.cost.seconds < taken - 0.95
