"""What one fetch brings, by the room it takes on the disk: for fetches that git may unpack as they come.

Free room is the whole disk's, so what other programs write meanwhile counts, too: the limits are large. Where
a limit is small, `Git.fetch` keeps one pack and measures that.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from bridge.bus.command import FETCH_LIMIT_BYTES
from bridge.protocol.sanitize import without_credentials


class Intake:
    """One fetch, made just before it begins.

    Args:
        directory: The bare repository that it fills.
        remote: Whose fault it is.
        limit_bytes: What it may bring.
    """

    def __init__(self, directory: Path, remote: str, limit_bytes: int = FETCH_LIMIT_BYTES) -> None:
        self._directory = directory
        self._remote = remote
        self._limit_bytes = limit_bytes
        self._free_bytes = shutil.disk_usage(directory).free
        self.is_too_much = False

    @property
    def taken_bytes(self) -> int:
        """How much less room is free than before the fetch."""
        return self._free_bytes - shutil.disk_usage(self._directory).free

    def guard(self) -> str | None:
        """Why the fetch must end; for `Git.fetch`."""
        size = 0
        for file in (self._directory / "objects" / "pack").glob("tmp_*"):
            with contextlib.suppress(FileNotFoundError):
                size += file.stat().st_size
        # Few objects are unpacked as they come, each a file of its own.
        size = max(size, self.taken_bytes)
        self.is_too_much = size > self._limit_bytes
        if not self.is_too_much:
            return None
        return f"{without_credentials(self._remote)} sends more than {self._limit_bytes} bytes"
