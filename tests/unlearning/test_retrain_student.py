"""Algorithm 1 on one client: who sees which data, when it stops, and what it reads at all."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from goldfish import params as P  # noqa: N812
from goldfish.data import TensorExamples
from goldfish.errors import ConfigError, DivergenceError
from goldfish.settings import TrainingSettings
from goldfish.training.batches import Transform
from goldfish.training.fit import Fitted, predict
from goldfish.training.teacher import Teacher
from goldfish.training.workspace import LoadedModel
from goldfish.types import Examples
from goldfish.unlearning.basic_model import (
    GoldfishSettings,
    removed_batch_size,
    retrain_student,
)

FEATURES, CLASSES = 4, 3
KEPT, GONE = 20, 8
BATCH = 5


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def retained_data(count: int = KEPT) -> TensorExamples:
    """Return samples whose first feature is positive and different for each."""
    inputs = torch.randn(count, FEATURES, generator=seeded(1))
    inputs[:, 0] = torch.arange(1, count + 1) / count
    labels = inputs[:, 1:].argmax(dim=1)
    return TensorExamples(inputs, labels, [f"kept-{i}" for i in range(count)])


def removed_data(count: int = GONE) -> TensorExamples:
    """Return samples whose first feature is negative and different for each."""
    inputs = torch.randn(count, FEATURES, generator=seeded(2))
    inputs[:, 0] = -torch.arange(1, count + 1) / count
    labels = (inputs[:, 1:].argmax(dim=1) + 1) % CLASSES
    return TensorExamples(inputs, labels, [f"gone-{i}" for i in range(count)])


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)
        )


class Recording(nn.Module):
    """Passes inputs on to a model and keeps every batch that it saw."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seen: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(inputs.detach().clone())
        logits: Tensor = self.model(inputs)
        return logits


class NeverCalled(nn.Module):
    """A teacher that must not be asked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        raise AssertionError("the teacher was asked")


class NeverRead(TensorExamples):
    """Data that must not be read."""

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("the removed data was read")


class RecordingExamples(TensorExamples):
    """Data that keeps which positions were read, batch by batch."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        super().__init__(images, labels)
        self.read: list[list[int]] = []

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.read.append(positions.tolist())
        return super().batch(positions)


def recording(examples: TensorExamples) -> RecordingExamples:
    return RecordingExamples(examples.images, examples.labels)


def retrain(
    student: nn.Module,
    teacher: nn.Module | Tensor,
    *,
    retained: Examples | None = None,
    removed: Examples | None = None,
    settings: GoldfishSettings | None = None,
    epochs: int = 1,
    batch_size: int = BATCH,
    learning_rate: float = 0.05,
    transform: Transform | None = None,
) -> Fitted:
    return retrain_student(
        LoadedModel(student),
        Teacher(teacher),
        retained_data() if retained is None else retained,
        removed,
        settings or GoldfishSettings(local_stop=False),
        TrainingSettings(local_epochs=epochs, batch_size=batch_size),
        learning_rate=learning_rate,
        generator=seeded(11),
        removed_generator=seeded(12),
        transform=transform,
    )


class Unchanged:
    """An augmentation that draws nothing and changes nothing."""

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.zeros(count)

    def apply(self, inputs: Tensor, drawn: Tensor) -> Tensor:
        return inputs


class Noisy:
    """An augmentation that moves each input."""

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        return 0.01 * torch.randn(count, FEATURES, generator=generator)

    def apply(self, inputs: Tensor, drawn: Tensor) -> Tensor:
        return inputs + drawn


# The whole procedure, against a slow one.


def slow_logits(student: nn.Module, inputs: Tensor, removed: Tensor) -> tuple[Tensor, Tensor]:
    """Return what :func:`network` says: of remaining inputs alone, then of removed ones.

    The latter are normalised by mean and (unbiased) variance of the former.
    """
    linear, norm, tanh, out = student.children()
    hidden = linear(inputs)
    mean, deviation = hidden.mean(dim=0), (hidden.var(dim=0) + 1e-5).sqrt()
    normal = (linear(removed) - mean) / deviation * norm.weight + norm.bias
    return student(inputs), out(tanh(normal))


def slow_goldfish(
    student: nn.Module,
    teacher: nn.Module,
    retained: TensorExamples,
    removed: TensorExamples,
    epochs: int,
    rate: float,
) -> list[float]:
    """Run Algorithm 1 with the paper's settings as a reader of the equations would write it.

    8 of 28 samples are removed, so T = 3 / e * exp(20/28). 20 samples in batches of 5 are 4
    steps, each with 2 of the 8 removed samples. Momentum 0.9, mu_c = 0.25, mu_d = 1.
    """
    temperature = 3 / math.e * math.exp(20 / 28)
    teacher.eval()
    with torch.no_grad():
        soft = torch.softmax(teacher(retained.images) / temperature, dim=1)
    student.train()
    order, removed_order = seeded(11), seeded(12)
    velocity = [torch.zeros_like(p) for p in student.parameters()]
    risks = []
    for _ in range(epochs):
        steps = torch.randperm(20, generator=order).split(5)
        lost = torch.randperm(8, generator=removed_order).split(2)
        risk = 0.0
        for keep, forget in zip(steps, lost, strict=True):
            logits, removed_logits = slow_logits(
                student, retained.images[keep], removed.images[forget]
            )
            l_r = -torch.log_softmax(logits, 1)[range(5), retained.labels[keep]].mean()
            each = -torch.log_softmax(removed_logits, 1)[range(2), removed.labels[forget]]
            l_f = torch.minimum(each, torch.tensor(math.log(3))).mean()
            probabilities = torch.softmax(removed_logits, dim=1)
            l_c = probabilities.var(dim=1, correction=0).sqrt().mean()
            l_d = -(soft[keep] * torch.log_softmax(logits / temperature, 1)).sum(dim=1).mean()
            total = l_r - l_f + 0.25 * l_c + 1.0 * l_d
            gradients = torch.autograd.grad(total, list(student.parameters()))
            with torch.no_grad():
                for p, v, g in zip(student.parameters(), velocity, gradients, strict=True):
                    v.mul_(0.9).add_(g)
                    p.sub_(rate * v)
            risk += (l_r + l_d).item()
        risks.append(risk / 4)
    return risks


@pytest.mark.parametrize(
    ("known", "transform"), [(True, None), (False, None), (False, Unchanged())]
)
def test_retraining_is_the_slow_one(known: bool, transform: Transform | None) -> None:
    """Weights, buffers and risks of two epochs, with the teacher asked once or at every step."""
    fast, slow = network(3), network(3)
    teacher = predict(network(4), retained_data()) if known else network(4)
    fitted = retrain(fast, teacher, removed=removed_data(), epochs=2, transform=transform)
    risks = slow_goldfish(slow, network(4), retained_data(), removed_data(), 2, 0.05)
    assert list(fitted.epoch_risks) == pytest.approx(risks, abs=1e-6)
    assert (fitted.steps, fitted.samples) == (8, 56)
    assert fitted.teacher_samples == (0 if known else 2 * KEPT)
    ours, theirs = P.params_of(fast), P.params_of(slow)
    for name, expected in theirs.items():
        assert torch.allclose(ours[name], expected, rtol=0, atol=1e-6), name
    assert P.distance(ours, P.params_of(network(3))) > 0.05, "something was learned"


# Knowledge flows from the teacher on the remaining data only.


@pytest.mark.parametrize("transform", [None, Unchanged()])
@pytest.mark.parametrize("stop", [False, True])
def test_the_teacher_sees_all_remaining_samples_and_no_removed_one(
    transform: Transform | None, stop: bool
) -> None:
    teacher = Recording(network(4))
    settings = GoldfishSettings(local_stop=stop, delta=0)
    retrain(
        network(3), teacher, removed=removed_data(), settings=settings, epochs=2,
        transform=transform,
    )  # fmt: skip
    seen = {tuple(row) for row in torch.cat(teacher.seen).tolist()}
    assert seen == {tuple(row) for row in retained_data().images.tolist()}


def test_what_the_teacher_looks_at_is_counted() -> None:
    """Batch by batch in each of three epochs, and once more for the reference of the stop."""
    teacher = Recording(network(4))
    settings = GoldfishSettings(delta=0)
    fitted = retrain(network(3), teacher, removed=removed_data(), settings=settings, epochs=3)
    assert sum(map(len, teacher.seen)) == fitted.teacher_samples == 4 * KEPT


class SecondOpinion(nn.Module):
    """A teacher that says the same on remaining data, and the opposite on removed data."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs)
        return torch.where(inputs[:, :1] < 0, -100 * logits, logits)


@pytest.mark.parametrize("transform", [None, Unchanged()])
def test_what_the_teacher_thinks_of_removed_data_does_not_reach_the_student(
    transform: Transform | None,
) -> None:
    """Two teachers that differ on removed data alone make the same student, bit for bit."""
    one, two = network(3), network(3)
    retrain(one, network(4), removed=removed_data(), epochs=2, transform=transform)
    retrain(two, SecondOpinion(network(4)), removed=removed_data(), epochs=2, transform=transform)
    assert P.digest(P.params_of(one)) == P.digest(P.params_of(two))


def test_what_the_teacher_thinks_of_remaining_data_does_reach_the_student() -> None:
    one, two = network(3), network(3)
    retrain(one, network(4), removed=removed_data())
    retrain(two, network(5), removed=removed_data())
    assert P.distance(P.params_of(one), P.params_of(two)) > 1e-3


@pytest.mark.parametrize("transform", [None, Noisy()])
def test_the_teacher_does_not_change(transform: Transform | None) -> None:
    """Neither its weights nor its BatchNorm buffers; and its dropout is off."""
    teacher = nn.Sequential(network(4), nn.Dropout(0.5))
    teacher.train()
    before = P.digest(P.params_of(teacher))
    students = [network(3), network(3)]
    for seed, student in enumerate(students):
        torch.manual_seed(seed)
        retrain(student, teacher, removed=removed_data(), epochs=2, transform=transform)
    assert P.digest(P.params_of(teacher)) == before
    assert P.digest(P.params_of(students[0])) == P.digest(P.params_of(students[1]))
    assert all(p.grad is None for p in teacher.parameters())


def test_with_augmentation_teacher_and_student_see_the_same_images() -> None:
    """The student's batch is the teacher's, then the removed samples, augmented as well."""
    student, teacher = Recording(network(3)), Recording(network(4))
    retrain(student, teacher, removed=removed_data(), epochs=2, transform=Noisy())
    assert len(student.seen) == len(teacher.seen) == 8
    originals = {tuple(row) for row in removed_data().images.tolist()}
    for both, taught in zip(student.seen, teacher.seen, strict=True):
        assert torch.equal(both[:BATCH], taught)
        assert (both[BATCH:, 0] < 0.01).all()
        assert not originals & {tuple(row) for row in both[BATCH:].tolist()}


# Batches of remaining and of removed data.


@pytest.mark.parametrize(
    ("batch_size", "kept", "gone", "expected"),
    [
        (100, 940, 60, 7),  # 6000 / 940 = 6.4 up: ten steps need 60 samples
        (100, 1000, 100, 10),  # 10 exactly
        (100, 1000, 1, 1),  # 0.1 up
        (100, 50, 10, 10),  # one step takes all ten, not 20
        (10, 5, 3, 3),  # 6, but there are only 3
        (100, 100, 300, 100),  # 300, but never more than a batch
        (5, 20, 8, 2),  # 2 exactly
        (1, 10, 10, 1),
    ],
)
def test_removed_batch_size(batch_size: int, kept: int, gone: int, expected: int) -> None:
    assert removed_batch_size(batch_size, kept, gone) == expected


def test_an_epoch_goes_once_through_both_parts() -> None:
    """Four steps of 5 and of 2, in a new order in the second epoch."""
    kept, gone = recording(retained_data()), recording(removed_data())
    student = Recording(network(3))
    settings = GoldfishSettings(mu_d=0, local_stop=False)
    retrain(student, NeverCalled(), retained=kept, removed=gone, settings=settings, epochs=2)
    assert [len(batch) for batch in student.seen] == [7] * 8
    for reads, count, size in [(kept.read, KEPT, 5), (gone.read, GONE, 2)]:
        epochs = [list(itertools.chain(*reads[:4])), list(itertools.chain(*reads[4:]))]
        assert [len(read) for read in reads] == [size] * 8
        assert [sorted(epoch) for epoch in epochs] == [list(range(count))] * 2
        assert epochs[0] != epochs[1]


def test_the_order_of_remaining_data_does_not_depend_on_removed_data() -> None:
    """So that every method, and every client, sees it in the same order."""
    settings = GoldfishSettings(mu_d=0, local_stop=False)
    orders = []
    for removed in (None, removed_data(), removed_data(3)):
        kept = recording(retained_data())
        retrain(network(3), NeverCalled(), retained=kept, removed=removed, settings=settings)
        orders.append(kept.read)
    assert orders[0] == orders[1] == orders[2]


def test_removed_data_and_its_generator_do_matter() -> None:
    digests = set()
    for seed in (12, 13):
        student = network(3)
        retrain_student(
            LoadedModel(student),
            Teacher(network(4)),
            retained_data(),
            removed_data(),
            GoldfishSettings(),
            TrainingSettings(batch_size=BATCH),
            learning_rate=0.05,
            generator=seeded(11),
            removed_generator=seeded(seed),
        )
        digests.add(P.digest(P.params_of(student)))
    student = network(3)
    retrain(student, network(4))
    assert len({*digests, P.digest(P.params_of(student))}) == 3


# Terms that are switched off.


@pytest.mark.parametrize(("stop", "epochs"), [(False, 3), (True, 1)])
@pytest.mark.parametrize("transform", [None, Noisy()])
def test_without_distillation_the_teacher_is_never_asked(
    stop: bool, epochs: int, transform: Transform | None
) -> None:
    """Where there is no local stop, or no second epoch that it could save."""
    settings = GoldfishSettings(mu_d=0, local_stop=stop)
    fitted = retrain(
        network(3), NeverCalled(), removed=removed_data(), settings=settings, epochs=epochs,
        transform=transform,
    )  # fmt: skip
    assert fitted.steps == 4 * epochs


def test_distillation_asks_the_teacher() -> None:
    with pytest.raises(AssertionError, match="the teacher was asked"):
        retrain(network(3), NeverCalled())


def test_without_both_terms_removed_data_is_never_read() -> None:
    removed = NeverRead(removed_data().images, removed_data().labels)
    settings = GoldfishSettings(mu_c=0, removed_weight=0, local_stop=False)
    fitted = retrain(network(3), network(4), removed=removed, settings=settings, epochs=2)
    assert fitted.samples == 2 * KEPT


@pytest.mark.parametrize(("mu_c", "weight"), [(0.0, 1.0), (0.25, 0.0)])
def test_each_of_both_terms_reads_removed_data(mu_c: float, weight: float) -> None:
    removed = NeverRead(removed_data().images, removed_data().labels)
    settings = GoldfishSettings(mu_c=mu_c, removed_weight=weight)
    with pytest.raises(AssertionError, match="the removed data was read"):
        retrain(network(3), network(4), removed=removed, settings=settings)


@pytest.mark.parametrize(
    "settings",
    [
        GoldfishSettings(mu_c=3),
        GoldfishSettings(removed_weight=0),
        GoldfishSettings(mu_d=0.2),
        GoldfishSettings(temperature=9),
        GoldfishSettings(temperature_alpha=2),
        GoldfishSettings(adaptive_temperature=False),
        GoldfishSettings(hard_loss="focal"),
        GoldfishSettings(removed_term="smooth"),
        GoldfishSettings(square_scaling=True),
    ],
    ids=lambda settings: str(settings.model_dump(exclude_defaults=True)),
)
def test_every_setting_of_the_loss_reaches_the_student(settings: GoldfishSettings) -> None:
    usual, other = network(3), network(3)
    retrain(usual, network(4), removed=removed_data(), settings=GoldfishSettings())
    retrain(other, network(4), removed=removed_data(), settings=settings)
    assert P.distance(P.params_of(usual), P.params_of(other)) > 1e-5


def test_a_temperature_too_low_is_refused_before_training() -> None:
    student = network(3)
    settings = GoldfishSettings(temperature=1.1)
    with pytest.raises(ConfigError, match="keeps 20 samples and removes 8"):
        retrain(student, network(4), removed=removed_data(), settings=settings)
    assert P.digest(P.params_of(student)) == P.digest(P.params_of(network(3)))


# The local stop, equation (7).


def test_a_large_threshold_ends_the_local_epochs_after_the_first() -> None:
    settings = GoldfishSettings(delta=1e6)
    fitted = retrain(network(3), network(4), removed=removed_data(), settings=settings, epochs=6)
    assert len(fitted.epoch_risks) == 1
    assert fitted.steps == 4


@pytest.mark.parametrize(
    "settings", [GoldfishSettings(delta=1e6, local_stop=False), GoldfishSettings(delta=0)]
)
def test_all_local_epochs_without_the_stop_or_with_a_threshold_of_0(
    settings: GoldfishSettings,
) -> None:
    fitted = retrain(network(3), network(4), removed=removed_data(), settings=settings, epochs=6)
    assert len(fitted.epoch_risks) == 6
    assert fitted.steps == 24


@pytest.mark.parametrize("transform", [None, Unchanged()])
@pytest.mark.parametrize("mu_d", [1.0, 0.5, 0.0])
def test_the_stop_is_at_the_first_epoch_within_the_threshold_of_the_teacher(
    mu_d: float, transform: Transform | None
) -> None:
    """The excess by hand: mean risk of the epochs so far against the teacher's own risk.

    The teacher's risk on the remaining data is its cross-entropy plus mu_d times the entropy of
    its softened prediction, at the client's temperature 3 / e * exp(20/28).
    """
    teacher = network(4)
    retrain(teacher, network(5), settings=GoldfishSettings(mu_d=0, local_stop=False), epochs=60)
    teacher.eval()
    with torch.no_grad():
        logits = teacher(retained_data().images)
    soft = torch.softmax(logits / (3 / math.e * math.exp(20 / 28)), dim=1)
    entropy = -(soft * soft.log()).sum(dim=1).mean()
    reference = (F.cross_entropy(logits, retained_data().labels) + mu_d * entropy).item()

    def run(settings: GoldfishSettings) -> list[float]:
        fitted = retrain(
            network(3), teacher, removed=removed_data(), settings=settings, epochs=8,
            transform=transform,
        )  # fmt: skip
        return list(fitted.epoch_risks)

    risks = run(GoldfishSettings(mu_d=mu_d, local_stop=False))
    excess = [abs(sum(risks[:n]) / n - reference) for n in range(1, 9)]
    assert excess == sorted(excess, reverse=True), "the student comes nearer with each epoch"
    between = (excess[2] + excess[3]) / 2
    assert len(run(GoldfishSettings(mu_d=mu_d, delta=between))) == 4
    assert len(run(GoldfishSettings(mu_d=mu_d, delta=(excess[5] + excess[6]) / 2))) == 7


# Divergence.


def deep(seed: int) -> nn.Module:
    """Three linear layers: what one of them gains, the others multiply."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)]
        return nn.Sequential(*layers)


def test_the_literal_term_diverges_and_the_error_says_what_to_change() -> None:
    settings = GoldfishSettings(removed_term="literal", local_stop=False)
    with pytest.raises(DivergenceError) as caught:
        retrain(deep(3), deep(4), removed=removed_data(), settings=settings, epochs=60)
    message = str(caught.value)
    assert "the loss became" in message
    assert 'removed_term = "literal" subtracts a loss that has no upper bound' in message
    assert 'set removed_term = "capped" (the default) or "smooth"' in message


@pytest.mark.parametrize("term", ["capped", "smooth"])
def test_the_bounded_terms_do_not_diverge_in_the_same_run(term: str) -> None:
    settings = GoldfishSettings.parse({"removed_term": term, "local_stop": False})
    fitted = retrain(deep(3), deep(4), removed=removed_data(), settings=settings, epochs=60)
    assert fitted.epoch_risks[-1] < fitted.epoch_risks[0] + 1


def test_other_divergence_does_not_blame_the_literal_term() -> None:
    """Remaining data that holds a NaN."""
    broken = retained_data()
    broken.images[3] = math.nan
    with pytest.raises(DivergenceError) as caught:
        retrain(network(3), network(4), retained=broken, removed=removed_data())
    assert "the loss became nan in local epoch 1" in str(caught.value)
    assert "literal" not in str(caught.value)


# Settings.


def test_the_defaults_are_those_of_the_paper() -> None:
    """T = 3, mu_d = 1, mu_c = 1/4, and alpha = 1/e, with which nothing removed means T0."""
    settings = GoldfishSettings()
    assert (settings.temperature, settings.mu_d, settings.mu_c) == (3, 1, 0.25)
    assert settings.temperature_alpha == 1 / math.e
    assert (settings.removed_term, settings.removed_weight) == ("capped", 1)
    assert not settings.square_scaling


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": 1}, ["methods.goldfish.temperature", "greater than 1", "(got 1)"]),
        ({"mu_c": -0.1}, ["methods.goldfish.mu_c", "(got -0.1)"]),
        ({"mu_d": math.inf}, ["methods.goldfish.mu_d", "(got inf)"]),
        ({"removed_term": "cap"}, ["methods.goldfish.removed_term", "'capped'", "(got 'cap')"]),
        ({"mu_e": 1}, ["'methods.goldfish.mu_e'", "Did you mean 'methods.goldfish.mu_"]),
        ({"temprature": 2}, ["Did you mean 'methods.goldfish.temperature'?"]),
    ],
)
def test_wrong_settings_are_refused_in_words(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        GoldfishSettings.parse(values, "methods.goldfish")
    for word in words:
        assert word in str(caught.value)
