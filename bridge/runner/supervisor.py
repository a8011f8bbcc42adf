"""The small program between the runner and a job: starts it, measures it, and ends everything of it.

It inherits the machine's lock and releases it when nothing of the job is left, also where the runner died.
Wire: a JSON object a line. In: a command, perhaps ``{"stop": grace_s}``. Out: ``{}`` at the start, each end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple, NoReturn

import psutil

LOOK_S = 0.25
_FOLDERS_S, _SHARE = 1.0, 20  # folders are measured every second, and for a twentieth of the time at most
_MAX_DEPTH = 400
_BLOCK = 512
_PATIENCE_S, _PAUSE_S = 60.0, 0.01
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(control: int, status: int, output: int, lock: int) -> int:
    """Run a job's commands one after the other: `control` closes when the runner finished or died."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for descriptor in (control, status, output, lock):
        os.set_inheritable(descriptor, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # on Linux orphans of the job come to this process
    _send(status, {})
    with os.fdopen(control, "rb", buffering=0) as messages:  # so that `select` sees each line
        while line := messages.readline():
            if "argv" in (job := json.loads(line)):  # else it asked to stop what had just ended
                _send(status, _run(job, messages, output))
    return 0


def _send(descriptor: int, message: Mapping[str, object]) -> None:
    # A runner that died reads no more: the tree is killed all the same.
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, (json.dumps(message) + "\n").encode())


def _run(job: dict[str, Any], messages: IO[bytes], output: int) -> dict[str, object]:
    """Run the job to its end; what the runner is told of it."""
    waker, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become(job, output)
    watchdog = Watchdog(job["allowed"], job["folder"])
    code, timed_out, breach = _wait(job, pid, messages, waker, watchdog)
    seconds = time.monotonic() - started
    codes, escaped, survivors = end_tree(watchdog.seen, job["env"]["HOME"])
    breach = breach or watchdog.look_at_folders()
    watchdog.close()
    signal.set_wakeup_fd(-1)
    for descriptor in (waker, wakes):
        os.close(descriptor)
    code = codes.get(pid, code)
    if code is not None and job["wrappers"] and 128 < code < 128 + signal.NSIG:
        code = 128 - code  # so bubblewrap reports that a signal killed the job
    return {
        "exit_code": code,
        "timed_out": timed_out,
        "breach": breach,
        "seconds": seconds,
        "survivors": survivors,
        "escaped": escaped,
    }


def _wait(
    job: dict[str, Any], pid: int, messages: IO[bytes], waker: int, watchdog: Watchdog
) -> tuple[int | None, bool, Breach | None]:
    """Until the job ended, was stopped, ran out of time, or exceeded a limit: its code, and which."""
    timed_out = stopping = False
    now = time.monotonic()
    deadline, look = now + job["timeout_s"], now + LOOK_S
    while (code := _reap().get(pid)) is None:
        now = time.monotonic()
        if now >= deadline:
            if stopping:
                break
            timed_out = stopping = True
            _terminate(pid, job["wrappers"])
            deadline = now + job["grace_s"]
        elif now >= look:
            if (breach := watchdog.look()) is not None:
                return None, timed_out, breach
            look = time.monotonic() + LOOK_S
        ready = select.select([messages.fileno(), waker], [], [], max(0.0, min(deadline, look) - now))[0]
        if waker in ready:
            os.read(waker, 512)
        if messages.fileno() in ready:
            line = messages.readline()
            if not line:
                break
            if not stopping:
                stopping = True
                _terminate(pid, job["wrappers"])
                deadline = time.monotonic() + json.loads(line)["stop"]
    return code, timed_out, None


def _terminate(pid: int, wrappers: int) -> None:
    """Ask the job's processes to end, but not the sandbox around them."""
    for number in [pid, *(each.pid for each in _descendants() if each.pid != pid)][wrappers:]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(number, signal.SIGTERM)


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
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]
            wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (wanted, wanted))
        os.umask(0o077)
        os.chdir(job["cwd"])
        os.execvpe(job["argv"][0], job["argv"], job["env"])  # noqa: S606 - argv comes from a preset
    except (OSError, ValueError) as error:
        os.write(2, f"cannot start {job['argv'][0]}: {error}\n".encode())
    os._exit(127)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


# Limits ---------------------------------------------------------------------------------------------------


class Breach(NamedTuple):
    """A limit that a job exceeded."""

    what: str  # memory, disk, left (on the disk): in bytes; processes (threads count), files, depth
    used: int  # what was measured; counting may have ended at the limit
    allowed: int  # of ``left``, the least


class Watchdog:
    """Measures the processes that descend from this one, and a job's folder; `seen` has all that were found.

    The kernel's limits count per process or per user, so what a job takes together is measured, a few times a
    second. `allowed` has the limits by `Breach.what`; what is missing is not measured.
    """

    def __init__(self, allowed: Mapping[str, int], folder: str) -> None:
        self._allowed = allowed
        # Held open: whatever the job puts in its place, this is what is measured.
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._due = time.monotonic() + _FOLDERS_S
        self._least_left = min(allowed.get("left", 0), self._left() // 2)
        self.seen: set[psutil.Process] = set()

    def look(self) -> Breach | None:
        """The first limit that is exceeded now; folders are measured less often the longer that takes."""
        running = _descendants()
        self.seen.update(running)
        memory = sum(_each(running, lambda each: each.memory_info().rss))
        if sys.platform == "linux" and self._over("memory", memory):
            # Pages that several processes share were counted for each of them: be exact before the job dies.
            exact = _each(running, psutil.Process.memory_full_info)
            memory = sum(int(each.pss + each.swap) for each in exact)
        found = self._over("processes", sum(_each(running, psutil.Process.num_threads)))
        found = found or self._over("memory", memory)
        if found is None and (left := self._left()) < self._least_left:
            found = Breach("left", left, self._least_left)
        began = time.monotonic()
        if found is None and began >= self._due:
            found = self.look_at_folders(running)
            now = time.monotonic()
            self._due = now + max(_FOLDERS_S, _SHARE * (now - began))
        return found

    def look_at_folders(self, running: Iterable[psutil.Process] = ()) -> Breach | None:
        """The first limit of the job's folders that is exceeded now, which the job may change meanwhile.

        No link is followed. What the processes in `running` hold open without a name counts, too.
        """
        files, size, seen = 0, 0, set[int]()
        for path, folders, names, handle in os.fwalk(".", dir_fd=self._folder):
            if path.count("/") > _MAX_DEPTH:
                return Breach("depth", _MAX_DEPTH + 1, _MAX_DEPTH)
            for name in (*folders, *names):
                files += 1
                if (found := self._over("files", files)) is not None:
                    return found
                with contextlib.suppress(OSError):  # it may be gone again
                    status = os.lstat(name, dir_fd=handle)
                    size += 0 if status.st_ino in seen else status.st_blocks * _BLOCK
                    seen.add(status.st_ino)
                    if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o500 != 0o500:
                        # A job may close a folder to itself, not to us.
                        os.chmod(name, 0o700, dir_fd=handle, follow_symlinks=False)
        return self._over("disk", size + sum(_unnamed_bytes(self._folder, running)))

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._folder)

    def _left(self) -> int:
        disk = os.fstatvfs(self._folder)
        return disk.f_bavail * disk.f_frsize

    def _over(self, what: str, used: int) -> Breach | None:
        allowed = self._allowed.get(what)
        return None if allowed is None or used <= allowed else Breach(what, used, allowed)


def _unnamed_bytes(folder: int, running: Iterable[psutil.Process]) -> Iterator[int]:
    """Sizes of files on the disk of a folder that processes hold open and that have no name (Linux)."""
    device, seen = os.fstat(folder).st_dev, set[int]()
    for each in running:
        with contextlib.suppress(OSError):
            for link in os.scandir(f"/proc/{each.pid}/fd"):
                with contextlib.suppress(OSError):
                    status = link.stat()
                    fresh = status.st_ino not in seen and status.st_dev == device
                    if fresh and status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                        seen.add(status.st_ino)
                        yield status.st_blocks * _BLOCK


# Processes ------------------------------------------------------------------------------------------------


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _reap() -> dict[int, int]:
    """Collect children that ended: exit codes by process id, negative for signals."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def end_tree(seen: Iterable[psutil.Process], home: str) -> tuple[dict[int, int], int, int]:
    """Kill and collect everything that descends from this process, and what escaped from the tree.

    Where orphans go to another parent (macOS), what leaves its session is found if a look saw it, or by the
    HOME that only this job has. Returns exit codes by process id, how many had left, and how many survive.
    """
    codes: dict[int, int] = {}
    known, escaped = set(seen), set[psutil.Process]()
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        below = set(_descendants())
        known |= below
        apart = _living({*known, *_with_home(home)}) - below
        escaped |= apart
        running = below | apart
        if not running or time.monotonic() > deadline:
            return codes, len(escaped), len(running)
        # Stopped first, so that nothing forks while the rest is killed.
        list(_each(running, psutil.Process.suspend))
        list(_each(running, psutil.Process.kill))
        codes |= _reap()
        time.sleep(_PAUSE_S)


def end_orphans(home: str) -> None:
    """Kill what a job left whose supervisor was killed, found by its HOME."""
    deadline = time.monotonic() + _PATIENCE_S
    while (left := _living(_with_home(home))) and time.monotonic() < deadline:
        list(_each(left, psutil.Process.kill))
        time.sleep(_PAUSE_S)


def _with_home(home: str) -> Iterator[psutil.Process]:
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.pid != os.getpid() and each.environ().get("HOME") == home:
                yield each


def _living(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    states = _each(
        processes, lambda each: each.is_running() and each.status() != psutil.STATUS_ZOMBIE and each
    )
    return {each for each in states if each}


def _each(processes: Iterable[psutil.Process], ask: Callable[[psutil.Process], Any]) -> Iterator[Any]:
    """The answer of each process that is still there and lets us ask."""
    for each in processes:
        with contextlib.suppress(psutil.Error):
            yield ask(each)


if __name__ == "__main__":
    os._exit(main(*map(int, sys.argv[1:])))  # the runner waits, and an interpreter ends slowly
