"""Convolutions, ReLU and max-pooling in one memory layout: the bits of PyTorch's, in less time.

On a CPU oneDNN keeps the channels of an image in blocks. PyTorch's layers bring its results back
into the usual layout after every convolution, and pool there one number at a time, which takes half
of a LeNet-5's training step. Here the images stay in blocks until the last pooling.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from goldfish.memory import keep_freed_memory

_X86 = platform.machine().lower() in ("x86_64", "amd64")
"""Where the bits were compared."""

_LARGE = 1e30
"""Far below the largest float32: see :func:`_stays_finite`."""

_POOLING = (2, 2, 0, 1, False, False)
"""What ``nn.MaxPool2d(2)`` does."""


class BlockedFeatures(nn.Sequential):
    """Layers that begin with convolution, ReLU and 2 x 2 max-pooling, ``repeats`` times.

    It computes what ``nn.Sequential`` does, to the bit. Gradients of gradients need PyTorch's
    own layers: ``with torch.backends.mkldnn.flags(enabled=False):``.
    """

    def __init__(self, *layers: nn.Module, repeats: int) -> None:
        super().__init__(*layers)
        self._repeats = repeats

    def compile(self, *options: Any, **named: Any) -> None:
        """Compile the layers, but not where images stay in blocks: compiled, they take longer."""
        if not (_on_cpu(self.parameters()) and _available()):
            super().compile(*options, **named)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the layers make of the inputs."""
        layers = list(self)
        first = 3 * self._repeats
        convolutions = None if _is_traced(inputs) else _usual(layers[:first])
        if convolutions is None or not _suits(inputs, convolutions):
            return cast("Tensor", super().forward(inputs))  # type: ignore[no-untyped-call]
        # to_mkldnn() gives a layout of oneDNN's own, which its operations hand on to each other.
        images = inputs.to_mkldnn()
        for layer in convolutions:
            images = torch.mkldnn_convolution(
                images,
                layer.weight,
                layer.bias,
                cast("tuple[int, int]", layer.padding),
                layer.stride,
                layer.dilation,
                layer.groups,
            )
            # ReLU and maximum may change places: fewer numbers are left for the second.
            images = torch.relu(torch.mkldnn_max_pool2d(images, 2, 2))
        features = images.to_dense()
        for following in layers[first:]:
            features = following(features)
        return features


def _is_traced(inputs: Tensor) -> bool:
    """Tell whether somebody writes down what is done, to compile or to export it."""
    return torch.compiler.is_compiling() or torch._C._is_tracing() or type(inputs) is not Tensor


def _usual(layers: Sequence[nn.Module]) -> list[nn.Conv2d] | None:
    """Return the convolutions of layers that are as they were; None where a user changed one."""
    kinds = (nn.Conv2d, nn.ReLU, nn.MaxPool2d)
    convolutions = []
    for place, layer in enumerate(layers):
        hooks = (
            layer._forward_hooks,
            layer._forward_pre_hooks,
            layer._backward_hooks,
            layer._backward_pre_hooks,
        )
        if type(layer) is not kinds[place % 3] or any(hooks):
            return None
        if isinstance(layer, nn.Conv2d):
            if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
                return None
            convolutions.append(layer)
        elif (
            isinstance(layer, nn.MaxPool2d)
            and (
                layer.kernel_size,
                layer.stride,
                layer.padding,
                layer.dilation,
                layer.ceil_mode,
                layer.return_indices,
            )
            != _POOLING
        ):
            return None
    return convolutions


def _available() -> bool:
    """Tell whether this process can use the layout, and have it keep memory for it."""
    return (
        _X86
        and torch.backends.mkldnn.is_available()
        and torch._C._get_mkldnn_enabled()
        and keep_freed_memory()  # new pages for its large blocks would cost more than they save
    )


def _on_cpu(tensors: Iterable[Tensor]) -> bool:
    return all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)


def _suits(inputs: Tensor, convolutions: Sequence[nn.Conv2d]) -> bool:
    """Tell whether the layout gives the bits of PyTorch's own layers for these inputs."""
    read = [inputs, *(p for layer in convolutions for p in layer.parameters())]
    return (
        _available()
        and not torch.is_autocast_enabled("cpu")
        and inputs.dim() == 4
        and len(inputs) > 0
        and _on_cpu(read)
        and not any(is_functorch_wrapped_tensor(t) for t in read)  # torch.func: single samples
        and _stays_finite(read)
    )


@torch.no_grad()
def _stays_finite(read: Sequence[Tensor]) -> bool:
    """Tell whether no convolution can overflow; oneDNN's pooling drops what is not a number.

    A weighted sum is at most the product of the norms of weights and values (Cauchy and Schwarz),
    and the values that one of the next layer reads have a norm of at most the largest of them
    times the root of their number. ``_LARGE`` leaves room for these roots.
    """
    bound = math.prod(1 + norm.item() for norm in torch._foreach_norm(list(read)))
    return bound < _LARGE
