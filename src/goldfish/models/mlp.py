"""The smallest model: one hidden layer, for images of any size."""

from __future__ import annotations

from torch import nn

from goldfish.errors import ConfigError


class MLP(nn.Sequential):
    """Flattens its input; one hidden layer with ReLU."""

    def __init__(self, num_classes: int = 10, in_features: int = 784, hidden: int = 200) -> None:
        if not isinstance(hidden, int) or hidden < 1:
            raise ConfigError(
                f"'hidden' of the model 'mlp' must be a positive int, not {hidden!r}."
            )
        super().__init__(
            nn.Flatten(),
            nn.Linear(in_features, hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )
