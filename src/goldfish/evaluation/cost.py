"""What a method costs, counted whole: time, work, traffic and memory."""

from __future__ import annotations

from goldfish.results import Cost
from goldfish.types import Round


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
