"""The runner's side of a supervised job: start it, follow its output, stop it, learn how it ended.

A `Standby` is a supervisor that waits without the lock. Opening a `Supervised` takes the machine's lock;
closing it kills whatever is left and frees the lock. The other side, and the wire between them, is
`bridge.runner.supervisor`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from bridge.errors import MachineError
from bridge.proc import helper_environment, spawn
from bridge.runner.isolation.enforced import Enforced
from bridge.runner.isolation.watchdog import Breach

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
class Order:
    """A child to start: complete environment, limits by RLIMIT name, seconds, bytes of output.

    It may write in `room` and below it, and nowhere else. `allowed` is what all its processes together may
    take, by `watchdog.Breach.what`.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    room: Path
    cwd: Path
    limits: Mapping[str, int]
    timeout_s: float
    grace_s: float = 2.0
    output_limit: int = 8 << 20
    allowed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How the child ended: exit code (None: it could not be collected; negative: killed by that signal).

    At most one of `timed_out`, `stopped` (the runner asked) and `flooded` (too much output) is true.
    `breach` is a limit that it went beyond, `strays` counts processes that had left its tree and were hunted
    down, `survivors` those that would not die.
    """

    exit_code: int | None
    seconds: float
    timed_out: bool
    stopped: bool
    flooded: bool
    survivors: int
    breach: Breach | None = None
    strays: int = 0


class Standby:
    """A supervisor that has started, settled where it will run its job, and waits to be told of one.

    What it hides is what is there now, so use it soon.

    Args:
        lock: The machine's lock file, which it will take.
        writable: Existing folders, one of which will hold the job's; they stay even inside hidden ones.
        network: Leave the job the machine's network.
        hide: Files and folders the job must not reach, where the machine can hide them.
        keep: Files and folders that the job may read wherever they are, such as its interpreter.

    Raises:
        MachineError: It cannot be started.
    """

    def __init__(
        self,
        lock: Path,
        *,
        writable: Sequence[Path] = (),
        network: bool = False,
        hide: Sequence[Path] = (),
        keep: Sequence[Path] = (),
    ) -> None:
        lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.lock = lock
        self.since = time.monotonic()
        control, self.control = os.pipe()
        self.status, status = os.pipe()
        self.output, output = os.pipe()
        self._ours: tuple[int, ...] = (self.control, self.status, self.output)
        setup = {
            "lock": str(lock),
            "control": control,
            "status": status,
            "output": output,
            "network": network,
            "hide": [str(path) for path in hide],
            "writable": [str(path) for path in writable],
            "keep": [str(path) for path in keep],
            "guards": [os.getpid(), os.getpgrp()],
        }
        try:
            self._process = spawn(
                [sys.executable, "-I", *SUPERVISOR, json.dumps(setup)],
                env=helper_environment(),
                pass_fds=(control, status, output),
            )
        except MachineError:
            self._close_ours()
            raise
        finally:
            for descriptor in (control, status, output):
                os.close(descriptor)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.wait(0) is None

    def let_go(self) -> None:
        """Have it kill whatever a job left and free the lock, without waiting for that."""
        self._close_ours()

    def close(self) -> None:
        """Let go; nothing of a job is left and the lock is free when this returns."""
        self._close_ours()
        if self._process.wait(START_S) is None:
            self._process.kill()

    def _close_ours(self) -> None:
        # Once only: a number that was closed may be somebody else's descriptor by now.
        ours, self._ours = self._ours, ()
        for descriptor in ours:
            os.close(descriptor)


class Supervised:
    """One supervised job. Use as a context manager: leaving it leaves no process and no lock."""

    def __init__(self, standby: Standby) -> None:
        """Take the lock.

        Args:
            standby: Its supervisor; closed with this.

        Raises:
            MachineBusy: Another job holds the lock.
            MachineError: The supervisor did not start.
        """
        self._standby = standby
        self._control, self._status, self._output = standby.control, standby.status, standby.output
        self._lines = b""
        with contextlib.suppress(MachineError):
            self._tell(take=True)
        first = self._event(START_S)
        if first is None or first["event"] != "locked":
            self.close()
            if first is None:
                raise MachineError(
                    "the job supervisor did not start", f"try: {sys.executable} -m bridge --help"
                )
            if first["event"] == "failed":
                raise MachineError(f"the job supervisor cannot isolate a job here: {first['why']}")
            raise MachineBusy(f"another job runs on this machine (lock {standby.lock})")
        self.enforced = Enforced(**first["enforced"])

    def run(
        self,
        order: Order,
        log: IO[bytes],
        *,
        on_line: Callable[[str], None],
        stop: Callable[[], bool],
    ) -> Ended:
        """Run the child to its end, writing its output to `log` up to the limit.

        Args:
            order: What to start.
            log: Open file that standard output and error are written to, as they come.
            on_line: Called with each line of output (cut at `MAX_LINE` characters).
            stop: Asked about ten times a second; True ends the job (TERM, then KILL after the grace).

        Raises:
            MachineError: The supervisor died; the kernel has ended the job with it.
        """
        self._tell(
            argv=list(order.argv),
            env=dict(order.env),
            cwd=str(order.cwd),
            room=str(order.room),
            limits=dict(order.limits),
            allowed=dict(order.allowed),
            timeout_s=order.timeout_s,
            grace_s=order.grace_s,
        )
        pump = _Pump(order.output_limit, on_line)
        stopped = False
        ended: dict[str, Any] | None = None
        last = math.inf
        while True:
            ready = select.select([self._status, self._output], [], [], _POLL_S)[0]
            if self._output in ready and (chunk := os.read(self._output, _CHUNK)):
                log.write(pump.take(chunk))
            elif ended is not None:
                break
            if ended is None:
                if (ended := self._ending(ready)) is not None:
                    last = time.monotonic() + _REST_S
            elif time.monotonic() >= last:  # a survivor may go on printing
                break
            if ended is None and not stopped and (pump.flooded or stop()):
                stopped = True
                self._tell(stop=0.0 if pump.flooded else order.grace_s)
        pump.flush()
        return Ended(
            exit_code=ended["exit_code"],
            seconds=ended["seconds"],
            timed_out=ended["timed_out"],
            stopped=stopped and not pump.flooded and not ended["timed_out"],
            flooded=pump.flooded and not ended["timed_out"],
            survivors=ended["survivors"],
            breach=Breach(**ended["breach"]) if ended["breach"] else None,
            strays=ended["strays"],
        )

    def close(self) -> None:
        """Let go; nothing of the job is left and the lock is free when this returns."""
        self._standby.close()

    def let_go(self) -> None:
        """Have the supervisor end, without waiting: the job's tree is gone already. `close` it later."""
        self._standby.let_go()

    def __enter__(self) -> Supervised:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tell(self, **message: object) -> None:
        data = (json.dumps(message) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._control, data) :]
        except BrokenPipeError:
            raise MachineError("the job supervisor died before it could start the job") from None

    def _ending(self, ready: list[int]) -> dict[str, Any] | None:
        """The supervisor's last word, if it is there; its silent end is an error."""
        while self._status in ready or b"\n" in self._lines:
            event = self._event(START_S)
            if event is None:
                raise MachineError("the job supervisor died, and the job with it")
            if event["event"] == "exited":
                return event
            ready = []
        return None

    def _event(self, timeout_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._lines:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._status], [], [], left)[0]:
                return None
            chunk = os.read(self._status, _CHUNK)
            if not chunk:
                return None
            self._lines += chunk
        line, _, self._lines = self._lines.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
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
