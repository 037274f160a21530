"""Rapid retraining (the paper's B2): retraining whose local steps are preconditioned.

Liu, Xu, Yuan, Wang and Li, "The Right to be Forgotten in Federated Learning: An Efficient
Realization with Rapid Retraining", INFOCOM 2022. Theirs: a fresh model learns from the remaining
data by Newton-like steps, the gradient's momentum divided by the diagonal of the empirical Fisher
information, which is averaged over the steps. Ours: relative damping; steps in units of plain ones,
so that the training's learning rate can be used; a warm-up of plain steps; that a client keeps the
average from round to round; how often it is measured, and what it is for a model with BatchNorm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field, NonNegativeInt
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from goldfish.errors import ConfigError
from goldfish.methods import fedavg
from goldfish.methods.method import Method
from goldfish.methods.steps import Fit
from goldfish.settings import Count, Positive, Settings
from goldfish.training.batches import Batch
from goldfish.training.fit import Fitted, fit
from goldfish.types import Client, Params, Step, Task, Update, Workspace

ByName: TypeAlias = Mapping[str, Tensor]
"""One tensor for each trainable parameter."""

_STEPS = "/steps"
"""Under which name a client keeps the number of its steps, beside those of the parameters."""

GRADIENTS_AT_ONCE = 2**26
"""How many values of per-sample gradients are held at a time: 256 MiB."""


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

        def rapid_fit(*args: Any, **kwargs: Any) -> Fitted:
            preconditioner = FisherPreconditioner(task.settings, client.state.arrays.get(key))
            fitted = fit(*args, **kwargs, precondition=preconditioner)
            client.state.arrays[key] = preconditioner.kept
            return replace(fitted, fisher_samples=preconditioner.samples)

        return rapid_fit

    return fedavg.local_training(task, client, workspace, fit_of)


RAPID = Step("rapid-retrain", rapid_retrain_step, RapidRetrainSettings)


class FisherPreconditioner:
    """Scales the gradients of local trainings by the averaged Fisher information.

    ``kept`` is what an earlier one had at its end: the average and its warm-up go on from there.
    ``samples`` counts those that the measurements processed, beside the training's own.
    """

    def __init__(self, settings: RapidRetrainSettings, kept: Params | None = None) -> None:
        self.samples = 0
        self._settings = settings
        self._steps = 0 if kept is None else int(kept[_STEPS])
        self._fisher: ByName = {n: t for n, t in (kept or {}).items() if n != _STEPS}
        self._scales: ByName = {}

    @property
    def kept(self) -> Params:
        """The average so far, and the number of steps."""
        fisher = {name: t.cpu() for name, t in self._fisher.items()}
        return {_STEPS: torch.tensor(self._steps), **fisher}

    def __call__(self, model: nn.Module, batch: Batch) -> None:
        """Scale the gradients of ``model`` in place; in the warm-up, leave them as they are."""
        settings = self._settings
        measured, due = divmod(self._steps, settings.fisher_every)
        if due == 0:
            new = diagonal_fisher(model, batch.inputs, batch.labels)
            self.samples += len(batch.labels)
            past = {name: t.to(new[name]) for name, t in self._fisher.items()}
            self._fisher = average_fisher(past, new, measured + 1, settings.fisher_decay)
        if due == 0 or not self._scales:
            self._scales = fisher_scales(
                self._fisher, settings.damping, settings.max_scale, settings.gain
            )
        self._steps += 1
        if self._steps <= settings.warmup_steps:
            return
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad *= self._scales[name]


def diagonal_fisher(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the diagonal of the empirical Fisher information, by parameter.

    It is the mean over the samples of the squared gradient of a sample's cross-entropy. A BatchNorm
    layer in training mode mixes the samples of a batch, so that a sample has no gradient of its
    own: here it has the statistics of ``inputs``, held fixed. (The running statistics of a fresh
    model are those of another function: they lag behind by some twenty steps.) Everything else is
    in evaluation mode, so dropout draws nothing. Modes and buffers are left as they were.
    """
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        buffers = _with_statistics_of(inputs, model, [m for m in modes if modes[m]])

        def sample_loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(model, (parameters, buffers), (image.unsqueeze(0),))
            return F.cross_entropy(logits, label.unsqueeze(0))

        gradients = vmap(grad(sample_loss), in_dims=(None, 0, 0))
        total = {name: torch.zeros_like(p) for name, p in trained.items()}
        size = max(1, GRADIENTS_AT_ONCE // sum(p.numel() for p in trained.values()))
        for some, their_labels in zip(inputs.split(size), labels.split(size), strict=True):
            for name, each in gradients(trained, some, their_labels).items():
                total[name] += each.square().sum(dim=0)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(
            "rapid-retrain needs the gradient of each sample, and torch.func cannot compute it for "
            f"{type(model).__name__}: {str(error).strip()} Use retrain, or a model without "
            "branches on values, changes of buffers in evaluation mode and recurrent layers."
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    return {name: t / len(labels) for name, t in total.items()}


def _with_statistics_of(
    inputs: Tensor, model: nn.Module, training: Sequence[nn.Module]
) -> dict[str, Tensor]:
    """Return copies of the buffers in which BatchNorm has the statistics of ``inputs``."""
    buffers = {name: t.clone() for name, t in model.named_buffers()}
    norms = [m for m in training if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    if any(norm.running_mean is None for norm in norms):
        raise ValueError("it has a BatchNorm layer without running statistics.")
    try:
        for norm in norms:
            norm.training, norm.momentum = True, 1.0  # only the newest batch counts
        if norms:
            with torch.no_grad():
                functional_call(model, buffers, (inputs,))
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.training, norm.momentum = False, momentum
    return buffers


def average_fisher(past: ByName, measured: ByName, count: int, decay: float) -> ByName:
    """Return the exponential average of the first ``count`` measurements, corrected for its start.

    The corrected average is a mean: the newest weighs (1 - decay) / (1 - decay^count), the first
    alone weighs 1.
    """
    if count == 1:
        return measured
    weight = (1 - decay) / (1 - decay**count)
    return {name: past[name].lerp(new, weight) for name, new in measured.items()}


def fisher_scales(fisher: ByName, damping: float, max_scale: float, gain: float = 1.0) -> ByName:
    """Return what each gradient is multiplied by: c / (F + damping * mean F).

    c is such that sum(F * scale) = gain * sum(F). The expected first-order gain of a step, the step
    size times the sum of scale * gradient^2, is then ``gain`` times that of a plain step, so the
    learning rate keeps its meaning; parameters without gradients (dead units) do not count. That
    alone has no bound: a single parameter with a large F raises all other scales, up to their
    number / damping. Where the largest scale would pass ``max_scale``, c is smaller. Where F is 0
    throughout the scales are 1.
    """
    mean = torch.cat([t.flatten() for t in fisher.values()]).mean()
    tiny = torch.finfo(mean.dtype).tiny
    relative = {name: t / mean.clamp(min=tiny) for name, t in fisher.items()}
    inverse = {name: 1 / (t + damping) for name, t in relative.items()}
    of_inverse = torch.cat([(relative[n] * inverse[n]).flatten() for n in fisher]).mean()
    largest = torch.stack([t.max() for t in inverse.values()]).max()
    c = torch.where(mean > 0, torch.minimum(gain / of_inverse, max_scale / largest), damping)
    return {name: c * t for name, t in inverse.items()}


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
