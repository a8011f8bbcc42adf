"""A runner's processes on this machine: one at a time has its name, and the earlier ones are remembered."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from bridge.errors import MachineError
from bridge.runner.station import Station

# How many earlier processes of a runner are remembered: each may have left a claim when it was killed.
_SESSIONS = 64


class NameTaken(MachineError):
    """Another process of this machine has the runner's name."""


@contextlib.contextmanager
def only_one(station: Station) -> Iterator[frozenset[str]]:
    """Hold the name as long as the block runs; gives what `note_session` does.

    Raises:
        NameTaken: Another process holds it.
        MachineError: This one cannot be noted.
    """
    with (station.folder / "lock").open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            raise NameTaken(
                f"a runner named {station.identity.name} already runs on this machine"
                f" (process {handle.read().strip() or 'unknown'})",
                "stop it, or start this one with another --name",
            ) from None
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        try:
            yield note_session(station)
        finally:  # closing would not do: a child that is just being born has the descriptor, too
            fcntl.flock(handle, fcntl.LOCK_UN)


def note_session(station: Station) -> frozenset[str]:
    """Note this process among the runner's sessions; returns the last few, this one included.

    Call it while holding the name: a claim of one of these sessions is nobody else's. Each is noted with the
    machine and the place of the folder, so a copy of it, here or elsewhere, takes none of them for its own.

    Raises:
        MachineError: It cannot be written.
    """
    path, here = station.folder / "sessions", _place(station.folder)
    lines = path.read_text("ascii", "replace").split() if path.exists() else []
    known = [line[:16] for line in lines if re.fullmatch(rf"[0-9a-f]{{16}}:{here}", line)]
    kept = [*known[-_SESSIONS:], station.identity.session]
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text("".join(f"{session}:{here}\n" for session in kept))
        temporary.replace(path)
    except OSError as error:
        raise MachineError(f"cannot keep state in {station.folder}: {error.strerror}") from None
    return frozenset(kept)


def _place(folder: Path) -> str:
    """What a copy of a folder does not have: its network hardware's address and its own place on the disk."""
    node, status = uuid.getnode(), folder.stat()
    # A random address says so in one bit, and would be another one the next time.
    hardware = 0 if node >> 40 & 1 else node
    return hashlib.sha256(f"{hardware}:{status.st_dev}:{status.st_ino}".encode()).hexdigest()[:16]
