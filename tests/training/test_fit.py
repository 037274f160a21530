"""The training loop against a slow one, the inference loop, and workspaces."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn, tensor

from goldfish import params as P  # noqa: N812
from goldfish.data import TensorExamples
from goldfish.errors import DivergenceError
from goldfish.settings import TrainingSettings
from goldfish.training.batches import Batch, BatchSource, plain_batches
from goldfish.training.fit import cross_entropy_objective, fit, predict
from goldfish.training.sgd import Loss
from goldfish.training.workspace import (
    Ensemble,
    LoadedModel,
    LocalWorkspace,
    ensemble_size,
    join,
)

CPU = torch.device("cpu")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(count: int, seed: int = 0) -> TensorExamples:
    generator = seeded(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorExamples(inputs, torch.randint(0, 3, (count,), generator=generator))


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def positions_seen(
    count: int, settings: TrainingSettings, generator: torch.Generator
) -> list[list[int]]:
    """Return the positions of each mini-batch that ``fit`` asks for."""
    seen: list[list[int]] = []
    examples = points(count)

    def batches(positions: Tensor) -> Batch:
        seen.append(positions.tolist())
        return Batch(*examples.batch(positions))

    fit(
        LoadedModel(nn.Linear(4, 3)),
        count,
        batches,
        cross_entropy_objective,
        settings,
        learning_rate=0.1,
        generator=generator,
    )
    return seen


# fit.


def slow_sgd_by_hand(
    model: nn.Module, examples: TensorExamples, settings: TrainingSettings, rate: float, seed: int
) -> list[float]:
    """Train as the textbook has it: v = beta v + g + decay w; w = w - eta v."""
    generator = seeded(seed)
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    model.train()
    means = []
    for _ in range(settings.local_epochs):
        order = torch.randperm(len(examples), generator=generator)
        losses = []
        for start in range(0, len(examples), settings.batch_size):
            chosen = order[start : start + settings.batch_size]
            loss = F.cross_entropy(model(examples.images[chosen]), examples.labels[chosen])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
                    velocity[name] = settings.momentum * velocity[name] + g
                    velocity[name] += settings.weight_decay * p
                    p.copy_(p - rate * velocity[name])
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    return means


def slow_sgd_of_torch(
    model: nn.Module, examples: TensorExamples, settings: TrainingSettings, rate: float, seed: int
) -> list[float]:
    """Train with the optimiser of torch, neither fused nor over lists of tensors."""
    generator = seeded(seed)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        foreach=False,
        fused=False,
    )
    model.train()
    means = []
    for _ in range(settings.local_epochs):
        losses = []
        for chosen in torch.randperm(len(examples), generator=generator).split(settings.batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(examples.images[chosen]), examples.labels[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    return means


@pytest.mark.parametrize("slow", [slow_sgd_by_hand, slow_sgd_of_torch])
@pytest.mark.parametrize(
    ("momentum", "decay", "epochs"), [(0.9, 0.0, 1), (0.0, 0.0, 1), (0.9, 0.01, 1), (0.5, 0.1, 3)]
)
def test_fit_is_the_slow_loop(slow: object, momentum: float, decay: float, epochs: int) -> None:
    """17 samples in batches of 5: weights, BatchNorm buffers and risks agree to 1e-6."""
    examples = points(17)
    settings = TrainingSettings(
        batch_size=5, momentum=momentum, weight_decay=decay, local_epochs=epochs
    )
    fast, obvious = network(), network()
    generator = seeded(7)
    fitted = fit(
        LoadedModel(fast),
        len(examples),
        plain_batches(examples, CPU, generator),
        cross_entropy_objective,
        settings,
        learning_rate=0.05,
        generator=generator,
    )
    assert callable(slow)
    risks = slow(obvious, examples, settings, 0.05, 7)
    ours, theirs = P.params_of(fast), P.params_of(obvious)
    assert P.distance(ours, P.params_of(network())) > 0.01, "something was learned"
    for name, expected in theirs.items():
        assert torch.allclose(ours[name], expected, rtol=0, atol=1e-6), name
    assert list(fitted.epoch_risks) == pytest.approx(risks, abs=1e-6)
    assert (fitted.steps, fitted.samples) == (4 * epochs, 17 * epochs)


def test_one_step_by_hand() -> None:
    """Loss w^2, w = 1, step size 1/10, momentum 1/2, one batch in each of two epochs.

    g = 2, v = 2, w = 1 - 0.2 = 0.8. Then g = 1.6, v = 1/2 * 2 + 1.6 = 2.6, w = 0.8 - 0.26 = 0.54.
    The risks are the losses before each step: 1 and 0.64. The momentum lives over epochs.
    """
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)

    def square(model: nn.Module, _batch: Batch) -> Loss:
        loss = model.weight.square().sum()  # type: ignore[operator]
        return Loss(loss, risk=loss)

    fitted = fit(
        LoadedModel(model),
        2,
        lambda positions: Batch(positions, positions),
        square,
        TrainingSettings(batch_size=2, local_epochs=2, momentum=0.5),
        learning_rate=0.1,
        generator=seeded(),
    )
    assert model.weight.item() == pytest.approx(0.54, abs=1e-6)
    assert list(fitted.epoch_risks) == pytest.approx([1, 0.64], abs=1e-6)


def test_fit_takes_its_step_size_from_its_argument() -> None:
    """The schedule decides it; the setting is where the schedule begins."""
    settings = TrainingSettings(learning_rate=100, batch_size=4)
    model = network()
    fit(
        LoadedModel(model),
        4,
        plain_batches(points(4), CPU, seeded()),
        cross_entropy_objective,
        settings,
        learning_rate=1e-12,
        generator=seeded(),
    )
    still, weights = P.params_of(network())["3.weight"], P.params_of(model)["3.weight"]
    assert torch.allclose(weights, still, rtol=0, atol=1e-9)


def test_the_risk_of_an_epoch_is_the_mean_over_its_batches() -> None:
    """The total is minimised, the risk reported: batches of 2, 2 and 2 with risks 1, 2 and 6."""
    risks = iter([1.0, 2.0, 6.0])

    def objective(model: nn.Module, batch: Batch) -> Loss:
        return Loss(model(batch.inputs).sum(), risk=tensor(next(risks)))

    fitted = fit(
        LoadedModel(nn.Linear(4, 3)),
        6,
        plain_batches(points(6), CPU, seeded()),
        objective,
        TrainingSettings(batch_size=2),
        learning_rate=0.1,
        generator=seeded(),
    )
    assert list(fitted.epoch_risks) == [3]


def test_samples_of_removed_data_are_counted() -> None:
    """Two steps of 3 remaining and 2 removed samples: 10 samples processed."""
    examples = points(6)

    def batches(positions: Tensor) -> Batch:
        inputs, labels = examples.batch(positions)
        return Batch(inputs, labels, removed=(inputs[:2], labels[:2]))

    fitted = fit(
        LoadedModel(nn.Linear(4, 3)),
        6,
        batches,
        cross_entropy_objective,
        TrainingSettings(batch_size=3),
        learning_rate=0.1,
        generator=seeded(),
    )
    assert (fitted.steps, fitted.samples) == (2, 10)


def test_only_the_generator_orders_the_samples() -> None:
    settings = TrainingSettings(batch_size=4, local_epochs=2)
    torch.manual_seed(0)
    first = positions_seen(12, settings, seeded(3))
    torch.manual_seed(1)
    assert positions_seen(12, settings, seeded(3)) == first
    assert positions_seen(12, settings, seeded(4)) != first
    assert first[:3] != first[3:], "each epoch has an order of its own"


def test_fit_draws_no_global_random_number() -> None:
    examples, model = points(12), network()
    before = torch.random.get_rng_state()
    fit(
        LoadedModel(model),
        12,
        plain_batches(examples, CPU, seeded()),
        cross_entropy_objective,
        TrainingSettings(batch_size=4),
        learning_rate=0.1,
        generator=seeded(),
    )
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [
        (9, 4, [4, 5]),
        (10, 4, [4, 4, 2]),
        (8, 4, [4, 4]),
        (5, 4, [5]),
        (4, 4, [4]),
        (3, 4, [3]),
        (1, 4, [1]),
    ],
)
def test_a_single_left_over_sample_joins_the_batch_before(
    count: int, size: int, sizes: list[int]
) -> None:
    """BatchNorm cannot train on one sample. Every sample is still seen once an epoch."""
    seen = positions_seen(count, TrainingSettings(batch_size=size), seeded())
    assert [len(batch) for batch in seen] == sizes
    assert sorted(position for batch in seen for position in batch) == list(range(count))


def test_a_left_over_sample_trains_with_batch_norm() -> None:
    fitted = fit(
        LoadedModel(network()),
        9,
        plain_batches(points(9), CPU, seeded()),
        cross_entropy_objective,
        TrainingSettings(batch_size=4),
        learning_rate=0.1,
        generator=seeded(),
    )
    assert (fitted.steps, fitted.samples) == (2, 9)


def test_stop_ends_the_training_early() -> None:
    """It is asked after each epoch, with all risks so far, and its first yes ends it."""
    asked: list[list[float]] = []

    def stop(risks: Sequence[float]) -> bool:
        asked.append(list(risks))
        return len(risks) == 3

    fitted = fit(
        LoadedModel(nn.Linear(4, 3)),
        8,
        plain_batches(points(8), CPU, seeded()),
        cross_entropy_objective,
        TrainingSettings(batch_size=4, local_epochs=10),
        learning_rate=0.1,
        generator=seeded(),
        stop=stop,
    )
    assert [len(risks) for risks in asked] == [1, 2, 3]
    assert list(fitted.epoch_risks) == asked[-1]
    assert (fitted.steps, fitted.samples) == (6, 24)


@pytest.mark.parametrize(
    ("limit", "epochs", "steps", "samples"),
    [(1, 1, 1, 4), (2, 1, 2, 8), (3, 2, 3, 12), (9, 3, 6, 24)],
)
def test_a_limit_of_steps_ends_the_training(
    limit: int, epochs: int, steps: int, samples: int
) -> None:
    """Two steps an epoch, three epochs. An epoch that was cut short has the mean of its steps."""
    risks = iter(range(1, 10))

    def objective(model: nn.Module, batch: Batch) -> Loss:
        return Loss(model(batch.inputs).sum(), risk=tensor(float(next(risks))))

    fitted = fit(
        LoadedModel(nn.Linear(4, 3)),
        8,
        plain_batches(points(8), CPU, seeded()),
        objective,
        TrainingSettings(batch_size=4, local_epochs=3),
        learning_rate=0.1,
        generator=seeded(),
        max_steps=limit,
    )
    expected = {1: [1], 2: [1.5], 3: [1.5, 3], 9: [1.5, 3.5, 5.5]}[limit]
    assert list(fitted.epoch_risks) == expected
    assert (len(fitted.epoch_risks), fitted.steps, fitted.samples) == (epochs, steps, samples)


def test_a_precondition_changes_the_gradients_of_a_step() -> None:
    """Gradients set to 1, step size 1/10, no momentum, two steps: every weight falls by 2/10."""
    model = nn.Linear(4, 3)
    before = P.params_of(model)
    sizes: list[int] = []

    def ones(model: nn.Module, batch: Batch, computes: nn.Module) -> None:
        assert computes is model
        sizes.append(len(batch.labels))
        for p in model.parameters():
            assert p.grad is not None
            p.grad.fill_(1)

    fit(
        LoadedModel(model),
        8,
        plain_batches(points(8), CPU, seeded()),
        cross_entropy_objective,
        TrainingSettings(batch_size=4, momentum=0),
        learning_rate=0.1,
        generator=seeded(),
        precondition=ones,
    )
    assert sizes == [4, 4]
    for name, t in P.params_of(model).items():
        assert torch.allclose(t, before[name] - 0.2, atol=1e-6)


def test_after_step_sees_the_stepped_model_and_ends_the_training() -> None:
    """Its third yes-or-no is yes: in the second of three epochs, after its first step."""
    model = nn.Linear(4, 3)
    seen = [P.digest(P.params_of(model))]
    losses: list[float] = []

    def after_step(stepped: nn.Module, loss: Loss) -> bool:
        assert stepped is model
        seen.append(P.digest(P.params_of(stepped)))
        losses.append(loss.risk.item())
        return len(losses) == 3

    fitted = fit(
        LoadedModel(model),
        8,
        plain_batches(points(8), CPU, seeded()),
        cross_entropy_objective,
        TrainingSettings(batch_size=4, local_epochs=3),
        learning_rate=0.1,
        generator=seeded(),
        after_step=after_step,
    )
    assert len(set(seen)) == 4
    assert list(fitted.epoch_risks) == pytest.approx([sum(losses[:2]) / 2, losses[2]], abs=1e-6)
    assert (fitted.steps, fitted.samples) == (3, 12)


@pytest.mark.parametrize(("bad", "word"), [(math.nan, "nan"), (math.inf, "inf")])
def test_a_loss_that_is_not_finite_is_an_error(bad: float, word: str) -> None:
    """In the second epoch, and in its first batch of two."""
    losses = iter([1.0, 1.0, bad, 1.0])

    def objective(model: nn.Module, batch: Batch) -> Loss:
        loss = model(batch.inputs).sum() * 0 + next(losses)
        return Loss(loss, risk=torch.zeros(()))

    with pytest.raises(DivergenceError, match=f"the loss became {word} in local epoch 2"):
        fit(
            LoadedModel(nn.Linear(4, 3)),
            8,
            plain_batches(points(8), CPU, seeded()),
            objective,
            TrainingSettings(batch_size=4, local_epochs=5),
            learning_rate=0.1,
            generator=seeded(),
        )


def test_fit_trains_in_training_mode() -> None:
    model = network()
    model.eval()
    fit(
        LoadedModel(model),
        8,
        plain_batches(points(8), CPU, seeded()),
        cross_entropy_objective,
        TrainingSettings(batch_size=4),
        learning_rate=0.1,
        generator=seeded(),
    )
    assert P.params_of(model)["1.num_batches_tracked"].item() == 2


# Batches.


def read(batches: BatchSource, positions: list[int]) -> Batch:
    return batches(tensor(positions))


def test_plain_batches_gives_inputs_and_labels_in_order() -> None:
    examples = points(5)
    batch = read(plain_batches(examples, CPU, seeded()), [3, 0])
    assert torch.equal(batch.inputs, examples.images[[3, 0]])
    assert torch.equal(batch.labels, examples.labels[[3, 0]])
    assert batch.teacher_logits is None
    assert batch.removed is None


class AddNoise:
    """Adds one random number to each input."""

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.rand(count, generator=generator)

    def apply(self, inputs: Tensor, drawn: Tensor) -> Tensor:
        return inputs + drawn[:, None]


def test_plain_batches_transforms_inputs_with_its_generator() -> None:
    examples, generator = points(5), seeded(1)
    batch = read(plain_batches(examples, CPU, generator, AddNoise()), [1, 2])
    noise = torch.rand(2, generator=seeded(1))
    assert torch.equal(batch.inputs, examples.images[[1, 2]] + noise[:, None])
    assert torch.equal(batch.labels, examples.labels[[1, 2]])


def test_cross_entropy_objective() -> None:
    """Logits 0 over three classes: ln 3, as loss and as risk."""
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    loss = cross_entropy_objective(model, Batch(torch.ones(2, 4), tensor([0, 2])))
    assert loss.total.item() == pytest.approx(math.log(3), abs=1e-6)
    assert loss.risk.item() == loss.total.item()


# predict.


def test_predict_is_in_order_and_complete() -> None:
    """Seven samples in batches of 3: row i is what the model says of sample i alone."""
    examples, model = points(7), nn.Linear(4, 3)
    logits = predict(model, examples, batch_size=3)
    assert logits.shape == (7, 3)
    for position in range(7):
        alone = model(examples.images[position : position + 1])[0]
        assert torch.allclose(logits[position], alone, atol=1e-6)


def test_predict_is_in_evaluation_mode() -> None:
    """Dropout is off, BatchNorm reads its running statistics and does not write them."""
    examples = points(9)
    model = nn.Sequential(network(), nn.Dropout(0.5))
    model.train()
    before = P.digest(P.params_of(model))
    first, second = predict(model, examples), predict(model, examples, batch_size=2)
    assert torch.allclose(first, second, atol=1e-6)
    model.eval()
    assert torch.allclose(first, model(examples.images), atol=1e-6)
    assert P.digest(P.params_of(model)) == before


def test_predict_keeps_no_gradients() -> None:
    logits = predict(network(), points(4))
    assert not logits.requires_grad
    assert logits.dtype == torch.float32


# Ensembles.


def test_an_ensemble_predicts_the_mean_of_probabilities() -> None:
    """(1/2, 1/4, 1/4) and (1/4, 1/4, 1/2): mean (3/8, 2/8, 3/8); the logits are its logarithm."""
    members = [nn.Linear(4, 3), nn.Linear(4, 3)]
    rows = [[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]
    with torch.no_grad():
        for place, (member, row) in enumerate(zip(members, rows, strict=True)):
            member.weight.zero_()
            member.bias.copy_(tensor(row).log() + place)
    logits = Ensemble(members)(torch.ones(1, 4))
    expected = [math.log(3 / 8), math.log(2 / 8), math.log(3 / 8)]
    assert logits[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_workspace_loads_ensembles_beside_single_models() -> None:
    one, two = P.params_of(network(1)), P.params_of(network(2))
    joined = join([one, two])
    assert (ensemble_size(joined), ensemble_size(one)) == (2, 0)
    workspace = LocalWorkspace(network)
    single = workspace.load("student", one)
    ensemble = workspace.load("student", joined)
    examples = points(5)
    probabilities = [
        torch.softmax(predict(workspace.load("member", params).module, examples), dim=1)
        for params in (one, two)
    ]
    mean = torch.softmax(predict(ensemble.module, examples), dim=1)
    assert torch.allclose(mean, (probabilities[0] + probabilities[1]) / 2, atol=1e-6)
    assert workspace.load("student", one) is single


# LocalWorkspace.


def test_a_workspace_builds_one_model_for_each_role_and_loads_it() -> None:
    built: list[nn.Module] = []

    def factory() -> nn.Module:
        built.append(network(len(built)))
        return built[-1]

    workspace = LocalWorkspace(factory)
    one, two = P.params_of(network(8)), P.params_of(network(9))
    student = workspace.load("student", one)
    teacher = workspace.load("teacher", two)
    assert student is not teacher
    assert P.digest(student.params()) == P.digest(one)
    assert workspace.load("student", two) is student
    assert P.digest(student.params()) == P.digest(two)
    assert len(built) == 2


def test_a_workspace_copies_what_it_loads_and_draws_no_number() -> None:
    params = P.params_of(network())
    before, state = P.digest(params), torch.random.get_rng_state()
    model = LocalWorkspace(lambda: nn.Sequential(*network().children())).load("student", params)
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.no_grad():
        for t in model.module.parameters():
            t.zero_()
    assert P.digest(params) == before


def test_building_a_model_leaves_the_callers_random_numbers_alone() -> None:
    params = P.params_of(nn.Linear(4, 3))
    state = torch.random.get_rng_state()
    LocalWorkspace(lambda: nn.Linear(4, 3)).load("student", params)
    assert torch.equal(torch.random.get_rng_state(), state)
