"""The only way to child processes, and the atomic file write.

`run_program` runs a short helper program to its end: fixed argv, allowlisted environment, no shell, capped
output, a timeout that is a value. `spawn` starts a long-lived child with exactly the descriptors it is
given; `bridge.runner.supervisor` builds on it. What a job's child may do is decided in
`bridge.runner.sandbox`, not here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from bridge.errors import MachineError

# What helper programs may see of our environment. Nothing secret-named is in it.
PASSED_NAMES = (
    *("HOME", "LANG", "LOGNAME", "PATH", "SSH_AGENT_PID", "SSH_AUTH_SOCK", "TMPDIR", "TZ", "USER"),
    "XDG_RUNTIME_DIR",
)
_CHUNK = 1 << 16
_GRACE_S = 0.5
_GUARD_S = 0.2


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended, and its output up to the limit."""

    exit_code: int  # negative: killed by that signal
    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool
    stopped: str | None = None  # what a guard objected to

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out and self.stopped is None


def run_program(
    argv: Sequence[str],
    *,
    input: bytes | Sequence[bytes] = b"",  # noqa: A002 - the name subprocess gave it
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    limit_bytes: int = 1 << 20,
    guard: Callable[[], str | None] | None = None,
) -> ProgramResult:
    """Run a helper program to its end and return what it said.

    Args:
        argv: The program and its arguments. Never a shell line.
        input: Bytes for its standard input, which is closed afterwards. Of several parts each is written when
            the program has answered.
        timeout_s: Seconds after which its whole process group is ended; then `timed_out` is true.
        env: The complete environment; None passes the few names of `PASSED_NAMES` and a C locale.
        cwd: Working directory.
        limit_bytes: How much of each output stream is kept. The rest is read and dropped.
        guard: Called a few times a second and once at the end; a text it returns ends the program.

    Raises:
        MachineError: The program cannot be started. One that fails is a value, not an exception.
    """
    deadline = time.monotonic() + timeout_s
    pipe = subprocess.PIPE
    process = _start(argv, env=env, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe)
    outputs = [_Reader(cast("IO[bytes]", stream), limit_bytes) for stream in (process.stdout, process.stderr)]
    parts = [input] if isinstance(input, bytes) else input
    writer = threading.Thread(
        target=_feed, args=(cast("IO[bytes]", process.stdin), parts, outputs[0].answered), daemon=True
    )
    for thread in (writer, *outputs):
        thread.start()
    try:
        timed_out, stopped = _supervise(process, deadline, guard or (lambda: None))
    finally:
        # The group is ours (new session), so helpers that the program left behind end with it.
        kill_group(process.pid)
        process.wait()
        for thread in (writer, *outputs):
            thread.join(_GRACE_S)
    return ProgramResult(
        exit_code=process.returncode,
        stdout=bytes(outputs[0].kept),
        stderr=bytes(outputs[1].kept),
        timed_out=timed_out,
        truncated=any(output.truncated for output in outputs),
        stopped=stopped,
    )


def _supervise(
    process: subprocess.Popen[bytes], deadline: float, guard: Callable[[], str | None]
) -> tuple[bool, str | None]:
    """Wait for the end of a program; whether its time ran out, and what the guard objected to."""
    while True:
        try:
            process.wait(max(0.0, min(deadline - time.monotonic(), _GUARD_S)))
            return False, guard()
        except subprocess.TimeoutExpired:
            objection = guard()
        if objection is not None or time.monotonic() >= deadline:
            break
    # Asked first: git then removes its lock files.
    kill_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    return objection is None, objection


class _Reader(threading.Thread):
    """Keeps the first `limit` bytes of a stream; `answered`: something came, or the stream ended."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        super().__init__(daemon=True)
        self._stream, self._limit = stream, limit
        self.kept = bytearray()
        self.truncated = False
        self.answered = threading.Event()

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._stream:
            while chunk := self._stream.read1(_CHUNK):  # type: ignore[attr-defined]
                left = self._limit - len(self.kept)
                self.truncated = self.truncated or len(chunk) > left
                self.kept += chunk[:left]
                self.answered.set()
        self.answered.set()


def _feed(stream: IO[bytes], parts: Sequence[bytes], answered: threading.Event) -> None:
    # A program that does not read its input closes the pipe early: not our error.
    with contextlib.suppress(OSError, ValueError), stream:
        for index, part in enumerate(parts):
            if index:
                answered.wait()
            stream.write(part)
            stream.flush()


class ChildProcess:
    """A running child, its process id, and the two things one does with it: wait and kill."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Exit code (negative: killed by that signal), or None when it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the child's process group and collect it."""
        if self._process.poll() is None:
            kill_group(self.pid)
        self._process.wait()


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    output: int = subprocess.DEVNULL,
    pass_fds: Iterable[int] = (),
) -> ChildProcess:
    """Start a child in a session of its own, with no standard input and only the descriptors named.

    Args:
        argv: The program and its arguments.
        env: Its complete environment.
        cwd: Its working directory.
        output: Descriptor for standard output and error.
        pass_fds: Further descriptors to keep open in the child, under the same numbers.
    """
    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    return ChildProcess(_start(argv, env=env, cwd=cwd, pass_fds=tuple(pass_fds), **streams))


def run_in_terminal(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> int:
    """Run a program that may ask its user something (a password of sudo) to its end; its exit code."""
    return _start(argv, env=env, cwd=cwd, start_new_session=False).wait()


def _start(argv: Sequence[str], *, env: Mapping[str, str] | None, **how: Any) -> subprocess.Popen[bytes]:
    if not argv or any("\0" in element for element in argv):
        raise MachineError(f"cannot start {list(argv)!r}: an argument vector without NUL is needed")
    own = helper_environment() if env is None else dict(env)
    try:
        return subprocess.Popen(  # noqa: S603 - argv comes from our own files, never from a shell line
            list(argv), env=own, **{"start_new_session": True, **how}
        )
    except OSError as error:
        raise MachineError(f"cannot start {argv[0]!r}: {error.strerror or error}") from None


def helper_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of helper programs: a few names of ours, a C locale, and `extra`."""
    passed = {name: os.environ[name] for name in PASSED_NAMES if name in os.environ}
    return {**passed, "LC_ALL": "C", **(extra or {})}


def find_program(name: str) -> str | None:
    """Absolute path of a program on PATH, or None."""
    return shutil.which(name)


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process group; one that is gone already is fine."""
    # macOS answers EPERM for a group with only zombies left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write a file so that a reader, also after a crash, sees the old or the new content and never a part."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
