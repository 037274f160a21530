"""The settings of the Flower engine; they can be read where Flower is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from goldfish.settings import Count, NonNegative, Positive, Settings


class FlowerClient(Settings):
    """With engine = "flower": what the server was told of a client when it joined."""

    node: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    """The number that `flwr supernode register` gave its key: no other node can be this client."""
    samples: Count | None = None
    """With data of its own: the most samples that it can have, instead of `flower.samples`."""


class FlowerSettings(Settings):
    """With engine = "flower": where the SuperLink is, and how long to wait for clients."""

    superlink: str | None = None
    """Address of the SuperLink as host:port."""
    root_certificates: str | None = None
    """The certificate of the authority that signed the SuperLink's; left out: the system's."""
    insecure: bool = False
    """Talk to the SuperLink without TLS: for one machine, or behind a proxy that has it."""
    timeout: Positive = 600.0
    """Seconds that a client has for a task; then the round goes on without it."""
    patience: NonNegative = 60.0
    """Seconds to wait for a client that is not connected, from when it was first missed."""
    retries: Annotated[int, Field(ge=0)] = 2
    """How often a task is sent again after its node was lost or its process died."""
    poll: Positive = 0.2
    """Seconds between two looks for answers."""
    samples: Count | None = None
    """The most samples that a client with data of its own can have. Clients are weighed by how many
    they say they learned from; one that says more has failed. Left out: they are believed."""
    clients: Mapping[str, FlowerClient] = {}
    """What the server knows of single clients, a table for each: `[flower.clients.ID]`."""

    @property
    def nodes(self) -> dict[str, int]:
        """The nodes of those clients that are bound to one."""
        return {name: told.node for name, told in self.clients.items() if told.node is not None}

    @model_validator(mode="after")
    def _one_client_a_node_and_one_security(self) -> Self:
        if len(set(self.nodes.values())) < len(self.nodes):
            raise ValueError("clients: a node is one client, and two have the same node")
        if self.insecure and self.root_certificates is not None:
            raise ValueError("insecure and root_certificates exclude each other: give one")
        return self
