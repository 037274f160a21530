"""Orders and answers as Flower records, for both sides of the wire.

A message is one strict pydantic model, written as JSON; the models that go with it are safetensors.
What stays the same over many tasks (the teacher, the client's setup) is named by its digest and
travels only to a client that does not have it. Nothing that arrives is trusted or unpickled: sizes,
types and shapes are checked before a tensor is made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from reprlib import repr as shown  # short, whatever arrived
from typing import Annotated, Any, Self, TypeAlias, TypeVar, get_type_hints

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from safetensors import SafetensorError
from safetensors.torch import load, save

from goldfish.errors import DivergenceError, WireError, plain
from goldfish.params import Shapes, all_finite, digest, shapes_of
from goldfish.settings import Checked, Count, TrainingSettings
from goldfish.training.workspace import MEMBERS, ensemble_size
from goldfish.types import Context, DeletionRequest, Params, Task, Update

IDENTIFY = "query.identify"
"""The message that asks a node which client it is."""
FORMAT = "safetensors"
"""How the bytes of a model are written."""
DTYPES: Mapping[str, torch.dtype] = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The types of numbers that can travel, by safetensors' names."""

MOST = 2**48
"""Values of a tensor, and steps or samples of a task, are fewer than this."""
MOST_SAID = 2**20
"""Letters of a client's message, beside its model."""
MOST_THREADS = 1024
"""Threads that a client starts for a task at most: another number could end its process."""
MOST_WORDS = 4000
"""Letters of an error that a client reports; what is longer is cut."""
ROOM = 300
"""Bytes of a model's header for what it says of one tensor, beside the name."""
COUNTS = ("steps", "samples", "teacher_samples", "fisher_samples", "measured_samples")
"""The metrics of an update that every round adds up; the last three may be missing."""
NEVER_NEGATIVE = ("running_var", "num_batches_tracked")
"""Buffers of BatchNorm; with a negative variance a model gives NaN, and so may its mean."""

Name: TypeAlias = Annotated[str, Field(max_length=1000)]
Digest: TypeAlias = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Whole: TypeAlias = Annotated[int, Field(ge=0, lt=MOST)]


class Message(Checked):
    """What one side says to the other: of the right types, and nothing beside it."""

    model_config = ConfigDict(strict=True, ser_json_inf_nan="constants")


M = TypeVar("M", bound=Message)


class Identity(Message):
    """Which client a node is, and which store it keeps its state in."""

    client_id: Name
    store: Name
    version: Name


class Missing(Message):
    """The client's answer when it lacks constants or the setup: send these again."""

    digests: Annotated[Sequence[Digest], Field(max_length=1000)]


class Failed(Message):
    """The client's answer when the step raised: the name of the error's class, and its text."""

    error: Annotated[Name, AfterValidator(plain)]
    cause: Annotated[str, Field(max_length=MOST_WORDS), AfterValidator(plain)]

    @classmethod
    def by(cls, error: BaseException) -> Self:
        """Return the answer for an error."""
        cause = str(error) or repr(error)
        return cls(error=type(error).__name__[:1000], cause=cause[:MOST_WORDS])


class Order(Message):
    """All that a task asks, with what a client across a wire must know beside it.

    Arrays, constants and the setup are there by their digests.
    """

    run: Name
    """The run that the client's state belongs to."""
    threads: Annotated[Count, Field(le=MOST_THREADS)]
    """Torch's threads, on which the last bits depend."""
    client_id: Name
    step: Name
    settings: Mapping[str, Any]
    context: Context
    training: TrainingSettings
    requests: tuple[DeletionRequest, ...]
    honoured: tuple[DeletionRequest, ...]
    arrays: Mapping[Name, Digest]
    constants: Mapping[Name, Digest]
    setup: Digest
    """How the client builds its data and model."""

    @classmethod
    def of(cls, task: Task[Any], run: str, setup: str, threads: int = 1) -> Self:
        """Return the order of a task."""
        return cls(
            run=run,
            threads=threads,
            client_id=task.client_id,
            step=task.step.name,
            settings=task.settings.model_dump(mode="json"),
            context=task.context,
            training=task.training,
            requests=tuple(task.requests),
            honoured=tuple(task.honoured),
            arrays={name: digest(params) for name, params in task.arrays.items()},
            constants={name: constant.digest for name, constant in task.constants.items()},
            setup=text_digest(setup),
        )

    @cached_property
    def id(self) -> str:
        """A digest of all that the order asks: a repeated order has the same."""
        return text_digest(self.model_dump_json())

    @property
    def kept(self) -> set[str]:
        """The digests of what the client keeps: the constants and the setup."""
        return {self.setup, *self.constants.values()}


@dataclasses.dataclass(frozen=True)
class Received:
    """An order as it arrives, with what came along: models by digest, and perhaps the setup."""

    order: Order
    models: Mapping[str, Params]
    setup: str | None


_UPDATE: Mapping[str, Any] = {
    field.name: (
        get_type_hints(Update, include_extras=True)[field.name],
        ... if field.default is dataclasses.MISSING else field.default,
    )
    for field in dataclasses.fields(Update)
    if field.name != "params"
}
"""The fields of an update but for its parameters: they travel by their types in ``Update``."""
_Answer: Any = create_model(
    "Answer", __base__=Message, id=(Digest, ...), kept=(Whole, ...), **_UPDATE
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The client's answer to an order."""

    id: str
    update: Update
    kept: int
    """Bytes that the client keeps under the name of the task's phase."""

    @property
    def message(self) -> Message:
        """All but the parameters."""
        said = {name: getattr(self.update, name) for name in _UPDATE}
        message: Message = _Answer.model_validate({"id": self.id, "kept": self.kept, **said})
        return message

    @classmethod
    def read(cls, text: str, params: Callable[[], Params]) -> Answer:
        """Return an answer from its message; the parameters are read when all else is right."""
        said = dict(_read(_Answer, text))
        own = {name: said.pop(name) for name in _UPDATE}
        for name in sorted({"loss", "steps", "samples", *own["metrics"]}):
            metric = own["metrics"].get(name)
            if metric is None or (name in COUNTS and not 0 <= metric < MOST):
                words = f"The metric {shown(name)} is {shown(metric)}; a number was expected."
                raise WireError(words)
        return cls(update=Update(params=params(), **own), **said)


def encode(message: Message, models: Mapping[str, Params] | None = None) -> RecordDict:
    """Return a message with the models that go with it."""
    content = RecordDict(
        {type(message).__name__: ConfigRecord({"json": message.model_dump_json()})}
    )
    for name, params in (models or {}).items():
        data = pack(params)
        content[name] = ArrayRecord({FORMAT: Array("uint8", (len(data),), FORMAT, data)})
    return content


def encode_order(order: Order, task: Task[Any], setup: str, send: Collection[str]) -> RecordDict:
    """Return the message of an order, with those constants (and setup) that ``send`` names."""
    constants = {c.digest: c.params for c in task.constants.values() if c.digest in send}
    arrays = {order.arrays[name]: params for name, params in task.arrays.items()}
    content = encode(order, constants | arrays)
    if order.setup in send:
        content["setup"] = ConfigRecord({"text": setup})
    return content


def encode_answer(answer: Answer) -> RecordDict:
    """Return the reply that carries a client's update."""
    return encode(answer.message, {"params": answer.update.params})


def decode(content: RecordDict, kind: type[M]) -> M | Failed:
    """Read the message of a client: one of this kind, or that it failed."""
    if Failed.__name__ in content.config_records:
        return _read(Failed, _text(content, Failed.__name__))
    return _read(kind, _text(content, kind.__name__))


def decode_order(content: RecordDict) -> Received:
    """Read an order, and check that what came along is what it names."""
    order = _read(Order, _text(content, Order.__name__))
    arrays, came = set(order.arrays.values()), content.array_records.keys()
    if not arrays <= came <= arrays | order.kept:
        raise WireError(f"An order came with other models than it names: {shown(sorted(came))}.")
    models = {name: unpack(_model(content, name)) for name in came}
    setup = content.config_records.get("setup", ConfigRecord()).get("text")
    whole = setup is None or text_digest(str(setup)) == order.setup
    if not whole or any(digest(params) != name for name, params in models.items()):
        raise WireError("An order arrived damaged: the digest of what came along is another one.")
    return Received(order, models, None if setup is None else str(setup))


def decode_reply(content: RecordDict, sent: Params) -> Answer | Missing | Failed:
    """Read whatever a client answers to an order that brought it the model ``sent``."""
    if Answer.__name__ not in content.config_records:
        return decode(content, Missing)
    text = _text(content, Answer.__name__)
    return Answer.read(text, lambda: unpack(_model(content, "params"), shapes_of(sent)))


def check_update(update: Update, counts: Collection[str], most: int) -> None:
    """Raise where an update that is a model of this federation says what cannot be.

    No count of samples exceeds ``most``, those that the client has: clients are weighed by it.
    ``counts`` names the metrics that count samples too. Numbers that are not finite are divergence.
    """
    said = {"num_examples": update.num_examples, **{n: update.metrics.get(n) for n in counts}}
    for name, number in said.items():
        if number is None or not 0 <= number <= most:
            raise WireError(
                f"the update's {name} is {shown(number)}; a number from 0 to {most} was expected, "
                "the samples that the client has"
            )
    for name, tensor in update.params.items():
        if name.rpartition(".")[2] in NEVER_NEGATIVE and bool((tensor < 0).any()):
            raise WireError(f"the update's {name[:200]!r} holds a number below 0, which cannot be")
    if not all_finite(update.params):
        raise DivergenceError("its update holds numbers that are not finite")


def pack(params: Params) -> bytes:
    """Return parameters as safetensors."""
    for name, t in params.items():
        if t.dtype not in DTYPES.values():
            raise WireError(f"{name!r} is of type {t.dtype}, which cannot travel.")
    # Copies: two names may stand for the same memory, which safetensors refuses.
    return save({name: t.detach().cpu().contiguous().clone() for name, t in params.items()})


def unpack(data: bytes, like: Shapes | None = None) -> Params:
    """Return the parameters that :func:`pack` packed.

    With ``like`` they must be like those, and come in their order. Of an ensemble there may be
    fewer members: one whose shard is empty is not there.
    """
    if like is not None:
        # What names, shapes and places take as JSON: longer headers are not even parsed.
        header = sum(6 * len(name.encode()) + ROOM for name in like) + ROOM
        most = 8 + header + sum(s.numel() * dtype.itemsize for s, dtype in like.values())
        said = int.from_bytes(data[:8], "little")
        for what, size, bound in (("header", said, header), ("model", len(data), most)):
            if size > bound:
                raise WireError(
                    f"the update's {what} has {size} bytes; {bound} are the most for what was sent"
                )
    shapes = _shapes(data)
    if like is not None:
        count = ensemble_size(like) and ensemble_size(shapes)
        members = tuple(f"{MEMBERS}{place}." for place in range(count))
        like = {n: s for n, s in like.items() if not members or n.startswith(members)}
        for name in {**like, **shapes}:
            own, wanted = shapes.get(name), like.get(name)
            if own != wanted:
                raise WireError(
                    f"the update's {name[:200]!r} is {_words(own)}; {_words(wanted)} was expected"
                )
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise WireError(f"A model cannot be read: {shown(str(error))}.") from None
    return {name: tensors[name] for name in (shapes if like is None else like)}


class _Tensor(Message):
    """What the header of safetensors says of a tensor."""

    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
    shape: Annotated[list[Whole], Field(max_length=32)]
    data_offsets: tuple[Whole, Whole]


_HEADER = TypeAdapter(dict[str, _Tensor])


def _shapes(data: bytes) -> Shapes:
    """Return the shape and type of each tensor, from the header alone."""
    size = int.from_bytes(data[:8], "little")
    try:
        header = _HEADER.validate_json(data[8 : 8 + size])
    except ValidationError as error:
        raise WireError(f"A model's header makes no sense: {_first(error)}") from None
    if any(math.prod(side or 1 for side in t.shape) >= MOST for t in header.values()):
        raise WireError("A model's header makes no sense: a tensor has too many values.")
    return {name: (torch.Size(t.shape), DTYPES[t.dtype]) for name, t in header.items()}


def _words(tensor: tuple[torch.Size, torch.dtype] | None) -> str:
    return "nothing" if tensor is None else f"{tensor[1]} of shape {list(tensor[0])}"


def _model(content: RecordDict, name: str) -> bytes:
    """Return the bytes of a model; refuse what is written in another way."""
    record = content.array_records.get(name, ArrayRecord())
    if list(record) != [FORMAT] or record[FORMAT].stype != FORMAT:
        raise WireError(f"{shown(name)} does not hold one model, written as {FORMAT}.")
    return record[FORMAT].data


def _text(content: RecordDict, kind: str) -> str:
    text = content.config_records.get(kind, ConfigRecord()).get("json")
    if not isinstance(text, str):
        raise WireError(f"A message has no part {kind!r}; it holds {shown(sorted(content))}.")
    if kind != Order.__name__ and len(text) > MOST_SAID:
        raise WireError(f"A client's message has {len(text)} letters; {MOST_SAID} are the most.")
    return text


def _read(kind: type[M], text: str) -> M:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise WireError(f"A message makes no sense: {kind.__name__}.{_first(error)}") from None


def _first(error: ValidationError) -> str:
    """Say what is wrong first, in few words whatever arrived."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))[:100]
    return f"{where} is {shown(first['input'])}: {first['msg'][:200]}."


def action(step: str) -> str:
    """Return a step's name as Flower wants it: a Python identifier."""
    return step.replace("-", "_")


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def num_bytes_on_wire(content: RecordDict) -> int:
    """Return how many bytes a message's arrays and texts hold; Flower adds a few hundred."""
    arrays = [array for record in content.array_records.values() for array in record.values()]
    texts = [(n, v) for record in content.config_records.values() for n, v in record.items()]
    return sum(len(a.data) for a in arrays) + sum(len(n) + len(str(v)) for n, v in texts)
