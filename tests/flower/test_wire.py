"""What crosses the wire: exact bits, strict messages, and nonsense refused in words."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from pydantic import Field
from torch import Tensor

from goldfish.errors import WireError
from goldfish.flower import wire
from goldfish.methods.goldfish import GOLDFISH_STEP
from goldfish.params import digest, num_bytes, shapes_of
from goldfish.settings import TrainingSettings
from goldfish.types import Constant, Context, DeletionRequest, Params, Task, Update
from goldfish.unlearning.basic_model import GoldfishSettings

MODEL = {
    "weight": torch.tensor([[1.5, -0.0], [float("nan"), float("inf")]]),
    "flag": torch.tensor([True, False, True]),
    "half": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16),
    "counter": torch.tensor(7),
    "double": torch.tensor([0.1], dtype=torch.float64),
    "brain": torch.tensor([[0.1]], dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "turned": torch.arange(6.0).reshape(2, 3).T,
}


TEACHER = {"weight": torch.ones(3)}
SETUP = "{}"


def task(**changes: Any) -> Task[Any]:
    values: dict[str, Any] = {
        "client_id": "client-1",
        "step": GOLDFISH_STEP,
        "arrays": {"model": MODEL},
        "settings": GoldfishSettings(mu_c=0.1),
        "context": Context(phase="goldfish", round=3, learning_rate=0.1 + 0.2),
        "requests": [DeletionRequest("client-1", sample_ids=["7", "9"])],
        "constants": {"teacher": Constant(TEACHER, digest(TEACHER))},
    }
    return Task(**{**values, **changes})


def order(run: str = "run-1", setup: str = SETUP, threads: int = 1, **changes: Any) -> wire.Order:
    return wire.Order.of(task(**changes), run, setup, threads)


def sent_order() -> RecordDict:
    return wire.encode_order(order(), task(), SETUP, order().kept)


def sent_answer(**changes: Any) -> RecordDict:
    update = Update("client-1", MODEL, 12, {"loss": 0.5, "steps": 3, "samples": 9})
    return wire.encode_answer(wire.Answer("a" * 64, dataclasses.replace(update, **changes), 40))


@pytest.mark.parametrize("dtype", wire.DTYPES.values(), ids=str)
def test_a_model_travels_with_its_exact_bits(dtype: torch.dtype) -> None:
    """All types of numbers; an odd byte before them moves every later tensor off its address."""
    params = {"odd": torch.ones(1, dtype=torch.uint8), "t": torch.arange(5).to(dtype), **MODEL}
    data = wire.pack(params)
    assert digest(wire.unpack(data)) == digest(params)
    back = wire.unpack(data, shapes_of(params))
    assert list(back) == list(params), "the order of what was sent"


def test_two_names_of_one_tensor_and_types_that_cannot_travel() -> None:
    tied = {"a": MODEL["weight"], "b": MODEL["weight"]}
    assert digest(wire.unpack(wire.pack(tied))) == digest(tied)
    with pytest.raises(WireError, match=r"'z' is of type torch.complex64, which cannot travel"):
        wire.pack({"z": torch.zeros(1, dtype=torch.complex64)})


def model_of(header: Any, size: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def tensor(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "header makes no sense"),
        (b"\xff" * 40, "header makes no sense"),
        (model_of(b"[" * 100_000), "header makes no sense"),
        (model_of([]), "header makes no sense"),
        (model_of({"a": 17}), "header makes no sense"),
        (model_of(tensor(dtype="object")), "header makes no sense.*'object'"),
        (model_of(tensor(shape=[-2])), "header makes no sense"),
        (model_of(tensor(shape=[2.0])), "header makes no sense"),
        (model_of(tensor(shape=[10**30, 0])), "header makes no sense"),
        (model_of(tensor(shape=[2**40, 2**40, 0])), "too many values"),
        (model_of(tensor(shape=[1] * 100)), "header makes no sense"),
        (model_of(tensor(more=1)), "header makes no sense"),
        (model_of(tensor(shape=[3])), "cannot be read"),
        (model_of(tensor(data_offsets=[4, 12])), "cannot be read"),
        (model_of(tensor(), 100), "cannot be read"),
        (model_of({**tensor(), "b": tensor()["a"]}), "cannot be read"),
    ],
)
def test_bytes_that_are_no_model_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message) as caught:
        wire.unpack(data)
    assert len(str(caught.value)) < 500


def test_shapes_are_compared_with_what_was_sent_before_anything_is_decoded() -> None:
    """The bytes after the header would not even fit it: nobody looks at them."""
    with pytest.raises(WireError, match=r"is torch.float32 of shape \[3\]; .* \[2\] was expected"):
        wire.unpack(model_of(tensor(shape=[3])), shapes_of({"a": torch.zeros(2)}))
    with pytest.raises(WireError, match=r"the update's 'b' is nothing; torch.float32"):
        wire.unpack(model_of(tensor()), shapes_of({"a": torch.zeros(2), "b": torch.zeros(1)}))
    with pytest.raises(WireError, match=r"the update's 'a' is .*; nothing was expected"):
        wire.unpack(model_of(tensor()), {})


def test_a_header_that_is_too_long_is_refused_before_it_is_parsed() -> None:
    """23 MB of header, beside a model of 32 MB; a parser would make 400,000 objects of it."""
    model = {"w": torch.zeros(2**23)}
    entry = '"%06d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    data = model_of(f"{{{','.join(entry % n for n in range(400_000))}}}".encode(), 2**20)
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(WireError, match=r"the update's header has 232\d+ bytes; 606 are the most"):
        wire.unpack(data, shapes_of(model))
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 0.1
    assert peak < 100_000
    with pytest.raises(WireError, match="the update's model has"):
        wire.unpack(wire.pack(model) + bytes(1000), shapes_of(model))
    long_names = {'"\u2028\n' * 300 + str(n): torch.zeros(2) for n in range(3)}
    assert wire.unpack(wire.pack(long_names), shapes_of(long_names)).keys() == long_names.keys()


def test_an_order_comes_back_as_it_was() -> None:
    sent = order()
    received = wire.decode_order(sent_order())
    assert received.order == sent
    assert received.order.id == sent.id
    assert GoldfishSettings.parse(received.order.settings) == task().settings
    assert set(received.models) == {digest(MODEL), digest(TEACHER)}
    assert all(digest(params) == name for name, params in received.models.items())
    assert received.setup == SETUP
    without = wire.decode_order(wire.encode_order(sent, task(), SETUP, ()))
    assert (without.order, set(without.models), without.setup) == (sent, {digest(MODEL)}, None)


@pytest.mark.parametrize(
    "change",
    [
        {"run": "run-2"},
        {"threads": 2},
        {"setup": "[]"},
        {"client_id": "client-2"},
        {"settings": GoldfishSettings(mu_c=0.2)},
        {"training": TrainingSettings(rounds=7)},
        {"context": Context(phase="goldfish", round=4)},
        {"requests": []},
        {"arrays": {"model": {"weight": torch.zeros(1)}}},
        {"constants": {}},
        {"constants": {"teacher": Constant({}, digest({}))}},
    ],
)
def test_the_id_of_an_order_depends_on_all_that_it_asks(change: dict[str, Any]) -> None:
    assert order().id == order().id
    assert order(**change).id != order().id


@pytest.mark.parametrize(
    "more", [{"loss": float("inf")}, {"teacher_samples": 4, "fisher_samples": 2, "own": -0.5}]
)
def test_an_answer_comes_back_as_it_was(more: dict[str, float]) -> None:
    metrics = {"loss": 0.1, "steps": 3, "samples": 9, **more}
    back = wire.decode_reply(sent_answer(metrics=metrics), MODEL)
    assert isinstance(back, wire.Answer)
    assert (back.id, back.kept) == ("a" * 64, 40)
    assert (back.update.client_id, back.update.num_examples) == ("client-1", 12)
    assert back.update.metrics == metrics
    assert digest(back.update.params) == digest(MODEL)


def test_an_error_travels_as_its_name_and_its_text_which_is_cut() -> None:
    failed = wire.decode_reply(wire.encode(wire.Failed.by(KeyError())), {})
    assert failed == wire.Failed(error="KeyError", cause="KeyError()")
    long = wire.Failed.by(ValueError("x" * 10**6))
    assert long.cause == "x" * wire.MOST_WORDS
    shouting = wire.encode(long)
    change("Failed", error="\x1b]0;me\x07", cause="done\x1b[2J\r\n\u202eroot:")(shouting)
    failed = wire.decode_reply(shouting, {})
    assert failed == wire.Failed(error=" ]0;me ", cause="done [2J   root:")
    missing = wire.Missing(digests=["a" * 64])
    assert wire.decode_reply(wire.encode(missing), {}) == missing


@dataclasses.dataclass(frozen=True)
class TimedUpdate(Update):
    """An update with one more field."""

    seconds: Annotated[float, Field(ge=0)] = 0.0


def test_a_field_of_the_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire and the client's store read the fields of ``Update``: no line of theirs changes."""
    monkeypatch.setattr("goldfish.types.Update", TimedUpdate)
    spec = importlib.util.spec_from_file_location("wire_of_timed_updates", wire.__file__)
    assert spec is not None
    assert spec.loader is not None
    timed = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, timed)
    spec.loader.exec_module(timed)
    metrics = {"loss": 0.5, "steps": 3, "samples": 9}
    update = TimedUpdate("client-1", TEACHER, 12, metrics, seconds=1.5)
    content = timed.encode_answer(timed.Answer("a" * 64, update, 40))
    back = timed.decode_reply(content, TEACHER)
    assert (back.update.seconds, back.update.num_examples) == (1.5, 12)
    change("Answer", seconds=-1)(content)
    with pytest.raises(WireError, match=r"Answer\.seconds is -1"):
        timed.decode_reply(content, TEACHER)


def change(part: str, **values: Any) -> Callable[[RecordDict], None]:
    """Return what changes the JSON of a message; None stands for a name that is not there."""

    def apply(content: RecordDict) -> None:
        said = {**json.loads(str(content.config_records[part]["json"])), **values}
        text = json.dumps({name: value for name, value in said.items() if value is not None})
        content.config_records[part]["json"] = text

    return apply


def text(part: str, said: Any) -> Callable[[RecordDict], None]:
    return lambda content: content.config_records[part].update({"json": said})


def model(name: str, params: Params, **more: Params) -> Callable[[RecordDict], None]:
    def apply(content: RecordDict) -> None:
        own = wire.encode(wire.Missing(digests=[]), {name: params, **more})
        content.update({part: own[part] for part in (name, *more)})

    return apply


def drop(part: str) -> Callable[[RecordDict], None]:
    def apply(content: RecordDict) -> None:
        del content[part]

    return apply


def as_pickle(content: RecordDict) -> None:
    data = content.array_records[digest(MODEL)][wire.FORMAT].data
    array = Array("float32", (2,), "numpy.ndarray", data)
    content[digest(MODEL)] = ArrayRecord({wire.FORMAT: array})


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop("Order"), "has no part 'Order'"),
        (text("Order", 3), "has no part 'Order'"),
        (text("Order", DEEP), "makes no sense"),
        (change("Order", run=3), "Order.run is 3"),
        (change("Order", threads="two"), "Order.threads is 'two'"),
        (change("Order", context=[]), "Order.context"),
        (change("Order", context={"phase": "a", "more": 1}), "Order.context.more"),
        (change("Order", training={"round": 1}), "Order.training.round"),
        (change("Order", requests=[{"client": 1}]), "Order.requests.0"),
        (change("Order", stranger=1), "Order.stranger"),
        (change("Order", setup=None), "Order.setup"),
        (change("Order", arrays={}), "An order came with"),
        (change("Order", arrays={"model": "b" * 64}), "An order came with"),
        (drop(digest(MODEL)), "An order came with"),
        (model(digest({}), {}), "An order came with"),
        (model(digest(MODEL), TEACHER), "arrived damaged"),
        (model(digest(TEACHER), MODEL), "arrived damaged"),
        (as_pickle, "does not hold one model, written as safetensors"),
        (lambda c: c.update(setup=ConfigRecord({"text": "another"})), "arrived damaged"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(
    damage: Callable[[RecordDict], None], message: str
) -> None:
    content = sent_order()
    damage(content)
    with pytest.raises(WireError, match=message) as caught:
        wire.decode_order(content)
    assert len(str(caught.value)) < 500


def metrics(**values: Any) -> Callable[[RecordDict], None]:
    return change("Answer", metrics={"loss": 0, "steps": 1, "samples": 1, **values})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop("Answer"), "has no part 'Missing'"),
        (text("Answer", DEEP), "makes no sense"),
        (text("Answer", f'{{"kept": {"9" * 5000}}}'), "makes no sense"),
        (text("Answer", "x" * (wire.MOST_SAID + 1)), "letters; 1048576 are the most"),
        (change("Answer", client_id=3), "Answer.client_id is 3"),
        (change("Answer", num_examples=-1), "Answer.num_examples is -1"),
        (change("Answer", num_examples=2**60), "Answer.num_examples is 11529"),
        (change("Answer", kept=0.5), "Answer.kept is 0.5"),
        (change("Answer", stranger=1), "Answer.stranger is 1"),
        (change("Answer", metrics={}), "'loss' is None; a number was expected"),
        (metrics(loss="low"), "Answer.metrics.loss is 'low'"),
        (metrics(loss=json.loads("[" * 100 + "]" * 100)), "Answer.metrics.loss"),
        (metrics(samples=float("inf")), "'samples' is inf"),
        (metrics(samples=float("nan")), "'samples' is nan"),
        (metrics(samples=True), "Answer.metrics.samples is True"),
        (metrics(teacher_samples=-1), "'teacher_samples' is -1"),
        (metrics(fisher_samples=float("nan")), "'fisher_samples' is nan"),
        (drop("params"), "'params' does not hold one model"),
        (model("params", TEACHER), "the update's 'weight' is"),
    ],
)
def test_a_reply_that_makes_no_sense_is_refused(
    damage: Callable[[RecordDict], None], message: str
) -> None:
    content = sent_answer()
    damage(content)
    with pytest.raises(WireError, match=message) as caught:
        wire.decode_reply(content, MODEL)
    assert len(str(caught.value)) < 500


def test_buffers_that_cannot_be_are_refused() -> None:
    """A variance below 0 makes NaN of every input, and the mean with an honest one may be too."""
    bn = torch.nn.BatchNorm1d(2).state_dict()
    metrics = {"loss": 0.5, "steps": 3, "samples": 9}
    wire.check_update(Update("client-1", {"bn." + n: t for n, t in bn.items()}, 9, metrics), (), 9)
    for name, wrong in (
        ("running_var", torch.tensor([1.0, -1.0])),
        ("num_batches_tracked", -bn["num_batches_tracked"] - 1),
    ):
        params = {"bn." + n: t for n, t in {**bn, name: wrong}.items()}
        with pytest.raises(WireError, match=f"'bn.{name}' holds a number below 0"):
            wire.check_update(Update("client-1", params, 9, metrics), (), 9)


@pytest.mark.parametrize("digests", [3, [3], ["short"], ["a" * 64] * 2000])
def test_a_reply_that_asks_for_nonsense_is_refused(digests: Any) -> None:
    content = wire.encode(wire.Missing(digests=[]))
    change("Missing", digests=digests)(content)
    with pytest.raises(WireError, match=r"Missing\.digests"):
        wire.decode_reply(content, {})


def test_the_bytes_on_the_wire_are_those_of_the_model_and_little_else() -> None:
    weights: dict[str, Tensor] = {f"layer-{n}": torch.zeros(100, 100) for n in range(20)}
    large = task(arrays={"model": weights})
    content = wire.encode_order(wire.Order.of(large, "run-1", SETUP), large, SETUP, ())
    size = num_bytes(weights)
    counted = wire.num_bytes_on_wire(content)
    objects = get_all_nested_objects(content)
    written = sum(len(item.deflate()) for item in objects.values())
    assert size < counted <= written < 1.01 * size
