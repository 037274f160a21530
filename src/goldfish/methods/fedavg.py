"""FedAvg (McMahan et al. 2017): local SGD on every client, then the server averages.

It makes the original model, and it is the client's side of retraining from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from goldfish.methods.method import Plan, federated_rounds
from goldfish.methods.steps import Fit, answer, nothing_to_learn, shard_key, train_on
from goldfish.settings import TrainingSettings
from goldfish.training.fit import Fitted, fit
from goldfish.types import Client, ClientStep, Params, Round, Task, Update, Workspace
from goldfish.unlearning.optimization import combine, partition_shards


def train(plan: Plan, start: Params) -> Iterator[Round]:
    """Yield the rounds of FedAvg from ``start`` on the clients' remaining data."""
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
    return local_training(task, client, workspace, lambda *_shard: fit)


def local_training(
    task: Task, client: Client, workspace: Workspace, fit_of: Callable[..., Fit]
) -> Update:
    """Train the model, or that of each shard, on the client's remaining data.

    ``fit_of`` gives the training loop: that of the shard whose number it is called with, or, called
    without one, that of the whole client.
    """
    settings = TrainingSettings.from_task(task.config)
    if len(client.retained) == 0:
        return nothing_to_learn(task)
    if settings.shards > 1:
        return _train_shards(task, client, workspace, settings, fit_of)
    start = task.arrays["model"]
    params, fitted = train_on(task, client.retained, workspace, settings, start, fit=fit_of())
    return answer(task, params, len(client.retained), [fitted])


STEPS: Mapping[str, ClientStep] = {"train": train_step}


def _train_shards(
    task: Task,
    client: Client,
    workspace: Workspace,
    settings: TrainingSettings,
    fit_of: Callable[..., Fit],
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
        models[shard.index], fitted = train_on(
            task,
            shard.retained,
            workspace,
            settings,
            begin,
            shard.index,
            fit=fit_of(shard.index),
        )
        kept[key] = models[shard.index]
        fits.append(fitted)
    return answer(task, combine(models, sizes), sum(sizes.values()), fits)
