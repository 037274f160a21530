"""What unlearning did to the samples that remain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from goldfish.audits import AffectedSample, AuditVerdict, ClientHarm, Harm
from goldfish.evaluation.attacks import margins
from goldfish.results import ORIGIN, Result

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


def with_places(
    verdict: AuditVerdict, name: str, result: Result, harmed: Harm | None
) -> AuditVerdict:
    """Say, of damage, on which class and for which remaining client the run lost most accuracy."""
    if verdict.word != "damaged":
        return verdict
    said = []
    both = (result.methods[key].final for key in (ORIGIN, name))
    rows = [[] if final is None else final.per_class for final in both]
    classes = {
        str(label): now - was
        for label, (was, now) in enumerate(zip(*rows, strict=True))
        if was is not None and now is not None
    }
    clients = {} if harmed is None else {k: v.after - v.before for k, v in harmed.clients.items()}
    for what, losses in (("on class", classes), ("for", clients)):
        worst = min(losses, key=lambda key: losses[key], default=None)
        if worst is not None and losses[worst] < 0:
            said.append(f"{what} {worst} ({losses[worst]:+.1f} points)")
    most = f" The run's model lost most, against origin, {' and '.join(said)}." if said else ""
    return verdict.model_copy(update={"sentence": verdict.sentence + most})
