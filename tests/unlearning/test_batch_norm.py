"""Removed samples leave nothing in the running statistics of a student's BatchNorm layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import goldfish
from goldfish.data import TensorExamples
from goldfish.models import model_factory
from goldfish.params import digest, params_of
from goldfish.settings import TrainingSettings
from goldfish.types import Client, DeletionRequest
from goldfish.unlearning.basic_model import joint_logits

MakeClients = Callable[..., list[Client]]
KEPT, GONE = 6, 3


def drawn(count: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def ready(model: nn.Module) -> nn.Module:
    """Give weights and statistics values that are not all the same."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2, generator=generator)
    return model.train()


class NormAndActivation(nn.BatchNorm2d):
    """A layer with a forward pass of its own, as image libraries have it."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(super().forward(inputs))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "1d, sequences": (lambda: nn.BatchNorm1d(4), (4, 5)),
    "2d": (lambda: nn.BatchNorm2d(4), (4, 3, 3)),
    "3d": (lambda: nn.BatchNorm3d(4), (4, 2, 3, 2)),
    "all batches alike": (lambda: nn.BatchNorm2d(4, momentum=None), (4, 3, 3)),
    "own forward": (lambda: NormAndActivation(4), (4, 3, 3)),
    "without weights": (lambda: nn.BatchNorm1d(4, affine=False), (4,)),
    "two, with momenta of their own": (
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.3)),
        (4,),
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_statistics_are_those_of_a_pass_over_the_remaining_samples_alone(kind: str) -> None:
    """Over three batches; and what is said of the remaining samples is what is said there."""
    make, shape = LAYERS[kind]
    model = ready(make())
    alone = copy.deepcopy(model)
    for seed in range(3):
        kept, gone = drawn(KEPT, *shape, seed=seed), 100 * drawn(GONE, *shape, seed=50 + seed)
        both = joint_logits(model, kept, gone)
        torch.testing.assert_close(both[:KEPT], alone(kept))
        for name, buffer in alone.named_buffers():
            torch.testing.assert_close(dict(model.named_buffers())[name], buffer)
    assert digest(params_of(model)) != digest(params_of(ready(make())))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", LAYERS)
def test_the_layers_are_left_as_they_were(kind: str) -> None:
    make, shape = LAYERS[kind]
    model = ready(make())
    before = {name: id(t) for name, t in model.named_buffers()}
    joint_logits(model, drawn(KEPT, *shape), drawn(GONE, *shape))
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        joint_logits(model, drawn(KEPT, 9), drawn(GONE, 9))
    after = {name: id(t) for name, t in model.named_buffers()}
    momenta = [m.momentum for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    fresh = [m.momentum for m in make().modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    assert before == after
    assert momenta == fresh
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(module.training for module in model.modules())


def slow_layer(norm: Any, kept: Tensor, gone: Tensor) -> Tensor:
    """Normalise both parts by mean and unbiased variance of the first, as one would write it."""
    across = [d for d in range(kept.dim()) if d != 1]
    shape = [-1 if d == 1 else 1 for d in range(kept.dim())]
    var, mean = torch.var_mean(kept, across, keepdim=True)
    normal = (gone - mean) / torch.sqrt(var + norm.eps)
    return torch.cat([norm(kept), normal * norm.weight.view(shape) + norm.bias.view(shape)])


@pytest.mark.parametrize("kind", ["1d", "1d, sequences", "2d", "3d"])
def test_outputs_and_gradients_are_those_of_the_slow_layer(kind: str) -> None:
    """Removed samples reach the remaining ones' gradients through mean and variance."""
    make, shape = LAYERS[kind]
    found = []
    for joint in (joint_logits, slow_layer):
        layer = ready(make()).double()
        kept = drawn(KEPT, *shape).double().requires_grad_()
        gone = drawn(GONE, *shape, seed=1).double().requires_grad_()
        said = joint(layer, kept, gone)
        weights = drawn(KEPT + GONE, *shape, seed=2).double()
        gradients = torch.autograd.grad((said * weights).sum(), [kept, gone, *layer.parameters()])
        found.append((said, *gradients))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_no_weight_is_pulled_in_a_direction_in_which_nothing_changes() -> None:
    """A bias before BatchNorm moves the mean by as much as the samples: its gradient is 0."""
    model = ready(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)))
    said = joint_logits(model, drawn(KEPT, 5), drawn(GONE, 5, seed=1))
    said[KEPT:].square().sum().backward()
    bias, weight = (model.get_parameter(name).grad for name in ("0.bias", "0.weight"))
    assert bias is not None
    assert weight is not None
    assert bias.abs().max() < 1e-5 * weight.abs().max()


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False)),
        nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4).eval()),
    ],
)
def test_other_models_keep_their_bits(model: nn.Module) -> None:
    """No BatchNorm, none that keeps statistics, or none that learns them: one plain pass."""
    kept, gone = drawn(KEPT, 5), drawn(GONE, 5, seed=1)
    assert torch.equal(joint_logits(model, kept, gone), model(torch.cat([kept, gone])))


def test_a_fresh_deep_network_stays_small_on_removed_samples() -> None:
    """By the running statistics of fresh layers its logits would be about 200."""
    torch.manual_seed(0)
    model = model_factory("resnet32", num_classes=10, image_shape=(3, 32, 32))().train()
    with torch.no_grad():
        said = joint_logits(model, drawn(8, 3, 32, 32), drawn(2, 3, 32, 32, seed=1))
    assert said[8:].abs().max() < 3 * said[:8].abs().max() < 30


@pytest.mark.parametrize("method", ["goldfish", "goldfish-warm", "incompetent-teacher"])
def test_removed_samples_do_not_reach_the_statistics_of_a_method(
    make_clients: MakeClients, small_net: type[nn.Module], test_set: TensorExamples, method: str
) -> None:
    """One step of one client, with removed samples beyond recognition: statistics keep their bits.

    Weights do not. (From the second step on statistics follow the weights.)
    """
    results = []
    for factor in (1, 1000):
        (client,) = make_clients((30,))
        data = client.retained
        assert isinstance(data, TensorExamples)
        images = data.images.clone()
        images[:5] *= factor
        clients = [replace(client, retained=TensorExamples(images, data.labels, data.ids))]
        federation = goldfish.InProcess(clients, small_net)
        start = small_net_params(small_net)
        trained = goldfish.Trained(
            federation, start, TrainingSettings(batch_size=30, learning_rate=0.1), 0
        )
        request = DeletionRequest("client-1", sample_ids=list(data.ids[:5]))
        results.append(
            goldfish.unlearn(trained, [request], method=method, rounds=1, test=test_set).params
        )
    one, other = results
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(one[name], other[name])
    assert not torch.equal(one["hidden.weight"], other["hidden.weight"])


def small_net_params(small_net: type[nn.Module]) -> Any:
    torch.manual_seed(3)
    return params_of(small_net())
