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
    teacher_samples: int = 0
    """Samples that a teacher looked at, over all clients: forward passes beside the steps."""
    fisher_samples: int = 0
    """Samples whose gradients were taken one by one, for the Fisher information of the steps."""
    measured_samples: int = 0
    """Test samples times models that the server measured, for weights, stops or choices."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            seconds=self.seconds + other.seconds,
            steps=self.steps + other.steps,
            samples=self.samples + other.samples,
            bytes_sent=self.bytes_sent + other.bytes_sent,
            bytes_kept=max(self.bytes_kept, other.bytes_kept),
            teacher_samples=self.teacher_samples + other.teacher_samples,
            fisher_samples=self.fisher_samples + other.fisher_samples,
            measured_samples=self.measured_samples + other.measured_samples,
        )

    def as_dict(self) -> dict[str, int | float]:
        """Return the fields by name, for JSON."""
        return asdict(self)


def round_cost(
    finished: Round, seconds: float, bytes_kept: int = 0, measured_samples: int = 0
) -> Cost:
    """Return what one finished round cost.

    ``seconds``, ``bytes_kept`` and ``measured_samples`` are the caller's measurements; the rest is
    what the clients that answered report.
    """
    reported = [update.metrics for update in finished.updates]
    return Cost(
        seconds=seconds,
        steps=sum(int(metrics["steps"]) for metrics in reported),
        samples=sum(int(metrics["samples"]) for metrics in reported),
        bytes_sent=finished.bytes_sent,
        bytes_kept=bytes_kept,
        teacher_samples=sum(int(metrics.get("teacher_samples", 0)) for metrics in reported),
        fisher_samples=sum(int(metrics.get("fisher_samples", 0)) for metrics in reported),
        measured_samples=measured_samples,
    )
