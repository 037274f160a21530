"""The evidence for each method at the end of a run: ``result.json`` and ``samples.json``."""

from __future__ import annotations

import base64
import io
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from goldfish import results
from goldfish.evaluation.similarity import confidence, jsd, jsd_distance, l2, welch
from goldfish.experiments.config import Config
from goldfish.experiments.engine import Engine
from goldfish.experiments.evaluator import Evaluator, named, removed_classes
from goldfish.experiments.scenario import Machine, Scenario
from goldfish.methods import deletion_kind
from goldfish.results import MARGINS, ORIGIN, YARDSTICK, Cost, Measures, MethodResult, Record, Spent
from goldfish.types import DeletionRequest, Memo, NotHonoured, Params, Scalar
from goldfish.version import __version__

SAMPLES_SHOWN = 8


@dataclass(frozen=True)
class Outcome:
    """A finished phase: its model, its rounds as recorded, and what a reader must know."""

    params: Params
    records: Sequence[Record]
    states: Mapping[str, Mapping[str, Params]] = field(default_factory=dict)
    memo: Memo = field(default_factory=dict)
    """What its last round remembered."""
    notes: Sequence[str] = ()
    not_honoured: Sequence[NotHonoured] = ()
    """Requests whose data is still in the model."""
    history_bytes: float = 0
    """Bytes that the server kept during the original training for this method."""
    preparation: Outcome | None = None
    """The method's own training, where it has one."""


@dataclass(frozen=True)
class Diverged:
    """A phase that left the finite numbers: why, in words, and the rounds before."""

    cause: str
    records: Sequence[Record]


def collect_evidence(
    config: Config,
    scenario: Scenario,
    outcomes: Mapping[str, Outcome | Diverged],
    evaluator: Evaluator,
    environment: results.Environment,
) -> tuple[results.Result, results.Samples]:
    """Return the contents of ``result.json`` and of ``samples.json``."""
    outcomes = {name: outcomes[name] for name in (ORIGIN, *config.unlearning.methods)}
    finished = {name: o.params for name, o in outcomes.items() if isinstance(o, Outcome)}
    on_test = {name: evaluator.logits(p, scenario.test) for name, p in finished.items()}
    on_removed: dict[str, Tensor] = {}
    if scenario.removed is not None:
        on_removed = {name: evaluator.logits(p, scenario.removed) for name, p in finished.items()}
    methods = {}
    for name, outcome in outcomes.items():
        rounds = list(outcome.records)
        if isinstance(outcome, Diverged):
            methods[name] = MethodResult(diverged=outcome.cause, rounds=rounds)
            continue
        before, own, training = on_removed.get(ORIGIN), outcome.preparation, None
        kept = Cost(bytes_kept=outcome.history_bytes)
        if own is not None:
            spent = sum((record.cost for record in own.records), Cost())
            kept += Cost(bytes_kept=spent.bytes_kept)
            training = results.Training(final=evaluator.measure(own.params), cost=spent)
            if scenario.removed is not None:
                before = evaluator.logits(own.params, scenario.removed)
        methods[name] = MethodResult(
            final=evaluator.measure(outcome.params, compared=name != YARDSTICK),
            rounds=rounds,
            similarity=results.Similarity(
                **_to_retrain(name, on_test),
                **({} if name == ORIGIN else _t_test(on_removed.get(name), before, scenario)),
            ),
            cost=sum((record.cost for record in rounds), kept),
            notes=list(outcome.notes),
            not_honoured=[
                results.LostRequest(
                    client_id=lost.request.client_id,
                    kind=deletion_kind(lost.request),
                    reason=lost.reason,
                )
                for lost in outcome.not_honoured
            ],
            training=training,
        )
    images = evaluator.test_images()
    margins = MARGINS.for_images(images.accuracy)
    result = results.Result(
        config=config.to_dict(),
        environment=environment,
        partition=_partition(scenario),
        deletion=_deletion(scenario),
        test_images=images,
        margins=margins,
        methods=with_time_to_quality(methods, margins),
    )
    return result, _samples(scenario, on_removed)


def _partition(scenario: Scenario) -> results.Division:
    if scenario.partition is None:
        return results.Division()
    sizes = {client: len(ids) for client, ids in scenario.partition.clients.items()}
    return results.Division(digest=scenario.partition.digest, sizes=sizes)


def with_time_to_quality(
    methods: Mapping[str, MethodResult], margins: results.Margins
) -> dict[str, MethodResult]:
    """Add what each method spent until it was as good as retrain ended up, and the speed-up.

    Nothing is added where origin itself counts as having forgotten: the test tells nothing then.
    """
    origin, retrained = methods[ORIGIN].final, methods.get(YARDSTICK, MethodResult()).final
    if origin is None or retrained is None or has_forgotten(origin, retrained, margins):
        return dict(methods)
    times = {
        name: time_to_quality(method.rounds, retrained, margins)
        for name, method in methods.items()
        if name != ORIGIN and method.final is not None
    }
    return {
        name: method.model_copy(
            update={
                "quality_tested": name in times,
                "time_to_quality": times.get(name),
                "speed_up": speed_up(times[YARDSTICK], times.get(name)),
            }
        )
        for name, method in methods.items()
    }


def speed_up(slow: Spent | None, fast: Spent | None) -> float | None:
    """Return how many times sooner ``fast`` was there; None where one of them never was."""
    return None if slow is None or fast is None else slow.seconds / fast.seconds


def time_to_quality(
    rounds: Sequence[Record], retrained: Measures, margins: results.Margins = MARGINS
) -> Spent | None:
    """Return what was spent up to the first round that is as good as ``retrained``, or None.

    As good means: accuracy within a margin of retrain's final one, and the removed data forgotten
    (:func:`has_forgotten`). It counts since the last deletion request arrived.
    """
    spent = Cost()
    for record in rounds:
        if record.stage < rounds[-1].stage:
            continue
        spent += record.cost
        accurate = record.accuracy >= retrained.accuracy - margins.accuracy
        if accurate and has_forgotten(record, retrained, margins):
            return Spent(
                round=record.round, seconds=spent.seconds, steps=spent.steps, samples=spent.samples
            )
    return None


def has_forgotten(
    scores: Measures, retrained: Measures, margins: results.Margins = MARGINS
) -> bool:
    """Say whether no test tells a model from retrain's final one as one that knows the data.

    The tests are those that the run has: what the trigger adds, the accuracy on a removed class,
    and the memory gap, whose difference to retrain's must not count as *remembers*. Retrain's own
    rounds have no such difference: retrain never saw the data.
    """
    for ours, floor in (
        (scores.trigger_adds, retrained.trigger_adds),
        (scores.class_known, retrained.class_known),
    ):
        if ours is not None and floor is not None and ours > floor + margins.backdoor:
            return False
    return scores.apart is None or scores.apart.finding != "remembers"


def _to_retrain(name: str, on_test: Mapping[str, Tensor]) -> dict[str, float]:
    """Compare predictions on the test data with those of retraining; not retrain with itself."""
    if YARDSTICK not in on_test or name == YARDSTICK:
        return {}
    both = on_test[name], on_test[YARDSTICK]
    return {"jsd": jsd(*both), "jsd_distance": jsd_distance(*both), "l2": l2(*both)}


def _t_test(
    after: Tensor | None, before: Tensor | None, scenario: Scenario
) -> dict[str, float | None]:
    """Test whether confidence in the trained label of the removed samples has changed.

    ``before`` is of the model that the method began from: origin, or its own training. Where some
    samples carry the trigger the test is on those.
    """
    poisoned = scenario.poisoned
    tested = poisoned if bool(poisoned.any()) else ~poisoned
    if after is None or before is None or scenario.removed is None or int(tested.sum()) < 2:
        return {}
    labels = scenario.removed.labels.cpu()[tested]
    test = welch(confidence(after[tested], labels), confidence(before[tested], labels))
    return {"t_test_p": test.p, "effect_size": test.effect_size}


def _deletion(scenario: Scenario) -> results.Deletion:
    backdoor, known = scenario.backdoor, {}
    if scenario.partition is not None and scenario.removed is not None:
        total = sum(len(ids) for ids in scenario.partition.clients.values())
        known = {
            "removed_samples": len(scenario.removed),
            "clean_samples": int((~scenario.poisoned).sum()),
            "training_samples": total,
            "rate_percent": 100 * len(scenario.removed) / total,
        }
    return results.Deletion(
        requests=[
            results.FiledRequest(
                client_id=request.client_id,
                kind=deletion_kind(request),
                samples=_asked_for(request, scenario),
                class_label=request.class_label,
            )
            for request in scenario.requests
        ],
        removed_classes=removed_classes(scenario),
        backdoor=backdoor
        and results.Trigger(target=backdoor.target, source=backdoor.source, size=backdoor.size),
        **known,
    )


def _asked_for(request: DeletionRequest, scenario: Scenario) -> int | None:
    """Return how many samples one request names; None where only its client can tell."""
    if request.sample_ids is not None:
        return len(request.sample_ids)
    if scenario.removed is None:
        return None
    return int(named(scenario, [request]).sum())


def environment(
    engine: Engine, machine: Machine, before: Sequence[Mapping[str, Scalar]]
) -> results.Environment:
    """Return where a run is computed; ``before`` are the machines that it was on earlier."""
    return results.Environment(
        goldfish=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_count=os.cpu_count(),
        threads=torch.get_num_threads(),
        workers=engine.workers,
        client_threads=engine.threads,
        compiled=machine.compiled,
        machines_before=[{name: str(value) for name, value in facts.items()} for facts in before],
        **{name: str(value) for name, value in machine.facts.items()},
    )


def _samples(scenario: Scenario, on_removed: Mapping[str, Tensor]) -> results.Samples:
    """Return a few removed samples, spread over all of them, with each model's prediction."""
    removed, shown = scenario.removed, []
    if removed is not None:
        last = len(removed) - 1
        places = torch.linspace(0, last, min(SAMPLES_SHOWN, len(removed))).round().long().tolist()
        best = {name: logits.softmax(-1).max(-1) for name, logits in on_removed.items()}
        shown = [
            results.Sample(
                id=removed.ids[i],
                client_id=scenario.holders[i],
                label=int(removed.labels[i]),
                true_label=scenario.true_labels[i],
                png=_png(removed.images[i].cpu()),
                predictions={
                    name: results.Prediction(label=int(b.indices[i]), confidence=float(b.values[i]))
                    for name, b in best.items()
                },
            )
            for i in places
        ]
    return results.Samples(class_names=list(scenario.class_names), samples=shown)


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
