"""A teacher: a model whose logits of a client's data a student learns to imitate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from goldfish.training.batches import ExampleBatches
from goldfish.training.fit import predict
from goldfish.types import Examples


class Teacher:
    """The teacher of one client's student, known by its logits of the client's data or as a model.

    A model is asked batch by batch, about the very inputs that the student sees. ``asked`` counts
    the samples that the teacher looked at. ``known`` returns what a model says of all of the
    client's data, and of how many samples it was asked for that; no logits where it cannot know.
    """

    def __init__(
        self,
        teacher: Tensor | nn.Module,
        asked: int = 0,
        known: Callable[[], tuple[Tensor, int]] | None = None,
    ) -> None:
        self._teacher = teacher
        self._known = known
        self.asked = asked

    def logits(self, examples: Examples) -> Tensor:
        """Return what the teacher says of all of the client's data."""
        if isinstance(self._teacher, Tensor):
            return self._teacher
        if self._known is not None:
            logits, asked = self._known()
            self.asked += asked
            if len(logits):
                return logits
        self.asked += len(examples)
        return predict(self._teacher, examples)

    def teach(self, plain: ExampleBatches, temperature: float = 1.0) -> ExampleBatches:
        """Return the batches with the teacher's logits, which are compared at ``temperature``."""
        taught = replace(plain, temperature=temperature)
        if isinstance(self._teacher, Tensor):
            return replace(taught, teacher_logits=self._teacher.to(plain.gather.device))
        return replace(taught, gather=replace(plain.gather, teacher=self._teacher))

    def count(self, samples: int) -> None:
        """Count samples of batches that the student was trained on: a model saw each of them."""
        if isinstance(self._teacher, nn.Module):
            self.asked += samples
