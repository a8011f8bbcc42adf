"""The runner's side of a supervised job; the other side, and the wire, is `bridge.runner.supervisor`."""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from bridge.errors import MachineError, describe
from bridge.proc import helper_environment, spawn
from bridge.runner.supervisor import Breach, end_orphans

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
    """A job to start, as the supervisor is told."""

    argv: list[str]  # with the sandbox
    env: Mapping[str, str]
    folder: str  # its folders, which are measured
    cwd: str
    wrappers: int  # processes of the sandbox above the job's program
    limits: Mapping[str, int]  # the kernel's, by RLIMIT name
    allowed: Mapping[str, int]  # for all its processes, by `Breach.what`
    timeout_s: float
    max_output: int  # bytes, after which it is stopped
    grace_s: float = 2.0  # between being asked to end and being killed


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
    """The supervisor of a job, which takes over the machine's lock; `close` leaves nothing of the job."""

    def __init__(self, lock: Path) -> None:
        with ExitStack() as theirs, ExitStack() as ours:
            try:
                lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
                theirs.callback(os.close, held)
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                control, self._control = _pipe(theirs, ours)
                self._status, status = _pipe(ours, theirs)
                self._output, output = _pipe(ours, theirs)
            except BlockingIOError:
                raise MachineBusy(f"another job runs on this machine (lock {lock})") from None
            except OSError as error:
                raise MachineError(f"cannot start the job supervisor: {describe(error)}") from None
            passed = (control, status, output, held)
            argv = [sys.executable, "-I", *SUPERVISOR, *map(str, passed)]
            self._process = spawn(argv, env=helper_environment(), pass_fds=passed)
            self._opened = ours.pop_all()
        self.pid = self._process.pid
        self._has_started = False

    def await_start(self) -> None:
        """Wait until the program is there; a `MachineError`: it does not start."""
        if self._has_started:
            return
        is_ready = select.select([self._status], [], [], START_S)[0]
        if not is_ready or self._event() is None:
            raise MachineError("the job supervisor did not start", f"try: {sys.executable} -m bridge --help")
        self._has_started = True

    def run(
        self, job: JobCommand, log: IO[bytes], *, on_line: Callable[[str], None], stop: Callable[[], bool]
    ) -> JobExit:
        """Run one command to its end and write its output to `log` as it comes, up to the limit.

        `on_line` takes each line of output (cut at `MAX_LINE` characters). `stop` is asked about ten times a
        second; True ends the job (TERM, then KILL after the grace). A `MachineError`: the supervisor died.
        """
        self.await_start()
        self._tell(asdict(job))
        left, partial = job.max_output, b""
        flooded = stopped = False
        ended: dict[str, Any] | None = None
        last = math.inf  # a survivor may go on printing
        while time.monotonic() < last:
            ready = select.select([self._status, self._output], [], [], _POLL_S)[0]
            if self._output in ready and (chunk := os.read(self._output, _CHUNK)):
                log.write(chunk[:left])
                flooded = flooded or len(chunk) > left
                left = max(0, left - len(chunk))
                *lines, partial = (partial + chunk.replace(b"\r", b"\n")).split(b"\n")
                partial = partial[:MAX_LINE]
                for line in filter(bytes.strip, lines):
                    on_line(line[:MAX_LINE].decode("utf-8", "replace"))
            elif ended is not None:
                break
            if ended is None and self._status in ready:
                ended, last = self._event(), time.monotonic() + _REST_S
                if ended is None:
                    end_orphans(job.env["HOME"])
                    raise MachineError("the job supervisor died, and the job with it")
            if ended is None and not stopped and (flooded or stop()):
                stopped = True
                self._tell({"stop": 0.0 if flooded else job.grace_s})
        assert ended is not None  # noqa: S101 - the loop ends after it
        if partial.strip():  # a last line that has no end
            on_line(partial.decode("utf-8", "replace"))
        breach, stopped = ended.pop("breach"), stopped and not ended["timed_out"]
        return JobExit(
            **ended,
            breach=Breach(*breach) if breach else None,
            stopped=stopped and not flooded,
            flooded=flooded and not ended["timed_out"],
        )

    def close(self) -> None:
        """End the supervisor: nothing of the job is left and the lock is free when this returns."""
        self._opened.close()
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


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """A pipe whose ends are closed with these stacks."""
    ends = os.pipe()
    for stack, end in zip((reader, writer), ends, strict=True):
        stack.callback(os.close, end)
    return ends
