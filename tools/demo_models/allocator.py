"""Keep freed memory in the process on Linux, for training only.

Each training step allocates and frees the same large arrays; by default glibc returns them to the kernel,
which has to clear the pages again: about a tenth of a step. Does nothing on other systems.
"""

from __future__ import annotations

import ctypes
import sys

# Parameters of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
    """Ask glibc to serve large arrays from one heap that never shrinks; whether it agreed."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    settings = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**28))
    answers = [mallopt(parameter, value) for parameter, value in settings]
    return answers == [1] * len(settings)
