"""Convolution, ReLU and max-pooling by C code that is compiled for each layer.

The machine's own C compiler does it, in a fraction of a second for each kind of layer. The results
are PyTorch's but for the last bits.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")
"""Nothing here lets the compiler assume that there are no infinities and no NaN."""


class Layer(NamedTuple):
    """What C code is compiled for: a convolution on images of one size."""

    channels_in: int
    channels_out: int
    kernel: int
    padding: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of what comes out for an image."""
        shrinks = self.kernel - 1 - 2 * self.padding
        return self.channels_out, (self.height - shrinks) // 2, (self.width - shrinks) // 2


def _call(function: Any, images: Tensor, *others: Tensor | None) -> None:
    places = [None if t is None else t.data_ptr() for t in (images, *others)]
    if function(len(images), *places):
        raise MemoryError("There is no memory for a layer's images.")


class _ConvPool(torch.autograd.Function):
    """The pooled images; ``choices`` says which pixel of each window was the largest."""

    @staticmethod
    def forward(
        ctx: Any, library: ctypes.CDLL, layer: Layer, images: Tensor, *held: Tensor
    ) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        weight, bias = (t.contiguous() for t in held)
        shape = (len(images), *layer.shape)
        outputs = torch.empty(
            shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last
        )
        choices = torch.empty_like(outputs, dtype=torch.uint8)
        _call(library.forward, images, weight, bias, outputs, choices)
        ctx.library = library
        ctx.save_for_backward(images, weight, choices)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, choices = ctx.saved_tensors
        # Hooks on saved tensors may have brought them back in another layout.
        images, choices, gradient = (
            t.contiguous(memory_format=torch.channels_last) for t in (images, choices, gradients[0])
        )
        weight = weight.contiguous()
        of_images = torch.empty_like(images) if ctx.needs_input_grad[2] else None
        of_weight, of_bias = torch.empty_like(weight), weight.new_empty(len(weight))
        results = (of_weight, of_bias, of_images)
        _call(ctx.library.backward, images, weight, choices, gradient, *results)
        return None, None, of_images, of_weight, of_bias


def conv_pool(images: Tensor, convolution: nn.Conv2d) -> Tensor | None:
    """Return what a convolution, ReLU and 2 x 2 max-pooling make of float32 images on the CPU.

    None where there is no compiled code for it: the kernel must be square and take every pixel.
    One thread does the work.
    """
    layer = _layer(images, convolution)
    if layer is None:
        return None
    with _compiling:
        library = _compiled(layer)
    if library is None:
        return None
    held = (convolution.weight, convolution.bias)
    return cast("Tensor", _ConvPool.apply(library, layer, images, *held))  # type: ignore[no-untyped-call]


def _layer(images: Tensor, convolution: nn.Conv2d) -> Layer | None:
    # What the code reads and writes goes by the tensors: a pruned layer's attributes may be wrong.
    channels_out, channels_in, kernel, width = convolution.weight.shape
    padding = int(convolution.padding[0])
    usual = (
        kernel == width
        and convolution.padding == (padding, padding)
        and padding >= 0
        and convolution.stride == (1, 1)
        and convolution.dilation == (1, 1)
        and convolution.groups == 1
        and convolution.bias is not None
        and convolution.bias.shape == (channels_out,)
        and images.shape[1] == channels_in
    )
    if not usual:
        return None
    layer = Layer(channels_in, channels_out, kernel, padding, images.shape[2], images.shape[3])
    return layer if min(layer.shape) > 0 else None


_compiling = threading.Lock()
_took: list[float] = []
"""The seconds of each compilation in this process."""


def working_clock() -> float:
    """Return a time in seconds that stands still while layers are compiled.

    They are compiled once in a process, which would be charged to the first that needs them.
    """
    with _compiling:
        return time.perf_counter() - sum(_took)


@functools.cache
def _compiled(layer: Layer) -> ctypes.CDLL | None:
    begin = time.perf_counter()
    try:
        return _compile(layer)
    except (OSError, ValueError) as error:
        _say_once(str(error))
        return None
    finally:
        _took.append(time.perf_counter() - begin)


def _compile(layer: Layer) -> ctypes.CDLL:
    """Compile the code for a layer and load it."""
    command = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no C compiler {command[0]!r}; the variable CC names one")
    names = ("IN", "OUT", "KERNEL", "PADDING", "HEIGHT", "WIDTH")
    sizes = [f"-D{name}={size}" for name, size in zip(names, layer, strict=True)]
    written = files("goldfish.hardware") / "conv_pool.c"
    with as_file(written) as source, tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "conv_pool.so"
        call = [*command, *FLAGS, *sizes, str(source), "-o", str(library)]
        done = subprocess.run(call, capture_output=True, text=True, errors="replace")  # noqa: S603
        if done.returncode:
            reason = done.stderr.strip().partition("\n")[0]
            raise OSError(f"{shlex.join(command)} failed: {reason}")
        code = ctypes.CDLL(str(library))  # it lets other threads run Python while it computes
    code.forward.argtypes = (ctypes.c_int, *[ctypes.c_void_p] * 5)
    code.backward.argtypes = (ctypes.c_int, *[ctypes.c_void_p] * 7)
    return code


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning(
        "The layers of a model could not be compiled (%s): it trains without, which is slower.",
        reason,
    )
