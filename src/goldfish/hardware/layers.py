"""Whether a layer computes what its class says: code that computes it otherwise has to know."""

from __future__ import annotations

from operator import attrgetter

from torch import nn

_hooks = attrgetter(
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
)


def has_hooks(layer: nn.Module) -> bool:
    """Tell whether something looks at what goes through a layer, or changes it."""
    return any(_hooks(layer))


def is_changed(layer: nn.Module) -> bool:
    """Tell whether a layer has hooks, or was given a forward of its own."""
    return "forward" in vars(layer) or has_hooks(layer)
