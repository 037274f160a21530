"""The evidence for each method at the end of a run: ``result.json`` and ``samples.json``."""

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

from goldfish.evaluation import (
    MEMORY_MARGIN,
    Cost,
    confidence,
    jsd,
    jsd_distance,
    l2,
    welch,
)
from goldfish.experiments.config import Config
from goldfish.experiments.engine import Engine
from goldfish.experiments.evaluator import Evaluator, numbers, removed_classes
from goldfish.experiments.quality import (
    ACCURACY_MARGIN,
    BACKDOOR_MARGIN,
    has_forgotten,
    time_to_quality,
)
from goldfish.experiments.scenario import Scenario
from goldfish.methods import deletion_kind
from goldfish.types import DeletionRequest, Memo, NotHonoured, Params
from goldfish.version import __version__

SCHEMA = 1
SAMPLES_SHOWN = 8


@dataclass(frozen=True)
class Outcome:
    """A finished phase: its model, its rounds as recorded, and what a reader must know."""

    params: Params
    records: Sequence[Mapping[str, Any]]
    states: Mapping[str, Mapping[str, Params]] = field(default_factory=dict)
    memo: Memo = field(default_factory=dict)
    """What its last round remembered."""
    notes: Sequence[str] = ()
    not_honoured: Sequence[NotHonoured] = ()
    """Requests whose data is still in the model."""
    history_bytes: int = 0
    """Bytes that the server kept during the original training for this method."""
    preparation: Outcome | None = None
    """The method's own training, where it has one."""


@dataclass(frozen=True)
class Diverged:
    """A phase that left the finite numbers: why, in words, and the rounds before."""

    cause: str
    records: Sequence[Mapping[str, Any]]


def collect_evidence(
    config: Config,
    scenario: Scenario,
    outcomes: Mapping[str, Outcome | Diverged],
    evaluator: Evaluator,
    engine: Engine,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of ``result.json`` and of ``samples.json``."""
    outcomes = {name: outcomes[name] for name in ("origin", *config.unlearning.methods)}
    finished = {name: o.params for name, o in outcomes.items() if isinstance(o, Outcome)}
    on_test = {name: evaluator.logits(p, scenario.test) for name, p in finished.items()}
    on_removed: dict[str, Tensor] = {}
    before: dict[str, Tensor] = {}
    if scenario.removed is not None:
        on_removed = {name: evaluator.logits(p, scenario.removed) for name, p in finished.items()}
        before = {name: on_removed["origin"] for name in finished if name != "origin"}
        for name, o in outcomes.items():
            if isinstance(o, Outcome) and o.preparation is not None:
                before[name] = evaluator.logits(o.preparation.params, scenario.removed)
    finals = {name: evaluator.measure(params) for name, params in finished.items()}
    if "retrain" in finals and finals["retrain"]["memory"] is not None:
        finals["retrain"]["memory"] |= {"to_retrain": None, "finding": None}  # it is the yardstick
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
                **_against_before(on_removed.get(name), before.get(name), scenario),
            },
            "cost": sum((_cost(record) for record in rounds), kept).as_dict(),
            "notes": list(outcome.notes),
            "not_honoured": [
                {
                    "client_id": lost.request.client_id,
                    "kind": deletion_kind(lost.request),
                    "reason": lost.reason,
                }
                for lost in outcome.not_honoured
            ],
        }
        if prepared is not None:
            methods[name]["training"] = {
                "final": evaluator.measure(prepared.params),
                "cost": sum(trained, Cost()).as_dict(),
            }
    _add_time_to_quality(methods, finals)
    result = {
        "schema": SCHEMA,
        "config": config.to_dict(),
        "environment": _environment(engine, evaluator.device),
        "partition": _partition(scenario),
        "deletion": _deletion(scenario),
        "test_images": evaluator.test_images(),
        "margins": {
            "accuracy": ACCURACY_MARGIN,
            "backdoor": BACKDOOR_MARGIN,
            "memory": MEMORY_MARGIN,
        },
        "methods": methods,
    }
    return result, _samples(scenario, on_removed)


def _partition(scenario: Scenario) -> dict[str, Any]:
    if scenario.partition is None:
        return {"digest": None, "sizes": {}}
    return {
        "digest": scenario.partition.digest,
        "sizes": {c: len(ids) for c, ids in scenario.partition.clients.items()},
    }


def _add_time_to_quality(methods: dict[str, Any], finals: Mapping[str, Mapping[str, Any]]) -> None:
    """Add what each method spent until it was as good as retrain ended up, and the speed-up.

    Nothing is added where origin itself counts as having forgotten: the test tells nothing then.
    """
    if "retrain" not in finals:
        return
    retrained = numbers(finals["retrain"])
    if has_forgotten(numbers(finals["origin"]), retrained):
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


def _against_before(
    after: Tensor | None, before: Tensor | None, scenario: Scenario
) -> dict[str, float | None]:
    """Test whether confidence in the trained label of the removed samples has changed.

    ``before`` is the model that the method began from: origin, or its own training. Where some
    samples carry the trigger the test is on those.
    """
    poisoned = scenario.poisoned
    tested = poisoned if bool(poisoned.any()) else ~poisoned
    if after is None or before is None or scenario.removed is None or int(tested.sum()) < 2:
        return {"t_test_p": None, "effect_size": None}
    labels = scenario.removed.labels.cpu()[tested]
    test = welch(confidence(after[tested], labels), confidence(before[tested], labels))
    return {"t_test_p": test.p, "effect_size": test.effect_size}


def _cost(record: Mapping[str, Any]) -> Cost:
    return Cost(**{name: record.get(name, 0) for name in Cost().as_dict()})


def _deletion(scenario: Scenario) -> dict[str, Any]:
    backdoor = scenario.backdoor
    keys = ("removed_samples", "clean_samples", "training_samples", "rate_percent")
    known: dict[str, Any] = dict.fromkeys(keys)
    if scenario.partition is not None and scenario.removed is not None:
        total = sum(len(ids) for ids in scenario.partition.clients.values())
        removed, clean = len(scenario.removed), int((~scenario.poisoned).sum())
        known = dict(zip(keys, (removed, clean, total, 100 * removed / total), strict=True))
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
        "removed_classes": removed_classes(scenario),
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
