"""What a run measures: every round's scores, and at the end the evidence for each method."""

from __future__ import annotations

import base64
import io
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from goldfish.data import TensorExamples
from goldfish.evaluation import (
    Cost,
    backdoor_success,
    confidence,
    jsd,
    jsd_distance,
    l2,
    score,
    welch,
)
from goldfish.experiments.config import Config
from goldfish.experiments.scenario import Scenario
from goldfish.training import LocalWorkspace, predict
from goldfish.types import Params

SCHEMA = 1
SAMPLES_SHOWN = 8


@dataclass(frozen=True)
class Outcome:
    """A finished phase: its model, its rounds as recorded, and what a reader must know."""

    params: Params
    records: Sequence[Mapping[str, Any]]
    states: Mapping[str, Mapping[str, Params]] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Diverged:
    """A phase that left the finite numbers: why, in words, and the rounds before."""

    cause: str
    records: Sequence[Mapping[str, Any]]


class Evaluator:
    """Measures models on the scenario's test data."""

    def __init__(self, scenario: Scenario, device: str) -> None:
        self._scenario = scenario
        self._workspace = LocalWorkspace(scenario.federation.model, device)

    def logits(self, params: Params, examples: TensorExamples) -> Tensor:
        """Return a model's logits."""
        return predict(self._workspace.load("evaluation", params), examples)

    def measure(self, params: Params) -> dict[str, Any]:
        """Return a model's scores: on clean test data, and on triggered data where there is any."""
        test, triggered = self._scenario.test, self._scenario.triggered
        scores = score(self.logits(params, test), test.labels.cpu(), self._scenario.num_classes)
        success = None
        if triggered is not None and self._scenario.backdoor is not None:
            logits = self.logits(params, triggered)
            success = backdoor_success(logits, self._scenario.backdoor.target)
        return {
            "accuracy": scores.accuracy,
            "loss": scores.loss,
            "mse": scores.mse,
            "per_class": list(scores.per_class),
            "backdoor_success": success,
        }


def collect_evidence(
    config: Config,
    scenario: Scenario,
    outcomes: Mapping[str, Outcome | Diverged],
    evaluator: Evaluator,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of ``result.json`` and of ``samples.json``."""
    finished = {name: o.params for name, o in outcomes.items() if isinstance(o, Outcome)}
    on_test = {name: evaluator.logits(p, scenario.test) for name, p in finished.items()}
    on_removed = {name: evaluator.logits(p, scenario.removed) for name, p in finished.items()}
    labels = scenario.removed.labels.cpu()
    methods: dict[str, Any] = {}
    for name, outcome in outcomes.items():
        rounds = [dict(record) for record in outcome.records]
        if isinstance(outcome, Diverged):
            methods[name] = {"diverged": outcome.cause, "rounds": rounds}
            continue
        methods[name] = {
            "final": evaluator.measure(outcome.params),
            "rounds": rounds,
            "similarity": {
                **_to_retrain(on_test[name], on_test.get("retrain")),
                **_against_origin(name, on_removed, labels),
            },
            "cost": sum((_cost(record) for record in rounds), Cost()).as_dict(),
            "notes": list(outcome.notes),
        }
    result = {
        "schema": SCHEMA,
        "config": config.to_dict(),
        "environment": _environment(scenario),
        "partition": {
            "digest": scenario.partition.digest,
            "sizes": {c: len(ids) for c, ids in scenario.partition.clients.items()},
        },
        "deletion": _deletion(scenario),
        "methods": methods,
    }
    return result, _samples(scenario, on_removed)


def _to_retrain(logits: Tensor, retrain: Tensor | None) -> dict[str, float | None]:
    """Compare predictions on the test data with those of retraining."""
    if retrain is None:
        return {"jsd": None, "jsd_distance": None, "l2": None}
    return {
        "jsd": jsd(logits, retrain),
        "jsd_distance": jsd_distance(logits, retrain),
        "l2": l2(logits, retrain),
    }


def _against_origin(
    name: str, on_removed: Mapping[str, Tensor], labels: Tensor
) -> dict[str, float | None]:
    """Test whether confidence in the trained label of the removed samples has changed."""
    if name == "origin" or len(labels) < 2:
        return {"t_test_p": None, "effect_size": None}
    test = welch(confidence(on_removed[name], labels), confidence(on_removed["origin"], labels))
    return {"t_test_p": test.p, "effect_size": test.effect_size}


def _cost(record: Mapping[str, Any]) -> Cost:
    return Cost(**{name: record[name] for name in Cost().as_dict()})


def _deletion(scenario: Scenario) -> dict[str, Any]:
    counts = {r.client_id: scenario.holders.count(r.client_id) for r in scenario.requests}
    total = sum(len(ids) for ids in scenario.partition.clients.values())
    backdoor = scenario.backdoor
    return {
        "requests": [
            {
                "client_id": r.client_id,
                "samples": counts[r.client_id],
                "kind": "samples"
                if r.sample_ids is not None
                else "client"
                if r.class_label is None
                else "class",
            }
            for r in scenario.requests
        ],
        "removed_samples": len(scenario.removed),
        "training_samples": total,
        "rate_percent": 100 * len(scenario.removed) / total,
        "backdoor": None
        if backdoor is None
        else {"target": backdoor.target, "source": backdoor.source, "size": backdoor.size},
    }


def _environment(scenario: Scenario) -> dict[str, Any]:
    federation = scenario.federation
    device = federation.device
    return {
        "goldfish": version("goldfish-fl"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "threads": torch.get_num_threads(),
        "workers": federation.workers,
    }


def _samples(scenario: Scenario, on_removed: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a few removed samples, spread over all of them, with each model's prediction."""
    count = len(scenario.removed)
    shown = torch.linspace(0, count - 1, min(SAMPLES_SHOWN, count)).round().long().tolist()
    certainty = {name: logits.softmax(-1).max(-1) for name, logits in on_removed.items()}
    return {
        "class_names": list(scenario.class_names),
        "samples": [
            {
                "id": scenario.removed.ids[i],
                "client_id": scenario.holders[i],
                "label": int(scenario.removed.labels[i]),
                "true_label": scenario.true_labels[i],
                "png": _png(scenario.removed.images[i].cpu()),
                "predictions": {
                    name: {
                        "label": int(best.indices[i]),
                        "confidence": float(best.values[i]),
                    }
                    for name, best in certainty.items()
                },
            }
            for i in shown
        ],
    }


def _png(image: Tensor) -> str:
    """Return an image ``[C, H, W]`` as a PNG in base64; values that are not bytes are stretched."""
    from PIL import Image

    if image.dtype != torch.uint8:
        low, high = image.min(), image.max()
        image = ((image - low) / (high - low).clamp(min=1e-12) * 255).to(torch.uint8)
    pixels = image[0] if len(image) == 1 else image[:3].permute(1, 2, 0)
    buffer = io.BytesIO()
    Image.fromarray(pixels.contiguous().numpy()).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
