"""Settings and their errors."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from pydantic import ValidationError

from goldfish.errors import ConfigError
from goldfish.settings import Settings, TrainingSettings, describe, learning_rate_at


class InnerSettings(Settings):
    """Nested."""

    depth: int = 1
    """How deep."""


class OuterSettings(Settings):
    """A table with a table in it."""

    name: Literal["one", "two"] = "one"
    """Which."""
    inner: InnerSettings = InnerSettings()
    """Nested."""


@pytest.mark.parametrize(
    ("values", "where", "words"),
    [
        ({"rounds": 0}, "", ["rounds: ", "greater than or equal to 1", "(got 0)"]),
        ({"rounds": 0}, "training", ["training.rounds: ", "(got 0)"]),
        ({"learning_rate": -0.5}, "training", ["training.learning_rate: ", "(got -0.5)"]),
        ({"learning_rate": math.inf}, "", ["learning_rate: ", "finite", "(got inf)"]),
        ({"learning_rate": math.nan}, "", ["learning_rate: ", "(got nan)"]),
        ({"momentum": 1.0}, "", ["momentum: ", "less than 1", "(got 1.0)"]),
        ({"quorum": 0}, "", ["quorum: ", "greater than 0", "(got 0)"]),
        ({"batch_size": "many"}, "", ["batch_size: ", "integer", "(got 'many')"]),
        ({"schedule": "cosin"}, "", ["schedule: ", "'cosine'", "(got 'cosin')"]),
        ({"batch_size": 2.5}, "", ["batch_size: ", "(got 2.5)"]),
    ],
)
def test_a_wrong_value_is_refused_with_its_field_and_value(
    values: dict[str, object], where: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingSettings.parse(values, where)
    message = str(caught.value)
    assert message.startswith(words[0])
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("name", "where", "near"),
    [
        ("learning_rat", "", "learning_rate"),
        ("learningrate", "training", "training.learning_rate"),
        ("batchsize", "training", "training.batch_size"),
        ("round", "", "rounds"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_one(name: str, where: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingSettings.parse({name: 1}, where)
    full = f"{where}.{name}" if where else name
    assert str(caught.value) == (
        f"Unknown setting {full!r}. Did you mean {near!r}? "
        "docs/configuration.md lists all settings."
    )


@pytest.mark.parametrize("where", ["", "training", "methods.goldfish"])
def test_a_name_that_is_near_to_none_suggests_none(where: str) -> None:
    """The table's name, which all settings share, makes no name near to another."""
    with pytest.raises(ConfigError) as caught:
        TrainingSettings.parse({"zzz": 1}, where)
    assert "Did you mean" not in str(caught.value)


def test_every_wrong_setting_has_a_line() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingSettings.parse({"rounds": 0, "momentum": 2, "shard": 1}, "training")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert [line for line in lines if "training.rounds" in line]
    assert [line for line in lines if "training.momentum" in line]
    assert [line for line in lines if "Did you mean 'training.shards'?" in line]


def test_describe_names_nested_settings_in_full() -> None:
    with pytest.raises(ValidationError) as caught:
        OuterSettings.model_validate({"name": "three", "inner": {"depth": "x", "deph": 2}})
    lines = describe(caught.value, OuterSettings, "table").splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("table.name: ")
    assert "(got 'three')" in lines[0]
    assert lines[1].startswith("table.inner.depth: ")
    assert "(got 'x')" in lines[1]
    assert lines[2].startswith(
        "Unknown setting 'table.inner.deph'. Did you mean 'table.inner.depth'?"
    )


def test_describe_without_a_table() -> None:
    with pytest.raises(ValidationError) as caught:
        OuterSettings.model_validate({"inner": {"deph": 2}})
    message = describe(caught.value, OuterSettings)
    assert message.startswith("Unknown setting 'inner.deph'. Did you mean 'inner.depth'?")


def test_settings_cannot_be_changed() -> None:
    settings = TrainingSettings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.rounds = 3  # type: ignore[misc]


def test_every_setting_says_what_it_is() -> None:
    for name, field in TrainingSettings.model_fields.items():
        assert field.description, name


def test_the_schedule_begins_at_the_setting() -> None:
    for schedule in ("constant", "cosine", "step"):
        settings = TrainingSettings.parse({"schedule": schedule, "learning_rate": 0.3})
        assert learning_rate_at(settings, 1, 10) == 0.3
