"""The incompetent teacher (the Goldfish paper's B3): unlearn by bad teaching.

Chundawat, Tarun, Mandal and Kankanhalli: "Can Bad Teaching Induce Forgetting? Unlearning in Deep
Networks Using an Incompetent Teacher", AAAI 2023. The student starts from the old model. On
remaining data it imitates the old model, the competent teacher; on removed data a randomly
initialised one, the incompetent teacher. No label is ever used.

Ours: the federation (each client trains on its own mixture of remaining and removed data, and
counts by the size of that mixture, so that the sum over the clients is the authors' loss over all
data), and that all remaining data is used, of which the authors take a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from goldfish.methods.method import WARM_START, Method, Plan, federated_rounds
from goldfish.methods.steps import (
    answer,
    check_asker,
    nothing_to_learn,
    task_generator,
    teacher_of,
    transform_of,
)
from goldfish.settings import Positive, Settings
from goldfish.training.batches import Batch, logits_of, plain_batches, with_removed
from goldfish.training.fit import fit
from goldfish.training.sgd import Loss
from goldfish.types import Client, Round, Step, Task, Update, Workspace
from goldfish.unlearning.basic_model import removed_batch_size, student_logits


class IncompetentTeacherSettings(Settings):
    """The settings of the incompetent teacher."""

    temperature: Positive = 1.0
    """Temperature at which the student imitates its teachers."""


def imitation_loss(student_logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher || student) at ``temperature``, the mean over the samples."""
    student = F.log_softmax(student_logits / temperature, dim=-1)
    teacher = F.log_softmax(teacher_logits / temperature, dim=-1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def bad_teaching_loss(
    logits: Tensor,
    competent_logits: Tensor,
    removed_logits: Tensor,
    incompetent_logits: Tensor,
    temperature: float,
) -> Tensor:
    """Return the mean over both parts of the batch, each sample imitating its own teacher."""
    student = torch.cat([logits, removed_logits])
    return imitation_loss(student, torch.cat([competent_logits, incompetent_logits]), temperature)


def unlearn(plan: Plan, settings: IncompetentTeacherSettings) -> Iterator[Round]:
    """Yield rounds from the old model; both teachers stay the same and travel once."""
    old = plan.origin.params
    teachers = {"competent": old, "incompetent": plan.fresh}
    return federated_rounds(plan, BAD_TEACHING, settings, start=old, constants=teachers)


def bad_teaching_step(
    task: Task[IncompetentTeacherSettings], client: Client, workspace: Workspace
) -> Update:
    """Train the student, one model without shards, on the client's remaining and removed data."""
    training = task.training
    retained, removed = client.retained, client.removed
    check_asker(client)
    if len(retained) == 0:
        return nothing_to_learn(task)
    student = workspace.load("student", task.arrays["model"])
    incompetent = workspace.load("incompetent", task.constants["incompetent"].params)
    order = task_generator(task, "batches")
    plain = plain_batches(retained, student.device, order, transform_of(training))
    competent = teacher_of(task, client, workspace, "competent", retained)
    batches = competent.teach(plain)
    if removed is not None:
        size = removed_batch_size(training.batch_size, len(retained), len(removed))
        batches = with_removed(batches, removed, size, task_generator(task, "removed"))
    fitted = fit(
        student,
        len(retained),
        batches,
        BadTeachingObjective(incompetent.module, task.settings.temperature),
        training,
        learning_rate=task.context.learning_rate,
        generator=order,
    )
    remaining = len(retained) * len(fitted.epoch_risks)
    competent.count(remaining)
    by_incompetent = fitted.samples - remaining  # it was asked of the removed samples
    mixture = len(retained) + (0 if removed is None else len(removed))
    fitted = replace(fitted, teacher_samples=competent.asked + by_incompetent)
    return answer(task, student.params(), mixture, [fitted])


BAD_TEACHING = Step("bad-teaching", bad_teaching_step, IncompetentTeacherSettings)


@dataclass(frozen=True)
class BadTeachingObjective:
    """Remaining and removed batch in one forward pass of the student."""

    incompetent: nn.Module
    temperature: float

    def __call__(self, student: nn.Module, batch: Batch) -> Loss:
        """Return the loss of the student on a batch."""
        temperature = self.temperature
        competent_logits = cast("Tensor", batch.teacher_logits)
        logits, removed_logits = student_logits(student, batch)
        risk = imitation_loss(logits, competent_logits, temperature)
        if batch.removed is None or removed_logits is None:
            return Loss(risk, risk=risk)
        bad = logits_of(self.incompetent, batch.removed[0])
        total = bad_teaching_loss(logits, competent_logits, removed_logits, bad, temperature)
        return Loss(total, risk=risk)


def _notes(plan: Plan, _settings: Settings) -> Sequence[str]:
    notes = [WARM_START]
    if plan.training.shards > 1:
        notes.append("Shards were not used: each client trained one student on all of its data.")
    return notes


INCOMPETENT_TEACHER = Method(
    name="incompetent-teacher",
    summary="The old model, taught by a random one on the removed data (B3): fast, leaves traces.",
    settings=IncompetentTeacherSettings,
    steps=[BAD_TEACHING],
    unlearn=unlearn,
    kind="update adjustment",
    deletions=frozenset({"samples", "class"}),
    needs_askers=lambda _plan, _settings: True,
    source=(
        "Chundawat, Tarun, Mandal, Kankanhalli: Can Bad Teaching Induce Forgetting? Unlearning in "
        "Deep Networks Using an Incompetent Teacher, AAAI 2023"
    ),
    notes=_notes,
)
