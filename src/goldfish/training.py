"""The only training loop (:func:`fit`), the only inference loop (:func:`predict`), settings."""

from __future__ import annotations

import difflib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from goldfish.device import DeviceRows, fetch, open_queues, working_on
from goldfish.errors import ConfigError, DataError, DivergenceError, unknown
from goldfish.feeds import Batch, ExampleFeed, Feed
from goldfish.graphs import allow_recording, recorder_of
from goldfish.memory import keep_freed_memory
from goldfish.params import READER
from goldfish.stepping import (
    Loss,
    Objective,
    PlainTrainer,
    Precision,
    Precondition,
    Sgd,
    Trainer,
    TrainingStep,
)
from goldfish.types import Examples, ModelFactory, Params, Scalar

MEMBERS = "members."
"""How the names of an ensemble's parameters begin."""

PREDICTED_AT_ONCE = 200
PREDICTED_AT_ONCE_BY_GPU = 2000
"""Samples in a batch of :func:`predict`: what a device does fastest."""

Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """Settings that are checked where they enter; a wrong name or value is refused in words."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Check values that a user gave; ``where`` is the table that they stand in."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: this is a table of settings, not {values!r}.")
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(describe(error, cls, where)) from None

    @classmethod
    def from_task(cls, config: Mapping[str, Scalar]) -> Self:
        """Read these settings out of a task's configuration, which holds others beside them."""
        fields = cls.model_fields
        own = {k: v for k, v in config.items() if k in fields}
        try:
            return cast("Self", _checked(cls, tuple(own.items())))
        except TypeError:  # a list, or another value that cannot be looked up
            return cls.model_validate(own)

    def to_task(self) -> dict[str, Scalar]:
        """Return the settings as scalars that any engine can carry."""
        dumped: dict[str, Any] = self.model_dump(exclude_none=True)
        return dumped


@functools.lru_cache(maxsize=64)
def _checked(settings: type[Settings], values: tuple[tuple[str, Scalar], ...]) -> Settings:
    """Check the values of a task: they are the same for all clients of a round."""
    return settings.model_validate(dict(values))


def describe(error: ValidationError, model: type[BaseModel], where: str = "") -> str:
    """Say in words what is wrong with settings: one line a field, by its full name."""
    lines = []
    for item in error.errors():
        path = [str(part) for part in item["loc"]]
        name = ".".join([where, *path] if where else path)
        if item["type"] == "extra_forbidden":
            hint = "docs/configuration.md lists all settings."
            lines.append(unknown("setting", name, _near(name, _names(model, where)), hint))
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{name}: {message} (got {item['input']!r})")
    return "\n".join(lines)


def _near(name: str, names: Sequence[str]) -> list[str]:
    """Return the names of the same table whose last part is like that of ``name``."""
    table, _, last = name.rpartition(".")
    siblings = {n.rpartition(".")[2]: n for n in names if n.rpartition(".")[0] == table}
    return [siblings[n] for n in difflib.get_close_matches(last, siblings, n=1)]


def _names(model: type[BaseModel], where: str) -> list[str]:
    """Return the full names of all settings of a model and of those nested in it."""
    names = []
    for name, info in model.model_fields.items():
        full = f"{where}.{name}" if where else name
        names.append(full)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            names += _names(info.annotation, full)
    return names


class TrainingSettings(Settings):
    """How clients train and how the server combines what they learned."""

    rounds: Count = 20
    """Federated rounds."""
    local_epochs: Count = 1
    """Passes over a client's data in one round (the paper's n)."""
    batch_size: Count = 100
    """Samples in a mini-batch (the paper's B)."""
    learning_rate: Positive = 0.001
    """Step size of local SGD (the paper's eta)."""
    schedule: Literal["constant", "cosine", "step"] = "constant"
    """How the step size changes over the rounds."""
    step_every: Count = 10
    """With schedule = "step": the step size shrinks after each so many rounds."""
    step_factor: Positive = 0.1
    """With schedule = "step": what the step size is multiplied by."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of local SGD (the paper's beta)."""
    weight_decay: NonNegative = 0.0
    """L2 penalty of local SGD."""
    augment: bool = False
    """Random crops and horizontal flips of the training images."""
    precision: Precision = "fp32"
    """Arithmetic of the training on a GPU; the weights are float32 in any case."""
    aggregation: Literal["size", "adaptive"] = "size"
    """Weights of the clients: by number of samples (FedAvg) or by server error (equation 12)."""
    server_samples: Count | None = None
    """Test samples that the server measures clients on; 2000 by default, fewer for many clients."""
    shards: Count = 1
    """Shards of each client's data, each with a model of its own (the paper's tau)."""
    shard_mode: Literal["shared", "isolated"] = "shared"
    """Shared: shards start each round from the global model, as in the paper. Isolated: never."""
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the clients that take part in a round, drawn anew for each."""
    quorum: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the asked clients that must answer; below it the round is an error."""


def learning_rate_at(settings: TrainingSettings, index: int, rounds: int) -> float:
    """Return the step size of round ``index`` (from 1) out of ``rounds``."""
    if settings.schedule == "cosine":
        return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (index - 1) / rounds))
    if settings.schedule == "step":
        shrinks = (index - 1) // settings.step_every
        return settings.learning_rate * float(settings.step_factor**shrinks)
    return settings.learning_rate


@dataclass(frozen=True)
class Fitted:
    """What :func:`fit` did: the mean risk of each epoch, and its cost."""

    epoch_risks: Sequence[float]
    steps: int
    samples: int
    teacher_samples: int = 0
    """Samples that a teacher looked at; who asks the teacher counts them."""
    fisher_samples: int = 0
    """Samples whose gradients were taken one by one; who takes them counts them."""


def fit(
    model: nn.Module,
    num_examples: int,
    feed: Feed,
    objective: Objective,
    settings: TrainingSettings,
    *,
    learning_rate: float,
    generator: torch.Generator,
    stop: Callable[[Sequence[float]], bool] | None = None,
    max_steps: int | None = None,
    precondition: Precondition | None = None,
    after_step: Callable[[nn.Module, Loss], bool] | None = None,
) -> Fitted:
    """Train ``model`` in place with SGD; the order of the samples comes from ``generator``.

    ``stop`` is asked after each epoch with the mean risks so far and ends the training early, as
    does having taken ``max_steps`` steps. ``precondition`` may change the gradients before a step;
    ``after_step`` gets the model after it, with the loss before it, and its yes ends the training.
    A loss that is not finite raises :class:`DivergenceError` at the end of its epoch.
    """
    sgd = Sgd(settings.momentum, settings.weight_decay, settings.precision)
    recorder = recorder_of(model) if precondition is None and after_step is None else None
    trainer: Trainer
    if recorder is not None and isinstance(feed, ExampleFeed) and feed.gather.on_device:
        trainer = recorder.trainer(feed, objective, sgd, learning_rate)
    else:
        step = TrainingStep(model, objective, sgd, learning_rate)
        trainer = PlainTrainer(step, feed, precondition, after_step)
    if not num_examples:
        raise DataError("There is no sample to train on.")
    all_sizes = _batch_sizes(num_examples, settings.batch_size)
    epoch_risks: list[float] = []
    steps = samples = 0
    for epoch in range(1, settings.local_epochs + 1):
        order = torch.randperm(num_examples, generator=generator)
        sizes = all_sizes if max_steps is None else all_sizes[: max_steps - steps]
        done = trainer.run(order[: sum(sizes)], sizes)
        steps += done.steps
        samples += done.samples
        if not math.isfinite(done.total):
            raise DivergenceError(f"the loss became {done.total} in local epoch {epoch}")
        epoch_risks.append(done.risk / done.steps)
        if done.ended or steps == max_steps or (stop is not None and stop(epoch_risks)):
            break
    return Fitted(epoch_risks, steps, samples)


def _batch_sizes(count: int, size: int) -> list[int]:
    """Return the sizes of the mini-batches of ``count`` samples.

    A single left-over sample joins the batch before it: BatchNorm cannot train on one sample.
    """
    whole, rest = divmod(count, size)
    sizes = [size] * whole + [rest] * (rest > 0)
    if len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [sizes[-2] + 1]
    return sizes


def cross_entropy_objective(model: nn.Module, batch: Batch) -> Loss:
    """Return the ordinary training loss."""
    loss = F.cross_entropy(model(batch.inputs), batch.labels)
    return Loss(loss, risk=loss)


@torch.no_grad()
def predict(model: nn.Module, examples: Examples, batch_size: int | None = None) -> Tensor:
    """Return the logits of all examples, on the CPU, in order; always in evaluation mode."""
    model.eval()
    device = next(model.parameters()).device
    size = batch_size or (PREDICTED_AT_ONCE if device.type == "cpu" else PREDICTED_AT_ONCE_BY_GPU)
    batches = torch.arange(len(examples)).split(size)
    return torch.cat([fetch(model(examples.batch(b)[0].to(device)).float()) for b in batches])


class Ensemble(nn.Module):
    """Several models that predict together: the logarithm of their mean probabilities."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits whose softmax is the mean of the members' softmax vectors."""
        logs = torch.stack([F.log_softmax(member(inputs), dim=-1) for member in self.members])
        return torch.logsumexp(logs, dim=0) - math.log(len(self.members))


def join(models: Sequence[Params]) -> Params:
    """Return the parameters of an :class:`Ensemble` of these models."""
    return {
        f"{MEMBERS}{place}.{name}": t
        for place, params in enumerate(models)
        for name, t in params.items()
    }


def count_members(params: Params) -> int:
    """Return how many models an ensemble's parameters hold; 0 for a single model."""
    places = {n.split(".")[1] for n in params if n.startswith(MEMBERS)}
    return len(places)


_building = threading.Lock()
"""Held while a model is built: workers share torch's global generator."""


class LocalWorkspace:
    """The models of one worker: built once for each role, then loaded again and again.

    On a GPU a worker has a stream of its own (:meth:`active`), and with ``graphs`` the training
    steps of its models are recorded and replayed. With ``compiled`` models are compiled.
    """

    def __init__(
        self,
        factory: ModelFactory,
        device: torch.device | str = "cpu",
        *,
        graphs: bool = True,
        compiled: bool = False,
    ) -> None:
        keep_freed_memory()
        self._factory = factory
        self._device = torch.device(device)
        self._graphs = graphs
        self._compiled = compiled
        self._modules: dict[str, nn.Module] = {}
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            open_queues()
            self._stream = torch.cuda.Stream(self._device)
            self._usual = torch.cuda.default_stream(self._device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return the context in which this worker works."""
        if self._stream is None:
            yield
            return
        with working_on(self._stream):
            if not self._usual.query():  # data may be under way
                self._stream.wait_stream(self._usual)
            yield

    def load(self, role: str, params: Params) -> nn.Module:
        """Return the module for ``role``, holding ``params``: one model, or an ensemble."""
        members = count_members(params)
        key = f"{role}/{members}"
        if key not in self._modules:
            # Its initial weights are not used: the caller's random numbers stay as they are.
            with _building, torch.random.fork_rng(devices=[]):
                built = [self._factory() for _ in range(members or 1)]
            self._modules[key] = self._ready(Ensemble(built) if members else built[0])
        module = self._modules[key]
        self._fill(module, params)
        return module

    def _fill(self, module: nn.Module, params: Params) -> None:
        """Copy the values into the module, to a GPU all of them at once."""
        rows: DeviceRows | None = getattr(module, READER, None)
        if rows is not None and rows.fit(params):
            rows.load(params)
        else:
            module.load_state_dict(dict(params))  # converts, or says what does not fit

    def _ready(self, module: nn.Module) -> nn.Module:
        module = module.to(self._device)
        if self._compiled:
            module.compile(dynamic=False)
        if self._stream is not None:
            setattr(module, READER, DeviceRows(module))
            if self._graphs:
                allow_recording(module)
        return module
