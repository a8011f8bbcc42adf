"""The small program between the runner and a job: holds the machine's lock and ends everything of the job.

The runner starts ``python -I -m bridge.runner.supervisor SETUP`` for each job. It inherits the lock (one job
a machine), starts the one command it is told to, measures it, enforces its timeout, and reports how it ended.
When the control pipe closes, because the runner finished or died, it kills everything the job started and
only then releases the lock. The command line comes with the sandbox in it; nothing here reads a manifest.

Wire: one JSON object a line. In: the job, then perhaps ``{"stop": grace_s}``. Out: an empty line at the
start, then how the job ended. The runner's side is `bridge.runner.child`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any, NoReturn

from bridge.runner.sandbox.watchdog import LOOK_S, Breach, Watchdog, descendants, end_tree, reap

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(setup: dict[str, int]) -> int:
    """Run one job and wait to be released; `setup` names the descriptors, of which the lock stays open."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for descriptor in setup.values():
        os.set_inheritable(descriptor, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # on Linux orphans of the job come to this process
    os.write(setup["status"], b"\n")  # started
    supervision = _Supervision(setup["control"])
    job = supervision.next_message()
    if job is not None:
        _send(setup["status"], **supervision.run(job, setup["output"]))
        while supervision.next_message() is not None:
            pass
    return 0


class _Supervision:
    """Starts the job, waits for it or for word from the runner, and leaves nothing of it behind."""

    def __init__(self, control: int) -> None:
        self._control = control
        self._buffer = b""

    def run(self, job: dict[str, Any], output: int) -> dict[str, object]:
        """Run the job to its end; what the runner is told of it."""
        waker, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _become(job, output)
        os.close(output)
        watchdog = Watchdog(job["allowed"], job["folder"])
        code, timed_out, breach = self._wait(job, pid, waker, watchdog)
        end = end_tree(watchdog.seen, job["home"])
        code = end.exit_codes.get(pid, code)
        if code is not None and job["wrappers"] and 128 < code < 128 + signal.NSIG:
            code = 128 - code  # so bubblewrap reports that a signal killed the job
        breach = breach or watchdog.look_at_folders()
        return {
            "exit_code": code,
            "timed_out": timed_out,
            "breach": None if breach is None else breach._asdict(),
            "seconds": time.monotonic() - started,
            "survivors": end.survivors,
            "escaped": end.escaped,
        }

    def _wait(
        self, job: dict[str, Any], pid: int, waker: int, watchdog: Watchdog
    ) -> tuple[int | None, bool, Breach | None]:
        """Until the job ended, was stopped, ran out of time, or exceeded a limit: its code, and which."""
        timed_out = stopping = False
        now = time.monotonic()
        deadline, look = now + job["timeout_s"], now + LOOK_S
        while True:
            code = reap().get(pid)
            if code is not None:
                return code, timed_out, None
            now = time.monotonic()
            if now >= deadline:
                if stopping:
                    return None, timed_out, None
                timed_out = stopping = True
                deadline = _terminate(pid, job) + job["grace_s"]
            elif now >= look:
                if (breach := watchdog.look()) is not None:
                    return None, timed_out, breach
                look = time.monotonic() + LOOK_S
            ready = select.select([self._control, waker], [], [], max(0.0, min(deadline, look) - now))[0]
            if waker in ready:
                os.read(waker, 512)
            if self._control in ready:
                message = self.next_message()
                if message is None:
                    return None, timed_out, None
                if not stopping:
                    stopping = True
                    deadline = _terminate(pid, job) + message["stop"]

    def next_message(self) -> dict[str, Any] | None:
        """The next line from the runner; None when it closed the pipe or died."""
        while b"\n" not in self._buffer:
            chunk = os.read(self._control, 1 << 16)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def _terminate(pid: int, job: dict[str, Any]) -> float:
    """Ask the job's processes to end, but not the sandbox around them; return the time."""
    for number in [pid, *(each.pid for each in descendants() if each.pid != pid)][job["wrappers"] :]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(number, signal.SIGTERM)
    return time.monotonic()


def _become(job: dict[str, Any], output: int) -> NoReturn:
    """In the forked child: set limits, descriptors and folder, then become the job's command."""
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the kernel ends a job before anything else when memory runs out
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        signal.set_wakeup_fd(-1)
        for name in ("SIGCHLD", "SIGHUP", "SIGINT", "SIGPIPE", "SIGTERM", "SIGXFSZ"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for name, value in job["limits"].items():
            _limit(getattr(resource, f"RLIMIT_{name}"), value)
        os.umask(0o077)
        os.chdir(job["cwd"])
        os.execvpe(job["argv"][0], job["argv"], job["env"])  # noqa: S606 - argv comes from a preset
    except (OSError, ValueError) as error:
        os.write(2, f"cannot start {job['argv'][0]}: {error}\n".encode())
    os._exit(127)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (wanted, wanted))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _send(descriptor: int, **event: object) -> None:
    # A runner that died reads no more: the tree is killed all the same.
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, (json.dumps(event) + "\n").encode())


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
