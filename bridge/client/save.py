"""A believed result on disk: every published file, all of them or none.

Files are written from the bytes that were checked, into a folder that did not hold anything else.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from bridge.bus.results import Believed, FetchedResult
from bridge.errors import MachineError


def save(believed: Believed, fetched: FetchedResult, folder: Path) -> list[Path]:
    """Write ``result.json``, its signature and every file it lists into `folder`.

    Args:
        believed: The checked result; only files it lists are written besides its own two.
        fetched: Where the bytes of ``result.json`` and its signature are.
        folder: Must not exist yet, or be empty.

    Raises:
        MachineError: The folder holds something, or the disk refuses.
    """
    try:
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
                target.write_bytes(data)
            if folder.exists():
                folder.rmdir()
            os.rename(whole, folder)
    except OSError as error:
        raise MachineError(f"cannot write {folder}: {error.strerror or error}") from None
    return sorted(path for path in folder.rglob("*") if path.is_file())
