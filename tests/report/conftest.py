"""Made run directories: the numbers come from a small rule, never from training."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from PIL import Image

TEN = (
    *("origin", "goldfish", "goldfish-warm", "retrain", "retrain-tuned", "rapid-retrain"),
    *("incompetent-teacher", "sisa", "fed-eraser", "fed-recovery", "gradient-ascent"),
)
"""Origin, and ten methods."""

MakeResult: TypeAlias = Callable[..., dict[str, Any]]
WriteRun: TypeAlias = Callable[..., Path]

ENDS = {  # accuracy and backdoor success at the end, how steep the way there is, and the cost
    "origin": (95.8, 99.6, 0.9, 5.1),
    "goldfish": (95.5, 0.6, 0.6, 1.9),
    "retrain": (95.1, 0.3, 0.35, 5.0),
    "rapid-retrain": (93.0, 4.1, 0.5, 2.7),
    "incompetent-teacher": (94.1, 12.8, 1.2, 0.8),
    "sisa": (91.2, 0.4, 0.3, 3.3),
    "fed-eraser": (93.4, 2.2, 0.7, 1.4),
    "fed-recovery": (86.0, 61.0, 0.8, 0.2),
    "goldfish-warm": (95.4, 1.1, 1.4, 1.2),
    "retrain-tuned": (95.3, 0.2, 0.5, 3.9),
    "gradient-ascent": (88.5, 22.0, 0.9, 0.1),
}


def method(name: str, backdoor: bool, compared: bool, rounds: int = 10) -> dict[str, Any]:
    """Return one method's entry of ``result.json``."""
    accuracy, success, steepness, cost = ENDS[name]

    def at(end: float, start: float, index: int) -> float:
        return end + (start - end) * math.exp(-steepness * index)

    near = compared and name != "retrain"
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
                "mse": 0.05,
                "backdoor_success": at(success, 10.0, index) if backdoor else None,
                "seconds": 0.31,
            }
            for index in range(1, rounds + 1)
        ],
        "similarity": {
            "jsd": round(0.0123 * cost, 4) if near else None,
            "jsd_distance": round(math.sqrt(0.0123 * cost), 4) if near else None,
            "l2": round(0.0456 * cost, 4) if near else None,
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
        "schema_version": 2,
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
            "deletion": {"rate": 0.074},
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
            "vector_instructions": "AVX2",
            "threads": 4,
            "workers": 2,
            "client_threads": 1,
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
        "test_images": {"accuracy": 10_000, "backdoor": 9_000 if backdoor else 0},
        "methods": {name: method(name, backdoor, "retrain" in methods) for name in methods},
    }


GAPS = {  # memory gap at the end; 0.004 where none is named
    "origin": 0.091,
    "goldfish": 0.012,
    "retrain": 0.004,
    "incompetent-teacher": -0.058,
    "fed-recovery": 0.083,
    "gradient-ascent": 0.071,
}
ONE_ROUND = ("fed-recovery", "gradient-ascent")
KEPT = {"fed-eraser": 48_000_000, "fed-recovery": 19_000_000, "sisa": 7_100_000}
MISSED = ("rapid-retrain", "sisa", "fed-recovery", "gradient-ascent", "incompetent-teacher")


def give_memory(
    entry: dict[str, Any], gap: float, to_retrain: float | None = None, half: float = 0.01
) -> None:
    """Compare a method's removed samples with unseen ones; ``half`` is half of an interval."""

    def ends(value: float) -> dict[str, float]:
        return {"value": value, "low": value - half, "high": value + half}

    entry["final"] |= {
        "memory_gap": gap,
        "memory": {
            "gap": ends(gap),
            "removed": 144,
            "unseen": 359,
            "left_out": 3,
            "removed_right": 99.3,
            "unseen_right": 97.2,
            "to_retrain": None if to_retrain is None else ends(to_retrain),
        },
    }


def grown(
    methods: Sequence[str] = TEN, *, backdoor: bool = True, seeds: int = 1, stages: int = 1
) -> dict[str, Any]:
    """Return a result with all that it may hold: memory gaps, times to quality, seeds, stages."""
    found = result(methods, backdoor)
    for name, entry in found["methods"].items():
        end, seconds = GAPS.get(name, 0.004), entry["cost"]["seconds"]
        rounds = entry["rounds"] = entry["rounds"][-1:] if name in ONE_ROUND else entry["rounds"]
        compared = "retrain" in methods and name != "retrain"
        give_memory(entry, end, end - GAPS["retrain"] if compared else None)
        entry["cost"]["bytes_kept"] = KEPT.get(name, 0)
        for index, record in enumerate(rounds, 1):
            last = index == len(rounds)
            record |= {"round": index, "seconds": seconds / len(rounds)}
            record["memory_gap"] = end if last else end + 0.02 * math.sin(3 * index + seconds)
            if last:
                record |= {key: entry["final"][key] for key in ("accuracy", "backdoor_success")}
            if stages > 1 and name != "origin":
                record["stage"] = min(stages, 1 + stages * (index - 1) // len(rounds))
        if name == "sisa":
            cost = {key: 4 * value for key, value in entry["cost"].items()}
            trained = {"accuracy": 91.9, "loss": 0.3, "mse": 0.04}
            trained |= {"backdoor_success": 97.2} if backdoor else {}
            entry["training"] = {"final": trained, "cost": cost}
            give_memory(entry["training"], 0.08, 0.076 if compared else None)
        if name != "origin" and "retrain" in methods:
            done, missed = (10 if name == "retrain" else 7), name in MISSED
            spent = {"round": done, "seconds": 0.1 * done * seconds, "steps": 9, "samples": 90}
            slow = 3.1 * ENDS["retrain"][3]
            entry["quality_tested"] = True
            entry["time_to_quality"] = None if missed else spent
            entry["speed_up"] = None if missed else slow / (0.1 * done * seconds)
        if seeds > 1:
            _add_spread(name, entry, seeds)
    found["deletion"] |= {"clean_samples": 107, "removed_classes": []}
    return found | ({"seeds": list(range(seeds))} if seeds > 1 else {})


def _add_spread(name: str, entry: dict[str, Any], seeds: int) -> None:
    cost = ENDS[name][3]
    stds = {"accuracy": cost / 9, "backdoor_success": 0.4 + cost / 5, "memory_gap": 0.004}
    ends = {key: entry["final"][key] for key in stds}
    reached = entry.get("time_to_quality")
    quality = reached and reached["seconds"]
    ends |= {"seconds": entry["cost"]["seconds"], "seconds_to_quality": quality}
    stds |= {
        "seconds": 0.09 * ends["seconds"],
        "seconds_to_quality": 0.1 * (reached or ends)["seconds"],
    }
    entry["spread"] = {}
    for key, mean in ends.items():
        known = mean is not None
        values = [mean + (i - (seeds - 1) / 2) * stds[key] if known else None for i in range(seeds)]
        tested = (
            known and name != "retrain" and key in ("accuracy", "backdoor_success", "memory_gap")
        )
        entry["spread"][key] = {
            "mean": mean,
            "std": stds[key] if known else None,
            "values": values,
            "p_vs_retrain": min(0.9, 0.0004 * 9**cost) if tested else None,
        }
    if name == "rapid-retrain":
        entry["spread"]["seconds_to_quality"]["values"][:2] = [6.1, 6.6]
    for record in entry["rounds"]:
        wide = 1 + 4 / record["round"]
        drawn = [key for key in ("accuracy", "backdoor_success") if ends[key] is not None]
        record["std"] = {key: wide * stds[key] for key in drawn}


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
        kept = {"origin": 7, "fed-recovery": 7 if n % 2 else 5}
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


def write(run_dir: Path, content: dict[str, Any], pictures: bool = True) -> Path:
    """Write a result (and pictures, unless told not to) as a run."""
    (run_dir / "result.json").write_text(json.dumps(content))
    if pictures:
        ran = [name for name, m in content["methods"].items() if "diverged" not in m]
        (run_dir / "samples.json").write_text(json.dumps(samples(ran)))
    return run_dir


@pytest.fixture(scope="session")
def make_result() -> MakeResult:
    return result


@pytest.fixture(scope="session")
def make_grown() -> MakeResult:
    return grown


@pytest.fixture(scope="session")
def write_to() -> WriteRun:
    return write


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    return partial(write, tmp_path)


@pytest.fixture
def remember() -> Callable[..., None]:
    """Return a function that gives a method of a result a memory gap."""

    def give(result: dict[str, Any], name: str, *numbers: Any) -> None:
        give_memory(result["methods"][name], *numbers)

    return give


def audit(methods: Sequence[str], models: int = 8) -> dict[str, Any]:
    """Return the whole of ``audit.json``: of the standard tier, or of the quick one without models.

    Origin remembers, incompetent-teacher over-forgets; the others cannot be told from retraining.
    """
    centres = {"origin": 1.1, "fed-recovery": 0.9, "incompetent-teacher": -0.8}
    words = {"origin": "remembers", "fed-recovery": "remembers"}
    words |= {"incompetent-teacher": "over-forgets"}
    oracles = [0.12 * math.sin(5 * n) for n in range(models)]

    def many(name: str) -> dict[str, Any]:
        centre = centres.get(name, 0.02)
        ends = {"value": centre, "low": centre - 0.2, "high": centre + 0.2}
        compared = {"unlearned": models, "oracles": models}
        found = min(1.0, 0.01 + abs(centre) / 4)
        rate = {"rate": found, "low": 0.8 * found, "high": min(1.0, 1.2 * found), "count": 800}
        falses = [10 ** (-3 + 3 * n / 39) for n in range(40)]
        return {
            "word": words.get(name, "indistinguishable"),
            "sentence": f"What {models} models of {name} show beside as many oracles.",
            "memory": {**ends, **compared},
            "accuracy": {"value": -0.2, "low": -0.9, "high": 0.5, **compared},
            "models": [centre + 0.1 * math.sin(7 * n + centre) for n in range(models)],
            "oracles": oracles,
            "distances": {"removed": 0.3 + abs(centre), "unseen": 0.31},
            "attack": {
                "at_1_percent": rate,
                "at_01_percent": rate,
                "roc": [(f, f ** (1 / (1 + 2 * abs(centre)))) for f in falses],
            },
        }

    def quick(name: str) -> dict[str, Any]:
        fast = 0.02 + abs(centres.get(name, 0.0)) / 5
        curve = [0.02 + 2 * math.exp(-fast * n) for n in range(101)]
        step = int(4 / fast)
        harmed = {
            f"client-{i}": {"before": 97.5, "after": 97.5 - i * ENDS[name][3] / 4, "samples": 281}
            for i in range(1, 6)
        }
        fallen = {"id": "402", "client_id": "client-3", "label": 8, "before": 4.1, "after": -2.2}
        return {
            "membership": {"rate": 0.55, "low": 0.5, "high": 0.6, "count": 107},
            "relearning": {
                "curve": [0.01] * 101 if name == "origin" else curve,
                "steps": [0, 0, 0] if name == "origin" else [step if step <= 100 else None, None],
            },
            "harm": None
            if name == "origin"
            else {
                "clients": harmed,
                "lost": 14,
                "gained": 9,
                "samples": 1405,
                "most_affected": [fallen],
            },
        }

    return {
        "tier": "standard" if models else "quick",
        "removed": 107,
        "unseen": 360,
        "relearned": 107,
        "quick": {name: quick(name) for name in methods},
        "models": models,
        "noise": {"removed": 0.28, "unseen": 0.26} if models else None,
        "band": 0.35 if models else 0.0,
        "methods": {name: many(name) for name in methods} if models else {},
    }


@pytest.fixture(scope="session")
def make_audit() -> MakeResult:
    return audit
