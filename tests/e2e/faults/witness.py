"""The witness: writes down what jobs say of themselves. They can write nothing outside of their folder.

A job makes a named pipe in its HOME and waits there until a process reads it, so no run goes unseen. What it
says then needs no disk, and is there to be read after the job was killed and its folder removed.
"""

from __future__ import annotations

import glob
import os
import threading
from types import TracebackType

from tests.e2e.faults.jobs import JOURNAL, ledger_of
from tests.e2e.faults.machines import Machine
from tests.fixtures.repo import RepoFixture

_LOOK_S = 0.01
_JOURNALS = f"runner/*/jobs/*/home/{JOURNAL}"


class Witness:
    """Listens, in a thread of its own, to every job of some machines. Use as a context manager.

    Args:
        repo: Where the ledger lies.
        machines: Whose jobs; the list may grow.
    """

    def __init__(self, repo: RepoFixture, machines: list[Machine]) -> None:
        self._ledger = ledger_of(repo)
        self._machines = machines
        self._heard: dict[tuple[int, int], int] = {}
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="witness", daemon=True)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Listen no more; whatever was said until now is in the ledger when this returns."""
        self._leaving.set()
        self._thread.join()

    def _listen(self) -> None:
        while not self._leaving.wait(_LOOK_S):
            self._write_down()
        self._write_down()
        for pipe in self._heard.values():
            os.close(pipe)

    def _write_down(self) -> None:
        there = {key for path in self._journals() if (key := self._open(path)) is not None}
        for key, pipe in list(self._heard.items()):
            try:
                said = os.read(pipe, 1 << 12)
            except BlockingIOError:  # the job lives, and has said nothing new
                continue
            if said:
                with self._ledger.open("ab", buffering=0) as ledger:
                    ledger.write(said)
            elif key not in there:  # no process can write into it any more
                os.close(self._heard.pop(key))

    def _journals(self) -> list[str]:
        return [
            str(state / name)
            for machine in list(self._machines)
            for state in map(machine.inside, machine.states)
            for name in glob.glob(_JOURNALS, root_dir=state)  # passes over what vanishes meanwhile
        ]

    def _open(self, path: str) -> tuple[int, int] | None:
        """Hold a journal's reading end; what tells it from every other one, None when it is gone."""
        try:
            pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:  # the folder was removed, or the daemon ended by whose view it is found
            return None
        status = os.fstat(pipe)
        key = (status.st_dev, status.st_ino)
        if self._heard.setdefault(key, pipe) != pipe:
            os.close(pipe)
        return key
