"""How the memory and the time of a complete run grow with the number of clients.

    python benchmarks/scale.py --data-dir DIR [--clients 10 100 1000]

Each run is ``goldfish run`` in a process of its own: LeNet-5 on MNIST on the CPU, three rounds of
training, 1 % of the samples deleted, three rounds of goldfish and of retrain, and the evidence.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = """
[data]
name = "mnist"
clients = {clients}

[training]
rounds = 3
learning_rate = 0.01

[deletion]
rate = 0.01

[unlearning]
rounds = 3
"""


def run(clients: int, data_dir: str) -> tuple[float, float]:
    """Return the peak memory, in GiB, and the seconds of a run."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.toml"
        config.write_text(CONFIG.format(clients=clients))
        command = [sys.executable, "-m", "goldfish", "run", str(config), "--data-dir", data_dir]
        begin = time.perf_counter()
        out = str(Path(folder) / "run")
        process = subprocess.Popen([*command, "--out", out], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"The run with {clients} clients failed with code {process.returncode}.")
        return usage.ru_maxrss / 2**20, time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    options = parser.parse_args()
    first = None
    for clients in options.clients:
        memory, seconds = run(clients, options.data_dir)
        first = first or memory
        print(f"{clients:5} clients   {memory:.2f} GiB   {memory / first:.2f}   {seconds:6.1f} s")


if __name__ == "__main__":
    main()
