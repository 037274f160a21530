"""``python -m goldfish.experiments.reference`` prints every setting: docs/configuration.md."""

from __future__ import annotations

import json
import sys

from pydantic.fields import FieldInfo

from goldfish.experiments.config import (
    DataSettings,
    DeletionSettings,
    EvaluationSettings,
    LaterDeletion,
    ModelSettings,
    UnlearningSettings,
)
from goldfish.federation.settings import FlowerClient, FlowerSettings
from goldfish.methods import METHODS
from goldfish.settings import Settings, TrainingSettings

INTRODUCTION = """# Configuration

A run is described by a TOML file; `goldfish run CONFIG.toml` reads it. Everything but
`[deletion]` may be left out. `--set training.rounds=5` changes a setting from the command line, and
`--seed N` the top-level `seed` (default 0), from which all randomness is derived. The top-level
`engine` is `"in-process"` (the default: all clients on this machine) or `"flower"` (clients are the
nodes of a Flower federation). The run directory holds the complete configuration as `config.toml`.

This page is written by `python -m goldfish.experiments.reference` from the settings themselves.
"""


def reference() -> str:
    """Return the page: one table of settings for each table of the TOML file."""
    tables: dict[str, type[Settings]] = {
        "data": DataSettings,
        "model": ModelSettings,
        "training": TrainingSettings,
        "deletion": DeletionSettings,
        "[deletion.then]": LaterDeletion,
        "unlearning": UnlearningSettings,
        "evaluation": EvaluationSettings,
        "flower": FlowerSettings,
        "flower.clients.ID": FlowerClient,
    }
    tables |= {f"unlearning.{name}": method.settings for name, method in METHODS.items()}
    return INTRODUCTION + "".join(_table(name, model) for name, model in tables.items())


def _table(name: str, model: type[Settings]) -> str:
    text = f"\n## `[{name}]`\n\n{(model.__doc__ or '').strip()}\n"
    if not model.model_fields:
        return text
    rows = [
        f"| `{field}` | {_default(info)} | {(info.description or '').replace(chr(10), ' ')} |\n"
        for field, info in model.model_fields.items()
    ]
    return text + "\n| setting | default | what it is |\n|---|---|---|\n" + "".join(rows)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return ""
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return ""
    shown = round(value, 6) if isinstance(value, float) else value
    return f"`{json.dumps(shown)}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
