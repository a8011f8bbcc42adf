"""A request's way to a Mac and back, over git. Imports no mlx, and never the engine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__version__ = "0.1.0"


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder for caches, keys and unpublished results (`KAKEYA_STATE`, else the platform's usual place)."""
    from pathlib import Path  # not above: every program of the bridge imports this module first

    if given := environ.get("KAKEYA_STATE"):
        return Path(given).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "kakeya-mac"
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kakeya-mac"


def config_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder for settings, policy and trusted keys (`KAKEYA_CONFIG`, else ``~/.config/kakeya-mac``)."""
    from pathlib import Path

    if given := environ.get("KAKEYA_CONFIG"):
        return Path(given).expanduser().absolute()
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "kakeya-mac"
