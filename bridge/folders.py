"""Where this machine keeps configuration and state. No dependencies: the setup of a Mac runs before any."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Folder for caches, keys and unpublished results (`KAKEYA_STATE`, else the platform's usual place)."""
    environ = os.environ if environ is None else environ
    if given := environ.get("KAKEYA_STATE"):
        return Path(given).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "kakeya-mac"
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kakeya-mac"


def config_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Folder for settings, policy and trusted keys (`KAKEYA_CONFIG`, else ``~/.config/kakeya-mac``)."""
    environ = os.environ if environ is None else environ
    if given := environ.get("KAKEYA_CONFIG"):
        return Path(given).expanduser().absolute()
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "kakeya-mac"
