"""What the client steps of all methods share: how they read a task and how they answer it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from goldfish.data import RandomCropFlip
from goldfish.errors import ConfigError
from goldfish.randomness import derive_seed, generator
from goldfish.settings import TrainingSettings
from goldfish.training.batches import Transform, plain_batches, reads_alike
from goldfish.training.fit import Fitted, cross_entropy_objective, fit, predict
from goldfish.training.teacher import Teacher
from goldfish.types import Client, Examples, Params, Task, Update, Workspace

Fit: TypeAlias = Callable[..., Fitted]
"""The training loop, :func:`goldfish.training.fit.fit`, or that loop with more arguments given."""


def task_generator(task: Task[Any], purpose: str, *parts: int) -> torch.Generator:
    """Return the generator for one purpose of this client in this round.

    The method's name is not part of it: all methods see the data in the same order.
    """
    context = task.context
    return generator(context.seed, purpose, context.round, task.client_id, *parts)


def transform_of(settings: TrainingSettings) -> Transform | None:
    """Return the augmentation that the settings ask for."""
    return RandomCropFlip() if settings.augment else None


def train_on(
    task: Task[Any],
    examples: Examples,
    workspace: Workspace,
    start: Params,
    *purpose: int,
    fit: Fit = fit,
    max_steps: int | None = None,
) -> tuple[Params, Fitted]:
    """Train from ``start`` with the cross-entropy; ``purpose`` tells trainings of a task apart."""
    model = workspace.load("student", start)
    order = task_generator(task, "batches", *purpose)
    fitted = fit(
        model,
        len(examples),
        plain_batches(examples, model.device, order, transform_of(task.training)),
        cross_entropy_objective,
        task.training,
        learning_rate=task.context.learning_rate,
        generator=order,
        max_steps=max_steps,
    )
    return model.params(), fitted


def teacher_of(
    task: Task[Any],
    client: Client,
    workspace: Workspace,
    name: str,
    examples: Examples,
    *purpose: int,
) -> Teacher:
    """Return a teacher of these examples: its logits of them if they can be known, else the model.

    ``name`` is that of the task's constant. A teacher does not change in a phase, so it is asked in
    the first round that the client takes part in, and its logits are kept for the others: one set
    for each ``purpose`` (a shard), until another phase comes. Where the inputs change, by
    augmentation or in the dataset itself, the model is asked batch by batch; of the data without
    augmentation its logits are kept then too, once they are needed.
    """
    constant = task.constants[name]
    fingerprint = f"{task.context.phase} {constant.digest} {digest_of_ids(examples)}"
    key = "/".join(["teacher-logits", *map(str, purpose)])
    cache = client.state.cache
    no_logits = torch.empty(0)  # no logits stand for inputs that change

    def known() -> tuple[Tensor, int]:
        found, logits = cache.get(key, ("", no_logits))
        asked = 0
        if found != fingerprint:
            logits = no_logits
            if reads_alike(examples):
                teacher = workspace.load("teacher", constant.params)
                logits = predict(teacher.module, examples).to(teacher.device)
                asked = len(examples)
            cache[key] = fingerprint, logits
        return logits, asked

    if not task.training.augment:
        logits, asked = known()
        if len(logits):
            return Teacher(logits, asked)
    return Teacher(workspace.load("teacher", constant.params).module, known=known)


def digest_of_ids(examples: Examples) -> str:
    """Return a digest of the ids of examples, in their order."""
    return _digest_of(tuple(examples.ids))


@functools.lru_cache(maxsize=1000)
def _digest_of(ids: tuple[str, ...]) -> str:
    return f"{derive_seed(0, *ids):016x}"


def shard_key(phase: str, index: int) -> str:
    """Return the key under which a client keeps the model of a shard."""
    return f"{phase}/shard-{index}"


def answer(
    task: Task[Any],
    params: Params,
    num_examples: int,
    fits: Sequence[Fitted],
    counts: Mapping[str, float] | None = None,
) -> Update:
    """Return the update: its loss is the mean risk of the last epochs, ``counts`` more metrics."""
    last = [fitted.epoch_risks[-1] for fitted in fits]
    metrics = {
        "loss": sum(last) / len(last) if last else 0.0,
        "steps": sum(fitted.steps for fitted in fits),
        "samples": sum(fitted.samples for fitted in fits),
        "teacher_samples": sum(fitted.teacher_samples for fitted in fits),
        "fisher_samples": sum(fitted.fisher_samples for fitted in fits),
        **(counts or {}),
    }
    return Update(task.client_id, params, num_examples, metrics)


def refuse_missing(client: Client) -> None:
    """Raise where samples are deleted already that the client must show the old model once more."""
    if client.missing:
        raise ConfigError(
            f"Sample {client.missing[0]!r} of {client.id} is not there any more, so the old model "
            f"cannot be untaught it ({len(client.missing)} in all): use a method that starts from "
            "fresh weights, such as goldfish or retrain."
        )


def check_asker(client: Client) -> None:
    """Raise where a client cannot unteach the old model what it wants removed.

    For methods that forget through their askers: they start from a model that knows the data. A
    client that had nothing left before has nothing to unteach.
    """
    refuse_missing(client)
    if client.removed is not None and len(client.retained) == 0:
        raise ConfigError(
            f"This deletion takes all that {client.id} has, as if it left, so nobody is left to "
            "unteach the old model: file it as a request without samples and class, and use a "
            "method that removes clients ('goldfish methods')."
        )


def nothing_to_learn(task: Task[Any], counts: Mapping[str, float] | None = None) -> Update:
    """Return the answer of a client that has no data left."""
    return answer(task, task.arrays["model"], 0, [], counts)
