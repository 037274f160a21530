"""Ordinary federated training: local SGD on every client, then the server averages.

It makes the original model, and it is the client's side of retraining from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from goldfish.feeds import plain_feed
from goldfish.methods.method import Plan, federated_rounds
from goldfish.methods.steps import (
    answer,
    nothing_to_learn,
    shard_key,
    task_generator,
    task_learning_rate,
    transform_of,
)
from goldfish.params import params_of
from goldfish.training import Fitted, TrainingSettings, cross_entropy_objective, fit
from goldfish.types import Client, ClientStep, Examples, Params, Round, Task, Update, Workspace
from goldfish.unlearning.optimization import combine, partition_shards

Fit: TypeAlias = Callable[..., Fitted]
"""The training loop, :func:`goldfish.training.fit`, or that loop with more arguments given."""


def train(plan: Plan, start: Params) -> Iterator[Round]:
    """Yield the rounds of ordinary training from ``start`` on the clients' remaining data."""
    return federated_rounds(
        plan,
        STEPS,
        "train",
        plan.training.to_task(),
        start=start,
        constants=shard_constants(plan, start),
        adaptive=plan.training.aggregation == "adaptive",
    )


def shard_constants(plan: Plan, start: Params) -> Mapping[str, Params]:
    """Return what isolated shards start from, whenever their client first takes part."""
    return {"start": start} if plan.training.shard_mode == "isolated" else {}


def train_step(task: Task, client: Client, workspace: Workspace) -> Update:
    """Train the model on the client's remaining data: ``LocalTraining`` of Algorithm 1."""
    return local_training(task, client, workspace, fit)


def local_training(task: Task, client: Client, workspace: Workspace, fit: Fit) -> Update:
    """Train the model, or that of each shard, on the client's remaining data with ``fit``."""
    settings = TrainingSettings.from_task(task.config)
    if len(client.retained) == 0:
        return nothing_to_learn(task)
    if settings.shards > 1:
        return _train_shards(task, client, workspace, settings, fit)
    start = task.arrays["model"]
    params, fitted = _train_on(task, client.retained, workspace, settings, start, fit)
    return answer(task, params, len(client.retained), [fitted])


STEPS: Mapping[str, ClientStep] = {"train": train_step}


def _train_shards(
    task: Task, client: Client, workspace: Workspace, settings: TrainingSettings, fit: Fit
) -> Update:
    """Train each shard's model and combine them by equation (8)."""
    start = task.arrays["model"]
    kept = client.state.arrays
    models: dict[int, Params] = {}
    sizes: dict[int, int] = {}
    fits: list[Fitted] = []
    for shard in partition_shards(client, settings.shards, int(task.config["shard_seed"])):
        sizes[shard.index] = len(shard.retained)
        if not len(shard.retained):
            continue
        key = shard_key(str(task.config["phase"]), shard.index)
        begin = start
        if settings.shard_mode == "isolated":
            begin = kept.get(key, task.constants["start"])
        models[shard.index], fitted = _train_on(
            task, shard.retained, workspace, settings, begin, fit, shard.index
        )
        kept[key] = models[shard.index]
        fits.append(fitted)
    return answer(task, combine(models, sizes), sum(sizes.values()), fits)


def _train_on(
    task: Task,
    examples: Examples,
    workspace: Workspace,
    settings: TrainingSettings,
    start: Params,
    fit: Fit,
    *purpose: int,
) -> tuple[Params, Fitted]:
    model = workspace.load("student", start)
    order = task_generator(task, "batches", *purpose)
    device = next(model.parameters()).device
    fitted = fit(
        model,
        len(examples),
        plain_feed(examples, device, order, transform_of(settings)),
        cross_entropy_objective,
        settings,
        learning_rate=task_learning_rate(task, settings),
        generator=order,
    )
    return params_of(model), fitted
