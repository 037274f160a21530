"""Made run directories: the numbers come from a small rule, never from training."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from PIL import Image

MakeResult: TypeAlias = Callable[..., dict[str, Any]]
WriteRun: TypeAlias = Callable[..., Path]

ENDS = {  # accuracy and backdoor success at the end, how steep the way there is, and the cost
    "origin": (95.8, 99.6, 0.9, 5.1),
    "goldfish": (95.5, 0.6, 0.6, 1.9),
    "retrain": (95.1, 0.3, 0.35, 5.0),
    "rapid_retrain": (93.0, 4.1, 0.5, 2.7),
    "incompetent_teacher": (94.1, 12.8, 1.2, 0.8),
    "sisa": (91.2, 0.4, 0.3, 3.3),
    "fed_eraser": (93.4, 2.2, 0.7, 1.4),
    "fed_recovery": (86.0, 61.0, 0.8, 0.2),
}


def method(name: str, backdoor: bool, compared: bool, rounds: int = 10) -> dict[str, Any]:
    """Return one method's entry of ``result.json``."""
    accuracy, success, steepness, cost = ENDS[name]

    def at(end: float, start: float, index: int) -> float:
        return end + (start - end) * math.exp(-steepness * index)

    near = compared and name != "retrain"
    itself = 0.0 if compared else None
    return {
        "final": {
            "accuracy": accuracy,
            "loss": 0.2114,
            "mse": 0.0312,
            "per_class": [round(accuracy - 3 * math.sin(k * cost), 4) for k in range(10)],
            "backdoor_success": success if backdoor else None,
        },
        "rounds": [
            {
                "round": index,
                "accuracy": at(accuracy, 10.0, index),
                "loss": at(0.2, 2.3, index),
                "backdoor_success": at(success, 10.0, index) if backdoor else None,
                "seconds": 0.31,
                "failures": [],
            }
            for index in range(1, rounds + 1)
        ],
        "similarity": {
            "jsd": round(0.0123 * cost, 4) if near else itself,
            "jsd_distance": round(math.sqrt(0.0123 * cost), 4) if near else itself,
            "l2": round(0.0456 * cost, 4) if near else itself,
            "t_test_p": None if name == "origin" or not backdoor else 1e-30,
            "effect_size": None if name == "origin" or not backdoor else round(4.2 - cost / 9, 2),
        },
        "cost": {
            "seconds": 3.1 * cost,
            "steps": int(150 * cost),
            "samples": int(14370 * cost),
            "bytes_sent": int(2_400_000 * cost),
            "bytes_kept": 0 if name == "retrain" else int(180_000 * cost),
        },
    }


def result(
    methods: Sequence[str] = ("origin", "goldfish", "retrain"), backdoor: bool = True
) -> dict[str, Any]:
    """Return the whole of ``result.json``."""
    return {
        "schema": 1,
        "config": {
            "seed": 17,
            "data": {"name": "digits", "clients": 5, "partition": "iid", "alpha": 0.5},
            "model": {"name": "lenet5"},
            "training": {
                "rounds": 10,
                "local_epochs": 1,
                "batch_size": 100,
                "learning_rate": 0.001,
                "schedule": "constant",
                "momentum": 0.9,
                "shards": 1,
                "shard_mode": "shared",
            },
            "deletion": {"rate": 0.074, "backdoor_target": 7 if backdoor else None},
            "unlearning": {
                "methods": [name for name in methods if name != "origin"],
                "rounds": 10,
                "goldfish": {
                    "temperature": 3.0,
                    "mu_c": 0.25,
                    "mu_d": 1.0,
                    "hard_loss": "cross_entropy",
                    "removed_term": "capped",
                },
            },
        },
        "environment": {
            "goldfish": "0.1.0",
            "python": "3.12.3",
            "torch": "2.6.0",
            "platform": "Linux",
            "cpu_count": 8,
            "device": "cpu",
            "threads": 4,
            "workers": 2,
        },
        "deletion": {
            "requests": [{"client_id": "client-1", "samples": 107, "kind": "samples"}],
            "removed_samples": 107,
            "training_samples": 1437,
            "rate_percent": 7.446,
            "backdoor": {"target": 7, "source": None, "size": 3} if backdoor else None,
        },
        "partition": {
            "digest": "5f2a9c01d3",
            "sizes": {f"client-{i}": 287 + (i < 3) for i in range(1, 6)},
        },
        "methods": {name: method(name, backdoor, "retrain" in methods) for name in methods},
    }


def samples(methods: Sequence[str]) -> dict[str, Any]:
    """Return the whole of ``samples.json``: crosses of changing size, with a trigger patch."""
    entries = []
    for n in range(8):
        image = Image.new("L", (28, 28))
        for i in range(6 + n, 22):
            image.putpixel((i, 14), 255)
            image.putpixel((14, i), 200)
        image.paste(255, (24, 24, 27, 27))
        file = io.BytesIO()
        image.save(file, "PNG")
        true = n if n != 7 else 8
        kept = {"origin": 7, "fed_recovery": 7 if n % 2 else 5}
        entries.append(
            {
                "id": str(17 + n),
                "client_id": "client-1",
                "label": 7,
                "true_label": true,
                "png": base64.b64encode(file.getvalue()).decode(),
                "predictions": {
                    name: {"label": kept.get(name, true), "confidence": round(0.99 - 0.03 * n, 3)}
                    for name in methods
                },
            }
        )
    return {"samples": entries, "class_names": [str(k) for k in range(10)]}


@pytest.fixture
def make_result() -> MakeResult:
    return result


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Return a function that writes a result (and pictures, unless told not to) as a run."""

    def write(content: dict[str, Any], pictures: bool = True) -> Path:
        (tmp_path / "result.json").write_text(json.dumps(content))
        if pictures:
            ran = [name for name, m in content["methods"].items() if "diverged" not in m]
            content = samples(ran)
            (tmp_path / "samples.json").write_text(json.dumps(content))
        return tmp_path

    return write
