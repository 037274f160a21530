"""Several seeds: means, spread and paired test; several stages: each from its own result."""

from __future__ import annotations

import json
import statistics
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from goldfish.experiments.seeds import combine_results

Goldfish = Callable[..., "subprocess.CompletedProcess[str]"]


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


def test_what_seeds_remember_and_did_not_honour_is_combined() -> None:
    """Gaps 0.05 and 0.01 with intervals of 0.04 to each side: the mean, 0.03, is within chance.

    The first seed alone counts as "remembers". A request that one seed did not honour is not
    honoured; a model that one seed left as it was is flagged.
    """
    singles: list[dict[str, Any]] = []
    for gap, found in ((0.05, "remembers"), (0.01, "alike")):
        memory = {"gap": gap, "low": gap - 0.04, "high": gap + 0.04, "to_retrain": None}
        final = {"accuracy": 90.0, "backdoor_success": None, "memory_gap": gap}
        method = {
            "final": {**final, "memory": {**memory, "finding": found}},
            "rounds": [],
            "similarity": {},
            "cost": {"seconds": 1.0},
        }
        singles.append(method)
    failed = {"client_id": "client-1", "kind": "samples", "reason": "took part in 0 of 5 rounds"}
    singles[1] |= {"not_honoured": [failed]}
    combined = combine_results([{"methods": {"goldfish": m}} for m in singles], [4, 5])
    goldfish = combined["methods"]["goldfish"]
    assert goldfish["final"]["memory"]["gap"] == pytest.approx(0.03)
    assert goldfish["final"]["memory"]["finding"] == "alike"
    assert goldfish["not_honoured"] == [failed | {"reason": "seed 5: took part in 0 of 5 rounds"}]


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
    written = tomllib.loads((out / "config.toml").read_text())
    assert [later["after"] for later in written["deletion"]["then"]] == [2]
