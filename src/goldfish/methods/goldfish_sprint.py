"""Goldfish as a sprint: the old model unlearns at the clients that asked, then a few rounds repair.

Ours, not the paper's; the loss is the paper's. The model starts from the old one.

1. The sprint: the clients that asked, and they alone, take some steps on their removed and
   remaining data with the complete Goldfish loss, and the mean of their results is the model. In
   ordinary rounds all other clients would thin out what they unteach. Where one of them still
   remembers, by the loss of unseen samples on the server's test set, it takes some more. Each
   removed sample is unlearned as far as the nearest remaining samples say that it should be: one
   whose neighbours have its label would be known without being seen.
2. The rounds: all clients train, together as long as a share of the training. The step size starts
   anew and falls to 0 over these rounds, along a cosine. The askers go on unteaching; the teacher
   is not asked any more.

``docs/fast.md`` has what was measured and what was tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import NonNegativeInt
from torch import Tensor

from goldfish.hardware.gpu import to_cpu
from goldfish.methods.goldfish import train_student
from goldfish.methods.method import Method, Plan, ask, average, weight_names
from goldfish.methods.steps import answer, check_asker, digest_of_ids, nothing_to_learn
from goldfish.params import digest
from goldfish.settings import (
    Count,
    NonNegative,
    Positive,
    Settings,
    TrainingSettings,
    learning_rate_at,
)
from goldfish.training.fit import batch_sizes, predict
from goldfish.types import Client, Constant, Examples, Params, Round, Step, Task, Update, Workspace
from goldfish.unlearning.basic_model import GoldfishSettings

FURTHER = 1 / 3
"""Length of a further turn of the sprint, as a share of the first."""

LONGEST = 0.1
"""A turn takes at most this share of the steps that the client took in the training: where these
were few, a longer one would harm the model."""

COMPARED = 3000
"""Remaining samples of a client, at most, among which neighbours are looked for."""

READ_AT_ONCE = 1000
"""Remaining samples that are compared with all removed ones at a time."""

REMEMBERED = 0.5
"""Removed samples whose mean loss is below this share of that of unseen ones are remembered."""


class GoldfishSprintSettings(Settings):
    """The settings of the sprint; its rounds are its own, whatever the other methods take."""

    sprint_steps: Count = 16
    """SGD steps of the clients that asked, in the first turn of the sprint; at most a tenth of
    those that they took in the training."""
    sprint_passes: Positive = 2.0
    """Passes over the removed data in these steps; a step takes no more of it than a batch."""
    most_turns: Count = 3
    """Turns of the sprint; those after the first are a third as long, while data is remembered."""
    anneal_share: Positive = 0.06
    """Length of the rounds of all clients after it, as a share of the epochs of the training."""
    anneal_rounds: Count = 8
    """How many rounds they are."""
    sprint_step: Positive = 0.75
    """Step size of the sprint, as a share of the mean step size of the training."""
    sprint_gain: Positive = 1.0
    """How far the model goes along the mean change of the askers: above 1 makes up for the mean,
    in which each of several askers' own unteaching counts only in part."""
    anneal_step: Positive = 0.75
    """Step size of the first of these rounds, as such a share; a cosine brings it to 0."""
    removed_weight: NonNegative = 0.7
    """Weight of the removed data's part in the hard loss, equation (1)."""
    mu_c: NonNegative = 0.25
    """Weight of the confusion loss in equation (6)."""
    mu_d: NonNegative = 1.0
    """Weight of the distillation loss in equation (6), in the sprint alone."""
    neighbours: NonNegativeInt = 5
    """Nearest remaining samples of its client by which a removed sample is unlearned: the more of
    them have its label, the less. 0: all are unlearned until they are known as little as a guess,
    which removes a backdoor more surely."""


class SprintSettings(GoldfishSettings):
    """What the clients are told, in the sprint and in the rounds."""

    steps: Count | None = None
    """SGD steps of the sprint, and no more than ``epochs`` passes over all of the client's data;
    without them, ``epochs`` count."""
    epochs: Positive = 1.0
    """Passes over the remaining data, or a part of one."""
    removed_passes: Positive = 1.0
    """Passes over the removed data in the meantime."""
    neighbours: NonNegativeInt = 0
    """As in :class:`GoldfishSprintSettings`."""
    unseen_losses: tuple[float | None, ...] = ()
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
    rounds = settings.anneal_rounds
    before = plan.origin.settings
    epochs = settings.anneal_share * before.rounds * before.local_epochs / rounds
    loss = _told(settings, mu_d=0.0, epochs=epochs, removed_passes=epochs)
    for place in range(done - turns + 1, rounds + 1):
        training = _training(plan, settings.anneal_step * cosine(place, rounds))
        asked = ask(replace(plan, training=training), SPRINT, turns + place, params, loss)
        params = average(asked.learned, plan.training)
        yield replace(asked, params=params, final=place == rounds, memo={"turns": turns})


def _lasts(plan: Plan, settings: GoldfishSprintSettings) -> int:
    """Return how many rounds there will be: while the sprint lasts, one more turn is expected."""
    done = plan.last
    turns = 1 if done is None else int(done.memo["turns"]) or done.index + 1
    return turns + settings.anneal_rounds


def _turn(plan: Plan, settings: GoldfishSprintSettings, index: int, params: Params) -> Round:
    """Let the askers train: all of them in the first turn, those that still remember in others."""
    before = plan.origin.settings
    share = 1.0 if index == 1 else FURTHER
    unseen = plan.server.class_losses(params) if index > 1 and plan.server is not None else ()
    told = _told(
        settings,
        mu_d=settings.mu_d,
        steps=math.ceil(share * settings.sprint_steps),
        epochs=LONGEST * before.participation * before.rounds * before.local_epochs,
        removed_passes=share * settings.sprint_passes,
        unseen_losses=unseen,
    )
    teacher = plan.origin.params
    asked = ask(
        replace(plan, training=_training(plan, settings.sprint_step)),
        SPRINT,
        index,
        params,
        told,
        constants={"teacher": Constant(teacher, digest(teacher))} if settings.mu_d else {},
        clients=plan.askers,
        quorum=1.0,  # the data of a client that fails here would stay in the model
        may_be_empty=index > 1,
    )
    if asked.learned:
        mean = average(asked.learned, plan.training)
        params = mean if settings.sprint_gain == 1 else _beyond(plan, params, mean, settings)
    ended = not asked.learned or index == settings.most_turns or plan.server is None
    return replace(asked, params=params, memo={"turns": index if ended else 0})


def _beyond(plan: Plan, start: Params, mean: Params, settings: GoldfishSprintSettings) -> Params:
    """Return the mean with its weights moved on, away from ``start``, by the gain."""
    weights = weight_names(plan.federation.model, start)
    return {**mean, **{n: start[n].lerp(mean[n], settings.sprint_gain) for n in weights}}


def _training(plan: Plan, share: float) -> TrainingSettings:
    """Return how clients train, without shards, at a share of the training's mean step size."""
    before = plan.origin.settings
    rounds = range(1, before.rounds + 1)
    mean = sum(learning_rate_at(before, i, before.rounds) for i in rounds) / before.rounds
    own = {"learning_rate": share * mean, "schedule": "constant", "shards": 1}
    return plan.training.model_copy(update=own)


def _told(settings: GoldfishSprintSettings, **more: Any) -> SprintSettings:
    """Return what clients are told of the loss, and ``more``."""
    more |= settings.model_dump(include={"removed_weight", "mu_c", "neighbours"})
    return SprintSettings(student="teacher", adaptive_temperature=False, local_stop=False, **more)


def cosine(place: int, rounds: int) -> float:
    """Return the share of the first step size in a round (from 1) of so many."""
    return 0.5 * (1 + math.cos(math.pi * (place - 1) / rounds))


def sprint_step(task: Task[SprintSettings], client: Client, workspace: Workspace) -> Update:
    """Train on remaining and removed data; in a further turn, only where it is remembered.

    In the sprint a client that has nothing of what is asked for, such as a class, has no part.
    The removed data's part of the loss is a mean, as in the paper, which would push twenty samples
    as hard as two thousand. In the sprint a removed sample weighs as much as a remaining one.
    """
    check_asker(client)
    settings, training, retained = task.settings, task.training, client.retained
    asked = 0 if client.removed is None else len(client.removed)
    if not len(retained) or (settings.steps and not asked):
        return nothing_to_learn(task)
    measured = {}
    if settings.unseen_losses and client.removed is not None:
        student = workspace.load("student", task.arrays["model"])
        logits = predict(student.module, client.removed)
        measured = {"measured_samples": asked}
        if not remembers(logits, client.removed.labels.cpu(), settings.unseen_losses):
            return nothing_to_learn(task, measured)
    trained_on = len(retained) + (asked if settings.steps else 0)
    in_epoch = len(batch_sizes(trained_on, training.batch_size))
    steps = max(1, round(settings.epochs * in_epoch))
    steps = min(steps, settings.steps or steps)
    size = min(training.batch_size, math.ceil(settings.removed_passes * asked / steps))
    if settings.steps:  # the sprint
        share = min(1.0, size / min(training.batch_size, len(retained)))
        weights = {"removed_weight": share * settings.removed_weight, "mu_c": share * settings.mu_c}
        task = replace(task, settings=settings.model_copy(update=weights))
    params, fitted = train_student(
        task,
        client,
        workspace,
        task.arrays["model"],
        steps=steps,
        removed_size=size or None,
        removed_targets=_targets(client, settings.neighbours),
    )
    return answer(task, params, len(retained), [fitted], measured)


SPRINT = Step("sprint", sprint_step, SprintSettings)


def _targets(client: Client, neighbours: int) -> Tensor | None:
    """Return the targets of a client's removed samples; they are found once, and then kept."""
    if client.removed is None or not neighbours:
        return None
    fingerprint = f"{neighbours} {digest_of_ids(client.retained)} {digest_of_ids(client.removed)}"
    found, targets = client.state.cache.get("removed-targets", ("", None))
    if targets is None or found != fingerprint:
        targets = neighbour_losses(client.removed, client.retained, neighbours)
        client.state.cache["removed-targets"] = fingerprint, targets
    return targets if len(targets) else None


@torch.no_grad()
def neighbour_losses(removed: Examples, retained: Examples, neighbours: int) -> Tensor:
    """Return about the loss that a model which never saw them would have on removed samples.

    The nearest remaining samples, by the Euclidean distance of inputs, are such a model. If s of k
    have the sample's label, it gives the label the probability (s + 1/2) / (k + 1): the estimator
    of Krichevsky and Trofimov, which is never sure. Of many remaining samples only some are
    looked at, evenly spaced. Empty where inputs are integers, such as tokens: their distance means
    nothing.
    """
    inputs, labels = removed.batch(torch.arange(len(removed)))
    if not inputs.is_floating_point():
        return torch.empty(0)
    rows = inputs.flatten(1)
    nearest, alike = rows.new_empty((len(rows), 0)), labels.new_empty((len(rows), 0))
    compared = min(len(retained), COMPARED)
    some = torch.arange(compared) * len(retained) // max(1, compared)
    for places in some.split(READ_AT_ONCE):
        others, theirs = retained.batch(places)
        distances = torch.cat([nearest, torch.cdist(rows, others.flatten(1))], dim=1)
        same = torch.cat([alike, (labels[:, None] == theirs).to(alike)], dim=1)
        nearest, chosen = distances.topk(min(neighbours, distances.shape[1]), largest=False)
        alike = same.gather(1, chosen)
    shares = (alike.sum(dim=1) + 0.5) / (alike.shape[1] + 1)
    return to_cpu(-shares.log())


def remembers(logits: Tensor, labels: Tensor, unseen: Sequence[float | None]) -> bool:
    """Tell whether a model remembers removed samples: their loss is far below that of unseen ones.

    ``unseen`` holds the mean loss of the unseen samples of each class, None where there is none;
    classes weigh as they do among the removed samples.
    """
    expected = torch.tensor([math.nan if loss is None else loss for loss in unseen])[labels]
    known = ~expected.isnan()
    losses = F.cross_entropy(logits[known], labels[known], reduction="sum")
    return bool(losses < REMEMBERED * expected[known].sum())


def _notes(plan: Plan, _settings: GoldfishSprintSettings) -> list[str]:
    """Say what a reader must know, and which settings of the unlearning have no effect."""
    notes = [
        "The model started from the old one, which knew the removed data: look at the memory gap "
        "beside that of retrain."
    ]
    names = ("learning_rate", "schedule", "step_every", "step_factor", "local_epochs")
    idle = [n for n in names if getattr(plan.training, n) != getattr(plan.origin.settings, n)]
    if plan.training.aggregation == "adaptive":
        notes.append("Clients were weighed by their number of samples, not by aggregation.")
    if idle:
        notes.append(
            f"Settings of the unlearning that had no effect: {', '.join(idle)}. This method goes "
            "by those of the training, and by its own: sprint_step, anneal_step and anneal_share."
        )
    return notes


GOLDFISH_SPRINT = Method(
    name="goldfish-sprint",
    summary="The askers unteach the old model, then a few annealed rounds: the fast one.",
    settings=GoldfishSprintSettings,
    steps=[SPRINT],
    unlearn=unlearn,
    kind="update adjustment",
    deletions=frozenset({"samples", "class"}),
    needs_askers=lambda _plan, _settings: True,
    lasts=_lasts,
    source="This project, with the loss of Wang, Zhu, Chen, Esteves-Veríssimo: Goldfish",
    measures=lambda _plan, own: ("how long the sprint lasted",) if own.most_turns > 1 else (),
    notes=_notes,
)
