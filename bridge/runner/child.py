"""The runner's side of a supervised job: start it, follow its output, stop it, learn how it ended.

Opening a `Supervisor` takes the machine's lock; closing it kills whatever is left of the job and releases the
lock. The other side, and the wire between them, is `bridge.runner.supervisor`.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
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
    """A job to start.

    Attributes:
        limits: Kernel limits, by RLIMIT name.
        allowed: What all its processes together may take, by `Breach.what`.
        timeout_s: Seconds until it is stopped.
        grace_s: Seconds between being asked to end and being killed.
        max_output: Bytes of output, after which it is stopped.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    access: Access
    sandbox: Sandbox
    limits: Mapping[str, int]
    timeout_s: float
    grace_s: float = 2.0
    max_output: int = 8 << 20
    allowed: Mapping[str, int] = field(default_factory=dict)

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
    """How a job ended.

    At most one of `timed_out`, `stopped` (the runner asked) and `flooded` (too much output) is true.

    Attributes:
        exit_code: None: it could not be collected; negative: killed by that signal.
        breach: A limit that it exceeded.
        escaped: How many processes had left its tree and were killed.
        survivors: How many would not die.
    """

    exit_code: int | None
    seconds: float
    timed_out: bool
    stopped: bool
    flooded: bool
    survivors: int
    breach: Breach | None = None
    escaped: int = 0


class Supervisor:
    """The supervisor of one job. As a context manager it leaves no process and no lock.

    Args:
        lock: The machine's lock file.

    Raises:
        MachineBusy: Another job holds the lock.
        MachineError: The supervisor did not start.
    """

    def __init__(self, lock: Path) -> None:
        lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        self._output, output = os.pipe()
        self._open: tuple[int, ...] = (self._control, self._status, self._output)
        setup = {"lock": str(lock), "control": control, "status": status, "output": output}
        try:
            self._process = spawn(
                [sys.executable, "-I", *SUPERVISOR, json.dumps(setup)],
                env=helper_environment(),
                pass_fds=(control, status, output),
            )
        except MachineError:
            self.release()
            raise
        finally:
            for descriptor in (control, status, output):
                os.close(descriptor)
        event = self._event() if select.select([self._status], [], [], START_S)[0] else None
        if event is None:
            self.close()
            raise MachineError("the job supervisor did not start", f"try: {sys.executable} -m bridge --help")
        if event["event"] != "locked":
            self.close()
            raise MachineBusy(f"another job runs on this machine (lock {lock})")

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    def run(
        self, job: JobCommand, log: IO[bytes], *, on_line: Callable[[str], None], stop: Callable[[], bool]
    ) -> JobExit:
        """Run the job to its end and write its output to `log`, up to the limit.

        Args:
            job: What to start.
            log: Open file for standard output and error, as they come.
            on_line: Called with each line of output (cut at `MAX_LINE` characters).
            stop: Asked about ten times a second; True ends the job (TERM, then KILL after the grace).

        Raises:
            MachineError: The supervisor died.
        """
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
        pump.flush()
        return JobExit(
            exit_code=ended["exit_code"],
            seconds=ended["seconds"],
            timed_out=ended["timed_out"],
            stopped=stopped and not pump.flooded and not ended["timed_out"],
            flooded=pump.flooded and not ended["timed_out"],
            survivors=ended["survivors"],
            breach=Breach(**ended["breach"]) if ended["breach"] else None,
            escaped=ended["escaped"],
        )

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

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        for line in lines:
            self._hand_out(line)
        return kept

    def flush(self) -> None:
        """Hand out a last line that has no end."""
        self._hand_out(self._partial)

    def _hand_out(self, line: bytes) -> None:
        if line.strip():
            self._on_line(line[:MAX_LINE].decode("utf-8", "replace"))
