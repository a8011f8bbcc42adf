"""Reading a child process to its end: both streams, a deadline, and nothing left of its group afterwards.

For a process in a session of its own, started elsewhere. What the outcome means is the caller's to say.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Protocol

_GRACE_S = 0.3
_LOOK_S = 0.2
_CHUNK = 1 << 16


class Process(Protocol):
    """The part of a `Popen` that is used here; its standard input is not a pipe."""

    pid: int
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None
    returncode: int | None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Block until it ends."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How a command ended; `stopped` is what the guard objected to."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    stopped: str | None = None


def collect(
    process: Process, *, deadline: float, limit_bytes: int, guard: Callable[[], str | None] | None = None
) -> Outcome:
    """Read both streams until the command ends, its deadline passes or the guard objects.

    A helper that outlives the command (an SSH master connection) may keep its streams open, so the end of the
    process counts, not only the end of its streams.

    Args:
        process: Leader of its own session, with both outputs piped.
        deadline: On the monotonic clock, in seconds.
        limit_bytes: Most bytes of standard output; more end the command.
        guard: Called a few times a second and when the command has ended; a text it returns ends the command.
    """
    assert process.stdout is not None and process.stderr is not None  # noqa: PT018, S101 - both are piped
    out, err = bytearray(), bytearray()
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout.fileno(), selectors.EVENT_READ, out)
            selector.register(process.stderr.fileno(), selectors.EVENT_READ, err)
            stopped = _drain(process, selector, deadline, guard, lambda: len(out) > limit_bytes)
        in_time = stopped is not None or _wait(process, deadline)
        if guard is not None and stopped is None:
            stopped = guard()  # it may have come far since the last look
    finally:
        end(process)
    code = process.returncode if process.returncode is not None else -1
    return Outcome(code, bytes(out), bytes(err), not in_time, stopped)


def _drain(
    process: Process,
    selector: selectors.BaseSelector,
    deadline: float,
    guard: Callable[[], str | None] | None,
    too_much: Callable[[], bool],
) -> str | None:
    ended_at: float | None = None
    drained = False
    next_look = 0.0
    while selector.get_map() and (now := time.monotonic()) < deadline:
        if guard is not None and now >= next_look:
            next_look = now + _LOOK_S
            if (objection := guard()) is not None:
                return objection
        if process.poll() is not None:
            ended_at = ended_at or now
            if drained and now - ended_at > _GRACE_S:
                return None
        pause = 0.02 if len(selector.get_map()) == 1 else _LOOK_S
        ready = selector.select(min(deadline - now, pause))
        drained = not ready
        for key, _ in ready:
            if chunk := os.read(key.fd, _CHUNK):
                key.data.extend(chunk)
            else:
                selector.unregister(key.fd)
        if too_much():
            return "it printed more than is read"
    return None


def _wait(process: Process, deadline: float) -> bool:
    """Wait for a process whose output has ended; False when the deadline comes first."""
    pause = 0.0002
    while process.poll() is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.02)
    return True


def end(process: Process) -> None:
    """End what is left of a process and its group: first asked (git then removes its locks), then killed."""
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        if not _wait(process, time.monotonic() + _GRACE_S):
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
