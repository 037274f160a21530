"""An asker that is offline, or leaves: what becomes of its request, for every method.

The table of ``docs/methods.md`` is what these tests find, on both engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message

from goldfish.errors import ConfigError, QuorumError
from goldfish.experiments.config import Config
from goldfish.experiments.engine import in_process
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine
from goldfish.federation import InProcess
from goldfish.flower import wire
from goldfish.flower.server_app import engine_on
from goldfish.methods import METHODS
from goldfish.types import Context, Failure, RoundReplies, Task

MakeConfig = Callable[..., Config]
PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
ROUNDS = 3
SHARDS: Mapping[str, dict[str, Any]] = {
    "": {},
    "shared shards": {"shards": 3},
    "isolated shards": {"shards": 3, "shard_mode": "isolated"},
}
ROWS = [*METHODS, "goldfish, shared shards", "goldfish, isolated shards"]
CASES: Mapping[str, tuple[dict[str, Any], Sequence[int]]] = {
    "offline for one round": ({"rate": 0.1}, [1]),
    "offline for all rounds": ({"rate": 0.1}, range(1, ROUNDS + 1)),
    "leaves": ({"clients": ["client-1"]}, []),
}
"""What is asked for, and the rounds of unlearning in which client-1, which asks, is offline."""


def is_lost(client_id: str, context: Context, rounds: Sequence[int]) -> bool:
    training = context.phase in ("origin", "sisa-training")
    return client_id == "client-1" and not training and context.round in rounds


class Unreliable(InProcess):
    """A federation whose first client does not answer in some rounds of unlearning."""

    rounds: Sequence[int] = ()

    def run(self, tasks: Sequence[Task[Any]]) -> RoundReplies:
        lost = [task for task in tasks if is_lost(task.client_id, task.context, self.rounds)]
        replies = super().run([task for task in tasks if task not in lost])
        offline = [Failure(task.client_id, "Timeout", "it is offline") for task in lost]
        return RoundReplies(replies.updates, [*replies.failures, *offline])


def unreliable(rounds: Sequence[int]) -> Callable[..., InProcess]:
    def make(*args: Any) -> InProcess:
        federation = in_process(*args)
        federation.__class__ = Unreliable
        federation.rounds = rounds  # type: ignore[attr-defined]
        return federation

    return make


def unreliable_grid(grid: Any, rounds: Sequence[int]) -> None:
    def fault(message: Message) -> Message:
        if message.metadata.message_type.startswith("train."):
            order = wire.decode_order(message.content).order
            if is_lost(order.client_id, order.context, rounds):
                return Message(Error(0, "it is offline"), reply_to=message)
        reply: Message = grid.carry_out(message)
        return reply

    grid.faults = {10: fault}


def outcome(config: Config, out: Path, engine: Any) -> str:
    """Return what became of the request, in a word or two."""
    try:
        for _ in run_experiment(config, out, Machine(threads=1), engine=engine):
            pass
    except QuorumError:
        return "stops"
    except ConfigError:
        return "refused"
    (name,) = config.unlearning.methods
    method = json.loads((out / "result.json").read_text())["methods"][name]
    return "**not honoured**" if method["not_honoured"] else "honoured"


def table() -> dict[str, dict[str, str]]:
    """Return the table of the page, by method and case."""
    heading = "## When a client that asked is not there"
    section = PAGE.read_text().split(heading)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *rows = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines
    ]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


@pytest.mark.parametrize("engine", ["in process", "flower"])
@pytest.mark.parametrize("case", CASES)
def test_what_becomes_of_a_request_is_what_the_page_says(
    grid: Any, make_config: MakeConfig, tmp_path: Path, case: str, engine: str
) -> None:
    deletion, rounds = CASES[case]
    unreliable_grid(grid, rounds)
    found = {}
    for row in ROWS:
        name, _, shards = row.partition(", ")
        config = make_config(
            deletion=deletion,
            training={"rounds": 2, **SHARDS[shards]},
            unlearning={
                "methods": [name],
                "rounds": ROUNDS,
                "goldfish-sprint": {"anneal_rounds": 1},
            },
        )
        here = unreliable(rounds) if engine == "in process" else engine_on(grid, config.flower)
        found[row] = outcome(config, tmp_path / row, here)
    assert found == {row: cells[case] for row, cells in table().items()}
