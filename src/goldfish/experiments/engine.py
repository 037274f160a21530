"""The engine of a run: what the runner needs of a federation beside the seam that all share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from goldfish.experiments.scenario import Machine, Scenario
from goldfish.federation import InProcess
from goldfish.types import Federation


class Engine(Federation, Protocol):
    """A federation that says how it uses its machines."""

    @property
    def workers(self) -> int:
        """Clients that work at a time."""

    @property
    def threads(self) -> int:
        """Torch's threads of one client, on which the last bits depend."""


EngineFactory: TypeAlias = Callable[[Scenario, Machine, str], Engine]
"""Makes the engine of a run from its scenario, the machine, and the run's own name."""


def in_process(
    scenario: Scenario, machine: Machine, _run_id: str, *, remember: bool = False
) -> InProcess:
    """Return the engine whose clients all live in this process.

    By default they do not ``remember`` what was removed: each method of a comparison starts with
    the removed samples in place.
    """
    return InProcess(
        scenario.clients,
        scenario.model,
        workers=machine.workers,
        threads=machine.threads,
        device=machine.device,
        compiled=machine.compiled,
        remember=remember,
    )
