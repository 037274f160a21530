"""Checkpoints: one safetensors file for a model and what its clients keep.

The model's tensors stand under their own names, so that any program can load them as a state
dict; what clients keep stands beside them under names that begin with ``state:``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from goldfish.errors import StoreError
from goldfish.files import write_whole
from goldfish.params import digest
from goldfish.types import Memo, Params, States

STATE = "state:"


@dataclass(frozen=True)
class Checkpoint:
    """A phase after one of its rounds."""

    round: int
    params: Params
    states: States = field(default_factory=dict)
    final: bool = False
    """The phase ended with this round."""
    memo: Memo = field(default_factory=dict)
    """What the method must remember to go on."""


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; the file appears whole or not at all."""
    from safetensors.torch import save

    tensors = {name: t.contiguous() for name, t in checkpoint.params.items()}
    for client_id, kept in checkpoint.states.items():
        for key, params in kept.items():
            for name, t in params.items():
                # A copy: two keys may hold the same tensor, which safetensors refuses.
                tensors[STATE + json.dumps([client_id, key, name])] = t.contiguous().clone()
    # One entry: safetensors writes several in no fixed order, and equal runs give equal files.
    about = {"round": checkpoint.round, "final": checkpoint.final, "memo": dict(checkpoint.memo)}
    sealed = {**about, "sha256": _seal(tensors, about)}
    write_whole(path, save(tensors, {"goldfish": json.dumps(sealed)}))


def _seal(tensors: Params, about: Mapping[str, object]) -> str:
    """Return a SHA-256 over all that a checkpoint holds."""
    return hashlib.sha256((digest(tensors) + json.dumps(about)).encode()).hexdigest()


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint back."""
    from safetensors import SafetensorError, safe_open

    params: dict[str, Tensor] = {}
    states: dict[str, dict[str, dict[str, Tensor]]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["goldfish"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        seal = about.pop("sha256", None)
        if seal is not None and seal != _seal(tensors, about):  # older versions wrote none
            raise ValueError("it was changed after it was written")  # noqa: TRY301
        for name, tensor in tensors.items():
            if name.startswith(STATE):
                client_id, key, inner = json.loads(name.removeprefix(STATE))
                states.setdefault(client_id, {}).setdefault(key, {})[inner] = tensor
            else:
                params[name] = tensor
        index, final, memo = int(about["round"]), bool(about["final"]), dict(about["memo"])
    except (
        SafetensorError,
        OSError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:
        raise StoreError(
            f"{path} cannot be read as a checkpoint ({error}). Delete it: the run then starts "
            "this phase again."
        ) from error
    return Checkpoint(index, params, states, final, memo)
