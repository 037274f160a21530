"""The composite loss of a complete Goldfish step with its gradient, in few operations.

The functions of :mod:`goldfish.unlearning.loss_function` say what is computed; on a GPU their many
small operations, and those of their backward pass, would take as long as the model itself. Here the
gradient with respect to the logits is written down, so that one forward pass does all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from goldfish.training.batches import Batch
from goldfish.training.sgd import Loss
from goldfish.unlearning.loss_function import CROSS_ENTROPY, confusion_shares, hard_loss

if TYPE_CHECKING:
    from goldfish.unlearning.basic_model import GoldfishSettings


def implements(settings: GoldfishSettings) -> bool:
    """Return whether this file computes the total with these settings, not the loss module."""
    return hard_loss(settings.hard_loss) is CROSS_ENTROPY and settings.removed_term == "capped"


def fused_losses(logits: Tensor, batch: Batch, settings: GoldfishSettings) -> Loss:
    """Return the total, equation (6), and its part on remaining data, L_r + mu_d L_d.

    ``logits`` are the student's of the remaining samples of the batch, then of the removed ones.
    Only the total has a gradient.
    """
    return Loss(*_Losses.apply(logits, batch, settings))  # type: ignore[no-untyped-call]


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, batch: Batch, settings: GoldfishSettings
    ) -> tuple[Tensor, Tensor]:
        labels, temperature = batch.labels, batch.temperature
        _, removed_labels = cast("tuple[Tensor, Tensor]", batch.removed)
        teacher_logits = cast("Tensor", batch.teacher_logits)
        retained, removed, classes = len(labels), len(removed_labels), logits.shape[-1]
        places = torch.cat([labels, removed_labels])[:, None]
        logs = F.log_softmax(logits, dim=-1)
        right = logs.gather(1, places)
        gradient = logs.exp()

        # The confusion loss, equation (2): the norm of centred probabilities.
        probabilities = gradient[retained:]
        centred = probabilities - probabilities.mean(dim=-1, keepdim=True)
        norms = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
        shares = confusion_shares(batch.removed_targets, classes)
        direction = centred.div_(norms.clamp(min=torch.finfo(norms.dtype).tiny))
        by_confusion = torch._softmax_backward_data(
            direction, probabilities, -1, probabilities.dtype
        )
        if shares is not None:
            norms = norms * shares[:, None]
            by_confusion = by_confusion * shares[:, None]
        confusion_share = settings.mu_c / math.sqrt(classes)

        # The hard loss, equation (1): softmax - one-hot; none where the removed loss is capped.
        least: float | Tensor = -CROSS_ENTROPY.of_a_uniform_guess(classes)
        if batch.removed_targets is not None:
            least = -batch.removed_targets[:, None].clamp(max=-least)
        gradient.scatter_(1, places, -1.0, reduce="add")
        gradient[:retained].mul_(1 / retained)
        gradient[retained:].mul_(right[retained:] >= least).mul_(-settings.removed_weight / removed)
        gradient[retained:].add_(by_confusion, alpha=confusion_share / removed)

        # The distillation loss, equation (5).
        soft_logs = F.log_softmax(logits[:retained] / temperature, dim=-1)
        targets = F.softmax(teacher_logits / temperature, dim=-1)
        distilled = torch.dot(targets.flatten(), soft_logs.flatten())
        by_distillation = soft_logs.exp_().sub_(targets).div_(temperature)
        if settings.square_scaling:
            distilled.mul_(temperature**2)
            by_distillation.mul_(temperature**2)
        gradient[:retained].add_(by_distillation, alpha=settings.mu_d / retained)

        remaining = right[:retained].mean()  # all logarithms are negative losses
        by_removed = right[retained:].clamp(min=least).mean()
        risk = torch.add(remaining, distilled, alpha=settings.mu_d / retained).neg_()
        total = torch.add(risk, by_removed, alpha=settings.removed_weight)
        total.add_(norms.mean(), alpha=confusion_share)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(risk)
        ctx.set_materialize_grads(False)
        return total, risk

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None
