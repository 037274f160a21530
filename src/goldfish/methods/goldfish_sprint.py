"""Goldfish as a sprint: the old model unlearns at the clients that asked, then a few rounds repair.

Ours, not the paper's; the loss is the paper's. The model starts from the old one.

1. The sprint: the clients that asked, and they alone, take some local epochs on their removed and
   remaining data with the complete Goldfish loss, and the mean of their results is the model. In
   ordinary rounds all other clients would thin out what they unteach. Where one of them still
   remembers, by the loss of unseen samples on the server's test set, it takes another epoch.
2. The rounds: all clients take one local epoch each. The step size starts anew and falls to 0 over
   these rounds, along a cosine. The askers go on unteaching; the teacher is not asked any more.

``docs/fast.md`` has what was measured and what was tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from goldfish.errors import ConfigError
from goldfish.methods.goldfish import STEPS as GOLDFISH_STEPS
from goldfish.methods.goldfish import goldfish_step
from goldfish.methods.method import Method, Plan, ask, average
from goldfish.methods.steps import nothing_to_learn
from goldfish.params import digest
from goldfish.settings import (
    Count,
    NonNegative,
    Positive,
    Settings,
    TrainingSettings,
    learning_rate_at,
)
from goldfish.training.fit import predict
from goldfish.types import Client, ClientStep, Params, Round, Scalar, Task, Update, Workspace
from goldfish.unlearning.basic_model import GoldfishSettings

EPOCHS_A_ROUND = 15
"""By default there is one annealed round for each so many epochs of the training."""

FEWEST_ROUNDS = 2
"""But no fewer than these: the cosine needs a large and a small step."""

REMEMBERED = 0.25
"""Removed samples whose mean loss is below this share of that of unseen ones are remembered."""


class GoldfishSprintSettings(Settings):
    """The settings of the sprint; its rounds are its own, whatever the other methods take."""

    sprint_epochs: Count = 3
    """Local epochs of the clients that asked, in the first turn of the sprint."""
    most_turns: Count = 3
    """Turns of the sprint: after the first, one epoch each, while removed data is remembered."""
    anneal_rounds: Count | None = None
    """Rounds of all clients after it; by default one for 15 epochs of training, at least 2."""
    sprint_step: Positive = 1.0
    """Step size of the sprint, as a share of the mean step size of the training."""
    anneal_step: Positive = 1.5
    """Step size of the first of these rounds, as such a share; a cosine brings it to 0."""
    removed_weight: NonNegative = 1.0
    """Weight of the removed data's part in the hard loss, equation (1)."""
    mu_c: NonNegative = 0.25
    """Weight of the confusion loss in equation (6)."""
    mu_d: NonNegative = 1.0
    """Weight of the distillation loss in equation (6), in the sprint alone."""


def unlearn(plan: Plan, settings: Settings) -> Iterator[Round]:
    """Yield the turns of the sprint, then the annealed rounds."""
    settings = cast("GoldfishSprintSettings", settings)
    if plan.original is None:
        raise ConfigError("The sprint needs the model to unlearn from.")
    params = plan.last.params if plan.last else plan.original
    done = plan.last.index if plan.last else 0
    turns = int(plan.last.memo["turns"]) if plan.last else 0  # of the sprint; 0 while it lasts
    while not turns:
        this = _turn(plan, settings, done + 1, params, plan.original)
        done, params, turns = this.index, this.params, int(this.memo["turns"])
        yield this
    rounds = anneal_rounds(plan, settings)
    for place in range(done - turns + 1, rounds + 1):
        training = _training(plan, settings.anneal_step * cosine(place, rounds), local_epochs=1)
        config = {**training.to_task(), **_loss(settings, mu_d=0.0)}
        own = replace(plan, training=training)
        asked = ask(own, STEPS, "goldfish", turns + place, params, config)
        params = average(asked.updates)
        yield asked.finish(params, final=place == rounds, memo={"turns": turns})


def _turn(
    plan: Plan, settings: GoldfishSprintSettings, index: int, params: Params, teacher: Params
) -> Round:
    """Let the askers train: all of them in the first turn, those that still remember in others."""
    # The data of a client that fails here would stay in the model: all of them must answer.
    epochs = settings.sprint_epochs if index == 1 else 1
    training = _training(plan, settings.sprint_step, local_epochs=epochs, quorum=1.0)
    config = {
        **training.to_task(),
        **_loss(settings, settings.mu_d),
        "teacher_digest": digest(teacher),
    }
    if index > 1 and plan.server is not None:
        config["unseen_losses"] = " ".join(map(str, plan.server.class_losses(params)))
    asked = ask(
        replace(plan, training=training),
        STEPS,
        "sprint",
        index,
        params,
        config,
        constants={"teacher": teacher} if settings.mu_d else {},
        clients=plan.askers,
        may_be_empty=index > 1,
    )
    if asked.updates:
        params = average(asked.updates)
    ended = not asked.updates or index == settings.most_turns or plan.server is None
    return asked.finish(params, memo={"turns": index if ended else 0})


def _training(plan: Plan, share: float, **changes: int | float) -> TrainingSettings:
    """Return how clients train, each its data as a whole, at a share of the mean step size."""
    training = plan.training
    rounds = range(1, training.rounds + 1)
    mean = sum(learning_rate_at(training, i, training.rounds) for i in rounds) / training.rounds
    own = {"learning_rate": share * mean, "schedule": "constant", "shards": 1, **changes}
    return training.model_copy(update=own)


def _loss(settings: GoldfishSprintSettings, mu_d: float) -> dict[str, Scalar]:
    """Return the Goldfish loss as a task holds it."""
    loss = GoldfishSettings(
        student="teacher",
        removed_weight=settings.removed_weight,
        mu_c=settings.mu_c,
        mu_d=mu_d,
        adaptive_temperature=False,
        local_stop=False,
    )
    return {**loss.to_task(), "warm": True}


def anneal_rounds(plan: Plan, settings: GoldfishSprintSettings) -> int:
    """Return how many rounds follow the sprint."""
    before = plan.original_training or plan.training
    by_default = before.rounds * before.local_epochs // EPOCHS_A_ROUND
    return settings.anneal_rounds or max(FEWEST_ROUNDS, by_default)


def cosine(place: int, rounds: int) -> float:
    """Return the share of the first step size in a round (from 1) of so many."""
    return 0.5 * (1 + math.cos(math.pi * (place - 1) / rounds))


def sprint_step(task: Task, client: Client, workspace: Workspace) -> Update:
    """Take a turn of the sprint; after the first, only where removed samples are remembered."""
    told = str(task.config.get("unseen_losses", ""))
    if told and client.removed is not None:
        student = workspace.load("student", task.arrays["model"])
        logits = predict(student.module, client.removed)
        unseen = torch.tensor([float(loss) for loss in told.split()])
        if not remembers(logits, client.removed.labels.cpu(), unseen):
            return nothing_to_learn(task)
    return goldfish_step(task, client, workspace)


def remembers(logits: Tensor, labels: Tensor, unseen: Tensor) -> bool:
    """Tell whether a model remembers removed samples: their loss is far below that of unseen ones.

    ``unseen`` holds the mean loss of the unseen samples of each class, NaN where there is none;
    classes weigh as they do among the removed samples.
    """
    known = ~unseen[labels].isnan()
    losses = F.cross_entropy(logits[known], labels[known], reduction="sum")
    return bool(losses < REMEMBERED * unseen[labels][known].sum())


STEPS: Mapping[str, ClientStep] = {"sprint": sprint_step, **GOLDFISH_STEPS}


def _measures(plan: Plan, settings: Settings) -> Sequence[str]:
    several = cast("GoldfishSprintSettings", settings).most_turns > 1
    return ("how long the sprint lasted",) if several and plan.server is not None else ()


def _notes(_plan: Plan, _settings: Settings) -> Sequence[str]:
    return (
        "The model started from the old one, which knew the removed data: look at the memory gap "
        "beside that of retrain.",
    )


GOLDFISH_SPRINT = Method(
    name="goldfish-sprint",
    summary="The askers unteach the old model, then a few annealed rounds: the fast one.",
    settings=GoldfishSprintSettings,
    steps=STEPS,
    unlearn=unlearn,
    kind="update adjustment",
    deletions=frozenset({"samples", "class"}),
    needs_askers=lambda _plan, _settings: True,
    source="This project, with the loss of Wang, Zhu, Chen, Esteves-Veríssimo: Goldfish",
    measures=_measures,
    notes=_notes,
)
