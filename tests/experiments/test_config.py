"""A configuration is written so that any TOML parser reads it back, whatever its strings hold."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from goldfish.errors import ConfigError
from goldfish.experiments.config import load_config, parse_config, read_toml
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine
from goldfish.methods import METHODS

EVERYTHING: dict[str, Any] = {
    "seed": 3,
    "engine": "flower",
    "flower": {"superlink": "🐟:1", "root_certificates": '/a "quoted" \\ place 🐟/ca.crt'},
    "data": {"members": ["hôpital-🏥", "b"], "path": "/🐟/\u2028\x7f\t.npz"},
    "model": {"name": "mlp", "options": {"hidden 🐟.units": 8, "note": "'''\"\"\""}},
    "training": {"learning_rate": 1e-05},
    "deletion": {
        "samples": "/ids.txt",
        "then": [{"after": 2, "clients": ["b"]}, {"after": 1, "class_label": 4}],
    },
    "unlearning": {"methods": ["goldfish", "sisa"], "goldfish": {"temperature": 4.0}},
}


def test_everything_survives_being_written() -> None:
    config = parse_config(EVERYTHING)
    assert parse_config(tomllib.loads(config.to_toml())) == config


def test_all_settings_are_values_of_json_too() -> None:
    """``result.json`` holds the configuration: a tuple there would end a finished run."""
    config = parse_config({"deletion": {"rate": 0.1}, "unlearning": {"methods": list(METHODS)}})
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_being_written(text: str) -> None:
    values = {"data": {"path": text}, "deletion": {"rate": 0.1}}
    config = parse_config(values)
    assert tomllib.loads(config.to_toml())["data"]["path"] == text


def test_a_run_whose_data_lies_under_a_fish_goes_on(tmp_path: Path) -> None:
    """Characters beyond the basic plane were written as two halves, which no parser reads."""
    draw = np.random.default_rng(0)
    images = draw.integers(0, 255, (60, 1, 8, 8), dtype=np.uint8)
    labels = draw.integers(0, 3, 60)
    data = tmp_path / "🐟.npz"
    np.savez(data, x_train=images, y_train=labels, x_test=images, y_test=labels)
    values = {
        "data": {"name": "npz", "path": str(data), "clients": 2},
        "model": {"name": "mlp"},
        "training": {"rounds": 1},
        "deletion": {"rate": 0.1},
        "unlearning": {"methods": ["retrain"], "rounds": 1},
    }
    out = tmp_path / "run"
    list(run_experiment(parse_config(values), out, Machine()))
    before = (out / "checkpoints" / "retrain.safetensors").read_bytes()
    (out / "checkpoints" / "retrain.safetensors").unlink()
    list(run_experiment(load_config(out / "config.toml"), out, Machine(), resume=True))
    assert (out / "checkpoints" / "retrain.safetensors").read_bytes() == before


@pytest.mark.parametrize("label", [np.int64(4), np.uint8(4), torch.tensor(4), 4])
def test_a_class_label_is_of_any_integer_type(label: Any) -> None:
    deletion = {"class_label": label, "backdoor_target": label, "backdoor_source": label}
    config = parse_config({"deletion": {**deletion, "then": [{"after": 1, "class_label": label}]}})
    assert config.deletion.then[0].class_label == config.deletion.class_label == 4
    assert parse_config(tomllib.loads(config.to_toml())) == config


@pytest.mark.parametrize(
    ("label", "words"),
    [(True, "a class label is a whole number"), (-1, "greater than or equal to 0"), (1.5, "int")],
)
def test_what_is_no_class_label_is_refused_in_words(label: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"deletion\.class_label: .*{words}"):
        parse_config({"deletion": {"class_label": label}})


def test_a_byte_order_mark_is_no_setting(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    path = tmp_path / "marked.toml"
    path.write_text("[data]\nclients = 3\n", "utf-8-sig")
    assert read_toml(path) == {"data": {"clients": 3}}
