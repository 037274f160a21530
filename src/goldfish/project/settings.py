"""The settings of a project: ``goldfish.toml``, which ``goldfish init`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from goldfish.errors import ConfigError, unknown
from goldfish.experiments.config import (
    DataSettings,
    EngineName,
    ModelSettings,
    make_absolute,
    method_settings,
    read_toml,
    split_methods,
)
from goldfish.federation.settings import FlowerSettings
from goldfish.methods import METHODS, Method
from goldfish.project import LEDGER
from goldfish.settings import Count, Settings, TrainingSettings

AUTO = "auto"
"""The method that is chosen by what is asked for."""

TEMPLATE = """\
# A Goldfish project. It works as it stands; docs/quickstart.md walks through it, and
# docs/configuration.md says what the settings of [data], [model] and [training] mean.

seed = 0

[data]
name = "digits"          # a dataset of 'goldfish data list'
clients = 5              # among which it is divided
partition = "iid"        # or uneven, dirichlet, explicit (with manifest = "who-holds-what.json")

# Your own images: one folder a class, under train/ and test/ in path.
# name = "image-folder"
# path = "images"

# Your own data of any kind: a function in a Python file of this folder. It returns the data of
# all clients by their names, and the server's test set; docs/own-model.md has an example.
# name = "my_data:load"

[model]
name = "lenet5"          # a model of 'goldfish models'

# Your own: a function in a Python file of this folder that returns a new torch.nn.Module.
# name = "my_model:build"

[training]
rounds = 10
local_epochs = 2
batch_size = 20
learning_rate = 0.01

[unlearning]
method = "auto"          # goldfish-sprint, or retrain where that cannot do it or costs too much
                         # accuracy. Or a name of 'goldfish methods'

[requests]
due_days = 30            # how long you have to answer a request

# Clients on other machines, as nodes of a Flower federation (docs/flower.md): write
# engine = "flower" at the top of this file, and say here where its SuperLink is.
# [flower]
# superlink = "127.0.0.1:9093"
# insecure = true
"""


class ProjectUnlearning(Settings):
    """How a project unlearns."""

    method: str = AUTO
    """A method from ``goldfish methods``, or "auto": goldfish-sprint, or retrain where it must."""
    rounds: Count | None = None
    """Rounds of unlearning; by default as many as the training has."""
    keep_for: list[str] = Field(default_factory=list)
    """Methods that need client updates of the training kept: fed-eraser, fed-recovery."""

    @model_validator(mode="after")
    def _known_methods(self) -> Self:
        for name in (*self.keep_for, *([] if self.method == AUTO else [self.method])):
            if name not in METHODS:
                raise ValueError(unknown("method", name, METHODS, "'goldfish methods' lists all."))
        return self


class RequestSettings(Settings):
    """How requests are answered."""

    due_days: Annotated[int, Field(ge=1)] = 30
    """Days from the day of a request until it must be answered."""


class _Tables(Settings):
    seed: Annotated[int, Field(ge=0)] = 0
    engine: EngineName = "in-process"
    flower: FlowerSettings = FlowerSettings()
    ledger: str = LEDGER
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    unlearning: ProjectUnlearning = ProjectUnlearning()
    requests: RequestSettings = RequestSettings()


@dataclass(frozen=True)
class ProjectSettings:
    """All settings of a project."""

    tables: _Tables
    methods: Mapping[str, Any]
    """The tables of the methods, as they stand in the file."""

    @classmethod
    def read(cls, path: Path) -> ProjectSettings:
        """Read and check a project's file; paths in it are relative to it."""
        written = read_toml(path)
        make_absolute(written, path.parent)
        values, methods = split_methods(written)
        tables = _Tables.parse(values)
        for name in methods:
            method_settings(name, methods)
        settings = cls(tables, methods)
        if settings.on_flower and settings.own_data:
            raise ConfigError(
                f"{path}: data.name: a function of yours reads data in one process, and with "
                'engine = "flower" every node reads its own: name a dataset.'
            )
        if settings.members is not None and not settings.on_flower:
            raise ConfigError(
                f"{path}: data.members have their data on their own machines: they need "
                'engine = "flower".'
            )
        return settings

    def of_method(self, name: str) -> Settings:
        """Return the settings of a method."""
        return method_settings(name, self.methods)

    @property
    def own_training(self) -> Method[Any] | None:
        """The method, where it has a training of its own."""
        own = METHODS.get(self.tables.unlearning.method)
        return own if own is not None and own.prepare is not None else None

    @property
    def on_flower(self) -> bool:
        """Whether the clients are nodes of a Flower federation."""
        return self.tables.engine == "flower"

    @property
    def members(self) -> list[str] | None:
        """The clients that have data of their own on their nodes, if that is so."""
        return self.tables.data.members

    @property
    def own_data(self) -> bool:
        """Whether a function of the user's reads the data."""
        return ":" in self.tables.data.name

    @property
    def pinned(self) -> dict[str, Any]:
        """What a trained model depends on: it must not change once there is one.

        Where the data lies may: its samples are known by their ids.
        """
        tables = self.tables
        return {
            **({"engine": tables.engine} if self.on_flower else {}),
            "seed": tables.seed,
            "data": tables.data.model_dump(mode="json", exclude={"path", "manifest"}),
            "model": tables.model.model_dump(mode="json"),
            "training": tables.training.model_dump(mode="json"),
        }
