"""What a run leaves on disk. Every file appears whole: written under another name, then renamed."""

from __future__ import annotations

from goldfish.store.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from goldfish.store.runs import BEFORE, CONFIG, RESULT, KeptHistory, RunDirectory, run_id_of

__all__ = [
    "BEFORE",
    "CONFIG",
    "RESULT",
    "Checkpoint",
    "KeptHistory",
    "RunDirectory",
    "load_checkpoint",
    "run_id_of",
    "save_checkpoint",
]
