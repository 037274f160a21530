"""Where the batches of a training come from.

What is random about a batch (a :class:`Draw`) is separate from the work of gathering its tensors
(a :class:`Gatherer`): all draws of an epoch can be made first, on the CPU, and the gathering can
then be recorded once on a GPU and replayed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from goldfish.data import Subset, TensorExamples
from goldfish.types import Examples

READ_TWICE = 16
"""Samples of a dataset that are read twice, to see whether it gives the same each time."""


class Transform(Protocol):
    """Augmentation of a batch of inputs."""

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return the random numbers for ``count`` inputs, a row for each."""

    def apply(self, inputs: Tensor, drawn: Tensor) -> Tensor:
        """Return the inputs, changed as ``drawn`` says."""


@dataclass(frozen=True)
class Batch:
    """All tensors that one training step needs, on the device of the model."""

    inputs: Tensor
    labels: Tensor
    teacher_logits: Tensor | None = None
    """What the teacher says of ``inputs``."""
    removed: tuple[Tensor, Tensor] | None = None
    """Inputs and labels of a mini-batch of removed data."""
    temperature: float | Tensor = 1.0
    """What the logits of teacher and student are divided by before they are compared."""
    removed_targets: Tensor | None = None
    """The loss up to which each removed sample is unlearned, where it has one of its own."""


BatchSource: TypeAlias = Callable[[Tensor], Batch]
"""Gathers the batch for the given positions in a client's remaining data."""


class Draw(NamedTuple):
    """What sets a batch apart from others; those of several can be joined, or stacked."""

    positions: Tensor
    changes: Tensor | None = None
    """What the transform drew for the inputs."""
    teacher_logits: Tensor | None = None
    """The teacher's logits, where they are known already."""
    removed: Tensor | None = None
    removed_changes: Tensor | None = None
    removed_targets: Tensor | None = None

    @property
    def shapes(self) -> tuple[torch.Size | None, ...]:
        """The shape of each part of one of several stacked draws; None where there is none."""
        return tuple(None if part is None else part.shape[1:] for part in self)

    def map(self, change: Callable[[Tensor], Tensor]) -> Draw:
        """Return the draw with each part changed."""
        return Draw._make(None if part is None else change(part) for part in self)


def fold(joined: Draw, sizes: Sequence[int], removed_sizes: Sequence[int]) -> list[Draw]:
    """Return joined draws, of these sizes each, as stacks: one for each run of one shape."""
    runs = [
        (*shape, sum(1 for _ in alike))
        for shape, alike in itertools.groupby(zip(sizes, removed_sizes, strict=True))
    ]
    counts = [count for _, _, count in runs]
    retained = [size * count for size, _, count in runs]
    removed = [size * count for _, size, count in runs]

    def pieces(part: Tensor | None, lengths: list[int]) -> list[Tensor | None]:
        if part is None:
            return [None] * len(runs)
        cut = zip(counts, part.split(lengths), strict=True)
        return [piece.view(count, -1, *part.shape[1:]) for count, piece in cut]

    parts = map(pieces, joined, (*[retained] * 3, *[removed] * 3))
    return [Draw._make(stacked) for stacked in zip(*parts, strict=True)]


@dataclass(frozen=True)
class Gatherer:
    """Gathers the tensors of a batch. Equal for all clients that hold parts of the same data."""

    source: Examples
    """The data that the positions of a located draw count in."""
    device: torch.device
    transform: Transform | None = None
    teacher: nn.Module | None = None
    """Asked batch by batch, where its logits are not known."""
    removed_source: Examples | None = None

    def __call__(self, draw: Draw, temperature: float | Tensor = 1.0) -> Batch:
        """Return the batch of a located draw."""
        inputs, labels = self._read(self.source, draw.positions, draw.changes)
        logits, removed = draw.teacher_logits, None
        if self.teacher is not None:
            logits = logits_of(self.teacher, inputs)
        if draw.removed is not None and self.removed_source is not None:
            removed = self._read(self.removed_source, draw.removed, draw.removed_changes)
        return Batch(inputs, labels, logits, removed, temperature, draw.removed_targets)

    def _read(
        self, source: Examples, positions: Tensor, changes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        inputs, labels = source.batch(positions)
        if self.transform is not None and changes is not None:
            inputs = self.transform.apply(inputs, changes)
        return inputs.to(self.device), labels.to(self.device)

    @property
    def on_device(self) -> bool:
        """Whether all data lies in memory on the model's device."""
        sources = [s for s in (self.source, self.removed_source) if s is not None]
        return all(
            isinstance(s, TensorExamples) and s.images.device.type == self.device.type
            for s in sources
        )


@dataclass(frozen=True)
class ExampleBatches:
    """Batches of examples: it draws what is random, locates it in the data, and gathers."""

    gather: Gatherer
    generator: torch.Generator
    view: Tensor | None = None
    """Where the client's samples are in the gatherer's source; None: they are all of it."""
    teacher_logits: Tensor | None = None
    """What the teacher says of each of the client's samples, on the device of the model."""
    temperature: float = 1.0
    """The client's temperature for comparing teacher and student."""
    removed_order: Iterator[Tensor] | None = None
    """Positions of removed samples, a batch at a time, without end."""
    removed_generator: torch.Generator | None = None
    removed_view: Tensor | None = None
    removed_targets: Tensor | None = None
    """The target of each of the removed samples, on the device of the model."""

    def __call__(self, positions: Tensor) -> Batch:
        """Return the batch at ``positions``."""
        drawn, _ = self.draw(positions, [len(positions)])
        return self.gather(self.locate(drawn), self.temperature)

    def draw(self, positions: Tensor, sizes: Sequence[int]) -> tuple[Draw, list[int]]:
        """Return what is random about the next batches, on the CPU, and their removed samples.

        ``positions`` holds the positions of batches of these ``sizes``, one after the other, as
        does the draw. The numbers of removed samples come with it, one for each batch.
        """
        transform = self.gather.transform
        changes, removed, removed_changes = [], [], []
        for size in sizes:
            if transform is not None:
                changes.append(transform.draw(size, self.generator))
            if self.removed_order is not None and self.removed_generator is not None:
                removed.append(next(self.removed_order))
                if transform is not None:
                    number = len(removed[-1])
                    removed_changes.append(transform.draw(number, self.removed_generator))
        numbers = [len(positions) for positions in removed] or [0] * len(sizes)
        joined = [torch.cat(d) if d else None for d in (changes, removed, removed_changes)]
        return Draw(positions, joined[0], None, *joined[1:]), numbers

    def locate(self, draw: Draw) -> Draw:
        """Return the draw, or several joined, with positions in the source, and what is known.

        Positions are looked up wherever the data lies.
        """
        return draw._replace(
            positions=_look_up(self.view, draw.positions),
            teacher_logits=None
            if self.teacher_logits is None
            else _look_up(self.teacher_logits, draw.positions),
            removed=None if draw.removed is None else _look_up(self.removed_view, draw.removed),
            removed_targets=None
            if draw.removed is None or self.removed_targets is None
            else _look_up(self.removed_targets, draw.removed),
        )


def plain_batches(
    examples: Examples,
    device: torch.device,
    generator: torch.Generator,
    transform: Transform | None = None,
) -> ExampleBatches:
    """Return batches of inputs and labels alone, augmented by ``transform``."""
    source, view = _below(examples)
    return ExampleBatches(Gatherer(source, device, transform), generator, view)


def with_removed(
    batches: ExampleBatches,
    removed: Examples,
    size: int,
    generator: torch.Generator,
    targets: Tensor | None = None,
) -> ExampleBatches:
    """Add ``size`` removed samples to each of the batches, in a new order each pass.

    ``targets`` are the losses up to which they are unlearned, if they have any of their own.
    """
    source, view = _below(removed)
    return replace(
        batches,
        gather=replace(batches.gather, removed_source=source),
        removed_order=_endless(len(removed), size, generator),
        removed_generator=generator,
        removed_view=view,
        removed_targets=None if targets is None else targets.to(batches.gather.device),
    )


def reads_alike(examples: Examples) -> bool:
    """Tell whether samples are the same at every reading.

    A dataset's own transforms may draw at random, and what a teacher says of one reading is then
    not what it would say of the next. Some samples are read twice to find out; nothing is drawn
    from torch's generator by that.
    """
    if isinstance(_below(examples)[0], TensorExamples):
        return True
    some = torch.linspace(0, len(examples) - 1, min(READ_TWICE, len(examples))).long()
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        (first, _), (second, _) = examples.batch(some), examples.batch(some)
        drew = not torch.equal(before, torch.get_rng_state())
    return not drew and torch.equal(first, second)


@torch.no_grad()
def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return a model's logits of a batch: in evaluation mode, without gradients."""
    model.eval()
    logits: Tensor = model(inputs)
    return logits


def _endless(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield mini-batches of positions without end, each pass in a new order."""
    while True:
        yield from torch.randperm(count, generator=generator).split(size)


def _below(examples: Examples) -> tuple[Examples, Tensor | None]:
    """Return the data that examples are a view of, and where they are in it."""
    if isinstance(examples, Subset):
        return examples.examples, examples.positions
    return examples, None


def _look_up(view: Tensor | None, positions: Tensor) -> Tensor:
    return positions if view is None else view.index_select(0, positions.to(view.device))
