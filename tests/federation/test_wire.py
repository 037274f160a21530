"""What crosses the wire: exact bits, one array a model, and nonsense refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from torch import Tensor

from goldfish.errors import WireError
from goldfish.federation import wire
from goldfish.params import digest, num_bytes
from goldfish.types import DeletionRequest, Task, Update

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


def order(**changes: Any) -> wire.Order:
    values: dict[str, Any] = {
        "client_id": "client-1",
        "step": "goldfish",
        "arrays": {"model": MODEL},
        "config": {"phase": "goldfish", "round": 3, "seed": 0, "learning_rate": 0.1},
        "requests": [DeletionRequest("client-1", sample_ids=["7", "9"])],
        "constants": {"teacher": {"weight": torch.ones(3)}},
    }
    beside: dict[str, Any] = {"run": "run-1", "setup": "{}", "threads": 1}
    beside |= {name: changes.pop(name) for name in list(changes) if name in beside}
    return wire.Order(task=Task(**{**values, **changes}), **beside)


def test_a_model_travels_as_one_array_with_its_exact_bits() -> None:
    array, manifest = wire.pack(MODEL)
    assert len(array.data) == num_bytes(MODEL)
    back = wire.unpack(array, manifest)
    assert list(back) == list(MODEL)
    assert digest(back) == digest(MODEL)


@pytest.mark.parametrize("dtype", wire.DTYPES.values(), ids=str)
def test_every_type_of_number_survives(dtype: torch.dtype) -> None:
    """An odd byte before it moves every later tensor off its natural address."""
    params = {"odd": torch.ones(1, dtype=torch.uint8), "t": torch.arange(5).to(dtype)}
    assert digest(wire.unpack(*wire.pack(params))) == digest(params)


def test_a_type_that_cannot_travel_is_refused() -> None:
    with pytest.raises(WireError, match=r"'z' is of type torch.complex64, which cannot travel"):
        wire.pack({"z": torch.zeros(1, dtype=torch.complex64)})


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ([["a", "float32", [3]]], "has 8 bytes, but its manifest describes 12"),
        ([["a", "float32", [2]], ["a", "float32", [0]]], "names a tensor twice"),
        ([["a", "object", [2]]], "holds .*'object'"),
        ([["a", "float32", [-2]]], "name, type and shape were expected"),
        ([["a", "float32", [2.0]]], "name, type and shape were expected"),
        ([["a", ["float32"], [2]]], "name, type and shape were expected"),
        ([["a", "float32", ""]], "name, type and shape were expected"),
        ([["a", "float32", {}]], "name, type and shape were expected"),
        ([["a", "float32", [10**30, 0]]], "name, type and shape were expected"),
        ([["a", "float32", [2**62, 2**62, 0]]], "name, type and shape were expected"),
        ([["a", "float32", [10**3000] * 9]], "name, type and shape were expected"),
        ([["a", "float32", [1] * 100]], "name, type and shape were expected"),
        ([17], "name, type and shape were expected"),
        ({"a": 1}, "a list was expected"),
    ],
)
def test_a_wrong_manifest_is_refused(manifest: Any, message: str) -> None:
    array, _ = wire.pack({"a": torch.zeros(2)})
    with pytest.raises(WireError, match=message):
        wire.unpack(array, json.dumps(manifest))


def test_bytes_written_by_somebody_else_are_refused() -> None:
    array = Array("float32", (2,), "numpy.ndarray", bytes(8))
    with pytest.raises(
        WireError, match=r"written as 'numpy.ndarray'; 'goldfish.flat' was expected"
    ):
        wire.unpack(array, json.dumps([["a", "float32", [2]]]))


def test_an_order_comes_back_as_it_was() -> None:
    sent = order()
    needed = {sent.setup_digest, *sent.constants.values()}
    received = wire.decode_order(wire.encode_order(sent, needed))
    assert (received.id, received.run, received.threads) == (sent.id, "run-1", 1)
    assert received.task.config == sent.task.config
    assert list(received.task.requests) == list(sent.task.requests)
    assert digest(received.task.arrays["model"]) == digest(MODEL)
    assert received.constants == sent.constants
    assert {n: digest(p) for n, p in received.sent.items()} == {
        sent.constants["teacher"]: digest(sent.task.constants["teacher"])
    }
    assert received.sent_setup == "{}"
    without = wire.decode_order(wire.encode_order(sent, ()))
    assert (without.sent, without.sent_setup) == ({}, None)
    assert without.constants == sent.constants


@pytest.mark.parametrize(
    "change",
    [
        {"run": "run-2"},
        {"threads": 2},
        {"setup": "[]"},
        {"client_id": "client-2"},
        {"step": "train"},
        {"config": {"phase": "goldfish", "round": 4, "seed": 0, "learning_rate": 0.1}},
        {"requests": []},
        {"arrays": {"model": {"weight": torch.zeros(1)}}},
        {"constants": {}},
        {"constants": {"teacher": {"weight": torch.zeros(3)}}},
    ],
)
def test_the_id_of_an_order_depends_on_all_that_it_asks(change: dict[str, Any]) -> None:
    assert order().id == order().id
    assert order(**change).id != order().id


def test_an_answer_comes_back_as_it_was() -> None:
    update = Update("client-1", MODEL, 12, {"loss": float("inf"), "steps": 3, "samples": 9})
    back = wire.decode_reply(wire.encode_answer(wire.Answer("id", update, 40)))
    assert isinstance(back, wire.Answer)
    assert (back.id, back.kept) == ("id", 40)
    assert (back.update.client_id, back.update.num_examples) == ("client-1", 12)
    assert back.update.metrics == update.metrics
    assert digest(back.update.params) == digest(MODEL)


def test_counts_that_an_update_need_not_have_come_back_too() -> None:
    metrics = {"loss": 0.5, "steps": 3, "samples": 9, "teacher_samples": 4, "fisher_samples": 2}
    update = Update("client-1", MODEL, 12, metrics)
    back = wire.decode_reply(wire.encode_answer(wire.Answer("id", update, 40)))
    assert isinstance(back, wire.Answer)
    assert back.update.metrics == metrics


def test_an_error_travels_as_its_name_and_its_text() -> None:
    assert wire.decode_reply(wire.encode_failure(KeyError())) == wire.Failed(
        "KeyError", "KeyError()"
    )
    assert wire.decode_reply(wire.encode_missing(["a", "b"])) == wire.Missing(["a", "b"])


def _change(part: str, **values: Any) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content.config_records[part].update(values)

    return change


def _drop_task(content: RecordDict) -> None:
    del content[wire.TASK]


def _second_array(content: RecordDict) -> None:
    content.array_records["array:model"]["more"] = wire.pack({})[0]


def _stranger(content: RecordDict) -> None:
    content["array:stranger"] = ArrayRecord({"flat": wire.pack({})[0]})


def _damage_constant(content: RecordDict) -> None:
    (name,) = [n for n in content.array_records if n.startswith("constant:")]
    content[name] = ArrayRecord({"flat": wire.pack({"weight": torch.zeros(3)})[0]})


def _other_setup(content: RecordDict) -> None:
    content["setup"] = ConfigRecord({"text": "another"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop_task, "has no part 'task'"),
        (_change("task", id=3), "'id' is 3; text was expected"),
        (_change("task", threads="two"), "'threads' is 'two'; a whole number was expected"),
        (_change("task", config="{"), "'config' is not JSON"),
        (_change("task", config="[]"), "'config' is .*; a table was expected"),
        (_change("task", requests='[{"client": 1}]'), "A deletion request cannot be read"),
        (_second_array, "one flat one was expected"),
        (_stranger, "came with manifests of"),
        (_damage_constant, "A constant arrived damaged"),
        (_other_setup, "The setup arrived damaged"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(
    change: Callable[[RecordDict], None], message: str
) -> None:
    sent = order()
    content = wire.encode_order(sent, {sent.setup_digest, *sent.constants.values()})
    change(content)
    with pytest.raises(WireError, match=message):
        wire.decode_order(content)


DEEP = "[" * 100_000 + "]" * 100_000
NESTED = "[" * 400 + "]" * 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change("update", client=3), "'client' is 3; text was expected"),
        (_change("update", examples=-1), "'examples' is -1; a whole number was expected"),
        (_change("update", kept=0.5), "'kept' is 0.5; a whole number was expected"),
        (_change("update", manifests=DEEP), "'manifests' is not JSON"),
        (_change("update", manifests=NESTED), "a table was expected"),
        (_change("update", manifests=json.dumps({"params": DEEP})), "'manifest' is not JSON"),
        (_change("update", manifests='{"params": [[]]}'), "'params' is .*; text was expected"),
        (_change("update", metrics=DEEP), "'metrics' is not JSON"),
        (_change("update", metrics="9" * 5000), "'metrics' is not JSON"),
        (_change("update", metrics="{}"), "'loss' is None; a number was expected"),
        (_change("update", metrics='{"loss": "low"}'), "'loss' is 'low'; a number was expected"),
        (_change("update", metrics='{"loss": 0, "steps": 1}'), "'samples' is None"),
        (_change("update", metrics='{"loss": 0, "samples": Infinity}'), "'samples' is inf"),
        (_change("update", metrics='{"loss": 0, "samples": NaN}'), "'samples' is nan"),
        (_change("update", metrics='{"loss": 0, "samples": true}'), "'samples' is True"),
        (
            _change(
                "update", metrics='{"loss": 0, "steps": 1, "samples": 1, "teacher_samples": -1}'
            ),
            "'teacher_samples' is -1",
        ),
        (
            _change("update", metrics='{"loss": 0, "fisher_samples": NaN}'),
            "'fisher_samples' is nan",
        ),
        (_change("update", metrics=f'{{"loss": {NESTED}}}'), "'loss' is .*; a number was expected"),
    ],
)
def test_a_reply_that_makes_no_sense_is_refused(
    change: Callable[[RecordDict], None], message: str
) -> None:
    update = Update("client-1", MODEL, 12, {"loss": 0.5, "steps": 3, "samples": 9})
    content = wire.encode_answer(wire.Answer("id", update, 40))
    change(content)
    with pytest.raises(WireError, match=message) as caught:
        wire.decode_reply(content)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("digests", [DEEP, "3", "[3]", f"[{NESTED}]"])
def test_a_reply_that_asks_for_nonsense_is_refused(digests: str) -> None:
    content = wire.encode_missing([])
    content.config_records[wire.MISSING]["digests"] = digests
    with pytest.raises(WireError):
        wire.decode_reply(content)


def test_the_bytes_on_the_wire_are_those_of_the_model_and_little_else() -> None:
    weights: dict[str, Tensor] = {f"layer-{n}": torch.zeros(100, 100) for n in range(20)}
    content = wire.encode_order(order(arrays={"model": weights}), ())
    size = num_bytes(weights)
    counted = wire.num_bytes_on_wire(content)
    objects = get_all_nested_objects(content)
    written = sum(len(item.deflate()) for item in objects.values())
    assert size < counted <= written < 1.01 * size
