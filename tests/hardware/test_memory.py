from __future__ import annotations

import subprocess
import sys

import pytest

from goldfish.hardware.memory import keep_freed_memory

STEPS = """
import resource, threading
import torch
from goldfish.hardware.memory import keep_freed_memory
from goldfish.models import model_factory

def work():
    torch.set_num_threads(1)
    model = model_factory("lenet5", num_classes=10, image_shape=(1, 28, 28))()
    layers = torch.nn.Sequential(*model)
    images = torch.randn(100, 1, 28, 28)
    for step in range(30):
        if step == 10:
            begin = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        layers(images).sum().backward()
    print((resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - begin) / 20)

def in_a_thread():
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

in_a_thread()
assert keep_freed_memory()
in_a_thread()
"""


@pytest.mark.skipif(not keep_freed_memory(), reason="this C library is left as it is")
def test_a_thread_gets_the_memory_back_that_it_freed() -> None:
    """New pages of a step; the results of the first convolution alone are 460 pages of 4 KiB."""
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    before, after = map(float, done.stdout.split())
    assert after < 50 < before
