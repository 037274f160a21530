"""Other tensors in the place of a model's parameters, for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

from torch import Tensor, nn


class Places:
    """Where a model holds its parameters: each place once, however many names lead to it.

    ``torch.func.functional_call`` goes by names, and leaves the other tensors in a module that has
    two of them.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {p: name for name, p in model.named_parameters()}
        self._places = [
            (module._parameters, key, names[p])
            for module in model.modules()
            for key, p in module._parameters.items()
            if p is not None
        ]

    @contextmanager
    def holding(self, others: Mapping[str, Tensor]) -> Iterator[None]:
        """Put tensors in the place of the parameters of these names, and take them out again."""
        own = [held[key] for held, key, _ in self._places]
        try:
            for held, key, name in self._places:
                if name in others:
                    held[key] = cast("nn.Parameter", others[name])
            yield
        finally:
            for (held, key, _), p in zip(self._places, own, strict=True):
                held[key] = p
