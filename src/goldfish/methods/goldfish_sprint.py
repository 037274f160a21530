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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from goldfish.methods.goldfish import GOLDFISH_STEP, goldfish_step
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
from goldfish.types import Client, Constant, Params, Round, Step, Task, Update, Workspace
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


class SprintSettings(GoldfishSettings):
    """What the clients that sprint are told."""

    unseen_losses: Sequence[float | None] = ()
    """The model's mean loss on unseen samples of each class, None where there is none; empty in
    the first turn, which all of them take."""


def unlearn(plan: Plan, settings: GoldfishSprintSettings) -> Iterator[Round]:
    """Yield the turns of the sprint, then the annealed rounds."""
    params = plan.last.params if plan.last else plan.origin.params
    done = plan.last.index if plan.last else 0
    turns = int(plan.last.memo["turns"]) if plan.last else 0  # of the sprint; 0 while it lasts
    while not turns:
        this = _turn(plan, settings, done + 1, params)
        done, params, turns = this.index, this.params, int(this.memo["turns"])
        yield this
    rounds = anneal_rounds(plan, settings)
    loss = GoldfishSettings(**_loss(settings, mu_d=0.0))
    for place in range(done - turns + 1, rounds + 1):
        training = _training(plan, settings.anneal_step * cosine(place, rounds), local_epochs=1)
        asked = ask(replace(plan, training=training), GOLDFISH_STEP, turns + place, params, loss)
        params = average(asked.learned, plan.training)
        yield replace(asked, params=params, final=place == rounds, memo={"turns": turns})


def _turn(plan: Plan, settings: GoldfishSprintSettings, index: int, params: Params) -> Round:
    """Let the askers train: all of them in the first turn, those that still remember in others."""
    epochs = settings.sprint_epochs if index == 1 else 1
    training = _training(plan, settings.sprint_step, local_epochs=epochs)
    unseen = plan.server.class_losses(params) if index > 1 and plan.server is not None else ()
    teacher = plan.origin.params
    asked = ask(
        replace(plan, training=training),
        SPRINT,
        index,
        params,
        SprintSettings(**_loss(settings, settings.mu_d), unseen_losses=unseen),
        constants={"teacher": Constant(teacher, digest(teacher))} if settings.mu_d else {},
        clients=plan.askers,
        quorum=1.0,  # the data of a client that fails here would stay in the model
        may_be_empty=index > 1,
    )
    if asked.learned:
        params = average(asked.learned, plan.training)
    ended = not asked.learned or index == settings.most_turns or plan.server is None
    return replace(asked, params=params, memo={"turns": index if ended else 0})


def _training(plan: Plan, share: float, **changes: int | float) -> TrainingSettings:
    """Return how clients train, each its data as a whole, at a share of the mean step size."""
    training = plan.training
    rounds = range(1, training.rounds + 1)
    mean = sum(learning_rate_at(training, i, training.rounds) for i in rounds) / training.rounds
    own = {"learning_rate": share * mean, "schedule": "constant", "shards": 1, **changes}
    return training.model_copy(update=own)


def _loss(settings: GoldfishSprintSettings, mu_d: float) -> dict[str, Any]:
    """Return the settings of the Goldfish loss."""
    return {
        "student": "teacher",
        "removed_weight": settings.removed_weight,
        "mu_c": settings.mu_c,
        "mu_d": mu_d,
        "adaptive_temperature": False,
        "local_stop": False,
    }


def anneal_rounds(plan: Plan, settings: GoldfishSprintSettings) -> int:
    """Return how many rounds follow the sprint."""
    before = plan.origin.settings
    by_default = before.rounds * before.local_epochs // EPOCHS_A_ROUND
    return settings.anneal_rounds or max(FEWEST_ROUNDS, by_default)


def cosine(place: int, rounds: int) -> float:
    """Return the share of the first step size in a round (from 1) of so many."""
    return 0.5 * (1 + math.cos(math.pi * (place - 1) / rounds))


def sprint_step(task: Task[SprintSettings], client: Client, workspace: Workspace) -> Update:
    """Take a turn of the sprint; after the first, only where removed samples are remembered."""
    unseen = task.settings.unseen_losses
    if unseen and client.removed is not None:
        student = workspace.load("student", task.arrays["model"])
        logits = predict(student.module, client.removed)
        if not remembers(logits, client.removed.labels.cpu(), unseen):
            return nothing_to_learn(task)
    return goldfish_step(cast("Task[GoldfishSettings]", task), client, workspace)


SPRINT = Step("sprint", sprint_step, SprintSettings)


def remembers(logits: Tensor, labels: Tensor, unseen: Sequence[float | None]) -> bool:
    """Tell whether a model remembers removed samples: their loss is far below that of unseen ones.

    ``unseen`` holds the mean loss of the unseen samples of each class, None where there is none;
    classes weigh as they do among the removed samples.
    """
    expected = torch.tensor([math.nan if loss is None else loss for loss in unseen])[labels]
    known = ~expected.isnan()
    losses = F.cross_entropy(logits[known], labels[known], reduction="sum")
    return bool(losses < REMEMBERED * expected[known].sum())


def _measures(_plan: Plan, settings: GoldfishSprintSettings) -> Sequence[str]:
    return ("how long the sprint lasted",) if settings.most_turns > 1 else ()


def _notes(_plan: Plan, _settings: Settings) -> Sequence[str]:
    return (
        "The model started from the old one, which knew the removed data: look at the memory gap "
        "beside that of retrain.",
    )


GOLDFISH_SPRINT = Method(
    name="goldfish-sprint",
    summary="The askers unteach the old model, then a few annealed rounds: the fast one.",
    settings=GoldfishSprintSettings,
    steps=[SPRINT, GOLDFISH_STEP],
    unlearn=unlearn,
    kind="update adjustment",
    deletions=frozenset({"samples", "class"}),
    needs_askers=lambda _plan, _settings: True,
    source="This project, with the loss of Wang, Zhu, Chen, Esteves-Veríssimo: Goldfish",
    measures=_measures,
    notes=_notes,
)
