"""A Flower grid without processes: the real client app, real messages, and faults on demand."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from goldfish.experiments.config import Config, parse_config
from goldfish.flower.client_app import app

Fault = Callable[[Message], "Message | None"]
"""Stands between a message and its client: returns the reply, or None for no reply at all."""


MEMBERS = ["ward-a", "ward-b", "ward-c"]


def over_the_wire(message: Message) -> Message:
    """Return the message as it arrives: written to bytes, and read back."""
    objects = get_all_nested_objects(message)
    contents = {name: item.deflate() for name, item in objects.items()}
    arrived = cast("Message", inflate_object_from_contents(message.object_id, contents))
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived


NOT_USED = "the federation must not use this part of a grid"


@dataclass
class LocalGrid(Grid):
    """A grid whose nodes are folders; a message is carried out when its reply is asked for.

    Parts of a grid's interface that the federation must not use fail the test that does.
    """

    nodes: dict[int, dict[str, Any]]
    """The node-config of every node that is there."""
    faults: dict[int, Fault] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    replies: list[Message] = field(default_factory=list)
    _waiting: dict[str, Message] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def set_run(self, run: Run) -> None:
        raise AssertionError(NOT_USED)

    @property
    def run(self) -> Run:
        raise AssertionError(NOT_USED)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise AssertionError(NOT_USED)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise AssertionError(NOT_USED)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            name = f"message-{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = name
            self._waiting[name] = over_the_wire(message)
            self.sent.append(self._waiting[name])
            ids.append(name)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        arrived = []
        for name in message_ids:
            message = self._waiting.pop(name, None)
            reply = None if message is None else self.deliver(message)
            if reply is not None:
                arrived.append(over_the_wire(reply))
        self.replies += arrived
        return arrived

    def deliver(self, message: Message) -> Message | None:
        """Let the node carry a message out, unless a fault comes between."""
        fault = self.faults.get(message.metadata.dst_node_id, self.carry_out)
        return fault(message)

    def carry_out(self, message: Message) -> Message:
        """Call the client app, as a node does."""
        node = message.metadata.dst_node_id
        if node not in self.nodes:
            return Message(Error(5, "Node unavailable"), reply_to=message)
        context = Context(1, node, self.nodes[node], RecordDict(), {})
        return app(message, context)

    def hold_back(self, message: Message) -> None:
        """Keep a message for later: its node has not carried it out yet."""
        self._waiting[message.metadata.message_id] = message

    def tasks(self) -> list[Message]:
        """Return the messages that asked for a step."""
        return [m for m in self.sent if m.metadata.message_type.startswith("train.")]


@pytest.fixture(autouse=True)
def _task_identity() -> None:
    """Flower stamps messages with the identity of its process."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


@pytest.fixture
def grid(tmp_path: Path) -> LocalGrid:
    """Three nodes, each with a state-dir of its own, that read the same file of images."""
    return LocalGrid(
        {
            10 + n: {
                "partition-id": n,
                "state-dir": str(tmp_path / "state" / f"node-{n}"),
                "path": str(tmp_path / "images.npz"),
            }
            for n in range(3)
        }
    )


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Small separable images: the class is the brightest of three stripes."""
    draw = np.random.default_rng(0)

    def make(count: int) -> tuple[Any, Any]:
        labels = draw.integers(0, 3, count)
        pixels = draw.integers(0, 120, (count, 6, 6, 1)).astype(np.uint8)
        for image, label in zip(pixels, labels, strict=True):
            image[2 * label : 2 * label + 2] += 100
        return pixels, labels

    path = tmp_path / "images.npz"
    (x_train, y_train), (x_test, y_test) = make(120), make(60)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path


@pytest.fixture
def make_config(images: Path) -> Callable[..., Config]:
    """Return a configuration of a run that takes a second or so."""

    def build(**tables: dict[str, Any]) -> Config:
        values: dict[str, Any] = {
            "engine": "flower",
            "flower": {"poll": 0.001, "patience": 0.2, "timeout": 20.0},
            "data": {"name": "npz", "path": str(images), "clients": 3},
            "model": {"name": "mlp", "options": {"hidden": 8}},
            "training": {"rounds": 3, "batch_size": 10, "learning_rate": 0.05},
            "deletion": {"rate": 0.1},
            "unlearning": {"methods": ["goldfish", "retrain"], "rounds": 2},
        }
        for name, table in tables.items():
            values[name] = table if name == "deletion" else {**values.get(name, {}), **table}
        return parse_config(values)

    return build


@pytest.fixture
def wards(grid: LocalGrid, images: Path, tmp_path: Path) -> LocalGrid:
    """Every node has a file of its own with a third of the samples; the server has the test."""
    whole = np.load(images)
    for number, (node, name) in enumerate(zip(list(grid.nodes), MEMBERS, strict=True)):
        part = slice(40 * number, 40 * number + 40)
        path = tmp_path / f"{name}.npz"
        ids = [f"{name}-{n}" for n in range(40)]
        np.savez(
            path, x_train=whole["x_train"][part], y_train=whole["y_train"][part], ids_train=ids
        )
        state = grid.nodes[node]["state-dir"]
        grid.nodes[node] = {"client-id": name, "data": "npz", "path": str(path), "state-dir": state}
    np.savez(tmp_path / "test.npz", x_test=whole["x_test"], y_test=whole["y_test"])
    return grid


@pytest.fixture
def make_own(make_config: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    def build(**tables: Any) -> Config:
        data = {"path": str(tmp_path / "test.npz"), "members": MEMBERS}
        return make_config(data=data, **tables)

    return build


@pytest.fixture
def ignoring() -> Iterator[None]:
    """Ignore signals in this process, as one that a shell started in the background does."""
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
