"""The layers around one job on a machine without Linux's: a sandbox profile, and a hunt for what got away.

On macOS a process that leaves its session and loses its parent hangs under no process of ours. So all that
was ever seen below the job is remembered, all that carries the job's HOME is looked for, and both are ended.
What starts, cleans its environment and leaves between two looks is not found; that is why the tree is
called ``hunted``, never held.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from bridge.runner.isolation import darwin, processes, seatbelt
from bridge.runner.isolation.enforced import NOT_ENFORCED, Enforced, words
from bridge.runner.isolation.processes import Process

_ROUNDS, _PAUSE_S = 20, 0.1


class Sandboxed:
    """The layers of one supervisor; the same face as `bridge.runner.isolation.cage.Cage`.

    Args:
        setup: ``hide``, ``writable`` (lists of paths) and ``network``; see `child.Standby`.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        folders = setup["writable"]
        hide = [name for name in setup["hide"] if os.path.lexists(name)]
        self._profile = seatbelt.best(hide, folders[0], network=setup["network"]) if folders else None
        there, strict = self._profile is not None, self._profile is not None and self._profile.strict
        held = words(("sandbox profile", there))
        self.enforced = Enforced(
            network="open" if setup["network"] else held,
            tree="hunted",
            writes=held,
            credentials=held,
            processes=words(("sandbox profile", strict)),
            calls=NOT_ENFORCED,
            memory="watched",
            disk="watched",
        )

    def narrow(self, room: str) -> None:
        """Nothing is to be done before the command line is made."""

    def command(self, argv: list[str], room: str) -> list[str]:
        """The command line that runs `argv` behind the layers."""
        return argv if self._profile is None else self._profile.command(argv, room)

    def scratch_bytes(self) -> int:
        """There is no scratch beside the room."""
        return 0

    def lock_in(self) -> None:
        """The command line does it."""

    def end_strays(self, room: str, seen: Mapping[int, int]) -> tuple[int, int]:
        """End what the job started and no longer hangs below this process.

        Args:
            room: The job's folders.
            seen: When each process started that was ever seen below the job, by its id.

        Returns:
            How many were found, and how many of them would not die.
        """
        found: set[int] = set()
        for _ in range(_ROUNDS):
            left = _strays(f"{room}/home", seen)
            if not left:
                return len(found), 0
            found |= left
            processes.send(left, signal.SIGKILL)
            processes.reap()
            time.sleep(_PAUSE_S)
        return len(found), len(left)


def _strays(home: str, seen: Mapping[int, int]) -> set[int]:
    running: dict[int, Process] = {each.pid: each for each in processes.table()}
    known = {pid for pid, started in seen.items() if pid in running and running[pid].started == started}
    return (known | darwin.marked(home)) & running.keys()
