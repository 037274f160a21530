from __future__ import annotations

import subprocess
import sys

import pytest

from goldfish.memory import keep_freed_memory

FAULTS = """
import resource, sys, threading
import torch
from goldfish.memory import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()

numbers = torch.ones(2**20)

def work():
    for _ in range(100):
        torch.relu(numbers)

begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin)
"""


@pytest.mark.skipif(not keep_freed_memory(), reason="this C library is left as it is")
def test_a_thread_gets_the_memory_back_that_it_freed() -> None:
    """Four megabytes are 1,024 pages of 4 KiB: once they were touched, they are there."""
    keeping = subprocess.run(
        [sys.executable, "-c", FAULTS, "keep"], capture_output=True, text=True, check=True
    )
    usual = subprocess.run(
        [sys.executable, "-c", FAULTS, "usual"], capture_output=True, text=True, check=True
    )
    assert int(keeping.stdout) < 3 * 1_024
    assert int(usual.stdout) > 2 * int(keeping.stdout)
