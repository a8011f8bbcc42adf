"""The small program between the runner and a job: holds the machine's lock and answers for the job's tree.

It is started as ``python -I -m bridge.runner.supervisor SETUP`` for each job, perhaps some time before there
is one. It moves into namespaces where the machine permits them, takes the lock when it is told to (one job a
machine), starts the one child it is told to, enforces its timeout, and reports how it ended. When the control
pipe closes, because the runner finished or died, it kills everything the job started and only then lets go
of the lock.

Wire: one JSON object a line. In: ``{"take": true}``, the job, then perhaps ``{"stop": grace_s}``. Out:
``locked`` or ``busy``, ``started``, ``exited``. The runner's side is `bridge.runner.child`. Nothing here
reads a manifest.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

from bridge.runner.isolation import libc, namespaces, processes, view
from bridge.runner.isolation.cage import Cage
from bridge.runner.isolation.watchdog import LOOK_S, Breach, Watchdog

if TYPE_CHECKING:
    from bridge.runner.isolation.sandboxed import Sandboxed


def main(setup: dict[str, Any]) -> int:
    """Settle, take the lock when told to, run one job, and wait to be let go."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for name in ("control", "status", "output"):
        os.set_inheritable(setup[name], False)  # whatever the job's limit of open files leaves unclosed
    # Opened outside the namespaces. All processes here share it, so it stays locked until the last is gone.
    lock = os.open(setup["lock"], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    guards = (*setup["guards"], os.getpid())
    setup["sockets"] = view.sockets()
    level = namespaces.best_level(network=setup["network"])
    namespaces.enter(level, network=setup["network"])
    if libc.LINUX and not _goes_on_guarded(setup, level):
        return 0
    try:
        cage = _layers(setup, level, (*guards, os.getpid()))
    except OSError as error:
        _send(setup["status"], event="failed", why=str(error))
        return 1
    namespaces.close_to_others()
    keeper = _Keeper(setup, cage)
    if keeper.next_order() is None:
        return 0
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _send(setup["status"], event="busy")
        return 0
    _send(setup["status"], event="locked", enforced=asdict(cage.enforced))
    keeper.serve()
    return 0


def _layers(setup: dict[str, Any], level: str, guards: tuple[int, ...]) -> Cage | Sandboxed:
    if libc.LINUX:
        return Cage(setup, level, guards)
    from bridge.runner.isolation.sandboxed import Sandboxed  # here, because Linux need not wait for it

    return Sandboxed(setup)


def _goes_on_guarded(setup: dict[str, Any], level: str) -> bool:
    """Go on in a child, watched over by this process: whichever of the two dies, the job's tree dies.

    Returns:
        True in the child; False in this process, when the child and everything below it is gone.
    """
    namespaces.adopt_orphans()
    inner = os.fork()
    if inner == 0:
        namespaces.die_with_parent(gently=level != "full")
        return True
    namespaces.close_to_others()
    for descriptor in (setup["control"], setup["status"], setup["output"]):
        os.close(descriptor)
    os.waitpid(inner, 0)
    processes.end_descendants()
    return False


class _Keeper:
    """Starts the job, waits for it or for word from the runner, and leaves nothing of it behind."""

    def __init__(self, setup: dict[str, Any], cage: Cage | Sandboxed) -> None:
        self._cage = cage
        self._control: int = setup["control"]
        self._status: int = setup["status"]
        self._output: int = setup["output"]
        self._buffer = b""
        self._job = 0
        self._code: int | None = None
        if os.getpid() != 1:  # else the kernel sees to it, and the job could send it
            signal.signal(namespaces.PARENT_DIED, self._end)

    def serve(self) -> None:
        order = self.next_order()
        if order is None:
            return
        self._cage.narrow(order["room"])
        waker, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        started = time.monotonic()
        self._job = os.fork()
        if self._job == 0:
            _become(order, self._output, self._cage)
        os.close(self._output)
        _send(self._status, event="started", pid=self._job)
        watchdog = Watchdog(order["allowed"], order["room"], scratch=self._cage.scratch_bytes)
        timed_out, breach = self._attend(waker, watchdog, started + order["timeout_s"], order["grace_s"])
        survivors, ended = processes.end_descendants(self._job)
        strays, left = self._cage.end_strays(order["room"], watchdog.seen)
        self._code = ended.get(self._job, self._code)
        seconds = time.monotonic() - started
        breach = breach or watchdog.look_at_room()
        _send(
            self._status,
            event="exited",
            exit_code=self._code,
            timed_out=timed_out,
            breach=None if breach is None else asdict(breach),
            seconds=seconds,
            survivors=survivors + left,
            strays=strays,
        )
        while self.next_order() is not None:
            pass

    def _attend(
        self, waker: int, watchdog: Watchdog, deadline: float, grace_s: float
    ) -> tuple[bool, Breach | None]:
        """Until the job ended, is to stop, ran out of time, or breached a limit: whether and which."""
        timed_out = stopping = False
        look = time.monotonic() + LOOK_S
        while True:
            self._code = (processes.reap() or {}).get(self._job)
            if self._code is not None:
                return timed_out, None
            now = time.monotonic()
            if now >= deadline:
                if stopping:
                    return timed_out, None
                timed_out = stopping = True
                deadline = self._ask_to_end(grace_s)
            elif now >= look:
                if (breach := watchdog.look()) is not None:
                    return timed_out, breach
                look = time.monotonic() + LOOK_S
            ready = select.select([self._control, waker], [], [], max(0.0, min(deadline, look) - now))[0]
            if waker in ready:
                os.read(waker, 512)
            if self._control in ready:
                order = self.next_order()
                if order is None:
                    return timed_out, None
                if not stopping:
                    stopping = True
                    deadline = self._ask_to_end(order["stop"])

    def _ask_to_end(self, grace_s: float) -> float:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._job, signal.SIGTERM)
        return time.monotonic() + grace_s

    def next_order(self) -> dict[str, Any] | None:
        """The next line from the runner; None when it closed the pipe or died."""
        while b"\n" not in self._buffer:
            chunk = os.read(self._control, 1 << 16)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        order: dict[str, Any] = json.loads(line)
        return order

    def _end(self, *_: object) -> NoReturn:
        """The guard died: leave nothing behind."""
        processes.end_descendants(self._job)
        os._exit(1)


def _become(order: dict[str, Any], output: int, cage: Cage | Sandboxed) -> NoReturn:
    """In the forked child: limits, descriptors, folder, and then the job's program in our place."""
    try:
        os.setsid()
        namespaces.die_with_parent()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        signal.set_wakeup_fd(-1)
        for name in ("SIGCHLD", "SIGHUP", "SIGINT", "SIGPIPE", "SIGTERM", "SIGXFSZ"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        for name, value in order["limits"].items():
            _limit(getattr(resource, f"RLIMIT_{name}"), value)
        os.umask(0o077)
        os.chdir(order["cwd"])
        argv = cage.command(order["argv"], order["room"])
        cage.lock_in()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.execvpe(argv[0], argv, order["env"])  # noqa: S606 - argv comes from a preset
    except (OSError, ValueError) as error:
        os.write(2, f"cannot start {order['argv'][0]}: {error}\n".encode())
    os._exit(127)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (wanted, wanted))


def _send(descriptor: int, **event: object) -> None:
    # A runner that died reads no more: the tree is killed all the same.
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, (json.dumps(event) + "\n").encode())


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
