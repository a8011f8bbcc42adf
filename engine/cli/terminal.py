"""Colours, cursor movement and line editing: only on a terminal, and never in CI."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def is_ci() -> bool:
    """Whether a CI system runs this process; some give their jobs a terminal."""
    return any(
        os.environ.get(name, "").lower() not in ("", "0", "false") for name in ("CI", "GITHUB_ACTIONS")
    )


def is_interactive(stream: Any) -> bool:
    return bool(stream.isatty()) and not _is_plain()


def _is_plain() -> bool:
    """Whether escape codes are unwanted; with ``NO_COLOR`` those of bold text and of cursors, too."""
    return is_ci() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def console(*, stderr: bool = False) -> "Console":
    """A console of rich that writes no escape codes in CI and with ``NO_COLOR``."""
    from rich.console import Console

    return Console(stderr=stderr, force_terminal=False if _is_plain() else None)
