"""A ResNet's layers on a GPU in few kernels: convolution, BatchNorm, shortcut and ReLU in one go.

PyTorch's layers take some sixteen kernels for what six do here, forwards and backwards, and
cuDNN's gradient of a weight with 16 channels alone takes longer than these six. The numbers are
PyTorch's but for the last bits, in float32 and under ``torch.autocast`` in bfloat16, unless the
values of a channel are far from its running mean: at a hundred of their standard deviations, as
images that are not normalised may be for a fresh model, this deviation is off by about one percent.
"""

from __future__ import annotations

import functools
import importlib.util
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import once_differentiable

from goldfish.hardware.layers import has_hooks, is_changed

CHANNELS = (16, 32, 64)
"""Numbers of channels that a layer may have; the images may have any up to 16."""

FIRST = "first"
"""Attribute of a BatchNorm layer: how many samples of a batch its statistics come from."""

LAST = torch.channels_last

_sizes = attrgetter(
    *("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode", "bias")
)


class Tiles(NamedTuple):
    """How many rows (pixels) a program of each kernel takes: at a time, and how often."""

    convolve: int
    of_weight: tuple[int, int]
    columns: int
    """Columns of the weight's gradient that a program finds."""
    sums: tuple[int, int]
    values: int
    """For kernels that go through values once."""


TILES = {
    16: Tiles(256, (128, 8), 64, (128, 8), 128),
    32: Tiles(128, (64, 8), 128, (64, 8), 256),
    64: Tiles(128, (64, 8), 64, (32, 8), 32),
}
"""What was fastest on one H200 in bfloat16, by the channels of a layer."""


class ResidualLayers(nn.Module):
    """Layers of a ResNet, which can be compiled for a GPU."""

    in_kernels = False
    """Whether the kernels of :mod:`goldfish.hardware.residual_kernels` are used where they suit."""

    def compile(self, *options: Any, **named: Any) -> None:
        """Compile the layers: on a GPU by the kernels of this package, else by PyTorch."""
        if next(self.parameters()).is_cuda and available():
            self.use_kernels()
        else:
            super().compile(*options, **named)

    def use_kernels(self) -> None:
        """Let these layers, and all inside, use the kernels wherever they suit."""
        for part in self.modules():
            if isinstance(part, ResidualLayers):
                part.in_kernels = True

    def layer(
        self,
        inputs: Tensor,
        convolution: nn.Conv2d,
        norm: nn.BatchNorm2d,
        shortcut: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return ``relu(norm(convolution(inputs)) + shortcut)``, and the inputs for a shortcut.

        These save an operation: their gradient is added where that of the convolution is made.
        """
        if self.in_kernels and _suits(inputs, convolution, norm):
            return _in_kernels(inputs, convolution, norm, shortcut)
        normal: Tensor = norm(convolution(inputs))
        return F.relu(normal if shortcut is None else normal + shortcut), inputs


@functools.cache
def available() -> bool:
    """Tell whether Triton for CUDA is installed, as it is with PyTorch for CUDA on Linux."""
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


def _in_kernels(
    inputs: Tensor, convolution: nn.Conv2d, norm: nn.BatchNorm2d, shortcut: Tensor | None
) -> tuple[Tensor, Tensor]:
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    kind = torch.bfloat16 if torch.is_autocast_enabled("cuda") else inputs.dtype
    images, added = (
        None if t is None else t.to(kind).contiguous(memory_format=LAST) for t in (inputs, shortcut)
    )
    first = vars(norm).get(FIRST, len(inputs))
    held = (convolution.weight, norm.weight, norm.bias, added)
    layer = (*held, norm, convolution.stride[0], first)
    return cast("tuple[Tensor, Tensor]", _Layer.apply(images, *layer))  # type: ignore[no-untyped-call]


def _suits(inputs: Tensor, convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> bool:
    """Tell whether the kernels compute such a layer; others, and layers with hooks, they do not."""
    if torch.compiler.is_compiling() or not (inputs.is_cuda and inputs.dim() == 4):
        return False
    if type(convolution) is not nn.Conv2d or type(norm) is not nn.BatchNorm2d:
        return False
    channels_out, channels_in, *_ = convolution.weight.shape
    count, channels, height, width = inputs.shape
    stride = convolution.stride[0]
    pixels = ((height - 1) // stride + 1) * ((width - 1) // stride + 1)
    return (
        _in_known_precision(inputs)
        and channels == channels_in
        and channels_out == norm.num_features
        and channels_out in CHANNELS
        and (channels_in in CHANNELS or (channels_in <= min(CHANNELS) and not inputs.requires_grad))
        and _sizes(convolution) == ((3, 3), (stride, stride), (1, 1), (1, 1), 1, "zeros", None)
        and count * height * width * max(CHANNELS) < 2**31
        and norm.affine
        and norm.running_mean is not None
        and norm.momentum is not None
        and (
            pixels * vars(norm).get(FIRST, count) > 1
            if norm.training
            else not torch.is_grad_enabled()
        )
        and not is_changed(convolution)
        and not (has_hooks(norm) if FIRST in vars(norm) else is_changed(norm))
        and not is_functorch_wrapped_tensor(inputs)
        and available()
    )


def _in_known_precision(inputs: Tensor) -> bool:
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda") == torch.bfloat16
    return inputs.dtype in (torch.bfloat16, torch.float32)


def _convolving(images: Tensor, channels: int) -> dict[str, Any]:
    """Return how ``convolve`` multiplies, float32 in parts, and the rows that a program takes."""
    block = TILES[channels].convolve
    if images.dtype == torch.bfloat16:
        return {"PRECISION": "ieee", "BLOCK": block}
    return {"PRECISION": "tf32x3", "BLOCK": block // 2}


class _Layer(torch.autograd.Function):
    """A layer, and its images once more: what is added to their gradient costs no operation."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        weight: Tensor,
        scale: Tensor,
        shift: Tensor,
        shortcut: Tensor | None,
        norm: nn.BatchNorm2d,
        stride: int,
        first: int,
    ) -> tuple[Tensor, Tensor]:
        from goldfish.hardware import residual_kernels as kernels

        count, inputs, height, width = images.shape
        channels = len(weight)
        tall, wide = (height - 1) // stride + 1, (width - 1) // stride + 1
        rows, counted = count * tall * wide, first * tall * wide
        shape = (count, channels, tall, wide)
        values = torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=LAST)
        # By channel: two sums of values, what they are apart from, and two of gradients, in a joint
        # pass four; and the weight's gradient.
        joint = first < count
        number = channels * (5 + 2 * joint + 9 * inputs) if norm.training else 0
        sums = torch.zeros(number, dtype=torch.float32, device=images.device)
        running = (norm.running_mean, norm.running_var)
        how = _convolving(images, channels)
        kernels.convolve[(_programs(rows, how["BLOCK"]),)](
            *(images, weight, values, sums, shortcut, scale, shift, *running),
            *(rows, counted, norm.eps, 0, *weight.stride()),
            HEIGHT=height,
            WIDTH=width,
            OUT_HEIGHT=tall,
            OUT_WIDTH=wide,
            INPUTS=inputs,
            PADDED=max(inputs, min(CHANNELS)),
            OUTPUTS=channels,
            STRIDE=stride,
            STATISTICS=norm.training,
            NORMALISED=not norm.training,
            SHORTCUT=shortcut is not None and not norm.training,
            **how,
        )
        if not norm.training:
            return values, images.view_as(images)
        outputs, tiles = torch.empty_like(values), TILES[channels]
        kernels.normalise[(_programs(rows, tiles.values),)](
            *(values, shortcut, outputs, sums, scale, shift, *running),
            *(rows, counted, norm.eps, norm.momentum),
            CHANNELS=channels,
            SHORTCUT=shortcut is not None,
            JOINT=joint,
            BLOCK=tiles.values,
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(images, weight, scale, shift, values, outputs)
        ctx.sums = sums  # not saved: parts of it become gradients, which may be changed
        ctx.counted, ctx.eps, ctx.stride = counted, norm.eps, stride
        ctx.shortcut, ctx.joint, ctx.used = shortcut is not None, joint, False
        return outputs, images.view_as(images)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from goldfish.hardware import residual_kernels as kernels

        images, weight, scale, shift, values, outputs = ctx.saved_tensors
        # Hooks on saved tensors may have brought them back in another layout.
        images, values, outputs = (
            t.contiguous(memory_format=LAST) for t in (images, values, outputs)
        )
        sums = ctx.sums
        coming, beside = (
            None if g is None else g.contiguous(memory_format=LAST) for g in gradients
        )
        if coming is None:  # only the images were used
            return beside, *[None] * 7
        inputs, height, width = images.shape[1:]
        channels, tall, wide = values.shape[1:]
        rows, tiles = values.numel() // channels, TILES[channels]
        found = sums[3 * channels :]
        if ctx.used:  # a second time, for a graph that was retained
            found = torch.zeros_like(found)
        ctx.used = True
        of_shift, of_scale = found[: 2 * channels].split(channels)
        of_weight = found[-channels * 9 * inputs :]
        block, blocks = tiles.sums
        kernels.sum_gradients[(_programs(rows, block * blocks),)](
            *(values, outputs, coming, sums, found, scale, shift, rows, ctx.counted, ctx.eps),
            CHANNELS=channels,
            SHORTCUT=ctx.shortcut,
            JOINT=ctx.joint,
            BLOCK=block,
            BLOCKS=blocks,
        )
        of_values = torch.empty_like(values)
        of_shortcut = torch.empty_like(values) if ctx.shortcut else None
        kernels.normalise_backward[(_programs(rows, tiles.values),)](
            *(values, outputs, coming, sums, found, scale, shift, of_values, of_shortcut),
            *(rows, ctx.counted, ctx.eps),
            CHANNELS=channels,
            SHORTCUT=ctx.shortcut,
            JOINT=ctx.joint,
            BLOCK=tiles.values,
        )
        block, blocks = tiles.of_weight
        columns = min(tiles.columns, 1 << (9 * inputs - 1).bit_length())
        programs = (_programs(rows, block * blocks), _programs(9 * inputs, columns))
        kernels.of_weight[programs](
            *(images, of_values, of_weight, rows),
            HEIGHT=height,
            WIDTH=width,
            OUT_HEIGHT=tall,
            OUT_WIDTH=wide,
            INPUTS=inputs,
            OUTPUTS=channels,
            STRIDE=ctx.stride,
            COLUMNS=columns,
            PRECISION=_convolving(images, channels)["PRECISION"],
            BLOCK=block,
            BLOCKS=blocks,
        )
        of_images = None
        if ctx.needs_input_grad[0]:
            of_images = _of_images(images, weight, of_values, ctx.stride, beside)
        shaped = of_weight.view(channels, 3, 3, inputs).permute(0, 3, 1, 2).to(weight.dtype)
        return of_images, shaped, of_scale, of_shift, of_shortcut, None, None, None


def _of_images(
    images: Tensor, weight: Tensor, of_values: Tensor, stride: int, beside: Tensor | None
) -> Tensor:
    """Return the gradient of the images of a convolution, and of what else they are used for.

    With stride 1 it is itself a convolution, of the gradient of the values, with the weight turned
    by half a turn.
    """
    from goldfish.hardware import residual_kernels as kernels

    if stride > 1:
        sizes = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])
        held = (of_values, images, weight.to(of_values.dtype), None)
        gradient: Tensor = torch.ops.aten.convolution_backward(*held, *sizes)[0]
        return gradient if beside is None else gradient + beside
    count, inputs, height, width = images.shape
    found = torch.empty_like(images)
    channels, rows, how = len(weight), count * height * width, _convolving(images, inputs)
    by_out, by_in, by_row, by_column = weight.stride()
    kernels.convolve[(_programs(rows, how["BLOCK"]),)](
        *(of_values, weight, found, None, beside, *[None] * 4),
        *(rows, 0, 0.0, 2 * by_row + 2 * by_column, by_in, by_out, -by_row, -by_column),
        HEIGHT=height,
        WIDTH=width,
        OUT_HEIGHT=height,
        OUT_WIDTH=width,
        INPUTS=channels,
        PADDED=channels,
        OUTPUTS=inputs,
        STRIDE=1,
        STATISTICS=False,
        NORMALISED=False,
        SHORTCUT=beside is not None,
        **how,
    )
    return found


def _programs(rows: int, block: int) -> int:
    return -(-rows // block)
