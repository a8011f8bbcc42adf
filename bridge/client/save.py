"""A believed result on disk: every published file, from the bytes that were checked; all of them or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bridge.bus.results import Believed, FetchedResult
from bridge.errors import FolderNotEmpty, MachineError
from bridge.protocol.result import ATTESTATION_NAMES


def save(
    believed: Believed,
    fetched: FetchedResult,
    folder: Path,
    *,
    attestations: Mapping[str, bytes] | None = None,
) -> list[Path]:
    """Write ``result.json``, its signature and every file it lists into a new or empty folder.

    Of attestations only checked ones are written, which the caller gives by path.
    """
    require_free(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            whole = Path(scratch) / "result"
            whole.mkdir()
            left_out = {*believed.files, *ATTESTATION_NAMES}
            own = {path: data for path, data in fetched.files.items() if path not in left_out}
            for path, data in {**own, **believed.files, **(attestations or {})}.items():
                target = whole / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as file:  # a disk may not tell names apart that differ in case alone
                    file.write(data)
            if folder.exists():
                folder.rmdir()
            os.rename(whole, folder)
    except OSError as error:
        raise MachineError(f"cannot write {folder}: {error.strerror or error}") from None
    return sorted(path for path in folder.rglob("*") if path.is_file())


def require_free(folder: Path) -> None:
    """Refuse a folder that a result cannot be saved in: `FolderNotEmpty`, or a `MachineError` for a link."""
    _refuse_links(folder)
    try:
        is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    except OSError as error:
        raise MachineError(f"cannot write {folder}: {error.strerror or error}") from None
    if not is_free:
        raise FolderNotEmpty(f"{folder} is not empty; nothing was written", "name a new folder with -o")


def _refuse_links(folder: Path) -> None:
    """A relative folder lies in a checkout, which may hold links of others; an absolute one was typed."""
    parts = [folder] if folder.is_absolute() else [folder, *folder.parents]
    for part in parts:
        if part.is_symlink():
            raise MachineError(
                f"{part} is a link to {os.readlink(part)!r}; nothing was written",
                "name the folder itself with -o, by its absolute path",
            )
