"""What unlearning did to the samples that remain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from goldfish.audits import AffectedSample, ClientHarm, Harm
from goldfish.evaluation.attacks import margins

MOST_AFFECTED = 5


def harm(
    before: Tensor, after: Tensor, labels: Tensor, ids: Sequence[str], holders: Sequence[str]
) -> Harm:
    """Compare two models' logits of remaining samples, of which ``holders`` are the clients."""
    was, now = margins(before, labels), margins(after, labels)
    right = [(logits.argmax(dim=1) == labels).double() for logits in (before, after)]
    clients = {}
    for client_id in dict.fromkeys(holders):
        own = torch.tensor([holder == client_id for holder in holders])
        shares = [100 * hits[own].mean().item() for hits in right]
        clients[client_id] = ClientHarm(before=shares[0], after=shares[1], samples=int(own.sum()))
    change = right[1] - right[0]
    fallen = (now - was).argsort()[:MOST_AFFECTED].tolist()
    return Harm(
        clients=clients,
        lost=int((change < 0).sum()),
        gained=int((change > 0).sum()),
        samples=len(labels),
        most_affected=[
            AffectedSample(
                id=ids[place],
                client_id=holders[place],
                label=int(labels[place]),
                before=was[place].item(),
                after=now[place].item(),
            )
            for place in fallen
            if now[place] < was[place]
        ],
    )
