"""The settings of the Flower engine; they can be read where Flower is not installed."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from goldfish.settings import NonNegative, Positive, Settings


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

    @model_validator(mode="after")
    def _one_security(self) -> Self:
        if self.insecure and self.root_certificates is not None:
            raise ValueError("insecure and root_certificates exclude each other: give one")
        return self
