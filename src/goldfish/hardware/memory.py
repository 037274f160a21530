"""Memory that is freed stays with the process, for its next allocations."""

from __future__ import annotations

import ctypes
import functools
import sys

_KEPT = {-3: 32 * 2**20, -1: 128 * 2**20}
"""Arguments of mallopt: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD."""


@functools.cache
def keep_freed_memory() -> bool:
    """Have the C library keep freed memory; tell whether it does.

    A training step frees some megabytes, and the next one asks for as much. glibc returns them to
    the system in between, most of all in threads other than the first, and the system then clears
    every page anew: a sixth of the time that clients train. Blocks of up to 32 MiB are kept, and
    up to 128 MiB at the end of the heap. Other C libraries are left as they are.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return all(mallopt(name, size) for name, size in _KEPT.items())
