"""The few kernel calls that Python does not offer, through libc. A failure is an OSError with its number."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

LINUX = sys.platform.startswith("linux")
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = (
    1,
    4,
    24,
    36,
    38,
)


def call(name: str, *arguments: object) -> int:
    """Call a function of libc that answers -1 when it fails.

    Raises:
        OSError: It failed.
    """
    result = int(getattr(_libc(), name)(*arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """Call the kernel by number; integers are passed whole.

    Raises:
        OSError: It failed.
    """
    whole = (ctypes.c_long(item) if isinstance(item, int) else item for item in arguments)
    return call("syscall", ctypes.c_long(number), *whole)


def prctl(option: int, value: int) -> bool:
    """Whether the kernel did what was asked; False on every other system."""
    return LINUX and bool(_libc().prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
