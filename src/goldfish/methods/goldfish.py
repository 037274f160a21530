"""Goldfish (Wang, Zhu, Chen and Esteves-Verissimo): a fresh student taught by the old model.

The server's side of Algorithm 1 and, for each client, the step that trains its student. That the
student may start from the old model instead (``student = "teacher"``, goldfish-warm) is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from goldfish.errors import ConfigError
from goldfish.methods.method import WARM_START, WEIGHTS, Method, Plan, federated_rounds
from goldfish.methods.steps import (
    answer,
    check_asker,
    nothing_to_learn,
    shard_key,
    task_generator,
    teacher_of,
    transform_of,
)
from goldfish.training.fit import Fitted, batch_sizes
from goldfish.training.teacher import Teacher
from goldfish.types import Client, Params, Round, Step, Task, Update, Workspace
from goldfish.unlearning.basic_model import GoldfishSettings, retrain_student
from goldfish.unlearning.optimization import (
    Shard,
    combine,
    partition_shards,
    recover_shards,
    shard_checkpoint,
)

SOURCE = "Wang, Zhu, Chen, Esteves-Veríssimo: Goldfish: An Efficient Federated Unlearning Framework"


def unlearn(plan: Plan, settings: GoldfishSettings) -> Iterator[Round]:
    """Yield the rounds of Algorithm 1: teacher and student to all clients, then aggregate."""
    teacher = plan.origin.params
    rounds = federated_rounds(
        plan,
        GOLDFISH_STEP,
        settings,
        start=teacher if settings.student == "teacher" else plan.fresh,
        constants={"teacher": teacher},
        adaptive=_weighs_by_error(plan, settings),
    )
    if not settings.round_stop:
        yield from rounds
        return
    if plan.server is None:
        raise ConfigError(
            "round_stop compares losses on the server's test set: pass one (test=...), or leave "
            "round_stop off."
        )
    target = plan.server.score(teacher).loss + settings.delta
    if plan.last is not None and plan.server.score(plan.last.params).loss <= target:
        return
    for this in rounds:
        reached = plan.server.score(this.params).loss <= target
        yield replace(this, final=this.final or reached)
        if reached:
            return


def _weighs_by_error(plan: Plan, settings: GoldfishSettings) -> bool:
    """Tell whether equation (12) weighs clients; by default only where there is a test set."""
    by_default = "adaptive_weights" not in settings.model_fields_set
    return settings.adaptive_weights and not (by_default and plan.server is None)


def goldfish_step(task: Task[GoldfishSettings], client: Client, workspace: Workspace) -> Update:
    """Train the student on one client; with shards, on those that the deletion hit."""
    if task.context.warm:
        check_asker(client)
    if len(client.retained) == 0:
        return nothing_to_learn(task)
    if task.training.shards > 1:
        return _retrain_sharded(task, client, workspace)
    params, fitted = train_student(task, client, workspace, task.arrays["model"])
    return answer(task, params, len(client.retained), [fitted])


GOLDFISH_STEP = Step("goldfish", goldfish_step, GoldfishSettings)


def _retrain_sharded(task: Task[GoldfishSettings], client: Client, workspace: Workspace) -> Update:
    """Unlearn on a client that keeps shard models.

    In the first round that it takes part in, the client starts from the checkpoint of the shards
    that were not hit, equation (9), instead of from the fresh student, and only what was hit is
    retrained. Later rounds go on as in training: shared shards start from the new global model;
    isolated ones never do, so those that were not hit stay as they are.

    Shared shards have seen the data of all clients through the global model. When a client leaves,
    nobody is left to unteach them, so all shards start from the fresh student.
    """
    training, settings, context = task.training, task.settings, task.context
    shards = partition_shards(client, training.shards, context.shard_seed)
    sizes = {shard.index: len(shard.retained) for shard in shards}
    models = _kept_models(client, context.phase, shards)
    first = not models
    if first and (context.warm or training.shard_mode == "isolated"):
        models = _kept_models(client, context.original_phase, shards)
    hit = [shard.index for shard in shards if shard.hit]
    start = task.arrays["model"]
    if first:
        literal = settings.shard_checkpoint == "literal"
        start = shard_checkpoint(models, sizes, hit, literal=literal) or start

    fits: list[Fitted] = []
    if settings.shard_retraining == "client":
        params, fitted = train_student(task, client, workspace, start)
        fits.append(fitted)
        # Where nothing was hit the client's model moved as a whole, and all shards with it.
        models |= recover_shards(params, models, sizes, hit or list(sizes))
    else:
        isolated = training.shard_mode == "isolated"
        for shard in shards:
            untouched = shard.index in models and not shard.hit and (first or isolated)
            if untouched or not sizes[shard.index]:
                continue
            begin = models[shard.index] if isolated and not first else start
            part = replace(client, retained=shard.retained, removed=shard.removed)
            models[shard.index], fitted = train_student(task, part, workspace, begin, shard.index)
            fits.append(fitted)
        params = combine(models, sizes)
    for index, model in models.items():
        client.state.arrays[shard_key(context.phase, index)] = model
    return answer(task, params, sum(sizes.values()), fits)


def _kept_models(client: Client, phase: str, shards: Sequence[Shard]) -> dict[int, Params]:
    kept = client.state.arrays
    keys = {shard.index: shard_key(phase, shard.index) for shard in shards if len(shard.retained)}
    return {index: kept[key] for index, key in keys.items() if key in kept}


def train_student(
    task: Task[Any],
    client: Client,
    workspace: Workspace,
    start: Params,
    *purpose: int,
    steps: int | None = None,
    removed_size: int | None = None,
    removed_targets: Tensor | None = None,
) -> tuple[Params, Fitted]:
    """Train a student from ``start``; the task's settings are :class:`GoldfishSettings`.

    ``purpose`` is the shard, if there are any, whose data alone ``client`` then holds. Instead of
    its local epochs it may take so many ``steps``, each with ``removed_size`` removed samples; of
    less than an epoch the teacher is asked batch by batch, since it need not be asked of all
    samples. ``removed_targets`` are those of :func:`retrain_student`.
    """
    training, settings, retained = task.training, task.settings, client.retained
    student = workspace.load("student", start)
    in_epoch = len(batch_sizes(len(retained), training.batch_size))
    short = steps is not None and steps < in_epoch
    teacher = None
    if settings.mu_d > 0 and not short:
        teacher = teacher_of(task, client, workspace, "teacher", retained, *purpose)
    elif settings.mu_d > 0 or settings.local_stop:
        teacher = Teacher(workspace.load("teacher", task.constants["teacher"].params).module)
    fitted = retrain_student(
        student,
        teacher,
        retained,
        client.removed,
        settings,
        training,
        learning_rate=task.context.learning_rate,
        generator=task_generator(task, "batches", *purpose),
        removed_generator=task_generator(task, "removed", *purpose),
        transform=transform_of(training),
        steps=steps,
        removed_size=removed_size,
        removed_targets=removed_targets,
    )
    return student.params(), fitted


def needs_askers(plan: Plan, settings: GoldfishSettings) -> bool:
    """Tell whether the student starts from models that know the removed data.

    It does when it starts from the teacher, and when it starts from shared shards, unless a client
    leaves: then all start fresh.
    """
    if settings.student == "teacher":
        return True
    shared = plan.training.shards > 1 and plan.training.shard_mode == "shared"
    return shared and not plan.leaving


def check(plan: Plan, settings: GoldfishSettings) -> None:
    """Raise where Goldfish cannot do what is asked."""
    training, before = plan.training, plan.origin.settings
    if (training.shards, training.shard_mode) != (before.shards, before.shard_mode):
        raise ConfigError(
            f"The model was trained with shards = {before.shards} ({before.shard_mode}), and what "
            "clients keep of it is divided so: leave shards and shard_mode as they were."
        )
    if training.shard_mode == "isolated" and settings.shard_retraining == "client":
        raise ConfigError(
            'shard_retraining = "client" trains one model on all shards, which ends their '
            'isolation: use shard_retraining = "shard", or training.shard_mode = "shared".'
        )
    if training.robust and settings.adaptive_weights:
        raise ConfigError(
            f"aggregation = {training.aggregation!r} knows no weights, and adaptive_weights "
            "(equation 12) weighs clients: set adaptive_weights = false for this method, or use "
            "another aggregation."
        )
    if settings.student == "fresh":
        return
    if plan.leaving:
        raise ConfigError(
            f"{plan.leaving[0]} leaves with all of its data, so nobody is left to unteach the old "
            'model: use student = "fresh".'
        )
    if settings.round_stop:
        raise ConfigError(
            "round_stop waits until the student is as good as the teacher, and one that starts "
            'from the teacher is so at once: leave it off, or use student = "fresh".'
        )


def _measures(_plan: Plan, settings: GoldfishSettings) -> Sequence[str]:
    decided = {WEIGHTS: settings.adaptive_weights, "when the rounds ended": settings.round_stop}
    return [what for what, measured in decided.items() if measured]


def _notes(plan: Plan, settings: GoldfishSettings) -> Sequence[str]:
    notes = []
    if settings.adaptive_weights and not _weighs_by_error(plan, settings):
        notes.append(
            "Clients were weighed by their number of samples: adaptive weights (equation 12) need "
            "the server's test set, and none was given."
        )
    if settings.student == "teacher":
        notes.append(WARM_START)
    if plan.training.shards > 1 and plan.training.shard_mode == "shared":
        notes.append(
            "Shards were shared, and a client left: all shards started from the fresh student."
            if plan.leaving
            else "Shards were shared: every shard started its rounds from a global model that had "
            "seen the removed data, so the checkpoints that unlearning started from are not free "
            "of it. This is a warm start: what the removed data taught fades, and traces stay."
        )
    elif plan.training.shards > 1:
        notes.append(
            "Shards were isolated: the checkpoints that unlearning started from never saw the "
            "removed data. The teacher did, and teaches on the remaining data."
        )
    return notes


GOLDFISH = Method(
    name="goldfish",
    summary="A fresh student, taught by the old model on the remaining data (the paper's method).",
    settings=GoldfishSettings,
    steps=[GOLDFISH_STEP],
    unlearn=unlearn,
    needs_askers=needs_askers,
    keeps="with shards, every client's shard models",
    source=SOURCE,
    check=check,
    measures=_measures,
    notes=_notes,
)


class GoldfishWarmSettings(GoldfishSettings):
    """The settings of Goldfish, with a student that starts from the teacher's weights."""

    student: Literal["fresh", "teacher"] = "teacher"
    """The student starts from fresh weights, as in the paper, or from the teacher's."""
    adaptive_weights: bool = False
    """Weigh clients by their error on the server's test set, equations (12) and (13)."""


GOLDFISH_WARM = replace(
    GOLDFISH,
    name="goldfish-warm",
    summary="Goldfish with a student that starts from the old model: fast, and leaves traces.",
    settings=GoldfishWarmSettings,
    kind="update adjustment",
    deletions=frozenset({"samples", "class"}),
    source="This project, after Wang, Zhu, Chen, Esteves-Verissimo: Goldfish",
)
"""Goldfish with a warm start. The student is as good as the teacher from the start, so that
equation (12) would weigh down those clients that unlearn: by default it does not weigh them."""
