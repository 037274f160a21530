"""Tasks and updates as Flower records, for both sides of the wire.

A model travels as one flat array of bytes, the exact bits of every tensor one after the other, with
a manifest of names, types and shapes: hundreds of small arrays would be many times slower. What
stays the same over many tasks (the teacher, the client's setup) is named by its digest and travels
only to a client that does not have it. Nothing that arrives is trusted or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from goldfish.errors import WireError
from goldfish.params import digest
from goldfish.types import DeletionRequest, Params, Task, Update

FLAT = "goldfish.flat"
"""How the bytes of an array are written: see :func:`pack`."""
IDENTIFY = "query.identify"
"""The message that asks a node which client it is."""
TASK, UPDATE, MISSING, FAILURE, IDENTITY = "task", "update", "missing", "failure", "identity"

MOST = 2**48
"""Values of a tensor, and steps or samples of a task, are fewer than this."""
MOST_SIDES = 32
COUNTS = ("steps", "samples", "teacher_samples", "fisher_samples")
"""The metrics of an update that every round adds up; the last two may be missing."""

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True)
class Order:
    """A task with what a client across a wire must know beside it."""

    run: str
    """The run that the client's state belongs to."""
    task: Task
    setup: str
    """How the client builds its data and model, as text."""
    threads: int = 1
    """Torch's threads, on which the last bits depend."""

    @cached_property
    def constants(self) -> Mapping[str, str]:
        """The digest of each of the task's constants."""
        return {name: digest(params) for name, params in self.task.constants.items()}

    @cached_property
    def setup_digest(self) -> str:
        """The digest of the setup."""
        return hashlib.sha256(self.setup.encode()).hexdigest()

    @cached_property
    def id(self) -> str:
        """A digest of all that the order asks: a repeated order has the same."""
        asked = [
            self.run,
            self.threads,
            self.task.client_id,
            self.task.step,
            dict(self.task.config),
            [asdict(request) for request in self.task.requests],
            [asdict(request) for request in self.task.honoured],
            {name: digest(params) for name, params in self.task.arrays.items()},
            dict(self.constants),
            self.setup_digest,
        ]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Received:
    """An order as it arrives: its task lacks the constants, which the client keeps."""

    id: str
    run: str
    task: Task
    threads: int
    constants: Mapping[str, str]
    setup: str
    """The digest of the setup."""
    sent: Mapping[str, Params]
    """Constants that came along, by digest."""
    sent_setup: str | None
    """The setup, when it came along."""


@dataclass(frozen=True)
class Identity:
    """Which client a node is, and which store it keeps its state in."""

    client_id: str
    store: str
    version: str


@dataclass(frozen=True)
class Missing:
    """The client's answer when it lacks constants or the setup: send these again."""

    digests: Sequence[str]


@dataclass(frozen=True)
class Failed:
    """The client's answer when the step raised."""

    error: str
    cause: str


@dataclass(frozen=True)
class Answer:
    """The client's answer to an order."""

    id: str
    update: Update
    kept: int
    """Bytes that the client keeps under the name of the task's phase."""


def pack(params: Params) -> tuple[Array, str]:
    """Return parameters as one array of bytes, and the manifest to read it by."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in params.items()}
    for name, t in tensors.items():
        if _dtype_name(t) not in DTYPES:
            raise WireError(f"{name!r} is of type {t.dtype}, which cannot travel.")
    manifest = [[name, _dtype_name(t), list(t.shape)] for name, t in tensors.items()]
    data = b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors.values())
    return Array("uint8", (len(data),), FLAT, data), json.dumps(manifest)


def unpack(array: Array, manifest: str) -> Params:
    """Return the parameters that :func:`pack` packed; refuse bytes that do not fit the manifest."""
    entries = _manifest(manifest)
    if array.stype != FLAT:
        raise WireError(f"An array is written as {array.stype!r}; {FLAT!r} was expected.")
    sizes = [math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in entries]
    if len(array.data) != sum(sizes):
        raise WireError(
            f"An array has {len(array.data)} bytes, but its manifest describes {sum(sizes)}."
        )
    params: dict[str, Tensor] = {}
    flat = torch.frombuffer(bytearray(array.data or b"\0"), dtype=torch.uint8)
    place = 0
    for (name, dtype, shape), size in zip(entries, sizes, strict=True):
        # A copy has memory of its own, which begins where its type needs it to.
        params[name] = flat[place : place + size].clone().view(DTYPES[dtype]).reshape(shape)
        place += size
    return params


def encode_order(order: Order, send: Collection[str]) -> RecordDict:
    """Return the message of an order, with those constants (and setup) that ``send`` names."""
    models = {f"array:{name}": params for name, params in order.task.arrays.items()}
    for name, constant in order.constants.items():
        if constant in send:
            models[f"constant:{constant}"] = order.task.constants[name]
    content, manifests = _pack_all(models)
    content[TASK] = ConfigRecord(
        {
            "id": order.id,
            "run": order.run,
            "client": order.task.client_id,
            "step": order.task.step,
            "threads": order.threads,
            "config": json.dumps(dict(order.task.config)),
            "requests": json.dumps([asdict(request) for request in order.task.requests]),
            "honoured": json.dumps([asdict(request) for request in order.task.honoured]),
            "constants": json.dumps(dict(order.constants)),
            "setup": order.setup_digest,
            "manifests": json.dumps(manifests),
        }
    )
    if order.setup_digest in send:
        content["setup"] = ConfigRecord({"text": order.setup})
    return content


def decode_order(content: RecordDict) -> Received:
    """Read an order, and check what arrived."""
    about = _record(content, TASK)
    models = _unpack_all(content, _text(about, "manifests"))
    sent = _named("constant:", models)
    for expected, params in sent.items():
        if digest(params) != expected:
            raise WireError("A constant arrived damaged: its digest is not the one it was sent by.")
    setup = content.config_records.get("setup")
    text = None if setup is None else _text(setup, "text")
    if text is not None and hashlib.sha256(text.encode()).hexdigest() != _text(about, "setup"):
        raise WireError("The setup arrived damaged: its digest is not the one it was sent by.")
    task = Task(
        client_id=_text(about, "client"),
        step=_text(about, "step"),
        arrays=_named("array:", models),
        config=_mapping(_json(about, "config"), "config"),
        requests=_requests(about, "requests"),
        honoured=_requests(about, "honoured"),
    )
    return Received(
        _text(about, "id"),
        _text(about, "run"),
        task,
        _whole(about, "threads"),
        _mapping(_json(about, "constants"), "constants"),
        _text(about, "setup"),
        sent,
        text,
    )


def encode_answer(answer: Answer) -> RecordDict:
    """Return the reply that carries a client's update."""
    content, manifests = _pack_all({"params": answer.update.params})
    content[UPDATE] = ConfigRecord(
        {
            "id": answer.id,
            "client": answer.update.client_id,
            "examples": answer.update.num_examples,
            "metrics": json.dumps(dict(answer.update.metrics)),
            "kept": answer.kept,
            "manifests": json.dumps(manifests),
        }
    )
    return content


def encode_missing(digests: Sequence[str]) -> RecordDict:
    """Return the reply of a client that lacks what the order names by digest."""
    return RecordDict({MISSING: ConfigRecord({"digests": json.dumps(list(digests))})})


def encode_failure(error: BaseException) -> RecordDict:
    """Return the reply of a client whose step raised: the name of the class, and the text."""
    cause = str(error) or repr(error)
    return RecordDict({FAILURE: ConfigRecord({"error": type(error).__name__, "cause": cause})})


def decode_reply(content: RecordDict) -> Answer | Missing | Failed:
    """Read whatever a client answers to an order."""
    records = content.config_records
    if FAILURE in records:
        return _failed(content)
    if MISSING in records:
        digests = _list(_json(records[MISSING], "digests"), "digests")
        if not all(isinstance(entry, str) for entry in digests):
            raise WireError("A message's 'digests' are no texts.")
        return Missing(digests)
    about = _record(content, UPDATE)
    models = _unpack_all(content, _text(about, "manifests"))
    if list(models) != ["params"]:
        raise WireError(f"An update holds {sorted(models)}; one model was expected.")
    metrics = _metrics(_json(about, "metrics"))
    update = Update(_text(about, "client"), models["params"], _whole(about, "examples"), metrics)
    return Answer(_text(about, "id"), update, _whole(about, "kept"))


def _failed(content: RecordDict) -> Failed:
    about = _record(content, FAILURE)
    return Failed(_text(about, "error"), _text(about, "cause"))


def encode_identity(identity: Identity) -> RecordDict:
    """Return the reply of a node that says which client it is."""
    return RecordDict({IDENTITY: ConfigRecord(dict(asdict(identity)))})


def decode_identity(content: RecordDict) -> Identity | Failed:
    """Read what a node says of itself."""
    if FAILURE in content.config_records:
        return _failed(content)
    about = _record(content, IDENTITY)
    return Identity(_text(about, "client_id"), _text(about, "store"), _text(about, "version"))


def action(step: str) -> str:
    """Return a step's name as Flower wants it: a Python identifier."""
    return step.replace("-", "_")


def num_bytes_on_wire(content: RecordDict) -> int:
    """Return how many bytes a message's arrays and texts hold; Flower adds a few hundred."""
    arrays = [array for record in content.array_records.values() for array in record.values()]
    texts = [(n, v) for record in content.config_records.values() for n, v in record.items()]
    return sum(len(a.data) for a in arrays) + sum(len(n) + len(str(v)) for n, v in texts)


def _pack_all(models: Mapping[str, Params]) -> tuple[RecordDict, dict[str, str]]:
    content = RecordDict()
    manifests = {}
    for name, params in models.items():
        array, manifests[name] = pack(params)
        content[name] = ArrayRecord({"flat": array})
    return content, manifests


def _unpack_all(content: RecordDict, manifests: str) -> dict[str, Params]:
    described = _mapping(_loads(manifests, "manifests"), "manifests")
    arrays = content.array_records
    if described.keys() != arrays.keys():
        raise WireError(f"Arrays {sorted(arrays)} came with manifests of {sorted(described)}.")
    models = {}
    for name, record in arrays.items():
        if list(record) != ["flat"]:
            raise WireError(f"{name} holds the arrays {sorted(record)}; one flat one was expected.")
        models[name] = unpack(record["flat"], _is_text(described[name], name))
    return models


def _metrics(value: Any) -> dict[str, float]:
    """Return an update's metrics: all numbers, and those that every round adds up finite."""
    metrics = _mapping(value, "metrics")
    for name in sorted({"loss", "steps", "samples", *metrics}):
        number: Any = metrics.get(name)
        good = type(number) in (int, float)
        if good and name in COUNTS:
            good = 0 <= number < MOST
        if not good:
            raise WireError(
                f"The metric {_shown(name)} is {_shown(number)}; a number was expected."
            )
    return metrics


def _named(kind: str, models: Mapping[str, Params]) -> dict[str, Params]:
    return {n.removeprefix(kind): p for n, p in models.items() if n.startswith(kind)}


def _manifest(text: str) -> list[tuple[str, str, list[int]]]:
    entries = []
    for entry in _list(_loads(text, "manifest"), "manifest"):
        try:
            name, dtype, shape = entry
            good = isinstance(name, str) and dtype in DTYPES
            good = good and _is_shape(shape)
        except (TypeError, ValueError):
            good = False
        if not good:
            raise WireError(
                f"A manifest holds {_shown(entry)}; name, type and shape were expected."
            )
        entries.append((name, dtype, shape))
    if len({name for name, _, _ in entries}) < len(entries):
        raise WireError("A manifest names a tensor twice.")
    return entries


def _is_shape(value: Any) -> bool:
    """Tell whether a tensor may have this shape; torch cannot count one with too many values."""
    if not isinstance(value, list) or len(value) > MOST_SIDES:
        return False
    if not all(type(side) is int and side >= 0 for side in value):
        return False
    return math.prod(side or 1 for side in value) < MOST


def _requests(record: ConfigRecord, name: str) -> list[DeletionRequest]:
    try:
        return [DeletionRequest(**entry) for entry in _list(_json(record, name), name)]
    except TypeError as error:
        raise WireError(f"A deletion request cannot be read: {error}.") from error


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _record(content: RecordDict, name: str) -> ConfigRecord:
    if name not in content.config_records:
        raise WireError(f"A message has no part {name!r}; it holds {sorted(content)}.")
    return content.config_records[name]


def _text(record: ConfigRecord, name: str) -> str:
    return _is_text(record.get(name), name)


def _is_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise WireError(f"A message's {name!r} is {_shown(value)}; text was expected.")
    return value


def _whole(record: ConfigRecord, name: str) -> int:
    value = record.get(name)
    if type(value) is not int or value < 0:
        raise WireError(f"A message's {name!r} is {_shown(value)}; a whole number was expected.")
    return value


def _json(record: ConfigRecord, name: str) -> Any:
    return _loads(_text(record, name), name)


def _loads(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"A message's {name!r} is not JSON: {error}.") from error


def _shown(value: Any) -> str:
    """Return a value as text for an error, which must be short whatever arrived."""
    return reprlib.repr(value)


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError(f"A message's {name!r} is {_shown(value)}; a table was expected.")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise WireError(f"A message's {name!r} is {_shown(value)}; a list was expected.")
    return value
