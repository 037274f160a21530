"""The basic model module: Algorithm 1's client procedure, a student taught by the old model.

Knowledge flows from the teacher on the remaining data only; the removed data meets the student
through the hard and the confusion loss alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from goldfish.errors import ConfigError, DivergenceError
from goldfish.hardware.gpu import to_cpu
from goldfish.settings import NonNegative, Positive, Settings, TrainingSettings
from goldfish.training.batches import Batch, Transform, plain_batches, with_removed
from goldfish.training.fit import Fitted, batch_sizes, fit
from goldfish.training.sgd import Loss
from goldfish.training.teacher import Teacher
from goldfish.training.workspace import LoadedModel
from goldfish.types import Examples
from goldfish.unlearning.batch_norm import statistics_of_first
from goldfish.unlearning.extension import adaptive_temperature
from goldfish.unlearning.fused_loss import fused_losses, implements
from goldfish.unlearning.loss_function import (
    RemovedTermName,
    confusion_loss,
    confusion_shares,
    distillation_loss,
    goldfish_loss,
    hard_loss,
    removed_loss,
)
from goldfish.unlearning.optimization import excess_empirical_risk


def _known(name: str) -> str:
    try:
        hard_loss(name)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return name


class GoldfishSettings(Settings):
    """The settings of the Goldfish method. A weight of 0 switches its term off."""

    student: Literal["fresh", "teacher"] = "fresh"
    """The student starts from fresh weights, as in the paper, or from the teacher's."""
    temperature: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 3.0
    """Distillation temperature (T0 of equation 11)."""
    adaptive_temperature: bool = True
    """Lower the temperature of clients that remove much, equation (11)."""
    temperature_alpha: Positive = 1 / math.e
    """Adjustment factor of equation (11); 1/e gives T0 to a client that removes nothing."""
    mu_c: NonNegative = 0.25
    """Weight of the confusion loss in equation (6)."""
    mu_d: NonNegative = 1.0
    """Weight of the distillation loss in equation (6)."""
    removed_weight: NonNegative = 1.0
    """Weight of the removed data's part in the hard loss, equation (1)."""
    hard_loss: Annotated[str, AfterValidator(_known)] = "cross-entropy"
    """Loss between prediction and label."""
    removed_term: RemovedTermName = "capped"
    """How the removed data's part is bounded; "literal" is as printed, and diverges."""
    square_scaling: bool = False
    """Multiply the distillation loss by T^2, as is usual elsewhere and not in the paper."""
    local_stop: bool = True
    """End a client's local epochs early by the excess empirical risk, equation (7)."""
    round_stop: bool = False
    """End the rounds once the student's loss on the server's test set is the teacher's + delta."""
    delta: NonNegative = 0.05
    """Threshold of both stops."""
    adaptive_weights: bool = True
    """Weigh clients by their error on the server's test set, equations (12) and (13)."""
    shard_retraining: Literal["shard", "client"] = "shard"
    """With shards: retrain the shards hit, or the client's model, and solve for them by (10)."""
    shard_checkpoint: Literal["normalised", "literal"] = "normalised"
    """Coefficients of the checkpoint, equation (9): divided by their sum, or as printed."""


def retrain_student(
    student: LoadedModel,
    teacher: Teacher | None,
    retained: Examples,
    removed: Examples | None,
    settings: GoldfishSettings,
    training: TrainingSettings,
    *,
    learning_rate: float,
    generator: torch.Generator,
    removed_generator: torch.Generator,
    transform: Transform | None = None,
    steps: int | None = None,
    removed_size: int | None = None,
    removed_targets: Tensor | None = None,
) -> Fitted:
    """Train the student in place: the procedure ``Goldfish`` of Algorithm 1.

    ``generator`` orders the remaining data and ``removed_generator`` the removed data, so that the
    order of the former is the one of every other method. Without a teacher there is neither a
    distillation loss nor a local stop. The training takes its local epochs, each with one pass over
    the removed data; or so many ``steps``, each with ``removed_size`` removed samples.
    ``removed_targets`` are the losses up to which removed samples are unlearned, if not all of them
    up to that of a uniform guess.
    """
    in_epoch = len(batch_sizes(len(retained), training.batch_size))
    if steps is not None:
        epochs = math.ceil(steps / in_epoch)
        training = training.model_copy(update={"local_epochs": epochs})
    temperature = client_temperature(
        settings, len(retained), 0 if removed is None else len(removed)
    )
    device = student.device
    batches = plain_batches(retained, device, generator, transform)
    if teacher is not None and settings.mu_d > 0:
        batches = teacher.teach(batches, temperature)
    if removed is not None and (settings.removed_weight > 0 or settings.mu_c > 0):
        size = removed_size or removed_batch_size(training.batch_size, len(retained), len(removed))
        batches = with_removed(batches, removed, size, removed_generator, removed_targets)

    stop = None
    if teacher is not None and settings.local_stop and training.local_epochs > 1:
        logits, labels = teacher.logits(retained).to(device), retained.labels.to(device)
        taught = logits if settings.mu_d > 0 else None
        own = Batch(logits, labels, taught, temperature=temperature)
        reference = to_cpu(goldfish_losses(own, logits, None, settings).risk).item()

        def stop(risks: Sequence[float]) -> bool:
            return excess_empirical_risk(risks, reference) <= settings.delta

    try:
        fitted = fit(
            student,
            len(retained),
            batches,
            GoldfishObjective(settings),
            training,
            learning_rate=learning_rate,
            generator=generator,
            stop=stop,
            max_steps=steps,
        )
    except DivergenceError as error:
        if settings.removed_term == "literal" and removed is not None:
            raise DivergenceError(
                f'{error}; removed_term = "literal" subtracts a loss that has no upper bound: '
                'set removed_term = "capped" (the default) or "smooth"'
            ) from error
        raise
    if teacher is None:
        return fitted
    if settings.mu_d > 0:
        epochs, more = divmod(fitted.steps, in_epoch)
        teacher.count(epochs * len(retained) + more * training.batch_size)
    return replace(fitted, teacher_samples=teacher.asked)


@dataclass(frozen=True)
class GoldfishObjective:
    """Equation (6): remaining and removed batch in one forward pass of the student."""

    settings: GoldfishSettings

    def __call__(self, student: nn.Module, batch: Batch) -> Loss:
        """Return the loss of the student on a batch."""
        settings = self.settings
        if (
            batch.inputs.is_cuda
            and batch.removed is not None
            and batch.teacher_logits is not None
            and implements(settings)
        ):
            both = joint_logits(student, batch.inputs, batch.removed[0])
            return fused_losses(both, batch, settings)
        logits, removed_logits = student_logits(student, batch)
        return goldfish_losses(batch, logits, removed_logits, settings)


def joint_logits(student: nn.Module, inputs: Tensor, removed: Tensor) -> Tensor:
    """Return what the student says of remaining and then of removed inputs, in one pass.

    Removed inputs leave nothing in the running statistics of BatchNorm layers.
    """
    with statistics_of_first(student, len(inputs)):
        both: Tensor = student(torch.cat([inputs, removed]))
    return both


def student_logits(student: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Return what the student says of remaining and of removed inputs, in one forward pass."""
    if batch.removed is None:
        return student(batch.inputs), None
    both = joint_logits(student, batch.inputs, batch.removed[0])
    return both[: len(batch.inputs)], both[len(batch.inputs) :]


def goldfish_losses(
    batch: Batch, logits: Tensor, removed_logits: Tensor | None, settings: GoldfishSettings
) -> Loss:
    """Return the total, equation (6), and its part on remaining data, L_r + mu_d L_d."""
    remaining = hard_loss(settings.hard_loss).of_samples(logits, batch.labels).mean()
    distillation: Tensor | float = 0.0
    if batch.teacher_logits is not None:
        distillation = distillation_loss(
            logits, batch.teacher_logits, batch.temperature, square_scaling=settings.square_scaling
        )
    risk = remaining + settings.mu_d * distillation
    if batch.removed is None or removed_logits is None:
        return Loss(risk, risk)
    targets = batch.removed_targets
    removed = removed_loss(
        removed_logits, batch.removed[1], settings.hard_loss, settings.removed_term, targets
    )
    hard = remaining - settings.removed_weight * removed
    confusion = confusion_loss(removed_logits, confusion_shares(targets, logits.shape[-1]))
    total = goldfish_loss(hard, confusion, distillation, settings.mu_c, settings.mu_d)
    return Loss(total, risk)


def client_temperature(settings: GoldfishSettings, num_retained: int, num_removed: int) -> float:
    """Return the temperature of a client: that of equation (11), or T0 when it is switched off."""
    if not settings.adaptive_temperature:
        return settings.temperature
    return adaptive_temperature(
        settings.temperature, num_retained, num_removed, settings.temperature_alpha
    )


def removed_batch_size(batch_size: int, num_retained: int, num_removed: int) -> int:
    """Return the share of removed samples in a step that takes an epoch once through both parts.

    At most ``batch_size``: a client that removes more than it keeps needs several epochs.
    """
    return min(batch_size, num_removed, math.ceil(batch_size * num_removed / num_retained))
