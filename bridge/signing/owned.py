"""Files that say whom to believe: read whole, and only where nobody else could have written them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bridge.errors import KeyListError, MachineError

MAX_BYTES = 1 << 20


def read(path: Path) -> bytes | None:
    """The bytes of a list of keys; None where there is no file.

    What is checked is the file that is read, not a path that could be changed between the two.

    Raises:
        KeyListError: Others could have written it, it is too large, or it cannot be read; or it is a link
            to nothing: an owner who made that means to revoke or to list somebody.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            _require_owned(path, os.fstat(file.fileno()))
            for folder in {path.parent, path.resolve().parent}:  # the file's own, where the path is a link
                _require_owned(folder, folder.stat())
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        if path.is_symlink():
            raise KeyListError(f"{path} is a link that leads to no file") from None
        return None
    except OSError as error:
        raise KeyListError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise KeyListError(f"{path}: more than {MAX_BYTES} bytes, which no list of keys has")
    return data


def stamps(*paths: Path) -> tuple[tuple[object, ...], ...]:
    """What tells lists from their later selves, to ask whether what was concluded from them still holds."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            seen = path.stat()
            found.append((path.name, seen.st_ino, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size))
    return tuple(found)


def write(path: Path, data: bytes) -> None:
    """Put a file of ours in place, whole or not at all, readable by its owner only.

    Raises:
        MachineError: It cannot be written.
    """
    fresh = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            fresh = file.name
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        if fresh is not None:
            Path(fresh).unlink(missing_ok=True)
        raise MachineError(f"cannot write {path}: {error.strerror or error}") from None


@contextlib.contextmanager
def changing(path: Path) -> Iterator[None]:
    """Hold the folder of a list while it is read, changed and written: of two commands at once none is lost.

    Raises:
        MachineError: The folder cannot be made or opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise MachineError(f"cannot use the folder {path.parent}: {error.strerror or error}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _require_owned(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.getuid(), 0):
        raise KeyListError(
            f"{path} belongs to user {status.st_uid}, so it does not say whom user {os.getuid()} believes",
            f"chown {os.getuid()} {path}",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KeyListError(f"{path} can be written by others, who could add a key", f"chmod go-w {path}")
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise KeyListError(f"{path} is no file")
