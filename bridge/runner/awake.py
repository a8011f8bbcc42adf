"""Keeps a Mac awake while a job runs: a sleep in the middle makes its figures worthless, and its claim stale.

The system's own program does it, and ends by itself should the runner die. Elsewhere nothing is needed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from bridge.errors import MachineError, described
from bridge.proc import find_program, helper_environment, spawn

SYSTEM = "darwin"
PROGRAM = "caffeinate"


def is_needed() -> bool:
    """Whether this machine may fall asleep under a job."""
    return sys.platform == SYSTEM


@contextlib.contextmanager
def kept(say: Callable[[str], None]) -> Iterator[bool | None]:
    """Keep the machine awake inside the block.

    Args:
        say: Takes one line for the owner, when it cannot be done.

    Yields:
        Whether it is; None: nothing is needed here.
    """
    if not is_needed():
        yield None
        return
    try:
        # No idle sleep, no sleeping disk, no system sleep on mains power; until it is killed or we are gone.
        holder = spawn(
            [find_program(PROGRAM) or PROGRAM, "-i", "-m", "-s", "-w", str(os.getpid())],
            env=helper_environment(),
        )
    except MachineError as error:
        say(f"the machine may fall asleep under this job: {described(error)}")
        yield False
        return
    try:
        yield True
    finally:
        holder.kill()
