"""The core types that all layers share; no behaviour lives here."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Generic, Protocol, TypeAlias, TypeVar

from pydantic import Field
from torch import Tensor, nn

from goldfish.errors import ConfigError
from goldfish.settings import Checked, Settings, TrainingSettings

if TYPE_CHECKING:
    from goldfish.training.workspace import LoadedModel

Params: TypeAlias = Mapping[str, Tensor]
"""A detached state dict: all weights and all buffers. Never mutated."""

Scalar: TypeAlias = int | float | str | bool
"""What any engine can carry beside arrays."""

Memo: TypeAlias = Mapping[str, Any]
"""What a method remembers of a round: names, and values that JSON can hold."""

States: TypeAlias = Mapping[str, Mapping[str, Params]]
"""What clients keep: client id, then key, then parameters."""

S = TypeVar("S", bound=Settings)
"""The class of a method's settings, or of those of a step."""

ModelFactory: TypeAlias = Callable[[], nn.Module]
"""Builds a new model with newly initialised weights and buffers at each call."""

Key: TypeAlias = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
"""A salted digest of a sample's id."""

MOST_NAMES = 20_000
"""So many samples an answer names at most."""


class Examples(Protocol):
    """Labelled data, read by position. Every sample has a stable id."""

    @property
    def ids(self) -> Sequence[str]:
        """One id a sample, unique within the data."""

    @property
    def labels(self) -> Tensor:
        """All labels, int64, in order."""

    def __len__(self) -> int: ...

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs (float32, or integers such as token ids) and the labels (int64)."""


@dataclass(frozen=True)
class DeletionRequest:
    """What one client wants removed: samples by id, one class, or (neither given) everything."""

    client_id: str
    sample_ids: Sequence[str] | None = None
    class_label: int | None = None

    def __post_init__(self) -> None:
        where = f"A deletion request of {self.client_id!r}"
        if self.sample_ids is not None and self.class_label is not None:
            raise ConfigError(f"{where} names samples and a class. File two.")
        if self.class_label is not None:
            object.__setattr__(self, "class_label", _class_label(self.class_label, where))
        if self.sample_ids is None:
            return
        if isinstance(self.sample_ids, str):
            raise ConfigError(f"{where}: sample_ids is a list of ids; write [{self.sample_ids!r}].")
        ids = tuple(self.sample_ids)
        if not ids or not all(isinstance(sample_id, str) for sample_id in ids):
            raise ConfigError(
                f"{where}: sample_ids holds at least one id, each a string like '17'."
            )
        object.__setattr__(self, "sample_ids", ids)


def _class_label(given: object, where: str) -> int:
    """Return a class label of any integer type, such as NumPy's."""
    try:
        label = -1 if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        label = -1
    if label < 0:
        raise ConfigError(f"{where}: class_label is a whole number from 0 on, not {given!r}.")
    return label


class ClientState:
    """What a client keeps between rounds: its shard models, and what it was asked to remove.

    The one mutable place. Keys of ``arrays`` are paths such as ``"origin/shard-2"``: the first
    part names the phase that wrote it, so that several methods can start from what one training
    left behind.
    """

    def __init__(
        self, arrays: Mapping[str, Params] | None = None, tombstones: set[str] | None = None
    ) -> None:
        self.arrays: MutableMapping[str, Params] = dict(arrays or {})
        self.tombstones = set() if tombstones is None else tombstones
        """Ids of samples that were asked to be removed once. No task uses them for training again,
        until the client's owner takes them out of here."""
        self.cache: MutableMapping[str, tuple[str, Tensor]] = {}
        """What can be computed again: for each key a fingerprint of its inputs, and the value."""


@dataclass(frozen=True)
class Client:
    """A member of the federation and its data; stays where the data is.

    Until a deletion is filed, ``retained`` is all of the client's data and ``removed`` is empty.
    """

    id: str
    retained: Examples
    removed: Examples | None = None
    """What is to be removed now; None when nothing is."""
    gone: Sequence[str] = ()
    """Ids of samples that earlier requests removed. They only keep shards as they were."""
    state: ClientState = field(default_factory=ClientState)
    fewest: int = 1
    """Of a group of fewer samples than this, no count, mean or histogram is told in an audit."""
    missing: Sequence[str] = ()
    """Ids of samples that are to be removed now, and that the client has deleted already."""


class Context(Checked):
    """What a step must know of the round that it belongs to."""

    phase: str
    """The name under which the client keeps what it must: ``origin``, or the method's."""
    round: Annotated[int, Field(ge=0, lt=2**48)] = 1
    learning_rate: float = 0.0
    """The step size of this round; 0 where nothing is trained."""
    seed: int = 0
    shard_seed: int = 0
    """The seed by which the client's data was divided into shards."""
    original_phase: str = "origin"
    """The name under which the client keeps what the original training left."""
    warm: bool = False
    """The method starts from a model that knows the removed data, and forgets it through the
    clients that ask."""


@dataclass(frozen=True)
class Constant:
    """Arrays that stay the same over all rounds of a phase (the teacher): they travel once."""

    params: Params
    digest: str
    """That of the params, :func:`goldfish.params.digest`."""


@dataclass(frozen=True)
class Step(Generic[S]):
    """The client's side of a method.

    ``run`` depends on the task, the client's data and its state alone. An engine on one machine
    calls it; an engine across a wire sends the name.
    """

    name: str
    run: Callable[[Task[S], Client, Workspace], Update]
    settings: type[S]
    """What the server tells it: the method's settings, or a class of its own."""
    counts: Callable[[Task[S]], Sequence[str]] = lambda _task: ()
    """The names of counts of samples that its answer's metrics hold beside those of all steps."""
    only_looks: bool = False
    """Whether the client keeps nothing of it: no answer, and no request that the task carries."""


@dataclass(frozen=True)
class Task(Generic[S]):
    """Server to client: run this step on these arrays."""

    client_id: str
    step: Step[S]
    arrays: Mapping[str, Params]
    settings: S
    """The step's own."""
    context: Context
    training: TrainingSettings = field(default_factory=TrainingSettings)
    requests: Sequence[DeletionRequest] = ()
    """What the client wants removed now."""
    honoured: Sequence[DeletionRequest] = ()
    """What it wanted removed earlier: the model that the method starts from is free of it."""
    constants: Mapping[str, Constant] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """Client to server: the new parameters, and from how many examples they were learned.

    ``num_examples == 0`` means that the client had nothing to learn from; its parameters are not
    aggregated. ``metrics`` always holds ``loss``, ``steps`` and ``samples``, and where there were
    any ``teacher_samples``, ``fisher_samples`` and ``measured_samples``.
    """

    client_id: str
    params: Params
    num_examples: Annotated[int, Field(ge=0, lt=2**48)]
    metrics: Mapping[str, float]
    names: Annotated[tuple[Key, ...], Field(max_length=MOST_NAMES)] = ()
    """The keys of samples, where a step is asked for them."""


@dataclass(frozen=True)
class Failure:
    """A client that was asked and did not answer, and why.

    ``error`` is the name of the exception's class, such as ``"DivergenceError"``.
    """

    client_id: str
    error: str
    cause: str
    final: bool = False
    """The server's own process knows that asking again does not mend it: an error of a setting, or
    divergence, then ends the phase. What a client says of itself over a wire is never final."""


@dataclass(frozen=True)
class RoundReplies:
    """What came back from one round of tasks, in the order of the tasks."""

    updates: Sequence[Update]
    failures: Sequence[Failure]


@dataclass(frozen=True)
class Round:
    """One finished round: the new global parameters and how they came about. Counts from 1."""

    index: int
    params: Params
    updates: Sequence[Update]
    failures: Sequence[Failure]
    bytes_sent: int
    final: bool = False
    """The method ended here (the round-level stop, or it needs no more rounds)."""
    memo: Memo = field(default_factory=dict)
    """What the method must remember to go on after this round."""
    absent: Sequence[str] = ()
    """Clients that had to take part, because the method forgets through them, and did not."""
    shortened: Sequence[str] = ()
    """Clients whose models were brought back to ``max_update_norm``."""
    discarded: Sequence[Mapping[str, float]] = ()
    """The metrics of further updates, which cost as much and are no part of the round's model."""

    @property
    def learned(self) -> Sequence[Update]:
        """The updates of clients that had something to learn from: those that count."""
        return [update for update in self.updates if update.num_examples > 0]


@dataclass(frozen=True)
class NotHonoured:
    """A request that the result does not honour: what it removes is still in the model."""

    request: DeletionRequest
    reason: str


@dataclass(frozen=True)
class HistoryEntry:
    """What the server kept of one round of the original training."""

    index: int
    start: Params
    """The global model that the round started from."""
    updates: Sequence[Update]


class Workspace(Protocol):
    """Where a client step finds its models; one for each worker, so never shared."""

    def load(self, role: str, params: Params) -> LoadedModel:
        """Return this worker's model for ``role``, holding ``params``."""


class Federation(Protocol):
    """The only seam between engines."""

    @property
    def client_ids(self) -> Sequence[str]:
        """The ids of all clients, in a fixed order."""

    @property
    def model(self) -> ModelFactory:
        """Builds the model that the federation trains."""

    def run(self, tasks: Sequence[Task[Any]]) -> RoundReplies:
        """Let each client run the step of its task."""

    def states(self) -> States:
        """Return what the clients keep, as far as it lives in this process."""

    def restore(self, states: States) -> None:
        """Put back what :meth:`states` returned."""

    def bytes_kept(self, phase: str) -> int:
        """Return how many bytes the clients keep under the name of a phase, wherever they are."""
