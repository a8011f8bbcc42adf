"""What a mirror's objects take of the disk, and giving it back.

Anybody who may push can send much and delete it again; git itself drops what no ref holds only when asked to,
and leaves behind what a fetch that was ended had not finished.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

# So much, and twice what the last tidying left, is reason for another one.
TIDY_BYTES = 1024**3
_LITTER = ("tmp_obj_??????", "??/tmp_obj_??????", "pack/tmp_*")


def size_bytes(objects: Path) -> int:
    """Bytes of all that an object folder holds."""
    size = 0
    for file in objects.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


def remove_litter(objects: Path) -> None:
    """Remove unfinished objects and packs, which may be gigabytes. No fetch may be going on."""
    for pattern in _LITTER:
        for path in objects.glob(pattern):
            path.unlink(missing_ok=True)
