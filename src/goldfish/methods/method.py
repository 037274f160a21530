"""The one shape of all methods, and the round loop that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from goldfish.errors import ConfigError, DivergenceError, QuorumError
from goldfish.params import all_finite, num_bytes, weighted_mean
from goldfish.training import Settings, TrainingSettings
from goldfish.types import (
    ClientStep,
    DeletionRequest,
    Federation,
    Params,
    Round,
    RoundReplies,
    Scalar,
    Task,
    Update,
)
from goldfish.unlearning.extension import ServerTest, adaptive_weights


@dataclass(frozen=True)
class Plan:
    """What a phase (the original training, or one method's unlearning) is given.

    All methods of a comparison get the same plan, apart from its name.
    """

    phase: str
    """A name, under which clients keep what they must: ``origin``, or the method's."""
    federation: Federation
    training: TrainingSettings
    rounds: int
    seed: int
    fresh: Params
    """Newly initialised weights and buffers."""
    requests: Sequence[DeletionRequest] = ()
    original: Params | None = None
    """The model to unlearn from; None in the original training."""
    original_phase: str = "origin"
    """Under which name the clients keep what that model's training left them."""
    server: ServerTest | None = None
    last: tuple[int, Params] | None = None
    """The last finished round and its model, when the phase goes on after an interruption."""


@dataclass(frozen=True)
class Method:
    """A way to unlearn: the client's side by name, and the server's side as rounds."""

    name: str
    summary: str
    settings: type[Settings]
    steps: Mapping[str, ClientStep]
    unlearn: Callable[[Plan, Settings], Iterator[Round]]
    notes: Callable[[Plan, Settings], Sequence[str]] = lambda _plan, _settings: ()
    """What a reader of the result must know, in sentences."""


def federated_rounds(
    plan: Plan,
    steps: Mapping[str, ClientStep],
    step: str,
    config: Mapping[str, Scalar],
    *,
    start: Params,
    constants: Mapping[str, Params] | None = None,
    adaptive: bool = False,
) -> Iterator[Round]:
    """Yield rounds in which every remaining client runs ``step`` and the server averages.

    A client whose whole data is to be removed is not asked.
    """
    if adaptive and plan.server is None:
        raise ConfigError(
            "Adaptive weights (equation 12) measure clients on the server's test set: pass one "
            "(test=...), or switch them off (adaptive_weights = false, aggregation = 'size')."
        )
    gone = {r.client_id for r in plan.requests if r.sample_ids is None and r.class_label is None}
    members = [c for c in plan.federation.client_ids if c not in gone]
    done, params = plan.last or (0, start)
    for index in range(done + 1, plan.rounds + 1):
        tasks = [
            Task(
                client_id=client_id,
                step=step,
                arrays={"model": params},
                constants=constants or {},
                config={
                    **config,
                    "phase": plan.phase,
                    "round": index,
                    "last_round": plan.rounds,
                    "seed": plan.seed,
                },
                requests=[r for r in plan.requests if r.client_id == client_id],
            )
            for client_id in members
        ]
        replies = plan.federation.run(tasks, steps)
        updates = _check(replies, len(tasks), index, plan)
        weights = _weights(updates, plan.server if adaptive else None)
        params = weighted_mean((u.params for u in updates), weights)
        sent = _bytes_sent(tasks, replies, first=index == 1)
        yield Round(index, params, replies.updates, replies.failures, sent)


def _check(replies: RoundReplies, asked: int, index: int, plan: Plan) -> list[Update]:
    """Return the updates that count, or raise: no finite numbers, or too few answers."""
    where = f"in round {index} of {plan.phase}"
    for failure in replies.failures:
        if failure.error == "DivergenceError":
            raise DivergenceError(
                f"Non-finite loss on {failure.client_id} {where}: {failure.cause}. If that is not "
                f"the cause, lower learning_rate (now {plan.training.learning_rate:g})."
            )
        if failure.error == "ConfigError":
            raise ConfigError(f"{failure.client_id} {where}: {failure.cause}")
    answered = len(replies.updates)
    if answered < plan.training.quorum * asked:
        causes = "; ".join(f"{f.client_id}: {f.error}: {f.cause}" for f in replies.failures[:3])
        raise QuorumError(
            f"Only {answered} of {asked} clients answered {where}; the quorum is "
            f"{plan.training.quorum:.0%} (training.quorum). First causes: {causes}"
        )
    updates = [u for u in replies.updates if u.num_examples > 0]
    if not updates:
        raise ConfigError(f"No client has any data left {where}: there is nothing to learn from.")
    for update in updates:
        if not all_finite(update.params):
            raise DivergenceError(
                f"Non-finite weights from {update.client_id} {where}: lower learning_rate "
                f"(now {plan.training.learning_rate:g})."
            )
    return updates


def _weights(updates: Sequence[Update], server: ServerTest | None) -> list[float]:
    if server is None:
        return [float(u.num_examples) for u in updates]
    return adaptive_weights([server.score(u.params).mse for u in updates])


def _bytes_sent(tasks: Sequence[Task], replies: RoundReplies, *, first: bool) -> int:
    """Count what crosses the wire: arrays both ways; constants travel in the first round only."""
    down = sum(num_bytes(p) for t in tasks for p in t.arrays.values())
    once = sum(num_bytes(p) for t in tasks for p in t.constants.values()) if first else 0
    up = sum(num_bytes(u.params) for u in replies.updates)
    return down + once + up
