"""Rapid retraining (the paper's B2): retraining whose local steps are preconditioned.

Liu, Xu, Yuan, Wang and Li, "The Right to be Forgotten in Federated Learning: An Efficient
Realization with Rapid Retraining", INFOCOM 2022. Theirs: a fresh model learns from the remaining
data by Newton-like steps, the gradient's momentum divided by the diagonal of the empirical Fisher
information, which is averaged over the steps. Ours: relative damping; steps in units of plain ones,
so that the training's learning rate can be used; a warm-up of plain steps; that a client keeps the
average from round to round; how often it is measured, and what it is for a model with BatchNorm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor, nn

from goldfish.hardware.gpu import to_cpu
from goldfish.methods import fedavg
from goldfish.methods.method import Method
from goldfish.methods.steps import Fit
from goldfish.params import FlatParams
from goldfish.settings import Count, Positive, Settings
from goldfish.training.batches import Batch
from goldfish.training.fisher import diagonal_fisher, known_layers
from goldfish.training.fit import Fitted, fit
from goldfish.training.workspace import LoadedModel
from goldfish.types import Client, Params, Step, Task, Update, Workspace

_STEPS = "/steps"
"""Under which name a client keeps the number of its steps, beside those of the parameters."""


class RapidRetrainSettings(Settings):
    """The settings of rapid retraining; step size and momentum are those of the training."""

    fisher_decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Weight of the past in the exponential average of the Fisher information, per measurement."""
    damping: Positive = 0.3
    """Added to the Fisher information, in units of its mean over all parameters."""
    gain: Positive = 3.0
    """Expected first-order gain of a step, in units of that of a plain step."""
    max_scale: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 15.0
    """No gradient is multiplied by more than this, whatever the Fisher information says."""
    fisher_every: Count = 1
    """Measure the Fisher information each so many steps."""
    warmup_steps: NonNegativeInt = 5
    """Plain steps of a client before its first preconditioned one."""


def rapid_retrain_step(
    task: Task[RapidRetrainSettings], client: Client, workspace: Workspace
) -> Update:
    """Train the model on the client's remaining data with preconditioned steps."""

    def fit_of(*shard: int) -> Fit:
        key = "-".join([f"{task.context.phase}/fisher", *map(str, shard)])

        def rapid_fit(model: LoadedModel, *args: Any, **kwargs: Any) -> Fitted:
            preconditioner = model.shared(FisherPreconditioner, task.settings)
            preconditioner.load(client.state.arrays.get(key))
            fitted = fit(model, *args, **kwargs, precondition=preconditioner)
            client.state.arrays[key] = preconditioner.kept
            return replace(fitted, fisher_samples=preconditioner.samples)

        return rapid_fit

    return fedavg.local_training(task, client, workspace, fit_of)


RAPID = Step("rapid-retrain", rapid_retrain_step, RapidRetrainSettings)


class FisherPreconditioner:
    """Scales the gradients of local trainings by the averaged Fisher information.

    One serves all trainings of a model, one after the other: each begins with :meth:`load`. All
    that changes lies in tensors that stay where they are, so that steps can be recorded.
    """

    def __init__(self, model: nn.Module, settings: RapidRetrainSettings) -> None:
        self._settings = settings
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._shapes = {name: p.shape for name, p in trained.items()}
        device = next(model.parameters()).device
        size = sum(shape.numel() for shape in self._shapes.values())
        self._fisher = torch.zeros(size, device=device)
        self._steps = torch.zeros((), dtype=torch.int64, device=device)
        self._samples = torch.zeros((), dtype=torch.int64, device=device)
        # Whether it is time to measure is decided on the host.
        self.recordable = settings.fisher_every == 1 and known_layers(model) is not None

    @property
    def state(self) -> Sequence[Tensor]:
        """The average, and the numbers of steps and of measured samples."""
        return self._fisher, self._steps, self._samples

    def load(self, kept: Params | None) -> None:
        """Begin a training where the one ended that left ``kept``; None: from the start."""
        for t in self.state:
            t.zero_()
        if kept is not None:
            self._fisher.copy_(torch.cat([kept[name].flatten() for name in self._shapes]))
            self._steps.copy_(kept[_STEPS])

    @property
    def kept(self) -> Params:
        """The average so far, by parameter, and the number of steps."""
        rows = {t.dtype: to_cpu(t.view(-1)).clone() for t in (self._steps, self._fisher)}
        shapes = {_STEPS: (torch.Size(), torch.int64)}
        shapes |= {name: (shape, torch.float32) for name, shape in self._shapes.items()}
        return FlatParams(rows, shapes)

    @property
    def samples(self) -> int:
        """How many samples the measurements processed, beside the training's own."""
        return int(to_cpu(self._samples))

    @torch.no_grad()
    def __call__(self, model: nn.Module, batch: Batch, computes: nn.Module) -> None:
        """Scale the gradients of ``model`` in place; in the warm-up, leave them as they are."""
        settings = self._settings
        if settings.fisher_every == 1 or int(to_cpu(self._steps)) % settings.fisher_every == 0:
            measured = diagonal_fisher(model, batch.inputs, batch.labels, computes)
            new = torch.cat([measured[name].flatten() for name in self._shapes]).float()
            count = self._steps // settings.fisher_every + 1
            self._fisher.copy_(average_fisher(self._fisher, new, count, settings.fisher_decay))
            self._samples += len(batch.labels)
        self._steps += 1
        scales = fisher_scales(self._fisher, settings.damping, settings.max_scale, settings.gain)
        scales = torch.where(self._steps <= settings.warmup_steps, 1.0, scales)
        parts = scales.split([shape.numel() for shape in self._shapes.values()])
        for (name, shape), scale in zip(self._shapes.items(), parts, strict=True):
            gradient = model.get_parameter(name).grad
            if gradient is not None:
                gradient *= scale.view(shape)


def average_fisher(past: Tensor, measured: Tensor, count: Tensor, decay: float) -> Tensor:
    """Return the exponential average of the first ``count`` measurements, corrected for its start.

    The corrected average is a mean: the newest weighs (1 - decay) / (1 - decay^count), the first
    alone weighs 1.
    """
    weight = (1 - decay) / (1 - decay ** count.double())
    return past.lerp(measured, weight.to(past.dtype))


def fisher_scales(fisher: Tensor, damping: float, max_scale: float, gain: float = 1.0) -> Tensor:
    """Return what the gradient of each parameter is multiplied by: c / (F + damping * mean F).

    c is such that sum(F * scale) = gain * sum(F). The expected first-order gain of a step, the step
    size times the sum of scale * gradient^2, is then ``gain`` times that of a plain step, so the
    learning rate keeps its meaning; parameters without gradients (dead units) do not count. That
    alone has no bound: a single parameter with a large F raises all other scales, up to their
    number / damping. Where the largest scale would pass ``max_scale``, c is smaller. Where F is 0
    throughout the scales are 1.
    """
    mean = fisher.mean()
    relative = fisher / mean.clamp(min=torch.finfo(fisher.dtype).tiny)
    inverse = 1 / (relative + damping)
    of_inverse = (relative * inverse).mean()
    c = torch.where(mean > 0, torch.minimum(gain / of_inverse, max_scale / inverse.max()), damping)
    return c * inverse


RAPID_RETRAIN = Method(
    name="rapid-retrain",
    summary="Train a fresh model on the remaining data, with Fisher-preconditioned steps (B2).",
    settings=RapidRetrainSettings,
    steps=[RAPID],
    unlearn=lambda plan, settings: fedavg.train(plan, plan.fresh, RAPID, settings),
    guarantee="exact",
    source=(
        'Liu, Xu, Yuan, Wang and Li: "The Right to be Forgotten in Federated Learning: An '
        'Efficient Realization with Rapid Retraining", INFOCOM 2022'
    ),
)
