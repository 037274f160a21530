"""FedAvg (McMahan et al. 2017): local SGD on every client, then the server averages.

It makes the original model, and it is the client's side of retraining from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from goldfish.methods.method import Plan, federated_rounds
from goldfish.methods.steps import Fit, answer, nothing_to_learn, shard_key, train_on
from goldfish.settings import Settings
from goldfish.training.fit import Fitted, fit
from goldfish.types import Client, Params, Round, Step, Task, Update, Workspace
from goldfish.unlearning.optimization import combine, partition_shards


def train_step(task: Task[Any], client: Client, workspace: Workspace) -> Update:
    """Train the model on the client's remaining data: ``LocalTraining`` of Algorithm 1."""
    return local_training(task, client, workspace, lambda *_shard: fit)


def local_training(
    task: Task[Any], client: Client, workspace: Workspace, fit_of: Callable[..., Fit]
) -> Update:
    """Train the model on the client's remaining data, or one on each shard: equation (8) combines.

    ``fit_of`` gives the training loop: that of the shard whose number it is called with, or, called
    without one, that of the whole client.
    """
    if len(client.retained) == 0:
        return nothing_to_learn(task)
    training, context, kept = task.training, task.context, client.state.arrays
    start = task.arrays["model"]
    if training.shards == 1:
        params, fitted = train_on(task, client.retained, workspace, start, fit=fit_of())
        return answer(task, params, len(client.retained), [fitted])
    models: dict[int, Params] = {}
    sizes: dict[int, int] = {}
    fits: list[Fitted] = []
    for shard in partition_shards(client, training.shards, context.shard_seed):
        sizes[shard.index] = len(shard.retained)
        if not len(shard.retained):
            continue
        key = shard_key(context.phase, shard.index)
        if training.shard_mode == "isolated":
            start = kept.get(key, task.constants["start"].params)
        models[shard.index], fitted = train_on(
            task, shard.retained, workspace, start, shard.index, fit=fit_of(shard.index)
        )
        kept[key] = models[shard.index]
        fits.append(fitted)
    return answer(task, combine(models, sizes), sum(sizes.values()), fits)


TRAIN = Step("train", train_step, Settings)


def train(
    plan: Plan, start: Params, step: Step[Any] = TRAIN, settings: Settings | None = None
) -> Iterator[Round]:
    """Yield the rounds of FedAvg from ``start``: ``step`` on the clients' remaining data."""
    # What isolated shards start from, whenever their client first takes part.
    constants = {"start": start} if plan.training.shard_mode == "isolated" else {}
    return federated_rounds(plan, step, settings or Settings(), start=start, constants=constants)
