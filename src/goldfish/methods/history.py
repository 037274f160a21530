"""What the methods share that work from the kept rounds of the original training."""

from __future__ import annotations

from goldfish.methods.method import Plan
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import HistoryEntry, ModelFactory, Params, Update


def weight_names(factory: ModelFactory, params: Params) -> list[str]:
    """Return, sorted, the names of what training learns; all other names are buffers.

    Buffers (BatchNorm's running statistics) are averages of what passed through the model, not
    sums of updates: stretched, subtracted or perturbed, a variance can become negative.
    """
    module = LocalWorkspace(factory).load("names", params).module
    return sorted(name for name, _ in module.named_parameters(remove_duplicate=False))


def kept_updates(plan: Plan, entry: HistoryEntry) -> dict[str, Update]:
    """Return the updates that went into a kept round's average, in the federation's order."""
    updates = {update.client_id: update for update in entry.updates if update.num_examples > 0}
    return {c: updates[c] for c in plan.federation.client_ids if c in updates}
