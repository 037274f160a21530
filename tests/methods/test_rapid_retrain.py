"""Rapid retraining: the preconditioner, and the method as a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import goldfish
from goldfish.data import TensorExamples
from goldfish.methods.rapid_retrain import (
    RAPID_RETRAIN,
    FisherPreconditioner,
    RapidRetrainSettings,
    average_fisher,
    fisher_scales,
)
from goldfish.params import digest, num_bytes, params_of
from goldfish.settings import TrainingSettings
from goldfish.training.batches import Batch, plain_batches
from goldfish.training.fisher import diagonal_fisher
from goldfish.training.fit import cross_entropy_objective, fit
from goldfish.training.sgd import Precondition
from goldfish.training.workspace import LoadedModel
from goldfish.types import Client, DeletionRequest, Params, Round
from goldfish.workflow import unlearning_plan

MakeClients = Callable[..., list[Client]]
REQUESTS = {
    "samples": [DeletionRequest("client-1", sample_ids=["c1-0", "c1-9"])],
    "class": [DeletionRequest(f"client-{n}", class_label=2) for n in (1, 2, 3)],
    "client": [DeletionRequest("client-3")],
}


def draw(count: int, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    return torch.randn(count, *shape, generator=generator), labels


# The preconditioner.


FREE = 1e9
"""A bound that no scale reaches."""


@given(
    values=st.lists(st.floats(0, 1e3, width=32), min_size=2, max_size=9),
    damping=st.floats(0.01, 100),
    max_scale=st.floats(1, 10),
)
def test_the_expected_gain_of_a_step_is_that_of_a_plain_one_or_less(
    values: list[float], damping: float, max_scale: float
) -> None:
    """The sum of F * scale is the sum of F, or less at the bound; scales fall as F rises."""
    fisher = torch.tensor(values)
    free, bounded = (fisher_scales(fisher, damping, most).double() for most in (FREE, max_scale))
    f = fisher.double()
    assert torch.isfinite(free).all()
    assert (bounded > 0).all()
    assert bounded.max() <= max_scale * (1 + 1e-5)
    if f.sum() == 0:
        assert torch.allclose(free, torch.ones_like(free))
    elif f.mean() > 1e-30:
        assert (f * free).sum().item() == pytest.approx(f.sum().item(), rel=1e-3)
        assert (f * bounded).sum().item() <= f.sum().item() * (1 + 1e-3)
        assert (free[f.argsort()].diff() <= 1e-6 * free.max()).all()


def test_one_large_value_does_not_enlarge_all_other_steps() -> None:
    """Without the bound, 999 parameters would take steps some 999 times as long."""
    fisher = torch.full((1000,), 1e-9)
    fisher[0] = 1.0
    assert fisher_scales(fisher, 1.0, FREE).max() > 900
    assert fisher_scales(fisher, 1.0, 5.0).max() == pytest.approx(5)


@given(c=st.floats(1e-3, 1e3))
def test_scales_do_not_depend_on_the_unit_of_the_loss(c: float) -> None:
    fisher = torch.tensor([0.5, 3.0, 0.0, 7.0])
    scaled = fisher_scales(c * fisher, 0.3, FREE)
    torch.testing.assert_close(scaled, fisher_scales(fisher, 0.3, FREE))


def test_equal_fisher_information_leaves_plain_steps() -> None:
    scales = fisher_scales(torch.full((4,), 0.25), 2.0, 1.0)
    torch.testing.assert_close(scales, torch.ones(4))


def test_the_average_is_the_corrected_exponential_one() -> None:
    """Against its textbook form: v = d v + (1 - d) F from v = 0, divided by 1 - d^t."""
    decay, v, mean = 0.8, 0.0, torch.tensor(0.0)
    for count, value in enumerate([1.0, 5.0, 2.0, 7.0], start=1):
        mean = average_fisher(mean, torch.tensor(value), torch.tensor(count), decay)
        v = decay * v + (1 - decay) * value
        assert mean.item() == pytest.approx(v / (1 - decay**count), rel=1e-6)


def preconditioned(**settings: Any) -> tuple[list[bool], int]:
    """Return which of 7 steps on 4 samples were scaled, and how many samples were measured."""
    torch.manual_seed(0)
    model, (inputs, labels) = nn.Linear(5, 3), draw(4, 5)
    precondition = FisherPreconditioner(model, RapidRetrainSettings(**settings))
    scaled = []
    for _ in range(7):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        precondition(model, Batch(inputs, labels), model)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        scaled.append(any(not torch.equal(g, torch.ones_like(g)) for g in gradients))
    return scaled, precondition.samples


def test_the_warm_up_is_plain() -> None:
    assert preconditioned(warmup_steps=3) == ([False] * 3 + [True] * 4, 7 * 4)
    assert preconditioned(warmup_steps=0) == ([True] * 7, 7 * 4)


def test_fisher_every() -> None:
    """Measured at steps 1, 4 and 7."""
    assert preconditioned(warmup_steps=0, fisher_every=3) == ([True] * 7, 3 * 4)


def trained_in_parts(parts: list[int], **settings: Any) -> tuple[str, dict[str, Tensor]]:
    """Train for so many steps on ever new batches, each part with what the one before it kept."""
    torch.manual_seed(0)
    model, seed = nn.Linear(5, 3), 0
    kept: Params | None = None
    for steps in parts:
        precondition = FisherPreconditioner(model, RapidRetrainSettings(**settings))
        precondition.load(kept)
        for _ in range(steps):
            inputs, labels = draw(4, 5, seed=(seed := seed + 1))
            model.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            precondition(model, Batch(inputs, labels), model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * torch.as_tensor(parameter.grad))
        kept = precondition.kept
    return digest(params_of(model)), dict(kept or {})


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("warmup_steps", [0, 2, 5])
def test_rounds_go_on_where_the_last_one_ended(every: int, warmup_steps: int) -> None:
    """Average, warm-up and the steps between two measurements, bit for bit."""
    settings = {"fisher_every": every, "warmup_steps": warmup_steps}
    whole, kept = trained_in_parts([9], **settings)
    parted, again = trained_in_parts([4, 1, 4], **settings)
    assert whole == parted
    assert digest(kept) == digest(again)
    assert sorted(kept) == ["/steps", "bias", "weight"]
    assert trained_in_parts([9], **{**settings, "fisher_decay": 0.5})[0] != whole


def batch_norm_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3),
    )  # fmt: skip


def fitted(precondition: Precondition | None, warmup_steps: int | None = None) -> str:
    torch.manual_seed(0)
    model, (inputs, labels) = batch_norm_model(), draw(20, 1, 6, 6)
    if warmup_steps is not None:
        settings = RapidRetrainSettings(warmup_steps=warmup_steps)
        precondition = FisherPreconditioner(model, settings)
    data = TensorExamples(inputs, labels, [str(i) for i in range(20)])
    order = torch.Generator().manual_seed(1)
    fit(
        LoadedModel(model),
        20,
        plain_batches(data, torch.device("cpu"), order),
        cross_entropy_objective,
        TrainingSettings(batch_size=5, local_epochs=2),
        learning_rate=0.1,
        generator=order,
        precondition=precondition,
    )
    return digest(params_of(model))


def test_fit_without_a_preconditioner_is_fit_with_one_that_does_nothing() -> None:
    idle = fitted(lambda model, batch, computes: None)
    assert fitted(None) == idle == fitted(None, warmup_steps=1000) != fitted(None, warmup_steps=5)


# The method.


class Branching(nn.Linear):
    """Asks for a value of the batch: torch.func cannot look at one sample's alone."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (2 if inputs.sum().item() > 0 else 1)


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        (Branching(6, 3), "Branching"),
        (
            nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False)),
            "without running statistics",
        ),
    ],
)
def test_models_without_gradients_of_single_samples_are_refused(
    make_clients: MakeClients, model: nn.Module, cause: str
) -> None:
    """In words, at the first round, and not as clients that did not answer."""
    model.train()
    with pytest.raises(goldfish.ConfigError, match=rf"gradient of each sample.*{cause}.*retrain"):
        diagonal_fisher(model, *draw(4, 6))
    assert model.training
    federation = goldfish.InProcess(make_clients(), lambda: copy.deepcopy(model))
    trained = goldfish.train(federation, rounds=1)
    with pytest.raises(goldfish.ConfigError, match="gradient of each sample"):
        goldfish.unlearn(trained, REQUESTS["samples"], method=RAPID_RETRAIN, rounds=1)


@pytest.fixture
def trained(make_clients: MakeClients, small_net: type[nn.Module]) -> goldfish.Trained:
    federation = goldfish.InProcess(make_clients(), small_net)
    return goldfish.train(federation, rounds=2, learning_rate=0.1, batch_size=8)


def rounds_of(trained: goldfish.Trained, last: Round | None = None, **more: Any) -> list[Round]:
    return list(iterate(trained, last, **more))


def iterate(trained: goldfish.Trained, last: Round | None = None, **more: Any) -> Iterator[Round]:
    settings = RapidRetrainSettings(warmup_steps=1)
    plan = unlearning_plan(
        trained,
        REQUESTS["samples"],
        RAPID_RETRAIN,
        settings,
        training=trained.settings.model_copy(update=more),
        rounds=3,
        seed=0,
    )
    return RAPID_RETRAIN.unlearn(replace(plan, last=last), settings)


@pytest.mark.parametrize("kind", sorted(RAPID_RETRAIN.deletions))
def test_every_kind_of_deletion(
    trained: goldfish.Trained, test_set: TensorExamples, kind: str
) -> None:
    result = goldfish.unlearn(
        trained, REQUESTS[kind], method=RAPID_RETRAIN, rounds=2, test=test_set, warmup_steps=1
    )
    assert [record.index for record in result.rounds] == [1, 2]
    assert not any(record.failures for record in result.rounds)
    asked = 2 if kind == "client" else 3
    assert result.rounds[0].cost.bytes_sent == 2 * asked * num_bytes(trained.params)
    assert result.params["norm.num_batches_tracked"] > 0


def test_the_cost_counts_the_measurements(trained: goldfish.Trained) -> None:
    """Each step is measured on its own batch; those samples have a name of their own."""
    request = REQUESTS["samples"]
    plain = goldfish.unlearn(trained, request, method="retrain", rounds=2)
    rapid = goldfish.unlearn(trained, request, method=RAPID_RETRAIN, rounds=2)
    assert rapid.cost.steps == plain.cost.steps
    assert rapid.cost.samples == rapid.cost.fisher_samples == plain.cost.samples
    assert plain.cost.fisher_samples == 0


def test_a_long_warm_up_is_retraining_bit_for_bit(trained: goldfish.Trained) -> None:
    request = REQUESTS["samples"]
    plain = goldfish.unlearn(trained, request, method="retrain", rounds=2)
    warm = goldfish.unlearn(trained, request, method=RAPID_RETRAIN, rounds=2, warmup_steps=100)
    rapid = goldfish.unlearn(trained, request, method=RAPID_RETRAIN, rounds=2, warmup_steps=1)
    assert digest(warm.params) == digest(plain.params) != digest(rapid.params)


def test_nothing_of_the_old_model_or_the_removed_samples_is_left(
    make_clients: MakeClients, small_net: type[nn.Module], trained: goldfish.Trained
) -> None:
    """Change both beyond recognition: the result keeps its bits."""
    clients = make_clients()
    data = clients[0].retained
    assert isinstance(data, TensorExamples)
    images = data.images.clone()
    images[[0, 9]] = 1e6
    clients[0] = replace(clients[0], retained=TensorExamples(images, data.labels, data.ids))
    other = replace(
        trained,
        federation=goldfish.InProcess(clients, small_net),
        params={n: t * 0 for n, t in trained.params.items()},
    )
    results = [rounds_of(t)[-1].params for t in (trained, other)]
    assert digest(results[0]) == digest(results[1])


@pytest.mark.parametrize("shards", [1, 3])
def test_workers_and_interruptions_do_not_change_the_bits(
    make_clients: MakeClients, small_net: type[nn.Module], trained: goldfish.Trained, shards: int
) -> None:
    wanted = [digest(r.params) for r in rounds_of(trained, shards=shards)]
    for workers in (1, 2):
        federation = goldfish.InProcess(make_clients(), small_net, workers=workers)
        states = []
        rounds = []
        for this in iterate(replace(trained, federation=federation), shards=shards):
            rounds.append(this)
            states.append(federation.states())
        assert [digest(r.params) for r in rounds] == wanted
    for done, kept in zip(rounds, states, strict=True):
        trained.federation.restore(kept)
        resumed = rounds_of(trained, last=done, shards=shards)
        assert [digest(r.params) for r in resumed] == wanted[done.index :]


@pytest.mark.parametrize("shards", [1, 3])
def test_what_clients_keep_of_the_fisher_information_matters_and_is_counted(
    trained: goldfish.Trained, shards: int
) -> None:
    """An average for each shard's weights, and a number; no other phase finds it."""
    first, second = islice(iterate(trained, shards=shards), 2)
    kept = trained.federation.states()["client-1"]
    names = ["fisher"] if shards == 1 else [f"fisher-{n}" for n in range(shards)]
    fishers = {key: p for key, p in kept.items() if "fisher" in key}
    assert sorted(fishers) == [f"rapid-retrain/{name}" for name in names]
    weights = {n for n in trained.params if "running" not in n and "tracked" not in n}
    assert all(set(p) == {"/steps", *weights} for p in fishers.values())
    assert trained.federation.bytes_kept("rapid-retrain") >= sum(map(num_bytes, fishers.values()))
    trained.federation.restore({})
    again = next(iterate(trained, last=first, shards=shards))
    assert digest(again.params) != digest(second.params)


def test_it_learns_from_small_batches_with_batch_norm(
    trained: goldfish.Trained, test_set: TensorExamples
) -> None:
    """client-3 has a last batch of two samples, whose statistics can be extreme.

    Without max_scale the loss jumps to 5.2 in round 7. A guess has ln 3 = 1.1.
    """
    result = goldfish.unlearn(
        trained,
        REQUESTS["samples"],
        method=RAPID_RETRAIN,
        rounds=10,
        test=test_set,
        warmup_steps=1,
    )
    losses = [record.scores.loss for record in result.rounds if record.scores is not None]
    assert len(losses) == 10
    assert max(losses) < 1.3
    assert losses[-1] < 0.8


def test_settings_are_refused_in_words(trained: goldfish.Trained) -> None:
    for wrong in (
        {"damping": 0},
        {"gain": 0},
        {"max_scale": 0.5},
        {"fisher_decay": 1.0},
        {"fisher_every": 0},
        {"warmup_steps": -1},
    ):
        with pytest.raises(goldfish.ConfigError, match=next(iter(wrong))):
            goldfish.unlearn(trained, REQUESTS["samples"], method=RAPID_RETRAIN, **wrong)


class InDouble(nn.Module):
    """A model that computes in float64; its layer norm is measured sample by sample."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), norm, nn.Linear(5, 3)).double()

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layers(inputs.double())
        return logits


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_models_in_double_precision(norm: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, (inputs, labels) = InDouble(norm(5)), draw(9, 6)
    precondition = FisherPreconditioner(model, RapidRetrainSettings(warmup_steps=0))
    plain = F.cross_entropy(model(inputs), labels)
    plain.backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    precondition(model, Batch(inputs, labels), model)
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert p.grad.dtype == torch.float64
        assert not torch.equal(p.grad, before[name])
