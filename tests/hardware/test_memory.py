from __future__ import annotations

import subprocess
import sys

import pytest

from goldfish.hardware.memory import keep_freed_memory

STEPS = """
import resource, sys, threading
import torch
from goldfish.hardware.memory import keep_freed_memory
from goldfish.models import model_factory

if sys.argv[1] == "keep":
    assert keep_freed_memory()

def work():
    torch.set_num_threads(1)
    model = model_factory("lenet5", num_classes=10, image_shape=(1, 28, 28))()
    layers = torch.nn.Sequential(*model)
    images = torch.randn(100, 1, 28, 28)
    for step in range(60):
        if step == 20:
            begin = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        layers(images).sum().backward()
    print((resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - begin) / 40)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def new_pages_in_a_step(mode: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", STEPS, mode], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


@pytest.mark.skipif(not keep_freed_memory(), reason="this C library is left as it is")
def test_a_thread_gets_the_memory_back_that_it_freed() -> None:
    """The results of the first convolution alone are 460 pages of 4 KiB."""
    assert new_pages_in_a_step("keep") < 50 < new_pages_in_a_step("leave")
