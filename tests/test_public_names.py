"""What ``import goldfish`` alone makes available, in a fresh process."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import pytest

import goldfish

CODE = """
import json, sys, goldfish
def loaded(*names):
    print(json.dumps([name for name in names if name in sys.modules]))
loaded("torch", "flwr")
goldfish.data.DatasetExamples
loaded("torch", "sklearn", "PIL", "scipy", "flwr")
for name in goldfish.__all__:
    getattr(goldfish, name)
import goldfish.experiments.runner, goldfish.flower.submit, goldfish.report
loaded("flwr")
import torch
data = goldfish.data.TensorExamples(torch.randn(8, 4), torch.arange(8) % 2)
federation = goldfish.InProcess([goldfish.Client("a", data)], lambda: torch.nn.Linear(4, 2))
goldfish.train(federation, rounds=1)
loaded("torch._dynamo")
for name in sys.argv[1:]:
    getattr(goldfish, name)
"""


def test_names_are_there_and_nothing_heavy_before_it_is_needed() -> None:
    """One import makes every name and every module available, in a fresh process.

    PyTorch waits for the first name; scikit-learn, Pillow and SciPy are not needed for data, Flower
    is for its own engine, and PyTorch's compiler, which takes a second to load, not for a training:
    a client's process on Flower lives for one round.
    """
    modules = [m.name for m in pkgutil.iter_modules(goldfish.__path__) if m.name[0] != "_"]
    assert "data" in modules
    command = [sys.executable, "-c", CODE, *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[], ["torch"], [], []]


def test_other_names_are_no_attributes() -> None:
    for name in ("dat", "__main__", "data_"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(goldfish, name)
