"""All layers around one job on this machine, in the order in which they are put on.

The supervisor makes a `Cage` before there is a job, so that the job need not wait for it, narrows it to the
job's own folders when it knows them, and the job's process locks itself in just before it becomes the
job's program. A layer that this machine does not have is left out and `enforced` says so; one that it has
and that fails keeps the job from starting.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bridge.runner.isolation import landlock, namespaces, seccomp, view
from bridge.runner.isolation.enforced import NOT_ENFORCED, Enforced, words

_SCOPED = 6  # the version of Landlock from which on signals and abstract names stay inside


class Cage:
    """The layers of one supervisor.

    Args:
        setup: ``hide``, ``writable``, ``keep``, ``sockets`` (lists of paths) and ``network``; see
            `child.Standby` and `view.sockets`.
        level: What this process entered, of `namespaces.LEVELS`.
        guards: Process ids that the job must not signal, nor the groups they lead.

    Raises:
        OSError: A layer that this machine has cannot be made.
    """

    def __init__(self, setup: Mapping[str, Any], level: str, guards: tuple[int, ...]) -> None:
        self._folders: list[str] = setup["writable"]
        self._has_view = namespaces.has_view(level)
        namespaces.go_first()
        if self._has_view:
            full = level == "full"
            view.build(setup["hide"], self._folders, setup["keep"], setup["sockets"], own_processes=full)
        known = landlock.version()
        # A view covers what is hidden, but not what somebody puts in its place while the job runs.
        hide = [*setup["hide"], "/dev"]
        self._rules = landlock.Rules(hide, listing=self._has_view) if known else None
        filters = seccomp.available()
        closed = seccomp.Closed(
            internet=level == "none" and not setup["network"],
            local=not self._has_view or (setup["network"] and known < _SCOPED),
            signals=() if level == "full" else guards,
        )
        self._filter = seccomp.program(os.uname().machine, closed) if filters else None
        self.enforced = Enforced(
            network=_network(level, filters, open_=setup["network"]),
            tree="process namespace" if level == "full" else _tree(),
            writes=words(("own view", self._has_view), ("landlock", bool(known))),
            credentials=words(("own view", self._has_view), ("landlock", bool(known))),
            processes=words(("own namespace", level == "full"), ("landlock", known >= _SCOPED)),
            calls=words(("filter", filters)),
            memory="watched",
            disk="watched",
        )

    def narrow(self, room: str) -> None:
        """Leave the job only its own folders below `room` to write to, and the fresh ones of the view.

        Raises:
            OSError: The kernel said no.
        """
        if self._has_view:
            for folder in self._folders:
                view.narrow(folder, room)
        if self._rules is not None:
            fresh = (*view.SCRATCH, *landlock.TERMINALS) if self._has_view else ()
            self._rules.allow_writing([room, *fresh, *landlock.DEVICES])

    def command(self, argv: list[str], room: str) -> list[str]:  # noqa: ARG002 - another machine's needs it
        """The command line that runs `argv` behind the layers: itself."""
        return argv

    def end_strays(self, room: str, seen: Mapping[int, int]) -> tuple[int, int]:  # noqa: ARG002 - likewise
        """Nothing can have got away: every orphan hangs below this process, or in its namespace."""
        return 0, 0

    def scratch_bytes(self) -> int:
        """Bytes of memory that the view's fresh folders hold."""
        return view.scratch_bytes() if self._has_view else 0

    def lock_in(self) -> None:
        """Put this process behind the layers, for good.

        Raises:
            OSError: The kernel said no.
        """
        namespaces.drop_privileges()
        if self._rules is not None:
            self._rules.enforce()
        if self._filter is not None:
            seccomp.enforce(self._filter)


def _network(level: str, filters: bool, *, open_: bool) -> str:
    if open_:
        return "open"
    return "own namespace" if level != "none" else words(("filter", filters))


def _tree() -> str:
    return "adopted" if namespaces.adopt_orphans() else NOT_ENFORCED
