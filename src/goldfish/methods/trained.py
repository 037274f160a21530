"""What unlearning starts from: a trained federation, which can be saved, loaded and adopted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import Field
from torch import nn

from goldfish.errors import ConfigError, StoreError
from goldfish.evaluation.scores import Scores
from goldfish.files import write_whole
from goldfish.params import all_finite
from goldfish.results import Cost, Part
from goldfish.settings import TrainingSettings
from goldfish.store import Checkpoint, KeptHistory, RunDirectory, load_checkpoint, save_checkpoint
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import DeletionRequest, Failure, Federation, HistoryEntry, Memo, Params, States

MODEL, ABOUT = "model.safetensors", "trained.json"


@dataclass(frozen=True)
class RoundRecord:
    """What is known of a finished round."""

    index: int
    cost: Cost
    failures: Sequence[Failure]
    scores: Scores | None
    """The global model on the test set, when there is one."""
    absent: Sequence[str] = ()
    """Clients that the method forgets through and that did not take part."""
    shortened: Sequence[str] = ()
    """Clients whose models were brought back to ``max_update_norm``."""


@dataclass(frozen=True)
class Trained:
    """A trained federation: where unlearning starts."""

    federation: Federation
    params: Params = field(repr=False)
    settings: TrainingSettings
    seed: int
    rounds: Sequence[RoundRecord] = ()
    phase: str = "origin"
    history: Mapping[int, HistoryEntry] = field(default_factory=dict, repr=False)
    """The rounds that were kept for methods that need them."""
    method: str | None = None
    """The method whose own training this was; None for FedAvg."""
    memo: Memo = field(default_factory=dict, repr=False)
    """What the last round of the training remembered."""
    states: States | None = field(default=None, repr=False)
    """What the clients kept when the training ended (shard models), as far as it lives in this
    process: :func:`goldfish.unlearn` gives it back to them first. None: what they keep by then."""
    honoured: Sequence[DeletionRequest] = ()
    """Requests of earlier deletions, whose data the model is free of."""
    lost: Sequence[DeletionRequest] = ()
    """Requests that were not honoured: the next unlearning takes them up again."""
    removed: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False)
    """Ids of the samples that clients in this process had removed by then: a request for a class
    names none, and the division into shards goes by all ids, those of deleted samples too."""

    @property
    def model(self) -> nn.Module:
        """A new module that holds the trained parameters."""
        return LocalWorkspace(self.federation.model).load("result", self.params).module.eval()

    @property
    def cost(self) -> Cost:
        """The whole cost of the training."""
        return sum((r.cost for r in self.rounds), Cost())

    @classmethod
    def from_state_dict(
        cls, federation: Federation, state: Mapping[str, Any], *, seed: int = 0, **settings: Any
    ) -> Self:
        """Return a model that was trained elsewhere, by this federation's clients.

        ``settings`` are those of :class:`TrainingSettings` that it was trained with: methods train
        as the training did. Methods that need more of the training than its model (kept updates,
        shard models) refuse it. The numbers are copied: training that goes on changes nothing here.
        """
        params = _loaded(federation, state, "The state dict")
        return cls(federation, params, TrainingSettings.parse(settings), seed)

    def save(self, folder: str | Path) -> Path:
        """Write everything that a later :func:`goldfish.load` needs into a new folder.

        What the rounds cost is not kept. On Flower, clients keep their shard models themselves.
        """
        folder = Path(folder)
        if (folder / ABOUT).exists():
            raise StoreError(f"{folder} holds a trained model already. Choose another folder.")
        about = _About(
            settings=self.settings,
            seed=self.seed,
            phase=self.phase,
            method=self.method,
            clients=list(self.federation.client_ids),
            history=sorted(self.history),
            honoured=list(self.honoured),
            lost=list(self.lost),
            removed={client_id: list(ids) for client_id, ids in self.removed.items()},
        )
        for index in about.history:
            RunDirectory(folder).save_history(self.history[index])
        rounds = len(self.rounds)
        kept = Checkpoint(rounds, self.params, self.states or {}, final=True, memo=self.memo)
        save_checkpoint(folder / MODEL, kept)
        write_whole(folder / ABOUT, about.model_dump_json(indent=1) + "\n")  # last: all is there
        return folder


class _About(Part):
    """The whole of ``trained.json``."""

    version: int = Field(default=1, ge=1, le=1)
    settings: TrainingSettings
    seed: int
    phase: str
    method: str | None
    clients: list[str]
    history: list[int]
    honoured: list[DeletionRequest]
    lost: list[DeletionRequest] = Field(default_factory=list)
    removed: dict[str, list[str]] = Field(default_factory=dict)


def load(folder: str | Path, federation: Federation) -> Trained:
    """Return what :meth:`Trained.save` wrote, for a federation of the same model and clients.

    Clients that have left since, with all of their data, need not be there.
    """
    folder = Path(folder)
    if not (folder / ABOUT).exists():
        raise StoreError(f"{folder} holds no trained model: {ABOUT} is missing.")
    about = _About.read(folder / ABOUT)
    left = {r.client_id for r in about.honoured if r.sample_ids is None and r.class_label is None}
    lost = [c for c in about.clients if c not in {*federation.client_ids, *left}]
    if lost:
        raise ConfigError(f"{folder} was trained with {', '.join(lost)}: not in this federation.")
    kept = load_checkpoint(folder / MODEL)
    return Trained(
        federation,
        _loaded(federation, kept.params, str(folder / MODEL)),
        about.settings,
        about.seed,
        phase=about.phase,
        history=KeptHistory(RunDirectory(folder), about.history),
        method=about.method,
        memo=kept.memo,
        states=kept.states or None,
        honoured=tuple(about.honoured),
        lost=tuple(about.lost),
        removed=about.removed,
    )


def _loaded(federation: Federation, state: Mapping[str, Any], what: str) -> Params:
    """Return a copy of a state dict as the federation's model, or an ensemble of it, holds it.

    That is on the CPU, in the model's own types. One that does not fit, or has diverged, is
    refused.
    """
    try:
        params = LocalWorkspace(federation.model).load("check", state).params()
    except (RuntimeError, KeyError, AttributeError, TypeError) as error:
        first = str(error).splitlines()
        reason = first[1].strip() if len(first) > 1 else str(error)
        raise ConfigError(f"{what} does not fit the federation's model: {reason}") from error
    if not all_finite(params):
        raise ConfigError(f"{what} holds numbers that are not finite: that model has diverged.")
    return params
