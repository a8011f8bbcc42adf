"""The only way to child processes (fixed argv, allowlisted environment, no shell), and `write_atomic`."""

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
from functools import partial
from pathlib import Path
from typing import Any

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
    grace_s: float = _GRACE_S,
) -> ProgramResult:
    """Run a helper program to its end and return what it said; a `MachineError`: it cannot be started.

    Of several parts of `input` each is written when the program has answered. After `timeout_s` the whole
    process group is ended: asked to, and killed `grace_s` later. The environment `env` is complete (None:
    `helper_environment`). Of each output stream more than `limit_bytes` is read and dropped. `guard` is
    called a few times a second and once at the end; a text it returns ends the program.
    """
    deadline = time.monotonic() + timeout_s
    pipe = subprocess.PIPE
    process = _start(argv, env=env, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe)
    stdout, stderr, answered = bytearray(), bytearray(), threading.Event()
    parts = [input] if isinstance(input, bytes) else input
    tasks = (
        partial(_feed, process.stdin, parts, answered),
        partial(_keep, process.stdout, stdout, limit_bytes, answered.set),
        partial(_keep, process.stderr, stderr, limit_bytes, lambda: None),
    )
    threads = [threading.Thread(target=task, daemon=True) for task in tasks]
    _, output, _ = threads
    for thread in threads:
        thread.start()
    stopped: str | None = None
    is_late = False
    try:
        while process.returncode is None and stopped is None and not is_late:
            # The output usually ends with the program; `wait` with a limit polls.
            output.join(max(0.0, min(deadline - time.monotonic(), _GUARD_S)))
            with contextlib.suppress(subprocess.TimeoutExpired):
                left = max(0.0, min(deadline - time.monotonic(), _GUARD_S))
                process.wait(0.0 if output.is_alive() else left)
            stopped, is_late = guard and guard(), time.monotonic() >= deadline
        timed_out = process.returncode is None and stopped is None
        if process.returncode is None:  # git, asked to end, removes its lock files
            kill_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
    finally:
        # The group is ours (new session), so helpers that the program left behind end with it.
        kill_group(process.pid)
        process.wait()
        for thread in threads:
            thread.join(_GRACE_S)
    return ProgramResult(process.returncode, bytes(stdout), bytes(stderr), timed_out, stopped)


def _keep(stream: Any, kept: bytearray, limit: int, note: Callable[[], object]) -> None:
    """Read a stream to its end and keep the first `limit` bytes; `note` each chunk and the end."""
    with contextlib.suppress(OSError, ValueError), stream:
        while chunk := stream.read1(_CHUNK):
            kept += chunk[: limit - len(kept)]
            note()
    note()


def _feed(stream: Any, parts: Sequence[bytes], answered: threading.Event) -> None:
    # A program that does not read its input closes the pipe early: not our error.
    with contextlib.suppress(OSError, ValueError), stream:
        for index, part in enumerate(parts):
            if index:
                answered.wait()
            stream.write(part)
            stream.flush()


class ChildProcess:
    """A running child."""

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

    `output` is the descriptor for standard output and error; `pass_fds` stay open under the same numbers.
    """
    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    return ChildProcess(_start(argv, env=env, cwd=cwd, pass_fds=tuple(pass_fds), **streams))


def run_in_terminal(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> int:
    """Run a program that may ask its user something (a password of sudo) to its end; its exit code."""
    return _start(argv, env=env, cwd=cwd, start_new_session=False).wait()


def _start(argv: Sequence[str], *, env: Mapping[str, str] | None, **how: Any) -> subprocess.Popen[bytes]:
    own = helper_environment() if env is None else dict(env)
    try:
        return subprocess.Popen(  # noqa: S603 - argv comes from our own files, never from a shell line
            list(argv), env=own, **{"start_new_session": True, **how}
        )
    except (OSError, ValueError, IndexError) as error:  # no argv, or a NUL in it
        raise MachineError(f"cannot start {list(argv)[:1]}: {error}") from None


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
