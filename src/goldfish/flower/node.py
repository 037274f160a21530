"""A node's own settings, as given to ``flower-supernode --node-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from goldfish.errors import ConfigError
from goldfish.types import Scalar

KNOWN = {
    "client-id": "the client's name in the federation",
    "partition-id": "instead of client-id: a number n, for the client named client-(n+1)",
    "num-partitions": "not used; Flower's own examples pass it",
    "state-dir": "a folder that outlives restarts, for what the client keeps",
    "data-dir": "where the datasets are; by default $GOLDFISH_DATA",
    "data": "npz or image-folder: this node has data of its own, at path",
    "path": "where the data (npz, image-folder) lies on this machine",
    "device": "cpu or cuda",
}


@dataclass(frozen=True)
class Node:
    """Who a node is, where its data is, and where it keeps its state."""

    client_id: str
    state_dir: Path
    data_dir: Path | None = None
    data: str | None = None
    path: Path | None = None
    device: str = "cpu"

    @classmethod
    def parse(cls, config: Mapping[str, Scalar]) -> Node:
        """Check a node-config; what is wrong is said in words."""
        for name in config:
            if name not in KNOWN:
                raise ConfigError(f"node-config: unknown {name!r}; known are {', '.join(KNOWN)}.")
        if "state-dir" not in config:
            raise ConfigError(
                'node-config: state-dir is missing: state-dir="/var/lib/goldfish" or so, a folder '
                "that outlives restarts."
            )
        if "data" in config and "path" not in config:
            raise ConfigError(f"node-config: data={config['data']!r} needs path, where it lies.")
        return cls(
            _client_id(config),
            Path(str(config["state-dir"])),
            None if "data-dir" not in config else Path(str(config["data-dir"])),
            None if "data" not in config else str(config["data"]),
            None if "path" not in config else Path(str(config["path"])),
            str(config.get("device", "cpu")),
        )


def _client_id(config: Mapping[str, Scalar]) -> str:
    if "client-id" in config:
        return str(config["client-id"])
    number = config.get("partition-id")
    if type(number) is not int or number < 0:
        raise ConfigError(
            'node-config: say which client this is, by client-id="hospital-a" or partition-id=0; '
            f"partition-id is {number!r}."
        )
    return f"client-{number + 1}"
