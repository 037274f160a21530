"""Memory that is freed stays with the process, for whoever asks next."""

from __future__ import annotations

import ctypes
import functools
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_BLOCK = 32 * 2**20
_FREE = 128 * 2**20


@functools.cache
def keep_freed_memory() -> bool:
    """Have the C library keep freed memory; tell whether it does.

    A training step frees some megabytes, and the next one asks for as much. glibc returns them to
    the system in between when a thread other than the first does this, and the system then clears
    every page anew: a sixth of the time that clients train. Blocks of up to 32 MiB are kept, and
    up to 128 MiB at the end of the heap. Other C libraries are left as they are.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _BLOCK)) and bool(mallopt(_M_TRIM_THRESHOLD, _FREE))
