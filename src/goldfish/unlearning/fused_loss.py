"""The composite loss of a complete Goldfish step with its gradient, in few operations.

The functions of :mod:`goldfish.unlearning.loss_function` say what is computed; on a GPU their many
small operations, and those of their backward pass, would take as long as the model itself. Here the
gradient with respect to the logits is written down, so that one forward pass does all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from goldfish.unlearning.loss_function import CROSS_ENTROPY, RemovedTermName, hard_loss


@dataclass(frozen=True)
class Terms:
    """The constants of equation (6), with the hard loss cross-entropy and the cap on L_f."""

    removed_weight: float
    mu_c: float
    mu_d: float
    temperature: float | Tensor
    square_scaling: bool


def implements(hard_loss_name: str, removed_term: RemovedTermName) -> bool:
    """Return whether the total with this hard loss and this removed term is the one of this file.

    All others are computed by the functions of the loss module.
    """
    return hard_loss(hard_loss_name) is CROSS_ENTROPY and removed_term == "capped"


def fused_losses(
    logits: Tensor, labels: Tensor, removed_labels: Tensor, teacher_logits: Tensor, terms: Terms
) -> tuple[Tensor, Tensor]:
    """Return the total, equation (6), and its part on remaining data, L_r + mu_d L_d.

    ``logits`` are the student's of the remaining samples, then of the removed ones. Only the total
    has a gradient.
    """
    total, risk = _Losses.apply(  # type: ignore[no-untyped-call]
        logits, labels, removed_labels, teacher_logits, terms
    )
    return total, risk


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        removed_labels: Tensor,
        teacher_logits: Tensor,
        terms: Terms,
    ) -> tuple[Tensor, Tensor]:
        retained, removed, classes = len(labels), len(removed_labels), logits.shape[-1]
        places = torch.cat([labels, removed_labels])[:, None]
        logs = F.log_softmax(logits, dim=-1)
        right = logs.gather(1, places)
        gradient = logs.exp()

        # The confusion loss, equation (2): the norm of centred probabilities.
        probabilities = gradient[retained:]
        centred = probabilities - probabilities.mean(dim=-1, keepdim=True)
        norms = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
        direction = centred.div_(norms.clamp(min=torch.finfo(norms.dtype).tiny))
        by_confusion = torch._softmax_backward_data(
            direction, probabilities, -1, probabilities.dtype
        )
        confusion_share = terms.mu_c / math.sqrt(classes)

        # The hard loss, equation (1): softmax - one-hot; none where the removed loss is capped.
        cap = CROSS_ENTROPY.of_a_uniform_guess(classes)
        gradient.scatter_(1, places, -1.0, reduce="add")
        gradient[:retained].mul_(1 / retained)
        gradient[retained:].mul_(right[retained:] >= -cap).mul_(-terms.removed_weight / removed)
        gradient[retained:].add_(by_confusion, alpha=confusion_share / removed)

        # The distillation loss, equation (5).
        temperature = terms.temperature
        soft_logs = F.log_softmax(logits[:retained] / temperature, dim=-1)
        targets = F.softmax(teacher_logits / temperature, dim=-1)
        distilled = torch.dot(targets.flatten(), soft_logs.flatten())
        by_distillation = soft_logs.exp_().sub_(targets).div_(temperature)
        if terms.square_scaling:
            distilled.mul_(temperature**2)
            by_distillation.mul_(temperature**2)
        gradient[:retained].add_(by_distillation, alpha=terms.mu_d / retained)

        remaining = right[:retained].mean()  # all logarithms are negative losses
        by_removed = right[retained:].clamp(min=-cap).mean()
        risk = torch.add(remaining, distilled, alpha=terms.mu_d / retained).neg_()
        total = torch.add(risk, by_removed, alpha=terms.removed_weight)
        total.add_(norms.mean(), alpha=confusion_share)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(risk)
        ctx.set_materialize_grads(False)
        return total, risk

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None, None
