"""Whole runs through the command line: results, resuming after kill -9, workers, divergence."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from goldfish.errors import StoreError
from goldfish.experiments.config import Config, parse_config
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine
from goldfish.experiments.seeds import run_seeds
from goldfish.results import Progress
from goldfish.store import load_checkpoint

Goldfish = Callable[..., "subprocess.CompletedProcess[str]"]
StartProcess = Callable[..., "subprocess.Popen[Any]"]


def without_times(value: Any) -> Any:
    """Drop what a clock measured, on which no two runs agree, and what is done again.

    A run that goes on asks teachers once more: their logits were in memory.
    """
    if isinstance(value, dict):
        clock = ("seconds", "speed_up", "teacher_samples")
        return {k: without_times(v) for k, v in value.items() if k not in clock}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def result_of(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    return result


def checkpoints_of(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()}


def test_a_run_leaves_everything_behind(finished: tuple[Path, str]) -> None:
    out, said = finished
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints",
        "config.toml",
        "lock",
        "metrics.jsonl",
        "partition.json",
        "pinned.json",
        "report.html",
        "requests.json",
        "result.json",
        "samples.json",
    ]
    result = result_of(out)
    assert result["schema_version"] == 2
    assert list(result["methods"]) == ["origin", "goldfish", "retrain"]
    for name, method in result["methods"].items():
        assert [r["round"] for r in method["rounds"]] == [1, 2, 3]
        last = method["rounds"][-1]
        assert method["final"]["accuracy"] == last["accuracy"], name
        assert method["cost"]["steps"] == sum(r["steps"] for r in method["rounds"])
    assert result["methods"]["retrain"]["similarity"]["jsd"] is None  # it is the yardstick
    assert 0 <= result["methods"]["goldfish"]["final"]["accuracy"] <= 100
    assert result["deletion"]["removed_samples"] == 144
    assert "origin" in said
    assert "report.html" in said


def test_the_written_configuration_gives_the_same_run_with_any_workers(
    goldfish_cli: Goldfish, finished: tuple[Path, str], tmp_path: Path
) -> None:
    """The second run differs in its workers alone: results and checkpoints are the same bits."""
    first, second = finished[0], tmp_path / "second"
    done = goldfish_cli("run", first / "config.toml", "--out", second, "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert (first / "config.toml").read_text() == (second / "config.toml").read_text()
    assert checkpoints_of(first) == checkpoints_of(second)
    assert without_times(result_of(first)["methods"]) == without_times(result_of(second)["methods"])


def test_report_writes_the_page_again(
    goldfish_cli: Goldfish, finished: tuple[Path, str], tmp_path: Path
) -> None:
    out = shutil.copytree(finished[0], tmp_path / "out")
    page = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    done = goldfish_cli("report", out)
    assert done.returncode == 0, done.stderr
    assert (out / "report.html").read_bytes() == page


def test_kill_and_resume_gives_the_same_bits(
    goldfish_cli: Goldfish,
    command: list[str],
    config_file: Path,
    tmp_path: Path,
    start_process: StartProcess,
) -> None:
    """Killed in every phase, one after the other, with shard models at the clients."""
    settings = ["--set", "training.shards=3", "--set", "unlearning.rounds=8"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = goldfish_cli("run", config_file, "--out", whole, *settings)
    assert done.returncode == 0, done.stderr

    for phase in ("origin", "retrain", "goldfish"):
        resume = [] if phase == "origin" else ["--resume"]
        process = start_process(
            [*command, "run", str(config_file), "--out", str(broken), *settings, *resume],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        metrics = broken / "metrics.jsonl"
        while process.poll() is None:
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            if sum(f'"phase": "{phase}"' in line for line in lines) >= 2:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        assert process.wait() == -signal.SIGKILL
        assert not (broken / "result.json").exists()

    resumed = goldfish_cli("run", config_file, "--out", broken, "--resume", *settings)
    assert resumed.returncode == 0, resumed.stderr
    assert without_times(result_of(broken)) == without_times(result_of(whole))
    assert checkpoints_of(broken) == checkpoints_of(whole)
    assert (broken / "samples.json").read_bytes() == (whole / "samples.json").read_bytes()


def test_a_run_that_goes_on_with_another_cpu_asks_first_and_says_so(
    goldfish_cli: Goldfish, command: list[str], config_file: Path, tmp_path: Path
) -> None:
    """PyTorch without vector instructions gives other bits: it stands for another machine."""
    settings = ("--set", "unlearning.rounds=1", "--set", "training.rounds=1", "--device", "cpu")
    out = tmp_path / "out"
    subprocess.run(
        [*command, "run", str(config_file), "--out", str(out), *settings],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    pinned = json.loads((out / "pinned.json").read_text())
    assert pinned["device"] == "cpu"
    assert pinned["torch"] == result_of(out)["environment"]["torch"]
    assert pinned["vector_instructions"] == "DEFAULT"
    (out / "checkpoints" / "goldfish.safetensors").unlink()
    refused = goldfish_cli("run", out, "--resume", "--device", "cpu")
    assert refused.returncode == 1
    vectors = torch.backends.cpu.get_cpu_capability()
    assert vectors != "DEFAULT"
    said = " ".join(refused.stderr.split())
    assert f"vector_instructions was DEFAULT and is {vectors} here" in said
    done = goldfish_cli("run", out, "--resume", "--elsewhere", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    facts = {name: pinned[name] for name in ("device", "torch", "vector_instructions")}
    environment = result_of(out)["environment"]
    assert environment["machines_before"] == [facts]
    assert environment["vector_instructions"] == vectors
    assert "machines_before.1.vector_instructions" in (out / "report.html").read_text()


def test_ctrl_c_says_how_to_go_on(
    command: list[str], config_file: Path, tmp_path: Path, start_process: StartProcess
) -> None:
    out = tmp_path / "out"
    process = start_process(
        [*command, "run", str(config_file), "--out", str(out), "--set", "training.rounds=10000"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    while not (out / "checkpoints" / "origin.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Interrupted" in output
    assert "--resume" in output
    assert load_checkpoint(out / "checkpoints" / "origin.safetensors").round >= 1


def test_the_literal_term_diverges_and_the_run_says_so(
    goldfish_cli: Goldfish, config_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = goldfish_cli(
        "run",
        config_file,
        "--out",
        out,
        "--set",
        "unlearning.goldfish.removed_term=literal",
        "--set",
        "unlearning.learning_rate=0.5",
        "--set",
        "unlearning.rounds=8",
    )
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "Non-finite loss on client-1 in round" in said
    assert 'set removed_term = "capped"' in said
    goldfish = result_of(out)["methods"]["goldfish"]
    assert "Non-finite loss on client-1" in goldfish["diverged"]
    assert goldfish["final"] is None
    assert "NaN" not in (out / "result.json").read_text()
    assert result_of(out)["methods"]["retrain"]["final"]["accuracy"] > 0
    assert "diverged" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("kind", "deletion"),
    [
        ("class", {"class_label": 4}),
        ("client", {"clients": ["client-3"]}),
        ("client", {"clients": ["client-3"], "backdoor_target": 7}),
        ("samples", {"class_label": 4, "backdoor_target": 7}),
        ("samples", {"samples": "ids.txt"}),
    ],
)
def test_other_deletions(
    config_file: Path, tmp_path: Path, kind: str, deletion: dict[str, Any]
) -> None:
    (tmp_path / "ids.txt").write_text("3\n5\n8\n", "utf-8-sig")  # as some editors write it
    if "samples" in deletion:
        deletion = {"samples": str(tmp_path / "ids.txt")}
    small = tomllib.loads(config_file.read_text())
    small["unlearning"]["rounds"] = 1
    config = parse_config({**small, "deletion": deletion})
    for _ in run_experiment(config, tmp_path / "out", Machine(threads=1)):
        pass
    result = result_of(tmp_path / "out")
    success = result["methods"]["goldfish"]["final"]["backdoor_success"]
    assert (success is not None) == ("backdoor_target" in deletion)
    kinds = {request["kind"] for request in result["deletion"]["requests"]}
    assert kinds == {kind}
    if "samples" in deletion:
        assert result["deletion"]["removed_samples"] == 3
    if kind == "class":
        assert result["methods"]["retrain"]["final"]["per_class"][4] == 0


def named_samples(folder: Path, **deletion: Any) -> tuple[Config, dict[str, Any]]:
    """Write 60 samples of 3 classes with names; return a run on them, and their arrays."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 255, (90, 6, 6, 1)).astype(np.uint8)
    data: dict[str, Any] = {"x_train": pixels[:60], "y_train": np.arange(60) % 3}
    data |= {"x_test": pixels[60:], "y_test": np.arange(30) % 3}
    data["ids_train"] = np.array([f"p{n}" for n in range(60)])
    np.savez(folder / "data.npz", **data)
    config = parse_config(
        {
            "data": {"name": "npz", "path": str(folder / "data.npz"), "clients": 2},
            "model": {"name": "mlp", "options": {"hidden": 8}},
            "training": {"rounds": 2, "batch_size": 10, "shards": 2, "shard_mode": "isolated"},
            "deletion": deletion,
            "unlearning": {"methods": ["retrain"], "rounds": 3},
        }
    )
    return config, data


def test_a_lost_file_of_ids_and_deleted_samples_do_not_block_a_resumed_run(tmp_path: Path) -> None:
    """Who holds what and who asks for what is stored with the run, and the bits stay the same."""
    (tmp_path / "ids.txt").write_text("p3\np17\np21\n")
    config, data = named_samples(tmp_path, samples=str(tmp_path / "ids.txt"))
    machine = Machine(threads=1)
    for _ in run_experiment(config, tmp_path / "whole", machine):
        pass
    for step in (steps := run_experiment(config, tmp_path / "run", machine)):
        if (step.phase, step.round) == ("retrain", 1):
            break
    steps.close()  # type: ignore[attr-defined]
    early = run_experiment(config, tmp_path / "early", machine)
    assert next(early).phase == "origin"
    early.close()  # type: ignore[attr-defined]

    (tmp_path / "ids.txt").unlink()
    left = [n for n in range(60) if n not in (3, 17, 21)]
    for name in ("x_train", "y_train", "ids_train"):
        data[name] = data[name][left]
    np.savez(tmp_path / "data.npz", **data)
    with pytest.raises(StoreError, match="3 of the samples to be removed are not there any more"):
        list(run_experiment(config, tmp_path / "early", machine, resume=True))
    for _ in run_experiment(config, tmp_path / "run", machine, resume=True):
        pass
    assert checkpoints_of(tmp_path / "run") == checkpoints_of(tmp_path / "whole")
    assert result_of(tmp_path / "run")["deletion"]["requests"]


def test_a_run_goes_on_when_all_samples_of_the_removed_class_are_deleted(tmp_path: Path) -> None:
    """The model keeps its three outputs, though the data has two classes now."""
    config, data = named_samples(tmp_path, class_label=2)
    machine = Machine(threads=1)
    list(run_experiment(config, tmp_path / "whole", machine))
    for step in (steps := run_experiment(config, tmp_path / "run", machine)):
        if (step.phase, step.round) == ("retrain", 1):
            break
    steps.close()  # type: ignore[attr-defined]
    kept = {split: data[f"y_{split}"] < 2 for split in ("train", "test")}
    left = {name: array[kept[name.partition("_")[2]]] for name, array in data.items()}
    np.savez(tmp_path / "data.npz", **left)
    list(run_experiment(config, tmp_path / "run", machine, resume=True))
    assert checkpoints_of(tmp_path / "run") == checkpoints_of(tmp_path / "whole")


def test_several_seeds_go_on_without_the_file_of_ids(tmp_path: Path) -> None:
    """Each seed that has begun has stored what was asked for; one that has not needs the file."""
    (tmp_path / "ids.txt").write_text("3\n5\n")
    config = parse_config(
        {
            "data": {"name": "digits", "clients": 2},
            "model": {"name": "mlp", "options": {"hidden": 8}},
            "training": {"rounds": 1},
            "deletion": {"samples": str(tmp_path / "ids.txt")},
            "unlearning": {"methods": ["retrain"], "rounds": 1},
        }
    )

    def run(*, resume: bool) -> Iterator[Progress]:
        return run_seeds(config, tmp_path / "out", Machine(threads=1), count=2, resume=resume)

    for step in (steps := run(resume=False)):
        if step.phase == "retrain #1":
            break
    steps.close()  # type: ignore[attr-defined]
    (tmp_path / "ids.txt").unlink()
    assert [step.phase for step in run(resume=True)][-1] == "retrain #1"
    assert result_of(tmp_path / "out")["seeds"] == [0, 1]


def test_progress_says_how_many_rounds_there_are(config_file: Path, tmp_path: Path) -> None:
    """Some methods have a number of their own: kept rounds, one, a sprint with its rounds.

    A run that goes on says of what is finished how long it was.
    """
    unlearning = {
        "methods": ["fed-eraser", "fed-recovery", "sisa", "goldfish-sprint"],
        "rounds": 6,
        "fed-eraser": {"keep_every": 2},
        "goldfish-sprint": {"anneal_rounds": 2, "most_turns": 1},
    }
    small = tomllib.loads(config_file.read_text())
    config = parse_config({**small, "unlearning": unlearning})
    expected = {
        "origin": 3,
        "fed-eraser": 2,
        "fed-recovery": 1,
        "sisa-training": 1,
        "sisa": 1,
        "goldfish-sprint": 3,
    }
    for _ in range(2):
        steps = list(run_experiment(config, tmp_path / "run", Machine(threads=1), resume=True))
        assert {(step.phase, step.rounds) for step in steps} == set(expected.items())
        assert {step.phase: step.round for step in steps} == expected
