"""Settings: how they are checked, and those of training."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from goldfish.errors import ConfigError, unknown

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=1)]


class Checked(BaseModel):
    """Values that are checked where they enter and never change; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Settings(Checked):
    """Settings; a wrong name or value is refused in words. This class itself has none."""

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Check values that a user gave; ``where`` is the table that they stand in."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: this is a table of settings, not {values!r}.")
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(describe(error, cls, where)) from None


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
    aggregation: Literal["size", "adaptive", "trimmed-mean", "median"] = "size"
    """The mean of the clients. "size": weighed by number of samples (FedAvg). "adaptive": by server
    error (equation 12). "trimmed-mean", "median": without weights, value by value, so that a few
    hostile clients cannot move it far."""
    trim: Annotated[float, Field(gt=0, lt=0.5)] = 0.2
    """With aggregation = "trimmed-mean": the share of the clients cut off at each end, at least
    one where three answer."""
    max_update_norm: Positive | None = None
    """A client's model that is further from what it was sent, as a Euclidean distance over all of
    its values, is brought back to this distance; each round says whose were."""
    server_samples: Count | None = None
    """Test samples that the server measures clients on; 2000 by default, fewer for many clients."""
    shards: Count = 1
    """Shards of each client's data, each with a model of its own (the paper's tau)."""
    shard_mode: Literal["shared", "isolated"] = "shared"
    """Shared: shards start each round from the global model, as in the paper. Isolated: never."""
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the clients that take part in a round, drawn anew for each; clients that must take
    part because they asked come on top."""
    quorum: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the asked clients that must answer; below it the round is an error."""

    @model_validator(mode="after")
    def _bounded_from_what_was_sent(self) -> Self:
        if self.max_update_norm is not None and self.shards > 1:
            raise ValueError(
                "max_update_norm is a distance from what was sent, and shards may start from models"
                " that clients keep: use one of max_update_norm and shards"
            )
        return self

    @property
    def robust(self) -> bool:
        """Whether the mean is one that few hostile clients cannot move far."""
        return self.aggregation in ("trimmed-mean", "median")


def learning_rate_at(settings: TrainingSettings, index: int, rounds: int) -> float:
    """Return the step size of round ``index`` (from 1) out of ``rounds``."""
    if settings.schedule == "cosine":
        return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (index - 1) / rounds))
    if settings.schedule == "step":
        shrinks = (index - 1) // settings.step_every
        return settings.learning_rate * float(settings.step_factor**shrinks)
    return settings.learning_rate
