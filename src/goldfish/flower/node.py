"""A node's own settings, as given to ``flower-supernode --node-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from goldfish.errors import ConfigError, DataError
from goldfish.types import Scalar

KNOWN = {
    "client-id": "the client's name in the federation",
    "partition-id": "instead of client-id: a number n, for the client named client-(n+1)",
    "num-partitions": "not used; Flower's own examples pass it",
    "state-dir": "a folder that outlives restarts, for what the client keeps",
    "data-dir": "where the datasets are; by default $GOLDFISH_DATA",
    "data": "npz or image-folder: this node has data of its own, at path",
    "path": "where the data (npz, image-folder) lies on this machine; no other is ever read",
    "models": "factories of one's own that may be called here: package.module:factory, by spaces",
    "min-samples": "the fewest samples that the node learns from, where it has data of its own",
    "min-audited": "the fewest samples that an audit is told of, where it has data of its own",
    "device": "cpu or cuda",
}
MIN_SAMPLES = 10
"""By default a node with data of its own learns from no fewer samples than these."""
MIN_AUDITED = 20
"""By default it tells an audit nothing of fewer samples than these."""


@dataclass(frozen=True)
class Node:
    """Who a node is, where its data is, and where it keeps its state."""

    client_id: str
    state_dir: Path
    data_dir: Path | None = None
    data: str | None = None
    path: Path | None = None
    models: tuple[str, ...] = ()
    """The factories of one's own that a server may name."""
    min_samples: int = MIN_SAMPLES
    device: str = "cpu"
    min_audited: int = MIN_AUDITED

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
        texts = ("client-id", "state-dir", "data-dir", "data", "path", "models", "device")
        for name in texts:
            value = config.get(name, "-")
            if not isinstance(value, str) or not value or "\0" in value:
                raise ConfigError(f'node-config: {name} is {value!r}; a text was expected: "...".')
        if "data" in config and "path" not in config:
            raise ConfigError(f"node-config: data={config['data']!r} needs path, where it lies.")
        fewest = {"min-samples": MIN_SAMPLES, "min-audited": MIN_AUDITED}
        for name, usual in fewest.items():
            number = config.get(name, usual)
            if type(number) is not int or number < 0:
                raise ConfigError(f"node-config: {name} is {number!r}; a whole number from 0 on.")
            fewest[name] = number
        client_id, place = config.get("client-id"), config.get("partition-id")
        if client_id is None:
            if type(place) is not int or place < 0:
                raise ConfigError(
                    'node-config: say which client this is, by client-id="hospital-a" or '
                    f"partition-id=0; partition-id is {place!r}."
                )
            client_id = f"client-{place + 1}"
        return cls(
            str(client_id),
            Path(str(config["state-dir"])),
            None if "data-dir" not in config else Path(str(config["data-dir"])),
            None if "data" not in config else str(config["data"]),
            None if "path" not in config else Path(str(config["path"])),
            tuple(str(config.get("models", "")).split()),
            fewest["min-samples"],
            str(config.get("device", "cpu")),
            fewest["min-audited"],
        )

    def check_model(self, name: str) -> None:
        """Raise where a server names a model that this node does not allow.

        A model of one's own is code: it is called with options of the server's.
        """
        if ":" in name and name not in self.models:
            raise ConfigError(
                f"{self.client_id} builds Goldfish's own models only, and those that its "
                f'node-config allows; {name!r} is none of them. Its owner allows it with models="'
                f'{name}".'
            )

    def check_samples(self, count: int) -> None:
        """Raise where a task leaves so few samples that what is learnt would show them.

        With none left there is nothing to show.
        """
        if self.data is not None and 0 < count < self.min_samples:
            raise DataError(
                f"{self.client_id} learns from no fewer than {self.min_samples} samples "
                f"(min-samples in its node-config), and this task leaves {count}: an update from "
                "so few gives them away."
            )
