"""FedEraser: rebuild the model from kept updates, each turned by a short calibration.

Liu, Ma, Yang, Wang and Liu, "FedEraser: Enabling Efficient Client-Level Data Removal from Federated
Learning Models", IWQoS 2021. During training the server keeps every client's update of one round
in ``keep_every``. To unlearn, it goes through the kept rounds, from the initial model on: the
remaining clients take a few local steps from the current unlearned model; that says in which
*direction* an update without the removed data points. The kept update says how *long* it is.

The start of any later kept round has seen the removed data, so only that of round 1, the
initialisation, is used; round 1 is therefore always kept. Its updates were computed from a model
that had seen nothing: those of clients that remove nothing are used as they are, without asking.

What is ours:

- Direction and length are per tensor. Lengths of updates differ between layers by orders of
  magnitude; one length for the whole model would let the layer that dominates the calibration
  decide how far all others go.
- The calibration may also be given in steps. Mind that a short one is stretched: its first
  direction is followed for the length of a whole round, past where it would have turned.
- A tensor that did not move in the calibration has no direction and stays as it is.
- Buffers (BatchNorm's statistics) are taken from the calibration as they are: they are no updates,
  and a stretched variance can become negative.
- The paper removes whole clients. When a client removes samples or a class, it calibrates on the
  data that it retains, and its kept updates, which the removed data helped to make, give the length
  alone. Those lengths, as those of all other clients after round 1, were measured on the original
  trajectory: what is left of the removed data is in them, so the result is approximate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from goldfish import params as P  # noqa: N812
from goldfish.errors import ConfigError
from goldfish.methods.method import (
    Method,
    Plan,
    ask,
    average,
    deletion_kind,
    kept_updates,
    weight_names,
)
from goldfish.methods.steps import answer, nothing_to_learn, train_on
from goldfish.settings import Count, Settings
from goldfish.types import Client, Params, Round, Step, Task, Update, Workspace


class FedEraserSettings(Settings):
    """How often updates are kept, and how long a client calibrates."""

    keep_every: Count = 2
    """The server keeps all updates of one round in so many (the paper's interval)."""
    calibration_ratio: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a FedAvg round's local steps that a calibration takes (the paper's ratio)."""
    calibration_steps: Count | None = None
    """Local steps of a calibration, instead of the share; at most those of a FedAvg round."""


def kept_rounds(settings: FedEraserSettings, rounds: int) -> Sequence[int]:
    """Return the rounds 1, 1 + k, 1 + 2k, ...: the first one always, it starts from nothing."""
    return range(1, rounds + 1, settings.keep_every)


def _replayed(plan: Plan, settings: FedEraserSettings) -> Sequence[int]:
    """Return the kept rounds that the method goes through."""
    return [i for i in sorted(plan.origin.history) if (i - 1) % settings.keep_every == 0]


def unlearn(plan: Plan, settings: FedEraserSettings) -> Iterator[Round]:
    """Yield one round for each kept round; the last one is final.

    What was kept sets their number: ``plan.rounds`` neither shortens nor prolongs it. A schedule
    of the step size spans the kept rounds. The clients of a round are those whose updates were kept
    in it, less those that left; they are weighted by samples.
    """
    history = plan.origin.history
    indices = _replayed(plan, settings)
    initial = history[1].start
    weights = weight_names(plan.federation.model, initial)
    plan = replace(plan, rounds=len(indices))
    staying, losing = set(plan.staying), {request.client_id for request in plan.requests}
    params = plan.last.params if plan.last else initial
    for index in plan.to_do:
        entry = history[indices[index - 1]]
        kept = {c: update for c, update in kept_updates(plan, entry).items() if c in staying}
        # Of the first round's updates, those that no removed sample had a part in stay.
        untouched = {c: kept[c] for c in kept if index == 1 and c not in losing}
        asking = [client_id for client_id in kept if client_id not in untouched]
        # The quorum is that of all clients of the round, of whom those untouched are there.
        needed = plan.training.quorum * len(kept) - len(untouched)
        asked = ask(
            plan,
            CALIBRATE,
            index,
            params,
            settings,
            clients=asking,
            quorum=max(0.0, needed / len(asking)) if asking else 0.0,
            may_be_empty=True,
        )
        updates = list(untouched.values())
        for update in asked.learned:
            before = P.subtract(kept[update.client_id].params, entry.start)
            change = calibrated_update(before, P.subtract(update.params, params), weights)
            updates.append(replace(update, params=P.add(params, change)))
        if updates:
            params = average(updates, plan.training)
        final = index == plan.rounds
        if final and P.distance(params, initial) == 0:
            raise ConfigError(
                "No client has any data left in any kept round: there is nothing to learn from."
            )
        yield replace(asked, params=params, final=final)


def calibrated_update(kept: Params, calibration: Params, weights: Collection[str]) -> Params:
    """Return an update with the direction of ``calibration`` and the length of ``kept``.

    Both are changes of a model; lengths are Euclidean norms, tensor by tensor. What is not among
    ``weights`` is that of the calibration.
    """
    update = dict(calibration)
    for name in weights:
        length = update[name].norm()
        if length != 0:  # without a direction it stays as it is
            update[name] = update[name] * (kept[name].norm() / length)
    return update


def calibrate_step(task: Task[FedEraserSettings], client: Client, workspace: Workspace) -> Update:
    """Take a few steps of local SGD on the client's remaining data."""
    settings, training, count = task.settings, task.training, len(client.retained)
    if count == 0:
        return nothing_to_learn(task)
    whole_round = training.local_epochs * math.ceil(count / training.batch_size)
    steps = settings.calibration_steps or max(1, round(settings.calibration_ratio * whole_round))
    start = task.arrays["model"]
    params, fitted = train_on(task, client.retained, workspace, start, max_steps=steps)
    return answer(task, params, count, [fitted])


CALIBRATE = Step("calibrate", calibrate_step, FedEraserSettings)


def _check(plan: Plan, _settings: FedEraserSettings) -> None:
    """Raise where the rounds would be averaged otherwise than was asked."""
    if plan.training.robust:
        raise ConfigError(
            "FedEraser rebuilds the model from each client's kept updates, weighed by samples; "
            f"aggregation = {plan.training.aggregation!r} knows no weights. Use max_update_norm, "
            "which bounds kept updates too, or another method."
        )


def _notes(plan: Plan, settings: FedEraserSettings) -> Sequence[str]:
    notes = [
        "The length of each client's updates comes from a training that saw the removed data; only "
        f"their direction is new. Kept: one round in {settings.keep_every}.",
    ]
    if any(deletion_kind(r) != "client" for r in plan.requests):
        notes.append(
            "The paper removes whole clients; removing samples or a class goes past it: the client "
            "that asks calibrates on what it retains."
        )
    return notes


FED_ERASER = Method(
    name="fed-eraser",
    summary="Rebuild the model from kept updates: calibrated direction, kept length.",
    settings=FedEraserSettings,
    steps=[CALIBRATE],
    unlearn=unlearn,
    kind="update adjustment",
    source=(
        "Liu, Ma, Yang, Wang, Liu: FedEraser: Enabling Efficient Client-Level Data Removal from "
        "Federated Learning Models. IWQoS 2021"
    ),
    keeps="every client's update of one round in keep_every, on the server",
    kept_rounds=kept_rounds,
    lasts=lambda plan, settings: len(_replayed(plan, settings)),
    check=_check,
    measures=lambda _plan, _settings: (),
    notes=_notes,
)
