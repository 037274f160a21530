"""Factories of models: a user's own, ``package.module:factory``, and fresh weights from any.

Fresh means fresh: new weights and new buffers, shared with no other model. A student that starts
from old buffers, or from weights that something else still holds, has not forgotten anything.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType

from torch import nn
from torch.nn.parameter import is_lazy

from goldfish.errors import ConfigError
from goldfish.randomness import seeded_globally
from goldfish.types import ModelFactory, Params, Scalar


def load_factory(name: str, options: Mapping[str, Scalar]) -> ModelFactory:
    """Import ``package.module:factory`` and bind ``options``, the only arguments it is given.

    The factory is a function or a class that returns a new ``torch.nn.Module`` at each call; it is
    called twice here to see that it does.
    """
    factory = functools.partial(_import(name), **options)
    with seeded_globally(0, "check", name):
        _require_new(_call(factory, name), _call(factory, name), f"The model {name!r}")
    return factory


def _import(name: str) -> Callable[..., nn.Module]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ConfigError(
            f"{name!r} does not name a model of your own. Write 'package.module:factory'."
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"The model {name!r} cannot be loaded: importing {module_name!r} failed with "
            f"{type(error).__name__}: {error}. Install the package, "
            "or add its folder to PYTHONPATH."
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(
            f"The model {name!r} cannot be loaded: {module_name!r} has no {attribute!r}. "
            "Name a function or a class of that module after the colon."
        )
    factory: Callable[..., nn.Module] = getattr(module, attribute)
    if not _builds(factory):
        raise ConfigError(
            f"The model {name!r} is {factory!r}, and is not called: it is neither a class of "
            "torch.nn.Module nor a Python function. Name one that builds and returns a new module."
        )
    return factory


def _builds(factory: object) -> bool:
    """Tell whether something may build a model: a class of models, or a function in Python."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    if isinstance(factory, type):
        return issubclass(factory, nn.Module)
    return isinstance(inspect.unwrap(factory), FunctionType)  # type: ignore[arg-type]


def _call(factory: Callable[[], nn.Module], name: str) -> nn.Module:
    try:
        model = factory()
    except Exception as error:
        raise ConfigError(
            f"The model {name!r} could not be built: {type(error).__name__}: {error}. It is called "
            "with the model's options as keyword arguments, and nothing else."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"The model {name!r} returned a {type(model).__name__}. "
            "It must return a torch.nn.Module."
        )
    return model


def fresh_params(factory: ModelFactory, seed: int, *purpose: str | int) -> Params:
    """Return the weights and buffers of a new model; equal seeds and purposes give equal bits.

    The factory is called twice, so that one which hands out the same model, or the same tensors,
    each time is refused. A factory that loads trained weights into a new model passes: what counts
    as initial is for the factory to say.
    """
    with seeded_globally(seed, *purpose):
        model = factory()
        _require_new(model, factory(), "The model factory")
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _require_new(first: nn.Module, second: nn.Module, source: str) -> None:
    """Raise unless two models, both alive, share neither a weight nor a saved buffer."""
    if first is second:
        raise ConfigError(
            f"{source} returned the same object twice. It must build a new model at each call: "
            "create the module inside the function, without a cache or a module-level instance."
        )
    places = _storages(second)
    shared = _storages(first).keys() & places.keys()
    if shared:
        raise ConfigError(
            f"{source} returned two models that share the tensor {places[min(shared)]!r}. "
            "It must build a new model at each call, with its own weights and buffers: create "
            "its layers inside the function, or copy the shared ones with copy.deepcopy."
        )


def _storages(model: nn.Module) -> dict[int, str]:
    """Return the name of each tensor by its place in memory; one without memory has none (0)."""
    state = model.state_dict()
    if any(map(is_lazy, state.values())):
        raise ConfigError(
            "The model has lazy layers without weights. Let its factory run one batch through it, "
            "so that every layer knows its shape."
        )
    places = {tensor.untyped_storage().data_ptr(): name for name, tensor in state.items()}
    places.pop(0, None)
    return places
