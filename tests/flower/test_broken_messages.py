"""Whatever arrives, at the server or at a client: an answer, or a sentence; and little memory.

``GOLDFISH_FUZZ=20 pytest tests/flower/test_broken_messages.py`` tries twenty times as many cases.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from goldfish.errors import ConfigError, GoldfishError
from goldfish.experiments.client_setup import ClientSetup, ModelSetup
from goldfish.federation.settings import FlowerSettings
from goldfish.flower import wire
from goldfish.flower.client_app import answer_order
from goldfish.flower.engine import FlowerFederation
from goldfish.flower.node import Node
from goldfish.methods.goldfish import GOLDFISH_STEP
from goldfish.params import all_finite, digest, num_bytes, params_of, shapes_of
from goldfish.settings import TrainingSettings
from goldfish.types import Constant, Context, DeletionRequest, Failure, Task, Update
from goldfish.unlearning.basic_model import GoldfishSettings

FUZZ = int(os.environ.get("GOLDFISH_FUZZ", "1"))
TIMES_THE_MODEL = 4
"""What reading a message may take beside the message itself: docs/security.md says so."""

MODEL = ModelSetup("mlp", {"hidden": 4}, 3, (1, 6, 6))
PARAMS = {**params_of(MODEL.factory()()), "norm.running_var": torch.ones(2)}
SETUP = ClientSetup("client-1", MODEL, ("a", "b", "c"), "npz", "images.npz", ("0", "1", "2", "3"))
TEACHER = params_of(MODEL.factory()())
TASK: Task[Any] = Task(
    "client-1",
    GOLDFISH_STEP,
    {"model": {n: t for n, t in PARAMS.items() if "norm" not in n}},
    GoldfishSettings(),
    Context(phase="goldfish", learning_rate=0.1),
    TrainingSettings(batch_size=2),
    requests=[DeletionRequest("client-1", sample_ids=["1"])],
    constants={"teacher": Constant(TEACHER, digest(TEACHER))},
)

NUMBERS = st.integers(-3, 3) | st.floats() | st.sampled_from([2**31, 2**48, 2**63, 10**30])
PLAIN = st.none() | st.booleans() | NUMBERS | st.text(max_size=5)
ODD = PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(st.text(max_size=3), PLAIN, max_size=2)
ALIKE: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(0, 3) | st.sampled_from([2**31, 2**63]),
    float: st.floats(0, 1) | st.floats(),
    str: st.text(max_size=3) | st.sampled_from(["goldfish", "train", "size", "median", "mlp"]),
}
"""Other values that may be taken for the right ones."""
BYTES = st.binary(max_size=60)
NAMES = st.sampled_from(["Answer", "Missing", "Failed", "Identity", "Order", "setup", "params", ""])
RECORDS = st.one_of(
    st.dictionaries(st.sampled_from(["json", "text", "x"]), st.text(max_size=9)).map(
        lambda own: ConfigRecord({**own})
    ),
    st.dictionaries(st.just("x"), st.floats()).map(lambda own: MetricRecord({**own})),
    st.tuples(st.sampled_from([wire.FORMAT, "numpy.ndarray", ""]), BYTES).map(
        lambda own: ArrayRecord({own[0]: Array("uint8", (len(own[1]),), own[0], own[1])})
    ),
)


def changed_value(value: Any, draw: st.DataObject) -> Any:
    """Return a value of JSON in which something, however deep, is another thing or is lost."""
    if isinstance(value, dict | list) and value and draw.draw(st.integers(0, 4)):
        keys = sorted(value) if isinstance(value, dict) else range(len(value))
        key, other = draw.draw(st.sampled_from(keys)), copy.copy(value)
        if draw.draw(st.integers(0, 3)):
            other[key] = changed_value(value[key], draw)
        else:
            del other[key]
        return other
    alike = ALIKE.get(type(value), ODD)
    return draw.draw(ODD if draw.draw(st.integers(0, 2)) == 0 else alike)


def changed_text(text: str, draw: st.DataObject) -> str:
    """Return a text that is cut, doubled, another one, or JSON with another value in it."""
    how = draw.draw(st.sampled_from(["value", "value", "value", "cut", "again", "other"]))
    place = draw.draw(st.integers(0, len(text)))
    if how == "value":
        with contextlib.suppress(ValueError):
            return json.dumps(changed_value(json.loads(text), draw))
    pieces = {"cut": text[:place], "again": text[:place] + text, "other": draw.draw(st.text())}
    return pieces.get(how, text)


def changed_bytes(data: bytes, draw: st.DataObject) -> bytes:
    """Return a model's bytes: cut, flipped, padded, or with another header."""
    how = draw.draw(st.sampled_from(["cut", "flip", "pad", "length", "header", "other"]))
    place = draw.draw(st.integers(0, max(len(data) - 1, 0)))
    size = int.from_bytes(data[:8], "little")
    if how == "header":
        with contextlib.suppress(ValueError):
            own = json.dumps(changed_value(json.loads(data[8 : 8 + size]), draw)).encode()
            return len(own).to_bytes(8, "little") + own + data[8 + size :]
    if how == "length":
        return draw.draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little") + data[8:]
    if how == "flip" and data:
        return (
            data[:place] + bytes([data[place] ^ draw.draw(st.integers(1, 255))]) + data[place + 1 :]
        )
    pieces = {"cut": data[:place], "pad": data + b"\0" * place, "other": draw.draw(BYTES)}
    return pieces.get(how, data)


def changed(content: RecordDict, draw: st.DataObject) -> RecordDict:
    """Return a message of which a part is changed, lost, called otherwise, or made up."""
    parts = dict(content.items())
    how = draw.draw(
        st.sampled_from(["change", "change", "change", "change", "drop", "move", "add"])
    )
    if how == "add" or not parts:
        return RecordDict({**parts, draw.draw(NAMES): draw.draw(RECORDS)})
    name = draw.draw(st.sampled_from(sorted(parts)))
    part = parts.pop(name)
    if how == "move":
        parts[draw.draw(NAMES)] = part
    elif how == "change" and isinstance(part, ConfigRecord):
        parts[name] = ConfigRecord({n: changed_text(str(v), draw) for n, v in part.items()})
    elif how == "change" and isinstance(part, ArrayRecord):
        arrays = {n: changed_bytes(array.data, draw) for n, array in part.items()}
        kind = draw.draw(st.sampled_from([wire.FORMAT, wire.FORMAT, wire.FORMAT, "numpy.ndarray"]))
        parts[name] = ArrayRecord(
            {n: Array("uint8", (len(d),), kind, d) for n, d in arrays.items()}
        )
    return RecordDict(parts)


def any_message(real: RecordDict, draw: st.DataObject) -> RecordDict:
    """Return a real message with one to three changes, or one that is made up."""
    if not draw.draw(st.integers(0, 9)):
        return RecordDict(draw.draw(st.dictionaries(NAMES, RECORDS, max_size=4)))
    for _ in range(draw.draw(st.integers(1, 3))):
        real = changed(real, draw)
    return real


@settings(max_examples=100 * FUZZ, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_a_reply_is_an_update_or_a_failure_of_its_client(grid: Any, draw: st.DataObject) -> None:
    """The engine itself, on whatever a node answers; what it takes for a model is one."""
    flower = FlowerSettings(poll=1e-4, patience=0.01, timeout=5.0)
    federation = FlowerFederation(
        grid,
        {"client-1": SETUP.to_json()},
        MODEL.factory(),
        run_id="run",
        settings=flower,
        samples={"client-1": 4},
    )
    task = dataclasses.replace(TASK, arrays={"model": PARAMS})
    update = Update("client-1", PARAMS, 3, {"loss": 0.5, "steps": 3, "samples": 3})

    def lie(message: Message) -> Message:
        if message.metadata.message_type == wire.IDENTIFY:
            return grid.carry_out(message)  # type: ignore[no-any-return]
        order = wire.decode_order(message.content).order
        real = wire.encode_answer(wire.Answer(order.id, update, 40))
        return Message(any_message(real, draw), reply_to=message)

    grid.faults = {10: lie}
    grid.sent.clear()
    grid.replies.clear()
    replies = federation.run([task])
    for failure in replies.failures:
        assert isinstance(failure, Failure)
        assert failure.cause.isprintable()
        assert len(failure.error) + len(failure.cause) < 6000
    for taken in replies.updates:
        assert shapes_of(taken.params) == shapes_of(PARAMS)
        assert all_finite(taken.params)
        assert taken.num_examples <= 4


@pytest.fixture
def node(grid: Any, images: Path) -> Node:
    return Node.parse(grid.nodes[10])


@settings(max_examples=200 * FUZZ, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_a_task_is_answered_or_refused_in_words(node: Node, draw: st.DataObject) -> None:
    """The client's whole way: setup, data, split and step, by whatever a server asks.

    A setup or a model that is changed goes by its own digest: it is not merely damaged.
    """
    setup = SETUP.to_json()
    if not draw.draw(st.integers(0, 3)):
        setup = changed_text(setup, draw)
    order = wire.Order.of(TASK, "run", setup)
    real = wire.encode_order(order, TASK, setup, order.kept)
    how = draw.draw(st.sampled_from(["order", "order", "order", "any", "real"]))
    if how == "order":
        said = changed_text(str(real.config_records["Order"]["json"]), draw)
        assume('"local_epochs": 2147' not in said and '"local_epochs": 9223' not in said)
        real["Order"] = ConfigRecord({"json": said})
    content = any_message(real, draw) if how == "any" else real
    with contextlib.suppress(GoldfishError):
        answer_order(content, node)


@pytest.mark.parametrize(
    ("hidden", "said"),
    [(5, "another model than"), (2**33, "another model than"), (2**62, "cannot be built")],
)
def test_a_server_cannot_have_a_client_build_what_no_memory_holds(
    node: Node, hidden: int, said: str
) -> None:
    """The model of the setup is compared with what the task brings before it is made."""
    other = dataclasses.replace(MODEL, options={"hidden": hidden})
    setup = dataclasses.replace(SETUP, model=other).to_json()
    order = wire.Order.of(TASK, "run", setup)
    with pytest.raises(ConfigError, match=said):
        answer_order(wire.encode_order(order, TASK, setup, order.kept), node)


LARGE = {"weight": torch.zeros(2**21), "norm.running_var": torch.ones(2**10)}
"""A model of 8 MiB."""


def reply_of(data: bytes, said: str | None = None) -> RecordDict:
    """Return the reply that carries these bytes as a model."""
    update = Update("client-1", {}, 3, {"loss": 0.5, "steps": 3, "samples": 3})
    content = wire.encode_answer(wire.Answer("a" * 64, update, 40))
    content["params"] = ArrayRecord({wire.FORMAT: Array("uint8", (len(data),), wire.FORMAT, data)})
    if said is not None:
        content["Answer"] = ConfigRecord({"json": said})
    return content


def header(text: bytes, rest: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + rest


MANY = b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(2**19))
GIANTS: dict[str, Callable[[], RecordDict]] = {
    "what was asked for": lambda: reply_of(wire.pack(LARGE)),
    "a model ten times as large": lambda: reply_of(
        wire.pack({**LARGE, "weight": torch.zeros(10 * 2**21)})
    ),
    "bytes after the model": lambda: reply_of(wire.pack(LARGE) + b"\0" * 2**26),
    "a header of many tensors": lambda: reply_of(header(b"{" + MANY + b"}")),
    "a header of brackets": lambda: reply_of(header(b"[" * 2**25)),
    "a tensor without end": lambda: reply_of(
        header(
            b'{"weight":{"dtype":"F32","shape":[281474976710655],"data_offsets":[0,4]}}', b"\0" * 4
        )
    ),
    "words without end": lambda: reply_of(wire.pack(LARGE), "[" * 2**25),
    "a number without end": lambda: reply_of(wire.pack(LARGE), '{"kept": ' + "9" * 2**19 + "}"),
    "a failure without end": lambda: RecordDict({"Failed": ConfigRecord({"json": "x" * 2**25})}),
}


def grown(work: Callable[[], object]) -> int:
    """Return by how many bytes this process was larger than before while it did something."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("name", GIANTS)
def test_reading_a_reply_takes_little_memory_whatever_arrives(name: str) -> None:
    content = GIANTS[name]()

    def read() -> None:
        with contextlib.suppress(GoldfishError):
            answer = wire.decode_reply(content, LARGE)
            assert isinstance(answer, wire.Answer)
            wire.check_update(answer.update, (), 4)

    assert grown(read) <= TIMES_THE_MODEL * num_bytes(LARGE)


def test_reading_a_task_takes_little_memory() -> None:
    constants = {
        "teacher": Constant({"other": LARGE["weight"]}, digest({"other": LARGE["weight"]}))
    }
    task = dataclasses.replace(TASK, arrays={"model": LARGE}, constants=constants)
    order = wire.Order.of(task, "run", "{}")
    content = wire.encode_order(order, task, "{}", order.kept)
    models = num_bytes(LARGE) + LARGE["weight"].nbytes
    assert grown(lambda: wire.decode_order(content)) <= TIMES_THE_MODEL * models
