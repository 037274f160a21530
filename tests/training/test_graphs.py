"""Recorded steps, with a recorder that needs no GPU: it keeps the work and does it again.

What a GPU adds to this is in tests/engines/test_gpu.py.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from goldfish import params as P  # noqa: N812
from goldfish.data import RandomCropFlip, Subset, TensorExamples
from goldfish.methods.rapid_retrain import FisherPreconditioner, RapidRetrainSettings
from goldfish.settings import TrainingSettings
from goldfish.training import graphs, sgd
from goldfish.training.batches import (
    Batch,
    BatchSource,
    Draw,
    Transform,
    plain_batches,
    with_removed,
)
from goldfish.training.fit import cross_entropy_objective, fit, predict
from goldfish.training.graphs import ROWS, Pace, Repeat, Replay
from goldfish.training.sgd import Sgd, TrainingStep
from goldfish.training.teacher import Teacher
from goldfish.training.workspace import LoadedModel
from goldfish.types import Params
from goldfish.unlearning.basic_model import GoldfishObjective, GoldfishSettings

CPU = torch.device("cpu")


class Recordings:
    """Counts what was recorded, and refuses when told to."""

    def __init__(self, refusal: str | None = None) -> None:
        self.count = 0
        self.refusal = refusal

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.count += 1
        if self.refusal is not None:
            raise RuntimeError(self.refusal)
        return work


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Steps:
    """Notes what is taken, and how many of them were counted from outside."""

    def __init__(self) -> None:
        self.taken: list[list[int]] = []
        self.counted = 0

    def __call__(self, draw: Draw) -> None:
        self.taken.append(draw.positions.tolist())

    @contextmanager
    def practice(self) -> Iterator[None]:
        before = list(self.taken)
        yield
        assert len(self.taken) > len(before)
        self.taken = before

    def uncounted(self) -> AbstractContextManager[None]:
        return nullcontext()

    def count(self, steps: int) -> None:
        self.counted += steps


def draws(count: int) -> Draw:
    return Draw(torch.stack([torch.tensor([place, -place]) for place in range(count)]))


@pytest.mark.parametrize("count", [1, 9, ROWS, ROWS + 1, 2 * ROWS + 50])
def test_every_draw_is_taken_once_and_in_order(count: int) -> None:
    steps, record = Steps(), Recordings()
    replay = Replay(cast("TrainingStep", steps), steps, record, Pace(CPU))
    replay.run(draws(count))
    replay.run(draws(2))
    expected = [[place, -place] for place in range(count)]
    assert steps.taken == [*expected, [0, 0], [1, -1]]
    assert steps.counted == count + 2
    assert record.count == 1


def test_a_step_that_cannot_be_recorded_is_taken_step_by_step() -> None:
    steps, record = Steps(), Recordings("operation not permitted\nand more")
    replay = Replay(cast("TrainingStep", steps), steps, record, Pace(CPU))
    for _ in range(2):
        replay.run(draws(20))
    assert [first for first, _ in steps.taken] == [*range(20), *range(20)]
    assert steps.counted == 0, "each counted itself"
    assert record.count == 1, "it is not tried again"
    assert replay.refusal == "operation not permitted"


def images(count: int, seed: int) -> TensorExamples:
    generator = seeded(seed)
    pixels = torch.randint(0, 256, (count, 1, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 4, (count,), generator=generator)
    return TensorExamples(pixels, labels, mean=[0.5], std=[0.3])


def network(norm: Callable[[int], nn.Module] = nn.LayerNorm) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), norm(16), nn.Linear(16, 4))


def goldfish_batches(
    examples: TensorExamples,
    transform: Transform | None,
    teacher: nn.Module,
    temperature: float = 2.5,
) -> tuple[BatchSource, int, torch.Generator]:
    order = seeded(11)
    retained, removed = Subset(examples, range(30, 215)), Subset(examples, range(30))
    known = teacher if transform else predict(teacher, retained)
    batches = Teacher(known).teach(plain_batches(retained, CPU, order, transform), temperature)
    targets = torch.linspace(0, 2, len(removed))
    return with_removed(batches, removed, 7, seeded(12), targets), len(retained), order


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize("transform", [None, RandomCropFlip(2)])
def test_recorded_training_is_the_plain_one(
    transform: Transform | None, norm: Callable[[int], nn.Module]
) -> None:
    """The whole Goldfish step, with partial batches of both kinds.

    Twice, with two step sizes and two temperatures: the second training replays the first one's.
    """
    examples, teacher = images(215, 0), network()
    plain, recorded = network(norm), network(norm)
    record = Recordings()
    models = LoadedModel(plain), LoadedModel(recorded, record)
    objective = GoldfishObjective(GoldfishSettings())
    settings = TrainingSettings(batch_size=10, local_epochs=2, weight_decay=0.01)
    for rate, temperature in ((0.05, 2.5), (0.01, 1.2)):
        outcomes = []
        for model in models:
            batches, count, order = goldfish_batches(examples, transform, teacher, temperature)
            outcomes.append(
                fit(model, count, batches, objective, settings, learning_rate=rate, generator=order)
            )
        assert outcomes[0].steps == outcomes[1].steps == 38
        assert outcomes[0].samples == outcomes[1].samples
        assert outcomes[1].epoch_risks == pytest.approx(outcomes[0].epoch_risks, abs=1e-5)
    assert record.count > 0
    ours, theirs = P.params_of(recorded), P.params_of(plain)
    assert P.distance(theirs, P.params_of(network(norm))) > 0.1, "something was learned"
    for name, expected in theirs.items():
        if expected.is_floating_point():  # what is done again here counts itself, too
            assert torch.allclose(ours[name], expected, rtol=0, atol=1e-5), name


@pytest.mark.parametrize(
    ("norm", "every", "recordings"),
    [(nn.Identity, 1, 2), (nn.BatchNorm1d, 1, 2), (nn.BatchNorm1d, 2, 0), (nn.LayerNorm, 1, 0)],
)
def test_clients_share_recorded_steps_and_keep_their_own_fisher_information(
    norm: Callable[[int], nn.Module], every: int, recordings: int
) -> None:
    """Two clients in turns, three rounds, four batches of 10 and one of 5: two shapes.

    The first two of a client's steps are plain. Steps that are not measured each time, or sample by
    sample, are not recorded.
    """
    examples, record = images(90, 0), Recordings()
    wanted = RapidRetrainSettings(warmup_steps=2, fisher_every=every)
    found: list[list[Params]] = []
    counted: list[list[int]] = []
    for recorder in (None, record):
        model = LoadedModel(network(norm), recorder)
        kept: dict[int, Params] = {}
        counts = []
        for client in [0, 1] * 3:
            mine = Subset(examples, range(45 * client, 45 * client + 45))
            precondition = model.shared(FisherPreconditioner, wanted)
            precondition.load(kept.get(client))
            fit(
                model,
                45,
                plain_batches(mine, CPU, seeded(11)),
                cross_entropy_objective,
                TrainingSettings(batch_size=10),
                learning_rate=0.05,
                generator=seeded(11),
                precondition=precondition,
            )
            kept[client] = precondition.kept
            counts.append(precondition.samples)
        found.append([model.params(), *kept.values()])
        counted.append(counts)
    assert record.count == recordings
    assert P.distance(found[0][0], P.params_of(network(norm))) > 0.1, "something was learned"
    for plain, recorded in zip(*found, strict=True):
        for name, expected in plain.items():
            if name != "2.num_batches_tracked":  # what is done again here counts itself, too
                assert torch.allclose(recorded[name], expected, rtol=1e-4, atol=1e-6), name
    _, one, other = found[1]
    assert one["/steps"].item() == other["/steps"].item() == 15
    assert not torch.equal(one["3.bias"], other["3.bias"])
    assert counted[0] == counted[1]
    if every == 1:
        assert counted[0] == [45] * 6


def batchnorm_step(momentum: float | None) -> tuple[nn.BatchNorm1d, TrainingStep]:
    norm = nn.BatchNorm1d(4, momentum=momentum)
    model = nn.Sequential(norm, nn.Linear(4, 3))
    return norm, TrainingStep(model, cross_entropy_objective, Sgd(), 0.1)


def test_the_counters_of_batchnorm_can_be_kept_from_outside() -> None:
    norm, step = batchnorm_step(0.1)
    batch = Batch(torch.randn(5, 4, generator=seeded(1)), torch.tensor([0, 1, 2, 0, 1]))
    step(lambda: batch)
    with step.uncounted():
        step(lambda: batch)
        assert norm.num_batches_tracked is None
    step.count(7)
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 8


class Forgetful(nn.Module):
    """Draws random numbers, and counts in a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.get_buffer("seen").add_(1)
        dropped: Tensor = nn.functional.dropout(self.layer(inputs), 0.5, training=True)
        return dropped


def test_practice_takes_back_random_numbers_velocities_and_all_buffers() -> None:
    batch = Batch(torch.randn(5, 4, generator=seeded(1)), torch.tensor([0, 1, 2, 0, 1]))
    found = []
    for practised in (False, True):
        torch.manual_seed(5)
        model = Forgetful()
        step = TrainingStep(model, cross_entropy_objective, Sgd(), 0.1)
        step(lambda: batch)
        if practised:
            with step.practice():
                step(lambda: batch)
        step(lambda: batch)
        assert model.get_buffer("seen").item() == 2
        found.append(P.digest(P.params_of(model)))
    assert found[0] == found[1]


def test_practice_leaves_no_trace() -> None:
    norm, step = batchnorm_step(0.1)
    batch = Batch(torch.randn(5, 4, generator=seeded(1)), torch.tensor([0, 1, 2, 0, 1]))
    step(lambda: batch)
    before, sums = P.params_of(step.model), step.sums.clone()
    with step.practice():
        step(lambda: batch)
        assert P.distance(P.params_of(step.model), before) > 0
    assert P.digest(P.params_of(step.model)) == P.digest(before)
    assert torch.equal(step.sums, sums)
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 1


def test_a_batchnorm_whose_momentum_is_its_counter_cannot_be_recorded() -> None:
    _, step = batchnorm_step(None)
    with pytest.raises(RuntimeError, match="averages over all batches"), step.uncounted():
        pass


def test_equal_objectives_share_a_recording_and_others_do_not() -> None:
    examples, record = images(215, 0), Recordings()
    model = LoadedModel(network(), record)
    settings = TrainingSettings(batch_size=10)
    counts = []
    for weight, temperature in (
        (1.0, 2.5),
        (1.0, 3.0),
        (1.0, 2.0),
        (1.0, 1.5),
        (2.0, 2.5),
        (1.0, 2.5),
    ):
        batches, count, order = goldfish_batches(examples, None, network(), temperature)
        objective = GoldfishObjective(GoldfishSettings(mu_d=weight))
        fit(model, count, batches, objective, settings, learning_rate=0.01, generator=order)
        counts.append(record.count)
    assert 0 < counts[3] < counts[4] == counts[5]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_recorded_steps_find_their_weights_after_another_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bf16 keeps the weights of convolutions in another order, at another place in memory.

    A graph has the places that it was recorded with, and each training its own precision.
    """
    chosen: list[str] = []
    monkeypatch.setattr(sgd, "_set_precision", lambda precision, _device: chosen.append(precision))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(108, 4))

    def record(work: Callable[[], None]) -> Callable[[], None]:
        places = [p.data_ptr() for p in module.parameters()]

        def replay() -> None:
            assert places == [p.data_ptr() for p in module.parameters()]
            work()

        return replay

    model, results = LoadedModel(module, record), []
    start = model.params()
    for precision in ("fp32", "fp32", "bf16", "bf16", "fp32"):
        model.load(start)
        order = seeded(1)
        settings = TrainingSettings(batch_size=10, precision=precision)
        batches = plain_batches(images(40, 0), CPU, order)
        fit(
            *(model, 40, batches, cross_entropy_objective, settings),
            learning_rate=0.1,
            generator=order,
        )
        results.append(P.digest(model.params()))
        assert chosen[-1] == precision
    assert results[0] == results[1] == results[4] != results[2] == results[3]


class Moody(nn.Module):
    """Notes in which mode it is asked, and fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)
        self.modes: list[bool] = []
        self.fails = True

    def forward(self, inputs: Tensor) -> Tensor:
        self.modes.append(self.training)
        if self.fails:
            raise RuntimeError("no memory left")
        logits: Tensor = self.layer(inputs.flatten(1))
        return logits


def test_what_is_recorded_after_a_failure_is_a_training_step() -> None:
    model = Moody()
    loaded = LoadedModel(model, Recordings())

    def train() -> None:
        batches = plain_batches(images(40, 0), CPU, seeded(11))
        settings = TrainingSettings(batch_size=10)
        objective = cross_entropy_objective
        fit(loaded, 40, batches, objective, settings, learning_rate=0.01, generator=seeded(11))

    with pytest.raises(RuntimeError, match="no memory left"):
        train()
    model.eval()
    model.fails = False
    train()
    assert all(model.modes)


def test_a_gpu_is_given_so_many_steps_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks after 16, 32, 48 steps; at the second the first one is waited for, and so on."""
    noted: list[str] = []

    def work_given(_device: torch.device) -> Callable[[], None]:
        mark = f"after {len(steps)}"
        noted.append(mark)
        return lambda: noted.append(f"waited for {mark}")

    monkeypatch.setattr(graphs, "work_given", work_given)
    pace, steps = Pace(CPU), list[int]()
    pace.start()
    for step in range(50):
        steps.append(step)
        pace.step()
    assert noted == [
        "after 16",
        "after 32",
        "waited for after 16",
        "after 48",
        "waited for after 32",
    ]


def test_the_reason_for_the_slow_way_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    graphs._log_once.cache_clear()
    examples, model = images(215, 0), LoadedModel(network(), Recordings("a branch on values"))
    settings = TrainingSettings(batch_size=10, local_epochs=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            batches, count, order = goldfish_batches(examples, None, network())
            objective = GoldfishObjective(GoldfishSettings())
            fit(model, count, batches, objective, settings, learning_rate=0.01, generator=order)
    assert [record.getMessage() for record in caplog.records] == [
        "The training step of Sequential cannot be recorded as a CUDA graph (a branch on values): "
        "it trains step by step, which is slower and gives the same result."
    ]


def test_recordings_end_with_their_model() -> None:
    model = LoadedModel(network(), Recordings())
    batches, count, order = goldfish_batches(images(215, 0), None, network())
    objective = GoldfishObjective(GoldfishSettings())
    settings = TrainingSettings(batch_size=10)
    fit(model, count, batches, objective, settings, learning_rate=0.01, generator=order)
    assert vars(model.module).keys() == vars(network()).keys(), (
        "nothing is hidden in a user's module"
    )
    gone = weakref.ref(model.module)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("refusal", [None, "a branch on values"])
def test_repeated_work_reads_its_tensors_anew(refusal: str | None) -> None:
    source = torch.zeros(2)
    record = Recordings(refusal)
    repeat = Repeat(lambda: source + 1, record)
    found = []
    for value in (1.0, 2.0, 3.0):
        source.fill_(value)
        found.append(repeat())
    assert [result.tolist() for result in found] == [[2, 2], [3, 3], [4, 4]]
    assert record.count == 1
