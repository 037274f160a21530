"""The configuration of a run: TOML in, checked settings out, and back to TOML."""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import tomli_w
from pydantic import BeforeValidator, Field, model_validator

from goldfish.errors import ConfigError, unknown
from goldfish.federation.settings import FlowerSettings
from goldfish.methods import METHODS, method_named
from goldfish.settings import Count, Positive, Settings, TrainingSettings
from goldfish.types import Scalar

EngineName: TypeAlias = Literal["in-process", "flower"]

DEMO = Path(__file__).parent / "presets" / "demo.toml"
"""The configuration of ``goldfish demo``."""


def _integer(value: Any) -> Any:
    """Return an integer of any type, such as NumPy's, as Python's; the rest is checked later."""
    if isinstance(value, bool):
        raise ValueError("a class label is a whole number")  # noqa: TRY004 (pydantic wants it)
    return operator.index(value) if hasattr(value, "__index__") else value


ClassLabel: TypeAlias = Annotated[int, BeforeValidator(_integer), Field(ge=0)]


class DataSettings(Settings):
    """The data and who holds it."""

    name: str = "digits"
    """A dataset from ``goldfish data list``."""
    path: str | None = None
    """Where your own data is, for name = "image-folder" or "npz"."""
    clients: Count = 5
    """Number of clients (the paper's C)."""
    partition: Literal["iid", "uneven", "dirichlet", "explicit"] = "iid"
    """How the training data is divided: equal parts, uneven sizes, label skew, or a manifest."""
    alpha: Positive = 0.5
    """Concentration of the Dirichlet label skew: the smaller, the more skewed."""
    manifest: str | None = None
    """With partition = "explicit": a partition.json of another run, or one of your own."""
    limit_train: Count | None = None
    """Use only so many of the training samples, drawn by the seed."""
    limit_test: Count | None = None
    """Use only so many of the test samples, drawn by the seed."""
    members: Annotated[list[str], Field(min_length=1)] | None = None
    """Clients with data of their own on their nodes; name and path are the server's test set."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.partition == "explicit") != (self.manifest is not None):
            raise ValueError('partition = "explicit" and manifest belong together: give both')
        names = self.members or []
        if len(set(names)) < len(names) or any(len(name.split()) != 1 for name in names):
            raise ValueError("members are different names, each without spaces")
        if names and self.manifest is not None:
            raise ValueError("members have data of their own, which no manifest divides")
        if names and (self.limit_train or self.limit_test):
            raise ValueError("members have data of their own, of which all is used")
        return self


class ModelSettings(Settings):
    """The model."""

    name: str = "lenet5"
    """A model from ``goldfish models``, or your own "package.module:factory"."""
    options: dict[str, Scalar] = Field(default_factory=dict)
    """Keyword arguments of the model."""


class Selection(Settings):
    """What is removed: exactly one of rate, clients, class_label and samples."""

    rate: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the whole training set, held by the first client (others join if it has too few)."""
    clients: Annotated[list[str], Field(min_length=1)] | None = None
    """Clients that leave with all of their data."""
    class_label: ClassLabel | None = None
    """A class that every client removes."""
    samples: str | None = None
    """A file with one sample id a line; with data.members, a client's id and a space before it."""

    @model_validator(mode="after")
    def _one_selection(self) -> Self:
        names = ("rate", "clients", "class_label", "samples")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            got = f"{' and '.join(given)} are given" if given else "none is given"
            raise ValueError(f"say what to remove by exactly one of {', '.join(names)}; {got}")
        return self


class LaterDeletion(Selection):
    """A request that arrives while the methods are at work on the one before."""

    after: Count
    """Rounds of unlearning that each method has had for the requests before this one."""


class DeletionSettings(Selection):
    """What is removed: exactly one of rate, clients, class_label and samples."""

    clean_rate: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Remove this share of the training set too, without a trigger, from the next client."""
    backdoor_target: ClassLabel | None = None
    """The removed samples carry a trigger and this label, to show whether they are gone."""
    backdoor_source: ClassLabel | None = None
    """Attack this class only (the paper's variant)."""
    by_shard: bool = False
    """With rate and training.shards: take shard after shard, so that few of them are hit."""
    trigger_size: Count = 3
    """Side of the trigger, in pixels."""
    canaries: Count | None = None
    """So many removed samples without a trigger get a wrong label, which shows who remembers."""
    then: list[LaterDeletion] = Field(default_factory=list)
    """Later requests, in order, each a [[deletion.then]] table with its ``after``."""

    @model_validator(mode="after")
    def _source_has_target(self) -> Self:
        if self.backdoor_source is not None and self.backdoor_target is None:
            raise ValueError("backdoor_source needs backdoor_target, the class to attack towards")
        return self


class UnlearningSettings(Settings):
    """How to unlearn; what is left out is as in the training."""

    methods: list[str] = Field(default=["goldfish", "retrain"])
    """Methods from ``goldfish methods``, from one trained federation; with [] a run only trains."""
    rounds: Count = 10
    """Rounds that each method gets."""
    learning_rate: Positive | None = None
    """Step size of local SGD while unlearning."""
    local_epochs: Count | None = None
    """Passes over a client's data in one round while unlearning."""
    schedule: Literal["constant", "cosine", "step"] | None = None
    """How the step size changes over the rounds of unlearning."""

    @model_validator(mode="after")
    def _known_methods(self) -> Self:
        for name in self.methods:
            if name not in METHODS:
                raise ValueError(unknown("method", name, METHODS, "'goldfish methods' lists all."))
        if len(set(self.methods)) < len(self.methods):
            raise ValueError("a method is listed twice")
        return self


class EvaluationSettings(Settings):
    """What is measured beside the global model."""

    clients: bool = False
    """Measure the accuracy of every client's own model in every round, before the aggregation."""


class _Tables(Settings):
    """The configuration without the tables of the methods."""

    seed: Annotated[int, Field(ge=0)] = 0
    engine: EngineName = "in-process"
    """What runs the clients: threads of this process, or the nodes of a Flower federation."""
    flower: FlowerSettings = FlowerSettings()
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    deletion: DeletionSettings
    unlearning: UnlearningSettings = UnlearningSettings()
    evaluation: EvaluationSettings = EvaluationSettings()


class Config(_Tables):
    """A complete, checked configuration."""

    methods: Mapping[str, Settings]
    """The settings of each listed method."""

    @property
    def kept_rounds(self) -> Mapping[str, Sequence[int]]:
        """The rounds of the training whose updates each listed method needs."""
        return {
            name: METHODS[name].kept_rounds(self.methods[name], self.training.rounds)
            for name in self.unlearning.methods
        }

    @property
    def unlearning_training(self) -> TrainingSettings:
        """How clients train while unlearning."""
        own = ("learning_rate", "local_epochs", "schedule")
        changed = {n: v for n in own if (v := getattr(self.unlearning, n)) is not None}
        return self.training.model_copy(update=changed)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, in the shape of the TOML file."""
        unsaid = {"methods"}
        unsaid |= set() if self.engine == "flower" else {"engine", "flower"}
        unsaid |= set() if self.evaluation.clients else {"evaluation"}
        values = self.model_dump(mode="json", exclude_none=True, exclude=unsaid)
        for name, settings in self.methods.items():
            values["unlearning"][name] = settings.model_dump(mode="json", exclude_none=True)
        return values

    def to_toml(self) -> str:
        """Return the complete configuration as TOML; reading it gives the same configuration."""
        return tomli_w.dumps(self.to_dict())


def load_config(path: Path, overrides: Sequence[str] = (), *, seed: int | None = None) -> Config:
    """Read a TOML file; ``overrides`` are ``key=value`` with dotted keys, applied on top.

    Paths inside the file are relative to it.
    """
    values = read_toml(path)
    for override in overrides:
        set_value(values, *read_override(override))
    if seed is not None:
        values["seed"] = seed
    make_absolute(values, path.parent)
    return parse_config(values)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the values of a configuration, not checked yet."""
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"There is no configuration file {path}.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text in UTF-8. Save it as such.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None


def parse_config(values: Mapping[str, Any]) -> Config:
    """Check a configuration that is already a mapping."""
    rest, own = split_methods(values)
    tables = _Tables.parse(rest)
    names = {**dict.fromkeys(tables.unlearning.methods), **own}
    methods = {name: method_settings(name, own) for name in names}
    return Config(methods=methods, **dict(tables))


def split_methods(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a configuration without the tables of the methods, and these by method."""
    unlearning = values.get("unlearning", {})
    if not isinstance(unlearning, Mapping):
        return dict(values), {}
    own = {k: v for k, v in unlearning.items() if k in METHODS}
    rest = {k: v for k, v in unlearning.items() if k not in METHODS}
    return {**values, "unlearning": rest}, own


def method_settings(name: str, own: Mapping[str, Any]) -> Settings:
    """Return the settings of a method, from the tables of all that have one."""
    settings: Settings = method_named(name).settings.parse(own.get(name, {}), f"unlearning.{name}")
    return settings


def read_override(override: str) -> tuple[str, Any]:
    """Return the full name of a setting and its value from ``key=value``."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes key=value, such as training.rounds=5; not {override!r}.")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()


def set_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Change a setting, by its full name, in a configuration that is not checked yet."""
    *path, name = key.split(".")
    table: Any = values
    for part in path:
        table = table.setdefault(part, {}) if isinstance(table, dict) else None
    if not isinstance(table, dict):
        raise ConfigError(f"--set {key}: {'.'.join(path)} is not a table.")
    table[name] = value


def make_absolute(values: dict[str, Any], folder: Path) -> None:
    """Let the paths in a configuration that is not checked yet be relative to a folder."""
    data, deletion = values.get("data"), values.get("deletion")
    places = [(data, "path"), (data, "manifest"), (deletion, "samples")]
    places.append((values.get("flower"), "root_certificates"))
    if isinstance(deletion, dict) and isinstance(deletion.get("then"), list):
        places += [(entry, "samples") for entry in deletion["then"]]
    for entry, name in places:
        if isinstance(entry, dict) and isinstance(entry.get(name), str):
            entry[name] = str((folder / entry[name]).resolve())
