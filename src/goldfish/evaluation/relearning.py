"""How fast a model learns removed samples again: one that never saw them takes longer."""

from __future__ import annotations

import torch
from torch import nn

from goldfish.audits import Relearning
from goldfish.evaluation.memory import sample_losses
from goldfish.randomness import generator
from goldfish.settings import TrainingSettings
from goldfish.training.batches import plain_batches
from goldfish.training.fit import cross_entropy_objective, fit, predict
from goldfish.training.sgd import Loss
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import Examples, Params

STEPS = 100
ORDERS = 3
"""The samples are learned again in so many orders, each from the same model."""


def relearn(
    workspace: LocalWorkspace,
    params: Params,
    removed: Examples,
    training: TrainingSettings,
    target: float,
    seed: int,
    *,
    orders: int = ORDERS,
    steps: int = STEPS,
) -> Relearning:
    """Train a model on the removed samples alone, and follow its loss on them step by step.

    The steps are those of ``training``; the orders of the samples come from ``seed`` and are the
    same for every model. The samples fit again once their mean loss is at most ``target``.
    """
    settings = training.model_copy(update={"local_epochs": steps})
    labels = removed.labels.cpu()
    curves: list[list[float]] = []
    for order in range(orders):
        model, draw = workspace.load("relearning", params), generator(seed, "relearning", order)
        losses = [sample_losses(predict(model.module, removed), labels).mean().item()]

        def follow(module: nn.Module, _loss: Loss, losses: list[float] = losses) -> bool:
            losses.append(sample_losses(predict(module, removed), labels).mean().item())
            module.train()
            return False

        fit(
            model,
            len(removed),
            plain_batches(removed, model.device, draw),
            cross_entropy_objective,
            settings,
            learning_rate=settings.learning_rate,
            generator=draw,
            max_steps=steps,
            after_step=follow,
        )
        curves.append(losses)
    return Relearning(
        curve=torch.tensor(curves).mean(dim=0).tolist(),
        steps=[
            next((step for step, loss in enumerate(losses) if loss <= target), None)
            for losses in curves
        ],
    )
