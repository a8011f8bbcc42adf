"""What a job sees of the file system: everything read-only, except its own folders.

Fresh and empty are the folders where programs leave things for each other and listen on sockets (``/tmp``,
``/var/tmp``, ``/run``), ``/dev`` holds the few devices that a program needs, ``/proc`` its own processes.
Hidden files and folders are covered with nothing, and so are sockets elsewhere: one that is read-only takes
connections all the same. Made in a mount namespace, so nothing of it reaches the
machine, and it ends with the job.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable, Sequence

from bridge.runner.isolation import libc

# Empty and writable; what lies there counts as memory of the job.
SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - of the job's own view
_EMPTY = ("/run", "/var/run")  # sockets of the machine's services
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}

_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY, _ATTR_NOSUID = 442, -100, 0x8000, 1, 2
# What a remount must say again of a mount, in the words of mountinfo.
_KEPT_FLAGS = {
    "ro": _RDONLY,
    "nosuid": _NOSUID,
    "nodev": _NODEV,
    "noexec": _NOEXEC,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
}


def private(*, own_processes: bool) -> None:
    """Part this namespace's mounts from the machine's; with `own_processes` a /proc that shows only those.

    Raises:
        OSError: The kernel said no.
    """
    _mount(None, "/", None, _REC | _PRIVATE)
    if own_processes:
        _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)


def sockets() -> list[str]:
    """Paths of the sockets that programs of this machine have; to be asked in the machine's own network."""
    found: list[str] = []
    with contextlib.suppress(OSError), open("/proc/net/unix", "rb") as file:
        for row in file:
            place = row.split(None, 7)[-1].removesuffix(b"\n")
            if place.startswith(b"/"):
                found.append(os.fsdecode(place))
    return found


def build(
    hide: Iterable[str],
    writable: Iterable[str],
    keep: Sequence[str] = (),
    close: Iterable[str] = (),
    *,
    own_processes: bool,
) -> None:
    """Make the view, in a mount namespace of our own.

    Args:
        hide: Files and folders to cover; those that do not exist are left out.
        writable: Existing folders that stay as they are, also inside hidden ones.
        keep: Files and folders that stay visible in folders that are fresh; those that do not exist are
            left out. What is hidden stays hidden.
        close: Sockets to cover; those that are gone are left out.
        own_processes: Mount a /proc of this process namespace.

    Raises:
        OSError: The kernel said no.
    """
    private(own_processes=own_processes)
    kept = [(name, _open(name)) for name in {*keep, *map(os.path.realpath, keep)} if os.path.exists(name)]
    rooms = [(os.path.realpath(name), _open(name)) for name in writable]
    devices = [(f"/dev/{name}", _open(f"/dev/{name}")) for name in _DEVICES if os.path.exists(f"/dev/{name}")]
    hidden = [(name, os.path.isdir(name)) for name in map(os.path.realpath, hide) if os.path.exists(name)]
    empty = _outermost(os.path.realpath(name) for name in (*_EMPTY, "/dev") if os.path.isdir(name))
    for name in empty:
        _empty(name, "0755")
    _make_devices(devices)
    scratch = _outermost(os.path.realpath(name) for name in SCRATCH if os.path.isdir(name))
    for name in scratch:
        _empty(name, "1777")
    for name, handle in sorted(kept):
        if _lies_in(name, [*empty, *scratch]):
            _put_back(name, handle)
        os.close(handle)
    for name in _outermost(name for name, is_folder in hidden if is_folder):
        os.makedirs(name, mode=0o700, exist_ok=True)
        _empty(name, "0700")
    for name, is_folder in hidden:
        if not is_folder and os.path.exists(name):
            _mount("/dev/null", name, None, _BIND)
    for name in close:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            if stat.S_ISSOCK(os.stat(name).st_mode):
                _mount("/dev/null", os.path.realpath(name), None, _BIND)
    for name, handle in rooms:
        _put_back(name, handle)
        os.close(handle)
    read_only("/")
    for name in (*scratch, *(name for name, _ in rooms)):
        _make_writable(name)


def narrow(folder: str, room: str) -> None:
    """Leave only `room` writable of a writable folder of the view.

    Raises:
        OSError: The kernel said no.
    """
    folder, room = os.path.realpath(folder), os.path.realpath(room)
    if folder == room:
        return
    _mount(room, room, None, _BIND)
    try:
        _set_attributes(folder, add=_ATTR_RDONLY, flags=0)
    except OSError:  # before Linux 5.12
        _mount(None, folder, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _kept_flags(folder))


def scratch_bytes() -> int:
    """Bytes that lie in the fresh writable folders of the view this process is in."""
    used = 0
    for name in SCRATCH:
        with contextlib.suppress(OSError):
            status = os.statvfs(name)
            used += (status.f_blocks - status.f_bfree) * status.f_frsize
    return used


def read_only(top: str) -> None:
    """Make every mount at and below `top` read-only, at once where the kernel can, else one by one.

    Raises:
        OSError: The kernel said no.
    """
    try:
        _set_attributes(top, add=_ATTR_RDONLY | _ATTR_NOSUID)
    except OSError:  # before Linux 5.12
        _remount_each(top)


def _remount_each(top: str) -> None:
    for place, flags in _mounts():
        if place == top or place.startswith(f"{top.rstrip('/')}/"):
            # What another mount covers cannot be named, nor reached.
            with contextlib.suppress(OSError):
                _mount(None, place, None, _REMOUNT | _BIND | flags | _RDONLY | _NOSUID)
    if not any(flags & _RDONLY for place, flags in _mounts() if place == top):
        raise OSError(f"{top} cannot be made read-only")


def _make_writable(place: str) -> None:
    """Undo `read_only` for one mount that was writable before; not for those below it."""
    try:
        _set_attributes(place, clear=_ATTR_RDONLY, flags=0)
    except OSError:
        _mount(None, place, None, _REMOUNT | _BIND | (_kept_flags(place) & ~_RDONLY))


def _set_attributes(place: str, *, add: int = 0, clear: int = 0, flags: int = _AT_RECURSIVE) -> None:
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", add, clear, 0, 0), 32)
    libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(place), flags, attributes, 32)


def _mounts() -> list[tuple[str, int]]:
    """Places and flags of this namespace's mounts; of several at one place the topmost is last."""
    found = []
    with open("/proc/self/mountinfo", "rb") as file:
        for row in file:
            fields = row.split()
            place = os.fsdecode(fields[4].decode("unicode_escape").encode("latin-1"))
            words = os.fsdecode(fields[5]).split(",")
            found.append((place, sum(_KEPT_FLAGS.get(word, 0) for word in words)))
    return found


def _kept_flags(place: str) -> int:
    return next((flags for name, flags in reversed(_mounts()) if name == place), 0)


def _empty(place: str, mode: str) -> None:
    _mount("tmpfs", place, "tmpfs", _NOSUID | _NODEV, f"mode={mode}")


def _make_devices(devices: Sequence[tuple[str, int]]) -> None:
    for name, handle in devices:
        _put_back(name, handle)
        os.close(handle)
    for link, target in _DEVICE_LINKS.items():
        os.symlink(target, f"/dev/{link}")
    for folder in ("shm", "pts"):
        os.mkdir(f"/dev/{folder}")
    with contextlib.suppress(OSError):  # a job without terminals
        _mount("devpts", "/dev/pts", "devpts", _NOSUID | _NOEXEC, "newinstance,ptmxmode=0666,mode=600")


def _put_back(place: str, handle: int) -> None:
    """Mount what `handle` is open on at its old place in a covered folder."""
    if os.path.isdir(f"/proc/self/fd/{handle}"):
        os.makedirs(place, mode=0o700, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
        with open(place, "ab"):
            pass
    _mount(f"/proc/self/fd/{handle}", place, None, _BIND | _REC)


def _outermost(folders: Iterable[str]) -> list[str]:
    """The folders that lie in no other one of them."""
    found: list[str] = []
    for folder in sorted(set(folders)):
        if not _lies_in(folder, found):
            found.append(folder)
    return found


def _lies_in(path: str, folders: Iterable[str]) -> bool:
    """Whether one of the folders is, or holds, this path."""
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _open(name: str) -> int:
    return os.open(name, os.O_PATH | os.O_CLOEXEC)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    libc.call("mount", *texts, ctypes.c_ulong(flags), None if data is None else data.encode())
