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
    return bool(stream.isatty()) and not is_ci()


def console(*, stderr: bool = False) -> "Console":
    """A console of rich that writes no escape codes in CI."""
    from rich.console import Console

    return Console(stderr=stderr, force_terminal=False if is_ci() else None)
