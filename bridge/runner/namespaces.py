"""Linux namespaces for a job, through libc: what this machine permits, and entering it.

Three levels, the best one that works is used:

    full      own process, network and mount namespace: no network, no survivor, hidden files
    network   own network namespace only
    none      neither (also every machine that is not Linux)

Not covered: read-only views of the file system, memory control groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
import sys
from collections.abc import Sequence

LEVELS = ("full", "network", "none")

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_LAST_CAPABILITY = 63


def best_level(*, network: bool) -> str:
    """The best level that this machine permits, found by trying each in a child that ends at once."""
    if not sys.platform.startswith("linux"):
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
    flags = _NEWUSER | (_NEWNS | _NEWIPC | _NEWPID if level == "full" else 0) | (0 if network else _NEWNET)
    _call("unshare", flags)
    with contextlib.suppress(FileNotFoundError):
        _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    if not network:
        _loopback_up()


def settle(hide: Sequence[str], keep: Sequence[str] = ()) -> None:
    """As the first process of a ``full`` level: a /proc of its own, and `hide` covered with nothing.

    Args:
        hide: Files and folders; those that do not exist are left out.
        keep: Existing folders below hidden ones, which stay as they are.

    Raises:
        OSError: The kernel said no.
    """
    die_with_parent()
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    kept = [(name, os.open(name, os.O_PATH | os.O_DIRECTORY)) for name in keep]
    folders = _outermost([os.path.realpath(name) for name in hide if os.path.isdir(name)])
    for name in hide:
        if os.path.exists(name) and not os.path.isdir(name):
            _mount("/dev/null", name, None, _MS_BIND)
    for name in folders:
        _mount("tmpfs", name, "tmpfs", _MS_NOSUID | _MS_NODEV)
    for name, handle in kept:
        os.makedirs(name, mode=0o700, exist_ok=True)
        _mount(f"/proc/self/fd/{handle}", name, None, _MS_BIND)
        os.close(handle)
    for name in folders:
        _mount(None, name, None, _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _outermost(folders: Sequence[str]) -> list[str]:
    """The folders that lie in no other one of them."""
    found: list[str] = []
    for folder in sorted(set(folders)):
        if not any(folder.startswith(f"{outer.rstrip('/')}/") for outer in found):
            found.append(folder)
    return found


def adopt_orphans() -> bool:
    """Make this process the parent of every orphan below it; False where that is not possible."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> bool:
    """Have the kernel kill this process when its parent dies; False where that is not possible."""
    return _prctl(_PR_SET_PDEATHSIG, 9)


def drop_privileges() -> None:
    """No new privileges, and no capability survives the next exec."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(_LAST_CAPABILITY + 1):
        if not _prctl(_PR_CAPBSET_DROP, capability):
            return


def _possible(level: str, network: bool) -> bool:
    """Whether `enter` and `settle` work at `level`, tried in a throw-away child."""
    return _succeeds(lambda: _attempt(level, network))


def _attempt(level: str, network: bool) -> None:
    enter(level, network=network)
    if level == "full" and not _succeeds(lambda: settle(())):
        raise OSError("no process namespace")


def _succeeds(action: object) -> bool:
    child = os.fork()
    if child == 0:
        try:
            action()  # type: ignore[operator]
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


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _call("mount", *encoded, ctypes.c_ulong(flags), None)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0)
