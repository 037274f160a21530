"""A user's own model, named by where its factory is: ``package.module:factory``."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType

from torch import nn

from goldfish.errors import ConfigError
from goldfish.models.fresh import require_new
from goldfish.randomness import seeded_globally
from goldfish.types import ModelFactory, Scalar


def load_factory(name: str, options: Mapping[str, Scalar]) -> ModelFactory:
    """Import ``package.module:factory`` and bind ``options``, the only arguments it is given.

    The factory is a function or a class that returns a new ``torch.nn.Module`` at each call; it is
    called twice here to see that it does.
    """
    factory = functools.partial(_import(name), **options)
    with seeded_globally(0, "check", name):
        require_new(_call(factory, name), _call(factory, name), f"The model {name!r}")
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
