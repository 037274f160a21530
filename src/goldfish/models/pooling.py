"""Max-pooling of 2 x 2 windows: the bits of PyTorch's, several times faster on a CPU.

PyTorch's kernel for images in the usual layout compares one number at a time and takes a third of
a LeNet-5's training step. Whole-tensor maxima use the vector units.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor


class MaxPool2x2(nn.MaxPool2d):
    """``nn.MaxPool2d(2)`` with the same outputs and gradients, bit for bit."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the maximum of each window; a last odd row or column is left out."""
        if (
            torch.compiler.is_compiling()
            or inputs.device.type != "cpu"
            or is_functorch_wrapped_tensor(inputs)  # torch.func looks at single samples
        ):
            return cast("Tensor", super().forward(inputs))
        height, width = inputs.shape[-2] // 2 * 2, inputs.shape[-1] // 2 * 2
        even = inputs[..., :height, :width]
        if torch.is_grad_enabled() and inputs.requires_grad:
            return cast("Tensor", _Pool.apply(even))  # type: ignore[no-untyped-call]
        rows = torch.maximum(even[..., 0::2, :], even[..., 1::2, :])
        return torch.maximum(rows[..., 0::2], rows[..., 1::2])


class _Pool(torch.autograd.Function):
    """The gradient goes to the first maximum of a window, row by row, as PyTorch's does."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        upper, lower = inputs[..., 0::2, :], inputs[..., 1::2, :]
        of_upper = torch.maximum(upper[..., 0::2], upper[..., 1::2])
        of_lower = torch.maximum(lower[..., 0::2], lower[..., 1::2])
        ctx.save_for_backward(inputs, of_upper, of_lower)
        return torch.maximum(of_upper, of_lower)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        inputs, of_upper, of_lower = ctx.saved_tensors
        result = torch.empty_like(inputs)
        to_lower = _where_positive(gradient, of_lower - of_upper)
        for row, share, maximum in (
            (0, gradient - to_lower, of_upper),
            (1, to_lower, of_lower),
        ):
            left = inputs[..., row::2, 0::2]
            to_right = _where_positive(share, maximum - left)
            result[..., row::2, 1::2] = to_right
            torch.sub(share, to_right, out=result[..., row::2, 0::2])
        return result


def _where_positive(values: Tensor, condition: Tensor) -> Tensor:
    """Return ``values`` where ``condition > 0`` and 0 elsewhere, in one vectorised pass."""
    chosen: Tensor = torch.ops.aten.threshold_backward(values, condition, 0)
    return chosen
