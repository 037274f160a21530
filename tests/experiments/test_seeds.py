"""Several seeds: means, spread and paired test; several stages: each from its own result."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from goldfish.experiments.quality import time_to_quality
from goldfish.experiments.seeds import combine_results

Goldfish = Callable[..., "subprocess.CompletedProcess[str]"]


def record(number: int, accuracy: float, backdoor: float | None) -> dict[str, float | None]:
    return {
        "round": number,
        "accuracy": accuracy,
        "backdoor_success": backdoor,
        "seconds": 2.0,
        "steps": 10,
        "samples": 100,
    }


def test_time_to_quality_by_hand() -> None:
    """Retrain ends at 95 % and 2 %: a round counts from 94.5 % on with at most 3 % backdoor.

    Round 1 is too inaccurate, round 2 keeps the backdoor, round 3 has both: 3 rounds of 2 s.
    """
    retrained = {"accuracy": 95.0, "backdoor_success": 2.0}
    rounds = [
        record(1, 94.4, 0.0),
        record(2, 96.0, 3.1),
        record(3, 94.5, 3.0),
        record(4, 99.0, 0.0),
    ]
    expected = {"round": 3, "seconds": 6.0, "steps": 30.0, "samples": 300.0}
    assert time_to_quality(rounds, retrained) == expected
    assert time_to_quality(rounds[:2], retrained) is None
    no_backdoor = [record(1, 94.6, None)]
    assert time_to_quality(no_backdoor, {"accuracy": 95.0, "backdoor_success": None}) is not None


def test_seeds_are_run_and_combined(
    goldfish_cli: Goldfish, config_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = goldfish_cli("run", config_file, "--out", out, "--seeds", 3)
    assert done.returncode == 0, done.stderr
    singles = [json.loads((out / f"seed-{s}" / "result.json").read_text()) for s in range(3)]
    result = json.loads((out / "result.json").read_text())
    assert result["seeds"] == [0, 1, 2]
    values = [s["methods"]["goldfish"]["final"]["accuracy"] for s in singles]
    assert len(set(values)) > 1
    spread = result["methods"]["goldfish"]["spread"]["accuracy"]
    assert spread["values"] == values
    assert spread["mean"] == pytest.approx(statistics.mean(values))
    assert spread["std"] == pytest.approx(statistics.stdev(values))
    assert 0 <= spread["p_vs_retrain"] <= 1
    assert result["methods"]["goldfish"]["final"]["accuracy"] == pytest.approx(spread["mean"])
    assert result["methods"]["retrain"]["spread"]["accuracy"]["p_vs_retrain"] is None
    assert result["methods"]["goldfish"]["rounds"][0]["accuracy_std"] >= 0
    assert (out / "report.html").exists()
    again = goldfish_cli("run", config_file, "--out", out, "--seeds", 2)
    assert again.returncode == 1
    assert "another configuration" in again.stderr


def test_a_seed_that_diverged_is_named() -> None:
    good = {
        "final": {"accuracy": 1.0, "backdoor_success": None, "memory_gap": None},
        "rounds": [],
        "similarity": {},
        "cost": {"seconds": 1.0},
    }
    results: list[dict[str, Any]] = [
        {"methods": {"goldfish": good}},
        {"methods": {"goldfish": {"diverged": "boom"}}},
    ]
    combined = combine_results(results, [4, 5])
    assert combined["methods"]["goldfish"]["diverged"] == "seed 5: boom"


def test_later_requests_are_honoured_from_the_methods_own_result(
    goldfish_cli: Goldfish, config_file: Path, tmp_path: Path
) -> None:
    with config_file.open("a") as file:
        file.write("[[deletion.then]]\nafter = 2\nrate = 0.05\n")
    out = tmp_path / "out"
    done = goldfish_cli("run", config_file, "--out", out, "--set", "deletion.clean_rate=0.05")
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "result.json").read_text())
    for name in ("goldfish", "retrain"):
        rounds = result["methods"][name]["rounds"]
        assert [(r["round"], r["stage"]) for r in rounds] == [
            (1, 1),
            (2, 1),
            (3, 2),
            (4, 2),
            (5, 2),
        ]
        assert isinstance(result["methods"][name]["final"]["memory_gap"], float)
    assert [r["samples"] for r in result["deletion"]["requests"]] == [144, 72, 72]
    assert result["deletion"]["removed_samples"] == 288
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == [
        f"{n}.safetensors" for n in ("goldfish.2", "goldfish", "origin", "retrain.2", "retrain")
    ]
    assert "[[deletion.then]]" in (out / "config.toml").read_text()
