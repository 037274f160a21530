"""Fresh means fresh: new weights and new buffers, shared with no other model.

A student that starts from old buffers, or from weights that something else still holds, has not
forgotten anything.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from goldfish.errors import ConfigError
from goldfish.randomness import seeded_globally
from goldfish.types import ModelFactory, Params


def fresh_params(factory: ModelFactory, seed: int, *purpose: str | int) -> Params:
    """Return the weights and buffers of a new model; equal seeds and purposes give equal bits.

    The factory is called twice, so that one which hands out the same model, or the same tensors,
    each time is refused. A factory that loads trained weights into a new model passes: what counts
    as initial is for the factory to say.
    """
    with seeded_globally(seed, *purpose):
        model = factory()
        require_new(model, factory(), "The model factory")
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def require_new(first: nn.Module, second: nn.Module, source: str) -> None:
    """Raise unless two models, both alive, share neither a weight nor a saved buffer."""
    if first is second:
        raise ConfigError(
            f"{source} returned the same object twice. It must build a new model at each call: "
            "create the module inside the function, without a cache or a module-level instance."
        )
    shared = sorted(_storages(first).keys() & _storages(second).keys())
    if shared:
        raise ConfigError(
            f"{source} returned two models that share the tensor {_storages(second)[shared[0]]!r}. "
            "It must build a new model at each call, with its own weights and buffers: create "
            "its layers inside the function, or copy the shared ones with copy.deepcopy."
        )


def _storages(model: nn.Module) -> dict[int, str]:
    """Return the name of each tensor by its place in memory (0: no memory, so never shared)."""
    if any(is_lazy(tensor) for tensor in model.state_dict().values()):
        raise ConfigError(
            "The model has lazy layers without weights. Let its factory run one batch through it, "
            "so that every layer knows its shape."
        )
    places = {
        tensor.untyped_storage().data_ptr(): name for name, tensor in model.state_dict().items()
    }
    return {place: name for place, name in places.items() if place}
