"""Whose files the owner's decisions are: what others may write decides nothing here."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from bridge.errors import PolicyError

PRESETS = "presets"
# Lists of keys beside the policy, each of which says whom this machine believes.
KEY_LISTS = ("allowed_signers", "known_runners", "revoked_keys")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


def check_unshared(path: Path, status: os.stat_result) -> None:
    """Refuse what others may write.

    Args:
        path: For the message.
        status: Of what is to be read: the open file's, so that nobody puts another in its place.

    Raises:
        PolicyError: It belongs to another user, or others may write it.
    """
    if status.st_uid not in (os.getuid(), _ROOT):
        raise PolicyError(
            f"policy: {path} belongs to user {status.st_uid}, not to the runner's",
            f"chown {os.getuid()} {path}",
        )
    if status.st_mode & _OTHERS_WRITE:
        raise PolicyError(f"policy: {path} can be written by others", f"chmod go-w {path}")


def check_private(path: Path, status: os.stat_result) -> None:
    """Refuse what others may write or read. Of what belongs to root, only what others may write.

    Raises:
        PolicyError: See above.
    """
    check_unshared(path, status)
    ours = status.st_uid == os.getuid()
    if ours and stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise PolicyError(
            f"policy: {path} is open to others (mode {stat.S_IMODE(status.st_mode):04o}): it says whom and"
            " what this machine trusts",
            f"chmod 600 {path}",
        )


def shared(folder: Path, policy: Path) -> Iterator[PolicyError]:
    """What nobody may rely on in a configuration folder, of each thing that decides something.

    Args:
        folder: The configuration folder; it need not exist.
        policy: The policy file in it.
    """
    presets = folder / PRESETS
    paths = [folder, presets, *sorted(presets.glob("*.toml")), *(folder / name for name in KEY_LISTS), policy]
    for path in paths:
        try:
            status = path.stat()
        except FileNotFoundError:
            if path.is_symlink():  # it was meant to decide something
                yield PolicyError(f"policy: {path} is a link that leads to no file")
            continue
        except OSError as error:
            yield PolicyError(f"cannot look at {path}: {error.strerror}")
            continue
        try:
            (check_private if path == policy else check_unshared)(path, status)
            if path.is_symlink():  # who may change the folder it leads to changes what is read
                check_unshared(path.resolve().parent, path.resolve().parent.stat())
        except PolicyError as error:
            yield error
