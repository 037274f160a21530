"""What a method costs, counted whole: time, work, traffic and memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from goldfish.types import Round


@dataclass(frozen=True)
class Cost:
    """The cost of a round or of a whole run; costs add up with ``+``."""

    seconds: float = 0.0
    """Wall-clock time."""
    steps: int = 0
    """Gradient steps, over all clients."""
    samples: int = 0
    """Samples processed in those steps, over all clients."""
    bytes_sent: int = 0
    """Bytes between server and clients, both ways."""
    bytes_kept: int = 0
    """Bytes that must be kept for later rounds; a level, so costs add to its maximum."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            seconds=self.seconds + other.seconds,
            steps=self.steps + other.steps,
            samples=self.samples + other.samples,
            bytes_sent=self.bytes_sent + other.bytes_sent,
            bytes_kept=max(self.bytes_kept, other.bytes_kept),
        )

    def as_dict(self) -> dict[str, int | float]:
        """Return the fields by name, for JSON."""
        return asdict(self)


def round_cost(finished: Round, seconds: float, bytes_kept: int = 0) -> Cost:
    """Return what one finished round cost.

    ``seconds`` and ``bytes_kept`` are the caller's measurements; the rest is what the clients that
    answered report.
    """
    return Cost(
        seconds=seconds,
        steps=sum(int(update.metrics["steps"]) for update in finished.updates),
        samples=sum(int(update.metrics["samples"]) for update in finished.updates),
        bytes_sent=finished.bytes_sent,
        bytes_kept=bytes_kept,
    )
