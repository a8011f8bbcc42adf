"""Linux namespaces for a job: what this machine permits, and entering it.

Four levels, the best one that works is used:

    full      own process, network, mount and IPC namespace
    view      the same without a process namespace (where no /proc of its own can be mounted)
    network   own network namespace only
    none      neither (also every machine that is not Linux)

What is mounted inside is `bridge.runner.isolation.view`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
from collections.abc import Callable

from bridge.runner.isolation import libc, view

LEVELS = ("full", "view", "network", "none")
PARENT_DIED = signal.SIGUSR1

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_FLAGS = {"full": _NEWNS | _NEWIPC | _NEWPID, "view": _NEWNS | _NEWIPC, "network": 0}
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_LAST_CAPABILITY, _CAPABILITIES_OF = 63, 0x20080522


def best_level(*, network: bool) -> str:
    """The best level that this machine permits, found by trying each in a child that ends at once."""
    if not libc.LINUX:
        return "none"
    return next((level for level in LEVELS[:-1] if _possible(level, network)), "none")


def enter(level: str, *, network: bool) -> None:
    """Move this process into new namespaces; for ``full`` only its next child is inside the process one.

    Args:
        level: One of `LEVELS`.
        network: Keep the machine's network instead of an empty one.

    Raises:
        OSError: The kernel said no.
    """
    if level == "none" or (level == "network" and network):
        return
    uid, gid = os.getuid(), os.getgid()
    libc.call("unshare", _NEWUSER | _FLAGS[level] | (0 if network else _NEWNET))
    with contextlib.suppress(FileNotFoundError):
        _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    if not network:
        _loopback_up()


def has_view(level: str) -> bool:
    """Whether a job at this level has mounts of its own."""
    return level in ("full", "view")


def adopt_orphans() -> bool:
    """Make this process the parent of every orphan below it; False where that is not possible."""
    return libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(*, gently: bool = False) -> bool:
    """Have the kernel kill this process when its parent dies; False where that is not possible.

    Args:
        gently: Send `PARENT_DIED` instead.
    """
    return libc.prctl(libc.PR_SET_PDEATHSIG, PARENT_DIED if gently else signal.SIGKILL)


def go_first() -> None:
    """Have the kernel end this process, and what it starts, before all others when memory runs out."""
    with contextlib.suppress(OSError):
        _write("/proc/self/oom_score_adj", "1000")


def close_to_others() -> None:
    """Let no other process of the user look into this one, nor change its memory."""
    libc.prctl(libc.PR_SET_DUMPABLE, 0)


def drop_privileges() -> None:
    """No new privileges, and no capability survives the next exec."""
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(_LAST_CAPABILITY + 1):
        if not libc.prctl(libc.PR_CAPBSET_DROP, capability):
            break
    # Nor any that a service manager had this user inherit.
    libc.call("capset", struct.pack("=Ii", _CAPABILITIES_OF, 0), bytes(24))


def _possible(level: str, network: bool) -> bool:
    """Whether `enter` and the mounts of a view work at `level`, tried in a throw-away child."""
    return _succeeds(lambda: _attempt(level, network))


def _attempt(level: str, network: bool) -> None:
    enter(level, network=network)
    if level == "full" and not _succeeds(lambda: view.private(own_processes=True)):
        raise OSError("no process namespace")
    if level == "view":
        view.private(own_processes=False)


def _succeeds(action: Callable[[], None]) -> bool:
    child = os.fork()
    if child == 0:
        try:
            action()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _loopback_up() -> None:
    import socket  # here, because every job waits for what its supervisor imports

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(handle, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
