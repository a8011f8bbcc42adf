"""The runner's side of a supervised job: start it, follow its output, stop it, learn how it ended.

Opening a `Supervisor` takes the machine's lock; closing it kills whatever is left of the job and releases the
lock. The other side, and the wire between them, is `bridge.runner.supervisor`.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bridge.errors import MachineError
from bridge.proc import helper_environment, spawn
from bridge.runner.sandbox.base import Access, Sandbox
from bridge.runner.sandbox.watchdog import Breach, end_orphans

# How the supervisor is started: the installed package, apart from the environment and the working directory.
SUPERVISOR = ("-m", "bridge.runner.supervisor")
START_S = 30.0
MAX_LINE = 4096
_POLL_S = 0.1
_REST_S = 5.0  # for what the job had printed when it ended
_CHUNK = 1 << 16


class MachineBusy(MachineError):
    """Another job runs on this machine."""


@dataclass(frozen=True)
class JobCommand:
    """A job to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    access: Access
    sandbox: Sandbox
    limits: Mapping[str, int]  # the kernel's, by RLIMIT name
    timeout_s: float
    grace_s: float = 2.0  # between being asked to end and being killed
    max_output: int = 8 << 20  # bytes, after which it is stopped
    allowed: Mapping[str, int] = field(default_factory=dict)  # for all its processes, by `Breach.what`

    def message(self) -> dict[str, object]:
        """What the supervisor is told."""
        dirs = self.access.dirs
        kept_together = self.sandbox.enforcement(network=False).tree == "process namespace"
        return {
            "argv": self.sandbox.command(self.argv, self.access),
            "env": dict(self.env),
            "cwd": str(dirs.workspace),
            "folder": str(dirs.root),
            "home": None if kept_together else str(dirs.home),
            "wrappers": self.sandbox.wrappers,
            "limits": dict(self.limits),
            "allowed": dict(self.allowed),
            "timeout_s": self.timeout_s,
            "grace_s": self.grace_s,
        }


@dataclass(frozen=True)
class JobExit:
    """How a job ended; at most one of `timed_out`, `stopped` and `flooded` is true."""

    exit_code: int | None  # None: it could not be collected; negative: killed by that signal
    seconds: float
    timed_out: bool
    stopped: bool  # the runner asked
    flooded: bool  # too much output
    survivors: int  # processes that would not die
    breach: Breach | None = None  # a limit that it exceeded
    escaped: int = 0  # processes that had left its tree and were killed


class Supervisor(AbstractContextManager["Supervisor"]):
    """The supervisor of one job, which holds the machine's lock. As a context manager it leaves nothing.

    The lock is taken here, because that takes no time, and handed over. The program starts meanwhile; see
    `await_start`.

    Raises:
        MachineBusy: Another job holds the lock.
        MachineError: The supervisor cannot be started.
    """

    def __init__(self, lock: Path) -> None:
        held = _take_lock(lock)
        try:
            control, self._control = os.pipe()
            self._status, status = os.pipe()
            self._output, output = os.pipe()
        except OSError as error:
            os.close(held)
            raise MachineError(f"cannot start the job supervisor: {error.strerror}") from None
        self._open: tuple[int, ...] = (self._control, self._status, self._output)
        setup = {"lock": held, "control": control, "status": status, "output": output}
        try:
            self._process = spawn(
                [sys.executable, "-I", *SUPERVISOR, json.dumps(setup)],
                env=helper_environment(),
                pass_fds=setup.values(),
            )
        except MachineError:
            self.release()
            raise
        finally:
            for descriptor in setup.values():
                os.close(descriptor)
        self.pid = self._process.pid
        self._has_started = False

    def await_start(self) -> None:
        """Wait until the program is there; a `MachineError`: it does not start."""
        if self._has_started:
            return
        is_ready = select.select([self._status], [], [], START_S)[0]
        if not is_ready or not os.read(self._status, 1):
            raise MachineError("the job supervisor did not start", f"try: {sys.executable} -m bridge --help")
        self._has_started = True

    def run(
        self, job: JobCommand, log: IO[bytes], *, on_line: Callable[[str], None], stop: Callable[[], bool]
    ) -> JobExit:
        """Run the job to its end and write its output to `log` as it comes, up to the limit.

        Args:
            job: What to start.
            log: An open file.
            on_line: Called with each line of output (cut at `MAX_LINE` characters).
            stop: Asked about ten times a second; True ends the job (TERM, then KILL after the grace).

        Raises:
            MachineError: The supervisor died.
        """
        self.await_start()
        self._tell(job.message())
        pump = _Pump(job.max_output, on_line)
        stopped = False
        ended: dict[str, Any] | None = None
        last = math.inf  # a survivor may go on printing
        while time.monotonic() < last:
            ready = select.select([self._status, self._output], [], [], _POLL_S)[0]
            if self._output in ready and (chunk := os.read(self._output, _CHUNK)):
                log.write(pump.take(chunk))
            elif ended is not None:
                break
            if ended is None and self._status in ready:
                ended, last = self._event(), time.monotonic() + _REST_S
                if ended is None:
                    end_orphans(str(job.access.dirs.home))
                    raise MachineError("the job supervisor died, and the job with it")
            if ended is None and not stopped and (pump.flooded or stop()):
                stopped = True
                self._tell({"stop": 0.0 if pump.flooded else job.grace_s})
        assert ended is not None  # noqa: S101 - the loop ends after it
        flooded = pump.flooded and not ended["timed_out"]
        stopped = stopped and not pump.flooded and not ended["timed_out"]
        pump.take(b"\n")  # hands out a last line that has no end
        breach = Breach(**ended["breach"]) if ended["breach"] else None
        return JobExit(**{**ended, "breach": breach}, stopped=stopped, flooded=flooded)

    def release(self) -> None:
        """Have the supervisor kill what is left and release the lock, without waiting for that."""
        descriptors, self._open = self._open, ()
        for descriptor in descriptors:
            os.close(descriptor)

    def close(self) -> None:
        """Release; nothing of the job is left and the lock is free when this returns."""
        self.release()
        if self._process.wait(START_S) is None:
            self._process.kill()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, message: Mapping[str, object]) -> None:
        data = (json.dumps(message) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._control, data) :]
        except BrokenPipeError:
            raise MachineError("the job supervisor died before it could start the job") from None

    def _event(self) -> dict[str, Any] | None:
        """The supervisor's next line, which it writes at once; None: it died."""
        line = os.read(self._status, _CHUNK)
        event: dict[str, Any] | None = json.loads(line) if line else None
        return event


def _take_lock(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise MachineBusy(f"another job runs on this machine (lock {path})") from None
    return lock


class _Pump:
    """Cuts output at the limit and hands out its lines."""

    def __init__(self, limit: int, on_line: Callable[[str], None]) -> None:
        self._left = limit
        self._on_line = on_line
        self._partial = b""
        self.flooded = False

    def take(self, chunk: bytes) -> bytes:
        """The part of `chunk` that still fits into the log."""
        kept = chunk[: self._left]
        self.flooded = self.flooded or len(kept) < len(chunk)
        self._left -= len(kept)
        *lines, self._partial = (self._partial + chunk.replace(b"\r", b"\n")).split(b"\n")
        self._partial = self._partial[:MAX_LINE]
        for line in filter(bytes.strip, lines):
            self._on_line(line[:MAX_LINE].decode("utf-8", "replace"))
        return kept
