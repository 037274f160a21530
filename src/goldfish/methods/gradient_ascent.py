"""Projected gradient ascent: undo the learning of the removed data, then repair the rest.

Halimi, Kadhe, Rawat and Baracaldo: "Federated Unlearning: How to Efficiently Erase a Client in
FL?", 2022. In the first round the clients that ask for a deletion, and they alone, *raise* the old
model's loss on what they remove, inside an L2 ball; the other rounds are FedAvg on the
remaining data.

Ours: a client may remove a part of its data, and several clients may ask at once (the server
averages their models by the number of removed samples). The ball is centred on the old model, where
the authors take the mean of the other clients' last models, which would have to be kept. The ascent
ends by the loss on a mini-batch, where the authors watch an accuracy. It sees the model as it
predicts, so that BatchNorm keeps its statistics and a single sample can be removed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from goldfish.errors import ConfigError
from goldfish.methods import fedavg
from goldfish.methods.method import Method, Plan, ask, average, nothing_left
from goldfish.methods.steps import (
    answer,
    nothing_to_learn,
    refuse_missing,
    task_generator,
    transform_of,
)
from goldfish.params import distance
from goldfish.settings import Count, NonNegative, Positive, Settings
from goldfish.training.batches import Batch, plain_batches
from goldfish.training.fit import fit
from goldfish.training.sgd import AfterStep, Loss, Precondition
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import Client, Round, Step, Task, Update, Workspace

RETAINED = "retained"
"""The metric by which an asker says how many samples it keeps."""


class GradientAscentSettings(Settings):
    """The settings of projected gradient ascent; step size and momentum are the training's."""

    radius: Positive = 1 / 3
    """How far the ascent may go, as a share of the distance from the old to a fresh model."""
    ascent_epochs: Count = 5
    """Passes over the removed data, unless the ascent ends before."""
    ascent_stop: Positive = 10.0
    """End once a mini-batch's loss exceeds so many times ln K, the loss of a uniform guess."""
    clip: Positive = 5.0
    """Longer gradients of the ascent are shortened to this length."""


class AscentSettings(GradientAscentSettings):
    """What the clients that ascend are told."""

    distance: NonNegative
    """How far they may go, as a distance between weights."""


def unlearn(plan: Plan, settings: GradientAscentSettings) -> Iterator[Round]:
    """Yield the round of the ascent, then rounds of FedAvg on the remaining data."""
    last = plan.last
    if last is None:
        last = _ascent_round(plan, settings)
        yield last
    # The repair goes without the askers, where they are not there.
    yield from fedavg.train(replace(plan, last=last, askers=()), plan.origin.params)


def _ascent_round(plan: Plan, settings: GradientAscentSettings) -> Round:
    """Let those clients ascend whose requests the old model is not free of yet."""
    old = plan.origin.params
    module = LocalWorkspace(plan.federation.model).load("old", old).module
    weights = {name: old[name] for name, _ in module.named_parameters()}  # without buffers
    reach = settings.radius * distance(weights, plan.fresh)
    asked = ask(
        plan,
        ASCEND,
        1,
        old,
        AscentSettings(**settings.model_dump(), distance=reach),
        clients=plan.askers,
        quorum=1.0,  # the data of a client that fails here would stay in the model
        may_be_empty=True,
    )
    if not asked.learned:
        raise ConfigError("The clients that ask hold nothing of what they want removed.")
    left = sum(update.metrics[RETAINED] for update in asked.learned)
    if not left and len(asked.learned) == len(plan.federation.client_ids):
        raise nothing_left(plan, 1)
    return replace(asked, params=average(asked.learned, plan.training), final=plan.rounds == 1)


def ascend_step(task: Task[AscentSettings], client: Client, workspace: Workspace) -> Update:
    """Raise the model's loss on what the client removes; what it keeps is not looked at."""
    settings, training = task.settings, task.training
    refuse_missing(client)
    kept = {RETAINED: len(client.retained)}
    if client.removed is None:
        return nothing_to_learn(task, kept)
    model = workspace.load("student", task.arrays["model"])
    order = task_generator(task, "removed")
    fitted = fit(
        model,
        len(client.removed),
        plain_batches(client.removed, model.device, order, transform_of(training)),
        ascent_objective,
        training.model_copy(update={"local_epochs": settings.ascent_epochs}),
        learning_rate=task.context.learning_rate,
        generator=order,
        precondition=clipping(settings.clip),
        after_step=projection(model.module, settings.distance, settings.ascent_stop),
    )
    return answer(task, model.params(), len(client.removed), [fitted], kept)


ASCEND = Step("ascend", ascend_step, AscentSettings, lambda _task: [RETAINED])


def ascent_objective(model: nn.Module, batch: Batch) -> Loss:
    """Return minus the loss; its risk is the loss over ln K, which is 1 for a uniform guess."""
    model.eval()  # BatchNorm keeps its statistics; it could not train on a single sample.
    logits = model(batch.inputs)
    loss = F.cross_entropy(logits, batch.labels)
    return Loss(-loss, risk=loss / math.log(logits.shape[-1]))


def clipping(longest: float) -> Precondition:
    """Return what shortens a model's gradient, all weights together, to ``longest``."""

    def clip(model: nn.Module, _batch: Batch, _computes: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), longest)

    return clip


def projection(model: nn.Module, radius: float, highest: float) -> AfterStep:
    """Return what keeps the weights within ``radius`` of those that ``model`` has now.

    It ends the training once the risk of a step's mini-batch exceeds ``highest``.
    """
    centre = [weight.detach().clone() for weight in model.parameters()]

    def after_step(model: nn.Module, loss: Loss) -> bool:
        project(list(model.parameters()), centre, radius)
        return loss.risk.item() > highest

    return after_step


@torch.no_grad()
def project(weights: Sequence[Tensor], centre: Sequence[Tensor], radius: float) -> None:
    """Move weights outside the L2 ball to its nearest point, in place."""
    ways = [weight - middle for weight, middle in zip(weights, centre, strict=True)]
    length = torch.stack([torch.linalg.vector_norm(way) for way in ways]).norm().item()
    if length <= radius:
        return
    for weight, middle, way in zip(weights, centre, ways, strict=True):
        weight.copy_(middle + way * (radius / length))


GRADIENT_ASCENT = Method(
    name="gradient-ascent",
    summary="Raise the old model's loss on the removed data, then train on: the simple first try.",
    settings=GradientAscentSettings,
    steps=[ASCEND],
    unlearn=unlearn,
    kind="update adjustment",
    needs_askers=lambda _plan, _settings: True,
    source=(
        "Halimi, Kadhe, Rawat, Baracaldo: Federated Unlearning: How to Efficiently Erase a Client "
        "in FL?, 2022"
    ),
    notes=lambda _plan, _settings: (
        "The ascent raises the loss; it does not erase what was learned. Training on the remaining "
        "data afterwards can bring a part of it back.",
    ),
)
