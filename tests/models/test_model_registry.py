"""Every model in MODELS, found by name, and a user's own models."""

from __future__ import annotations

import functools
import math
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F  # noqa: N812
from typer.testing import CliRunner

from goldfish.cli import app
from goldfish.errors import ConfigError
from goldfish.experiments.config import parse_config
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine
from goldfish.models import MODELS, ImageShape, ModelSpec, build_model, model_factory

build = functools.partial(build_model, num_classes=7, image_shape=(3, 32, 32))
Register = Callable[[object], str]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Return a function that makes its argument importable, and returns its name."""

    def _register(factory: object) -> str:
        module = ModuleType("their_models")
        vars(module)["factory"] = factory
        monkeypatch.setitem(sys.modules, "their_models", module)
        return "their_models:factory"

    return _register


def test_there_are_models() -> None:
    assert set(MODELS) >= {"lenet5", "lenet5-cifar", "resnet20", "resnet32", "resnet56", "mlp"}
    assert all(spec.summary for spec in MODELS.values())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("image_shape", [(1, 28, 28), (3, 32, 32)])
def test_output_has_one_logit_a_class(name: str, image_shape: tuple[int, int, int]) -> None:
    model = build_model(name, num_classes=7, image_shape=image_shape)
    assert model(torch.rand(2, *image_shape)).shape == (2, 7)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.arange(8) % 7).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", MODELS)
def test_eval_is_deterministic_and_keeps_the_state(name: str) -> None:
    model = build(name).eval()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    images = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(images), model(images))
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_factories_build_new_models_and_travel_to_other_processes(name: str) -> None:
    factory = model_factory(name, num_classes=7, image_shape=(3, 32, 32))
    assert factory() is not factory()
    travelled = pickle.loads(pickle.dumps(factory))
    assert travelled().state_dict().keys() == factory().state_dict().keys()


def test_checking_a_factory_does_not_disturb_the_global_generator() -> None:
    state = torch.get_rng_state()
    model_factory("mlp", num_classes=2, image_shape=(1, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)


def test_options_reach_the_model() -> None:
    assert build("mlp", options={"hidden": 5}).state_dict()["1.weight"].shape == (5, 3 * 32 * 32)


def softmax_regression(num_classes: int, image_shape: ImageShape, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(image_shape), num_classes, bias))


def test_a_model_is_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one entry of MODELS a model is listed and runs, with its options; see CONTRIBUTING.md.

    28 x 28 pixels and 10 classes without bias are 7840 weights.
    """
    monkeypatch.setitem(MODELS, "softmax", ModelSpec(softmax_regression, "One linear layer"))
    assert "One linear layer" in CliRunner().invoke(app, ["models"]).output
    with pytest.raises(ConfigError, match="options of the model 'softmax': bias"):
        build("softmax", options={"hidden": 3})
    config = parse_config(
        {
            "data": {"clients": 2},
            "model": {"name": "softmax", "options": {"bias": False}},
            "training": {"rounds": 1},
            "deletion": {"rate": 0.1},
            "unlearning": {"rounds": 1, "methods": ["goldfish"]},
        }
    )
    for _ in run_experiment(config, tmp_path, Machine(threads=1)):
        pass
    stored = [load_file(path) for path in tmp_path.rglob("*.safetensors")]
    assert stored
    assert {sum(tensor.numel() for tensor in params.values()) for params in stored} == {7840}


@pytest.mark.parametrize(
    ("name", "num_classes", "image_shape", "options", "words"),
    [
        ("lenet", 10, (1, 28, 28), {}, "Unknown model 'lenet'. Did you mean 'lenet5'"),
        ("mlp", 1, (1, 28, 28), {}, "at least 2 classes, not 1"),
        ("mlp", 10, (1, 0, 28), {}, "channels, height, width"),
        ("mlp", 10, (28, 28), {}, "channels, height, width"),
        ("mlp", 10, (1, 28, 28), {"hiden": 3}, "'hiden'. Did you mean 'hidden'"),
        ("mlp", 10, (1, 28, 28), {"hidden": 0}, "positive int, not 0"),
        ("mlp", 10, (1, 28, 28), {"hidden": "3"}, "positive int, not '3'"),
        ("resnet20", 10, (3, 32, 32), {"depth": 8}, "options of the model 'resnet20': none"),
        ("lenet5", 10, (1, 28, 32), {}, "square images, not 28 x 32"),
        ("lenet5", 10, (1, 8, 8), {}, "at least 12 x 12 pixels, not 8 x 8"),
        ("lenet5-cifar", 10, (1, 15, 15), {}, "at least 16 x 16 pixels, not 15 x 15"),
        (":factory", 10, (1, 8, 8), {}, "Write 'package.module:factory'"),
        ("module:", 10, (1, 8, 8), {}, "Write 'package.module:factory'"),
        ("no_such_package.m:f", 10, (1, 8, 8), {}, "No module named 'no_such_package'"),
        ("math:no_such", 10, (1, 8, 8), {}, "'math' has no 'no_such'"),
        ("os:system", 10, (1, 8, 8), {"command": "touch was-here"}, "is not called"),
        ("subprocess:Popen", 10, (1, 8, 8), {"args": "false"}, "is not called"),
        ("math:pi", 10, (1, 8, 8), {}, "is not called: it is neither a class of torch.nn.Module"),
    ],
)
def test_errors_say_what_to_do(
    name: str,
    num_classes: int,
    image_shape: tuple[int, int, int],
    options: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        build_model(name, num_classes=num_classes, image_shape=image_shape, options=options)
    assert words in str(error.value)


def test_a_users_model_gets_the_options_and_nothing_else(register: Register) -> None:
    def factory(**options: int) -> nn.Module:
        assert options == {"width": 3}
        return nn.Linear(2, options["width"])

    model = build_model(
        register(factory), num_classes=9, image_shape=(1, 1, 2), options={"width": 3}
    )
    assert isinstance(model, nn.Linear)
    assert model.out_features == 3


def test_a_users_model_is_built_once_from_the_global_generator(register: Register) -> None:
    name = register(lambda: nn.Linear(2, 3))
    torch.manual_seed(5)
    built = build(name)
    torch.manual_seed(5)
    assert torch.equal(built.state_dict()["weight"], nn.Linear(2, 3).weight)


def _sharing(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(2, 2), layer)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda: 3, "returned a int. It must return a torch.nn.Module"),
        (lambda width: nn.Linear(2, width), "could not be built: TypeError"),
        (functools.cache(lambda: nn.Linear(2, 2)), "returned the same object twice"),
        (_sharing(nn.Linear(2, 2)), "share the tensor '1."),
        (_sharing(nn.BatchNorm1d(2, affine=False)), "share the tensor '1."),
    ],
)
def test_a_users_factory_must_build_a_new_module(
    register: Register, factory: object, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        model_factory(register(factory), num_classes=2, image_shape=(1, 1, 2))
    assert words in str(error.value)
    assert "their_models:factory" in str(error.value)
