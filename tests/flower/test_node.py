"""A node's own settings, and the steps that it can carry out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from goldfish.errors import ConfigError
from goldfish.experiments.client_setup import ClientSetup
from goldfish.flower.client_app import STEPS, app, steps_of
from goldfish.flower.node import KNOWN, Node
from goldfish.methods import METHODS
from goldfish.settings import Settings
from goldfish.types import Scalar, Step


def test_a_node_says_who_it_is_and_where_things_are() -> None:
    assert Node.parse({"partition-id": 0, "num-partitions": 3, "state-dir": "/s"}) == Node(
        "client-1", Path("/s")
    )
    everything = {"client-id": "ward", "state-dir": "/s", "data-dir": "/d", "device": "cuda"}
    own: dict[str, Scalar] = {
        "path": "/d/x.npz",
        "models": "nets:small  nets:large",
        "min-samples": 3,
    }
    assert Node.parse({**everything, **own}) == Node(
        *("ward", Path("/s"), Path("/d"), None, Path("/d/x.npz")),
        *(("nets:small", "nets:large"), 3, "cuda"),
    )
    assert set(everything) < set(KNOWN)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"client-id": "a"}, "state-dir is missing"),
        ({"state-dir": "/s"}, "say which client this is"),
        ({"state-dir": "/s", "partition-id": "0"}, "partition-id is '0'"),
        ({"state-dir": "/s", "client-id": "a", "data": "npz"}, "data='npz' needs path"),
        ({"state-dir": "/s", "partition-id": -1}, "partition-id is -1"),
        ({"state-dir": "/s", "client-id": "a", "data_dir": "/d"}, "unknown 'data_dir'; known are"),
    ],
)
def test_a_wrong_node_config_is_refused_in_words(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Node.parse(config)


def test_every_step_of_every_method_has_a_handler() -> None:
    for method in METHODS.values():
        assert set(method.steps) <= set(STEPS.values())
    handlers = {name for name in app._registered_funcs if name.startswith("train.")}
    assert len(handlers) == len(STEPS) >= 6


def test_one_name_stands_for_one_step() -> None:
    def other(*_: Any) -> Any:
        return None

    twin = replace(METHODS["goldfish"], steps=[Step("goldfish", other, Settings)])
    with pytest.raises(ConfigError, match="Two methods call different steps 'goldfish'"):
        steps_of([METHODS["goldfish"], twin])
    alike = replace(METHODS["goldfish"], steps=[Step("rapid_retrain", other, Settings)])
    with pytest.raises(ConfigError, match="Flower cannot tell these steps apart"):
        steps_of([METHODS["rapid-retrain"], alike])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 1, "backdoor": null}'])
def test_a_setup_that_is_none_is_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigError, match="A client's setup cannot be read"):
        ClientSetup.from_json(text)
