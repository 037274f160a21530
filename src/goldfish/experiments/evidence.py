"""What a run measures: every round's scores, and at the end the evidence for each method."""

from __future__ import annotations

import base64
import io
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from goldfish.experiments.engine import Engine
from goldfish.experiments.quality import time_to_quality
from goldfish.experiments.scenario import Scenario, select
from goldfish.methods import deletion_kind
from goldfish.training import LocalWorkspace, predict
from goldfish.types import DeletionRequest, Params, Scalar
from goldfish.version import __version__

SCHEMA = 1
SAMPLES_SHOWN = 8


@dataclass(frozen=True)
class Outcome:
    """A finished phase: its model, its rounds as recorded, and what a reader must know."""

    params: Params
    records: Sequence[Mapping[str, Any]]
    states: Mapping[str, Mapping[str, Params]] = field(default_factory=dict)
    memo: Mapping[str, Scalar] = field(default_factory=dict)
    """What its last round remembered."""
    notes: Sequence[str] = ()
    history_bytes: int = 0
    """Bytes that the server kept during the original training for this method."""
    preparation: Outcome | None = None
    """The method's own training, where it has one."""


@dataclass(frozen=True)
class Diverged:
    """A phase that left the finite numbers: why, in words, and the rounds before."""

    cause: str
    records: Sequence[Mapping[str, Any]]


class Evaluator:
    """Measures models on the scenario's test data."""

    def __init__(self, scenario: Scenario, device: str) -> None:
        self._scenario = scenario
        self._clean_removed = _without_trigger(scenario)
        self.device = device
        self._workspace = LocalWorkspace(scenario.model, device)

    def logits(self, params: Params, examples: TensorExamples) -> Tensor:
        """Return a model's logits."""
        return predict(self._workspace.load("evaluation", params), examples)

    def measure(self, params: Params) -> dict[str, Any]:
        """Return a model's scores: on clean test data, and on triggered data where there is any."""
        test, triggered = self._scenario.test, self._scenario.triggered
        on_test = self.logits(params, test)
        scores = score(on_test, test.labels.cpu(), self._scenario.num_classes)
        success = None
        if triggered is not None and self._scenario.backdoor is not None:
            logits = self.logits(params, triggered)
            success = backdoor_success(logits, self._scenario.backdoor.target)
        gap = None
        if self._clean_removed is not None:
            removed = self.logits(params, self._clean_removed)
            labels = self._clean_removed.labels.cpu()
            same = torch.isin(test.labels.cpu(), labels)  # unseen samples of the same classes
            unseen = score(on_test[same], test.labels.cpu()[same], self._scenario.num_classes)
            gap = unseen.loss - score(removed, labels, self._scenario.num_classes).loss
        return {
            "accuracy": scores.accuracy,
            "loss": scores.loss,
            "mse": scores.mse,
            "per_class": list(scores.per_class),
            "backdoor_success": success,
            "memory_gap": gap,
        }


def collect_evidence(
    config: Config,
    scenario: Scenario,
    outcomes: Mapping[str, Outcome | Diverged],
    evaluator: Evaluator,
    engine: Engine,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of ``result.json`` and of ``samples.json``."""
    finished = {name: o.params for name, o in outcomes.items() if isinstance(o, Outcome)}
    on_test = {name: evaluator.logits(p, scenario.test) for name, p in finished.items()}
    removed = scenario.removed
    on_removed: dict[str, Tensor] = {}
    labels = torch.empty(0, dtype=torch.long)
    if removed is not None:
        on_removed = {name: evaluator.logits(p, removed) for name, p in finished.items()}
        labels = removed.labels.cpu()
    finals = {name: evaluator.measure(params) for name, params in finished.items()}
    methods: dict[str, Any] = {}
    for name, outcome in outcomes.items():
        rounds = [dict(record) for record in outcome.records]
        if isinstance(outcome, Diverged):
            methods[name] = {"diverged": outcome.cause, "rounds": rounds}
            continue
        prepared = outcome.preparation
        trained = [] if prepared is None else [_cost(record) for record in prepared.records]
        kept = Cost(bytes_kept=max([outcome.history_bytes, *(c.bytes_kept for c in trained)]))
        methods[name] = {
            "final": finals[name],
            "rounds": rounds,
            "similarity": {
                **_to_retrain(on_test[name], on_test.get("retrain")),
                **_against_origin(name, on_removed, labels, scenario.poisoned),
            },
            "cost": sum((_cost(record) for record in rounds), kept).as_dict(),
            "notes": list(outcome.notes),
        }
        if prepared is not None:
            methods[name]["training"] = {
                "final": evaluator.measure(prepared.params),
                "cost": sum(trained, Cost()).as_dict(),
            }
    _add_time_to_quality(methods, finals.get("retrain"))
    result = {
        "schema": SCHEMA,
        "config": config.to_dict(),
        "environment": _environment(engine, evaluator.device),
        "partition": _partition(scenario),
        "deletion": _deletion(scenario),
        "methods": methods,
    }
    return result, _samples(scenario, on_removed)


def _without_trigger(scenario: Scenario) -> TensorExamples | None:
    """Return the removed samples that carry no trigger, if there are any to be seen here."""
    if scenario.removed is None:
        return None
    clean = (~scenario.poisoned).nonzero().flatten()
    ids = [scenario.removed.ids[position] for position in clean.tolist()]
    return select(scenario.removed, clean, ids) if ids else None


def _partition(scenario: Scenario) -> dict[str, Any]:
    if scenario.partition is None:
        return {"digest": None, "sizes": {}}
    return {
        "digest": scenario.partition.digest,
        "sizes": {c: len(ids) for c, ids in scenario.partition.clients.items()},
    }


def _add_time_to_quality(methods: dict[str, Any], retrained: Mapping[str, Any] | None) -> None:
    """Add what each method spent until it was as good as retrain ended up, and the speed-up."""
    if retrained is None:
        return
    times = {
        name: time_to_quality(_last_stage(method["rounds"]), retrained)
        for name, method in methods.items()
        if name != "origin" and "final" in method
    }
    slow = times["retrain"]
    for name, fast in times.items():
        methods[name]["time_to_quality"] = fast
        methods[name]["speed_up"] = (
            None if fast is None or slow is None else slow["seconds"] / fast["seconds"]
        )


def _last_stage(rounds: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rounds since the last deletion request arrived."""
    return [record for record in rounds if record["stage"] == rounds[-1]["stage"]]


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
    name: str, on_removed: Mapping[str, Tensor], labels: Tensor, poisoned: Tensor
) -> dict[str, float | None]:
    """Test whether confidence in the trained label of the removed samples has changed.

    Where some carry the trigger the test is on those.
    """
    tested = poisoned if bool(poisoned.any()) else ~poisoned
    if name == "origin" or int(tested.sum()) < 2:
        return {"t_test_p": None, "effect_size": None}
    ours, theirs = (confidence(on_removed[key][tested], labels[tested]) for key in (name, "origin"))
    test = welch(ours, theirs)
    return {"t_test_p": test.p, "effect_size": test.effect_size}


def _cost(record: Mapping[str, Any]) -> Cost:
    return Cost(**{name: record.get(name, 0) for name in Cost().as_dict()})


def _deletion(scenario: Scenario) -> dict[str, Any]:
    backdoor = scenario.backdoor
    known: dict[str, Any] = dict.fromkeys(("removed_samples", "training_samples", "rate_percent"))
    if scenario.partition is not None and scenario.removed is not None:
        total = sum(len(ids) for ids in scenario.partition.clients.values())
        removed = len(scenario.removed)
        known = dict(zip(known, (removed, total, 100 * removed / total), strict=True))
    return {
        "requests": [
            {
                "client_id": r.client_id,
                "samples": _asked_for(r, scenario),
                "kind": deletion_kind(r),
            }
            for r in scenario.requests
        ],
        **known,
        "backdoor": None
        if backdoor is None
        else {"target": backdoor.target, "source": backdoor.source, "size": backdoor.size},
    }


def _asked_for(request: DeletionRequest, scenario: Scenario) -> int | None:
    """Return how many samples one request names; None where only its client can tell."""
    if request.sample_ids is not None:
        return len(request.sample_ids)
    if scenario.removed is None:
        return None
    labels = [
        label
        for label, holder in zip(scenario.true_labels, scenario.holders, strict=True)
        if holder == request.client_id
    ]
    return len(labels) if request.class_label is None else labels.count(request.class_label)


def _environment(engine: Engine, device: str) -> dict[str, Any]:
    return {
        "goldfish": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "threads": torch.get_num_threads(),
        "workers": engine.workers,
        "client_threads": engine.threads,
    }


def _samples(scenario: Scenario, on_removed: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a few removed samples, spread over all of them, with each model's prediction."""
    removed = scenario.removed
    count = 0 if removed is None else len(removed)
    shown = torch.linspace(0, count - 1, min(SAMPLES_SHOWN, count)).round().long().tolist()
    certainty = {name: logits.softmax(-1).max(-1) for name, logits in on_removed.items()}
    return {
        "class_names": list(scenario.class_names),
        "samples": [
            {
                "id": removed.ids[i],
                "client_id": scenario.holders[i],
                "label": int(removed.labels[i]),
                "true_label": scenario.true_labels[i],
                "png": _png(removed.images[i].cpu()),
                "predictions": {
                    name: {
                        "label": int(best.indices[i]),
                        "confidence": float(best.values[i]),
                    }
                    for name, best in certainty.items()
                },
            }
            for i in shown
            if removed is not None
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
