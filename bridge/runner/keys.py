"""The key with which one runner signs: where it lies, made on first use, renewed when its owner says so."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from bridge import signing
from bridge.errors import MachineError

KEY_NAME = "id_ed25519"


def key_path(state_dir: Path, name: str) -> Path:
    """Where the private key of a runner lies."""
    return state_dir / "runner" / name / KEY_NAME


def ensure(state_dir: Path, name: str) -> Path:
    """The private key of a runner, made on first use.

    Raises:
        MachineError: There is no ``ssh-keygen``, or it failed.
    """
    return signing.ensure_key(key_path(state_dir, name), _comment(name))


def renew(state_dir: Path, name: str) -> Path:
    """Put a new key in the place of a runner's old one, which is gone then.

    Raises:
        MachineError: There is no ``ssh-keygen``, or the key cannot be written.
    """
    path = key_path(state_dir, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".key-") as folder:
            fresh = signing.ensure_key(Path(folder) / KEY_NAME, _comment(name))
            os.replace(signing.public_key(fresh), signing.public_key(path))
            os.replace(fresh, path)
    except OSError as error:
        raise MachineError(f"cannot write the key {path}: {error.strerror or error}") from None
    return path


def _comment(name: str) -> str:
    return f"kakeya-mac runner {name}"
