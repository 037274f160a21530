"""The diagonal of a model's empirical Fisher information: layer by layer, or sample by sample.

A sample's gradient of a layer's weights is a product of what the layer read and the gradient of
what it returned. One pass gives both for all samples. Sample by sample is the slow, obvious way,
for the models that the fast one does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.func import grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from goldfish.errors import ConfigError
from goldfish.hardware.layers import is_changed
from goldfish.training.swap import Places

ByName: TypeAlias = Mapping[str, Tensor]
"""One tensor for each trainable parameter."""

GRADIENTS_AT_ONCE = 2**26
"""How many values of per-sample gradients, or of their factors, are held at a time: 256 MiB."""

_IN_CACHE = 2**20
"""The same on a CPU, layer by layer: what its cache holds is multiplied several times as fast."""

_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def diagonal_fisher(
    model: nn.Module, inputs: Tensor, labels: Tensor, computes: nn.Module | None = None
) -> dict[str, Tensor]:
    """Return the diagonal of the empirical Fisher information, by parameter.

    It is the mean over the samples of the squared gradient of a sample's cross-entropy. A BatchNorm
    layer in training mode mixes the samples of a batch, so that a sample has no gradient of its
    own: here it normalises with the statistics of ``inputs``, as in training, held fixed. (The
    running statistics of a fresh model are those of another function: they lag behind by some
    twenty steps.) Everything else is in evaluation mode, so dropout draws nothing. Modes and
    buffers are left as they were. ``computes`` is what computes the logits, where it is not the
    model itself but a copy of it in another precision.
    """
    with _measured(model) as norms:
        total = _by_layer(model if computes is None else computes, inputs, labels, norms)
        if total is None:
            total = _by_sample(model, inputs, labels, norms)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return {name: total[p] / len(labels) for name, p in trained.items()}


@contextmanager
def _measured(model: nn.Module) -> Iterator[list[_BatchNorm]]:
    """Put a model into evaluation mode, uncompiled; yield its BatchNorm layers in training mode.

    At the end it has its modes again, and its own buffers: until then it may change copies.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    compiled = [(m, m._compiled_call_impl) for m in modules if m._compiled_call_impl is not None]
    norms = [m for m in modules if isinstance(m, _BatchNorm) and m.training]
    try:
        model.eval()
        for module, _ in compiled:
            module._compiled_call_impl = None
        for module, own in zip(modules, buffers, strict=True):
            if type(module) not in _PLAIN_NORMS:  # these change nothing
                module._buffers.update({n: t if t is None else t.clone() for n, t in own.items()})
        yield norms
    finally:
        for module, mode, own in zip(modules, modes, buffers, strict=True):
            module.training = mode
            module._buffers.update(own)
        for module, call in compiled:
            module._compiled_call_impl = call


@contextmanager
def _with_statistics_of_the_batch(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Let BatchNorm layers in evaluation mode normalise with the statistics of what they read."""

    def hold(norm: _BatchNorm, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        inputs = args[0] if args else named["input"]
        _, mean, scale = torch.native_batch_norm(
            inputs.detach(), None, None, None, None, training=True, momentum=0.0, eps=norm.eps
        )
        kind = cast("Tensor", norm.running_mean).dtype
        norm.running_mean, norm.running_var = mean.to(kind), scale.to(kind) ** -2 - norm.eps

    handles = [norm.register_forward_pre_hook(hold, with_kwargs=True) for norm in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# Sample by sample.


def _by_sample(
    model: nn.Module, inputs: Tensor, labels: Tensor, norms: Sequence[_BatchNorm]
) -> dict[Tensor, Tensor]:
    """Return the sum of the squared gradients of single samples, by parameter."""
    if labels.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("it uses its layers in a way that needs the gradient of each sample")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    places = Places(model)

    def sample_loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        with places.holding(parameters):
            logits = model(image.unsqueeze(0))
        return F.cross_entropy(logits, label.unsqueeze(0))

    try:
        _hold_statistics(model, inputs, norms)
        gradients = vmap(grad(sample_loss), in_dims=(None, 0, 0))
        weights = {name: p.detach() for name, p in trained.items()}
        total = {name: torch.zeros_like(p) for name, p in weights.items()}
        size = max(1, GRADIENTS_AT_ONCE // sum(p.numel() for p in weights.values()))
        for some, their_labels in zip(inputs.split(size), labels.split(size), strict=True):
            for name, each in gradients(weights, some, their_labels).items():
                total[name] += each.square().sum(dim=0)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(
            "rapid-retrain needs the gradient of each sample, and torch.func cannot compute it for "
            f"{type(model).__name__}: {str(error).strip()} Use retrain, or a model without "
            "branches on values, changes of buffers in evaluation mode and recurrent layers."
        ) from error
    return {trained[name]: t for name, t in total.items()}


def _hold_statistics(model: nn.Module, inputs: Tensor, norms: Sequence[_BatchNorm]) -> None:
    """Let BatchNorm layers in evaluation mode have the statistics of the inputs from now on."""
    if any(norm.running_mean is None for norm in norms):
        raise ValueError("it has a BatchNorm layer without running statistics.")
    if norms:
        with torch.no_grad(), _with_statistics_of_the_batch(norms):
            model(inputs)


# Layer by layer.


def known_layers(model: nn.Module) -> list[nn.Module] | None:
    """Return the layers that hold the trainable parameters; None where one is no plain layer.

    Plain are Linear, Conv2d without groups, BatchNorm1d and BatchNorm2d, as PyTorch has them and
    with weights of their own.
    """
    layers, parameters = [], set[Tensor]()
    for module in model.modules():
        if isinstance(module, _BatchNorm) and (
            type(module) not in _PLAIN_NORMS or module.running_mean is None
        ):
            return None
        own = {p for p in module._parameters.values() if p is not None and p.requires_grad}
        if not own:
            continue
        if type(module) not in _SQUARES or is_changed(module):
            return None
        if isinstance(module, nn.Conv2d) and (
            module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str)
        ):
            return None
        if own & parameters:
            return None
        parameters |= own
        layers.append(module)
    return layers


class _Calls:
    """What layers read in a pass, and where the gradients of what they returned arrive."""

    def __init__(self) -> None:
        self._of: dict[nn.Module, list[tuple[Tensor, GradientEdge] | None]] = {}

    @contextmanager
    def noted(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Note the calls of these layers."""
        self._of = {layer: [] for layer in layers}
        handles = [layer.register_forward_hook(self._note) for layer in self._of]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        usual = len(args) == 1 and output.requires_grad
        # The place is noted now: a ReLU in place would put itself between.
        self._of[layer].append((args[0], get_gradient_edge(output)) if usual else None)

    def single(self, layer: nn.Module, batch: int) -> tuple[Tensor, GradientEdge] | None:
        """Return the only call of a layer, if it read a batch of samples, each a row or images."""
        call = self._of[layer][0] if len(self._of[layer]) == 1 else None
        dims = 4 if isinstance(layer, nn.Conv2d | nn.BatchNorm2d) else 2
        return call if call is not None and _is_batch(call[0], batch, dims) else None


def _is_batch(t: object, batch: int, dims: int) -> bool:
    return isinstance(t, Tensor) and t.dim() == dims and len(t) == batch


def _by_layer(
    model: nn.Module, inputs: Tensor, labels: Tensor, norms: Sequence[_BatchNorm]
) -> dict[Tensor, Tensor] | None:
    """Return the sum of the squared gradients of single samples, by parameter.

    None for a model that has other layers, or uses one of them, or its weights, in another way.
    That samples are mixed by nothing but BatchNorm is not seen here: it is taken for granted.
    """
    layers = known_layers(model)
    if layers is None:
        return None
    parameters: dict[nn.Module, dict[str, Tensor]] = {
        layer: {n: p for n, p in layer._parameters.items() if p is not None and p.requires_grad}
        for layer in layers
    }
    calls = _Calls()
    with torch.enable_grad(), calls.noted([*layers, *norms]), _with_statistics_of_the_batch(norms):
        logits = model(inputs)
        if not _is_batch(logits, len(labels), 2):
            return None
        loss = F.cross_entropy(logits, labels, reduction="sum")
    singles = [calls.single(layer, len(labels)) for layer in layers]
    unusual = any(calls.single(norm, len(labels)) is None for norm in norms if norm not in layers)
    if (
        unusual
        or not all(singles)
        or not _enter_once(loss, sum(len(own) for own in parameters.values()))
    ):
        return None
    reads, edges = zip(*cast("list[tuple[Tensor, GradientEdge]]", singles), strict=True)
    gradients = torch.autograd.grad(loss, edges, allow_unused=True)
    total: dict[Tensor, Tensor] = {}
    with torch.no_grad():
        for layer, read, gradient in zip(layers, reads, gradients, strict=True):
            if gradient is None:
                return None
            squares = _SQUARES[type(layer)](layer, read.to(gradient.dtype), gradient)
            total.update({p: squares[n] for n, p in parameters[layer].items()})
    return total


def _enter_once(loss: Tensor, count: int) -> bool:
    """Tell whether so many weights enter the loss, at one place each."""
    entered: list[Tensor] = []
    seen, todo = set[Node](), [cast("Node", loss.grad_fn)]
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is None:
                continue
            if type(node).__name__ == "AccumulateGrad":
                entered.append(node.variable)  # type: ignore[attr-defined]
            elif node not in seen:
                seen.add(node)
                todo.append(node)
    return len(entered) == len(set(entered)) == count


def _linear(_layer: nn.Module, read: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Sum over n of ``(dy[n] x[n]^T)^2``, which is ``(dy^2)^T (x^2)``."""
    squared = gradient.float().square()
    return {"weight": squared.T @ read.float().square(), "bias": squared.sum(dim=0)}


def _conv2d(layer: nn.Module, read: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Sum over n of ``(dy[n] patches[n]^T)^2``: a patch is what a pixel of dy was made of."""
    layer = cast("nn.Conv2d", layer)
    patches = _patches(layer, read, gradient.shape[2:])
    each = patches[0].numel() + len(layer.weight) * patches.shape[1:4].numel()
    most = GRADIENTS_AT_ONCE if read.is_cuda else _IN_CACHE
    size = max(1, most // each)
    squares = [
        _squares(
            torch.bmm(dy.flatten(2), some.reshape(len(dy), -1, dy[0, 0].numel()).transpose(1, 2))
        )
        for dy, some in zip(gradient.split(size), patches.split(size), strict=True)
    ]
    weight = squares[0] if len(squares) == 1 else torch.stack(squares).sum(dim=0)
    return {"weight": weight.view_as(layer.weight), "bias": _squares(_over_pixels(gradient))}


def _patches(layer: nn.Conv2d, read: Tensor, sides: Sequence[int]) -> Tensor:
    """Return for each image, channel and place in the kernel what the pixels read there: a view.

    ``F.unfold`` would start a kernel for each image on a GPU.
    """
    high, wide = cast("tuple[int, int]", layer.padding)
    rows, columns = read.shape[2:]
    images = read.new_zeros(*read.shape[:2], rows + 2 * high, columns + 2 * wide)
    images[:, :, high : high + rows, wide : wide + columns] = read
    image, channel, row, column = images.stride()
    places = (layer.dilation[0] * row, layer.dilation[1] * column)
    steps = (layer.stride[0] * row, layer.stride[1] * column)
    return images.as_strided(
        (*images.shape[:2], *layer.kernel_size, *sides), (image, channel, *places, *steps)
    )


def _batch_norm(layer: nn.Module, read: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Sum over n of ``(sum over pixels of dy[n] xhat[n])^2``, with statistics held fixed."""
    layer = cast("nn.BatchNorm1d | nn.BatchNorm2d", layer)
    mean, var = cast("Tensor", layer.running_mean), cast("Tensor", layer.running_var)
    centred = read - mean.view(-1, *[1] * (read.dim() - 2))
    weight = _squares(_over_pixels(gradient * centred)) / (var + layer.eps)
    return {"weight": weight, "bias": _squares(_over_pixels(gradient))}


def _over_pixels(t: Tensor) -> Tensor:
    """Return the sums over the pixels, if there are any."""
    return t if t.dim() == 2 else t.sum(dim=(2, 3), dtype=torch.float32)


def _squares(t: Tensor) -> Tensor:
    """Return the sums of the squares over the samples, in float32."""
    return t.square().sum(dim=0, dtype=torch.float32)


_SQUARES: dict[type[nn.Module], Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
}
"""What adds up the squared gradients of a layer's weights, from what it read and its gradient."""
