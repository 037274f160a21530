"""Convolutions, ReLU and max-pooling in less time than PyTorch's layers take.

On a CPU oneDNN keeps the channels of an image in blocks. PyTorch's layers bring its results back
into the usual layout after every convolution, and pool there one number at a time, which takes half
of a LeNet-5's training step. Here the images stay in blocks until the last pooling, and the bits
are PyTorch's. Compiled, the layers are those of :mod:`goldfish.hardware.native`.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from goldfish.hardware.layers import is_changed
from goldfish.hardware.memory import keep_freed_memory
from goldfish.hardware.native import conv_pool
from goldfish.hardware.residual import ResidualLayers
from goldfish.types import ModelFactory

_X86 = platform.machine().lower() in ("x86_64", "amd64")
"""Where the bits were compared."""

_NATIVE_TRAINING = 8
_NATIVE_PREDICTING = 1
"""Threads up to which compiled code, which has one, is faster than oneDNN's: see performance.md."""

_LARGE = 1e30
"""Far below the largest float32: see :func:`_blocks_suit`."""

_pooling = attrgetter(
    *("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
)
"""What a max-pooling does."""

_POOLING = _pooling(nn.MaxPool2d(2))


class BlockedFeatures(nn.Sequential):
    """Layers that begin with convolution, ReLU and 2 x 2 max-pooling, and these three once more.

    It computes what ``nn.Sequential`` does, to the bit, and once compiled but for the last bits.
    Gradients of gradients need PyTorch's own layers:
    ``with torch.backends.mkldnn.flags(enabled=False):``.
    """

    _native = False

    def compile(self, *options: Any, **named: Any) -> None:
        """Compile the layers: on a CPU by :mod:`goldfish.hardware.native`, else by PyTorch."""
        if _on_cpu(self.parameters()):
            self._native = True
        else:
            super().compile(*options, **named)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the layers make of the inputs."""
        layers, others = list(self)[:6], list(self)[6:]
        convolutions = None if _is_traced(inputs) else _usual(layers)
        features = None
        if convolutions is not None and _plain(inputs, convolutions):
            if self._native:
                features = _compiled(inputs, convolutions)
            if features is None and _blocks_suit(inputs, convolutions):
                features = _in_blocks(inputs, convolutions)
        if features is None:
            return cast("Tensor", super().forward(inputs))  # type: ignore[no-untyped-call]
        for following in others:
            features = following(features)
        return features


def compiled_early(factory: ModelFactory, device: str) -> ModelFactory:
    """Return what builds the same models, with layers compiled wherever a model is used.

    PyTorch's compiler takes too long for models that only predict now and then; ours does not.
    """
    on_cpu = torch.device(device).type == "cpu"

    def build() -> nn.Module:
        model = factory()
        if on_cpu and isinstance(model, BlockedFeatures):
            model.compile()
        if not on_cpu and isinstance(model, ResidualLayers):
            model.use_kernels()
        return model

    return build


def _compiled(inputs: Tensor, convolutions: Sequence[nn.Conv2d]) -> Tensor | None:
    """Return the features by compiled code; None where there is none, or threads are faster."""
    most = _NATIVE_TRAINING if torch.is_grad_enabled() else _NATIVE_PREDICTING
    if torch.get_num_threads() > most:
        return None
    images: Tensor | None = inputs
    for layer in convolutions:
        images = None if images is None else conv_pool(images, layer)
    return images


def _in_blocks(inputs: Tensor, convolutions: Sequence[nn.Conv2d]) -> Tensor:
    """Return the features by oneDNN's operations, which pass images on in oneDNN's own layout."""
    images = inputs.to_mkldnn()
    for layer in convolutions:
        padding = cast("tuple[int, int]", layer.padding)
        images = torch.mkldnn_convolution(
            images, layer.weight, layer.bias, padding, layer.stride, layer.dilation, layer.groups
        )
        # ReLU and maximum may change places: fewer numbers are left for the second.
        images = torch.relu(torch.mkldnn_max_pool2d(images, 2, 2))
    return images.to_dense()


def _is_traced(inputs: Tensor) -> bool:
    """Tell whether the operations are traced, to compile or to export the model."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or type(inputs) is not Tensor
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _usual(layers: Sequence[nn.Module]) -> list[nn.Conv2d] | None:
    """Return the convolutions of layers that are as they were; None where a user changed one."""
    kinds = (nn.Conv2d, nn.ReLU, nn.MaxPool2d) * 2
    if len(layers) < len(kinds):
        return None
    convolutions = []
    for layer, kind in zip(layers, kinds, strict=True):
        if type(layer) is not kind or is_changed(layer):
            return None
        if isinstance(layer, nn.Conv2d):
            if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
                return None
            convolutions.append(layer)
        elif isinstance(layer, nn.MaxPool2d) and _pooling(layer) != _POOLING:
            return None
    return convolutions


def _on_cpu(tensors: Iterable[Tensor]) -> bool:
    return all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)


def _read(inputs: Tensor, convolutions: Sequence[nn.Conv2d]) -> list[Tensor]:
    return [inputs, *(p for layer in convolutions for p in layer.parameters())]


def _plain(inputs: Tensor, convolutions: Sequence[nn.Conv2d]) -> bool:
    """Tell whether these are images in float32 on the CPU, and PyTorch's layers not asked for."""
    read = _read(inputs, convolutions)
    return (
        inputs.dim() == 4
        and len(inputs) > 0
        and _on_cpu(read)
        and torch._C._get_mkldnn_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not any(is_functorch_wrapped_tensor(t) for t in read)  # torch.func: single samples
    )


@torch.no_grad()
def _blocks_suit(inputs: Tensor, convolutions: Sequence[nn.Conv2d]) -> bool:
    """Tell whether the layout can be used, and gives the bits of PyTorch's own layers.

    No convolution may overflow: oneDNN's pooling drops what is not a number. A weighted sum is at
    most the product of the norms of weights and values (Cauchy and Schwarz), and the values that
    one of the next layer reads have a norm of at most the largest of them times the root of their
    number. ``_LARGE`` leaves room for these roots.
    """
    if not (_X86 and torch.backends.mkldnn.is_available() and keep_freed_memory()):
        return False  # new pages for its large blocks would cost more than they save
    norms = torch._foreach_norm(_read(inputs, convolutions))
    return math.prod(1 + norm.item() for norm in norms) < _LARGE
