"""What a round costs on Flower: three nodes on loopback against the same run in one process.

ResNet32 on a few synthetic images of 32x32 pixels, so that the way there and back is seen, not the
training. Run it on a quiet machine: ``python benchmarks/flower.py``.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from pathlib import Path

import numpy as np

from goldfish.experiments.config import load_config
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine
from goldfish.flower.ops.up import Deployment
from goldfish.flower.submit import run_on_flower

CONFIG = """
engine = "{engine}"
[flower]
superlink = "{superlink}"
insecure = true
[data]
name = "npz"
path = "images.npz"
clients = 3
[model]
name = "resnet32"
[training]
rounds = 5
batch_size = 20
[deletion]
rate = 0.1
[unlearning]
methods = ["goldfish"]
rounds = 1
"""
SAMPLES = 120


def main() -> None:
    """Measure both engines and print one line each."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _write_images(folder / "images.npz")
        with Deployment(folder / "state", 3, path=folder / "images.npz") as deployment:
            flower = _rounds(folder, "flower", deployment.superlink.address)
        local = _rounds(folder, "in-process", "")
        wire = re.findall(
            r"(\d+) bytes on the wire", (folder / "flower" / "flower.log").read_text()
        )
    print(f"in process  {_seconds(local)}")
    print(f"on Flower   {_seconds(flower)}")
    sent = flower[-1]["bytes_sent"]
    print(f"bytes of a round: {sent} of models, {wire[4]} on the wire, x{int(wire[4]) / sent:.3f}")


def _rounds(folder: Path, engine: str, superlink: str) -> list[dict[str, float]]:
    config = folder / f"{engine}.toml"
    config.write_text(CONFIG.format(engine=engine, superlink=superlink))
    run = run_on_flower if engine == "flower" else run_experiment
    for _ in run(load_config(config), folder / engine, Machine(threads=1)):
        pass
    lines = (folder / engine / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["phase"] == "origin"]


def _seconds(rounds: list[dict[str, float]]) -> str:
    seconds = [record["seconds"] for record in rounds]
    later = f"{min(seconds[1:]):.1f} to {max(seconds[1:]):.1f}"
    return f"round: {statistics.median(seconds[1:]):.1f} s ({later}); first {seconds[0]:.1f} s"


def _write_images(path: Path) -> None:
    draws = np.random.default_rng(0)
    np.savez(
        path,
        allow_pickle=False,
        x_train=draws.integers(0, 256, (SAMPLES, 3, 32, 32), dtype=np.uint8),
        y_train=draws.integers(0, 10, SAMPLES),
        x_test=draws.integers(0, 256, (20, 3, 32, 32), dtype=np.uint8),
        y_test=draws.integers(0, 10, 20),
    )


if __name__ == "__main__":
    main()
