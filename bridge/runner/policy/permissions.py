"""Whether a file of the owner's is the owner's alone to write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from bridge.errors import PolicyError


def check_owner(path: Path, status: os.stat_result) -> None:
    """Refuse what others may write.

    Raises:
        PolicyError: It belongs to another user, or others may write it.
    """
    if status.st_uid not in (os.getuid(), 0):
        raise PolicyError(f"policy: {path} belongs to user {status.st_uid}, not to the runner's")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PolicyError(f"policy: {path} can be written by others", f"chmod go-w {path}")
