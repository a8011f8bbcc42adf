"""A believed result on disk: every published file, all of them or none.

Files are written from the bytes that were checked, each new, into a folder that did not hold anything else. A
checkout may hold links that others committed, so a relative folder is never reached through one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from bridge.bus.results import Believed, FetchedResult
from bridge.errors import MachineError

# A file must not be there yet, not even as a link to another one.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def save(believed: Believed, fetched: FetchedResult, folder: Path) -> list[Path]:
    """Write ``result.json``, its signature and every file it lists into a new or empty folder.

    Raises:
        MachineError: The folder holds something or leads through a link, or the disk refuses.
    """
    try:
        _refuse_links(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise MachineError(f"{folder} is not empty; nothing was written", "name a new folder with -o")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            whole = Path(scratch) / "result"
            whole.mkdir()
            own = {path: data for path, data in fetched.files.items() if path not in believed.files}
            for path, data in {**own, **believed.files}.items():
                target = whole / path
                target.parent.mkdir(parents=True, exist_ok=True)
                _write_new(target, data)
            if folder.exists():
                folder.rmdir()
            os.rename(whole, folder)
    except OSError as error:
        raise MachineError(f"cannot write {folder}: {error.strerror or error}") from None
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _refuse_links(folder: Path) -> None:
    """A relative folder lies in a checkout as often as not; an absolute one was chosen by who typed it."""
    parts = [folder] if folder.is_absolute() else [folder, *folder.parents]
    for part in parts:
        if part.is_symlink():
            raise MachineError(
                f"{part} is a link to {os.readlink(part)!r}; nothing was written",
                "name the folder itself with -o, by its absolute path",
            )


def _write_new(path: Path, data: bytes) -> None:
    """Where file names differ in case alone and the disk does not tell them apart, this fails."""
    with os.fdopen(os.open(path, _NEW, 0o666), "wb") as sink:
        sink.write(data)
