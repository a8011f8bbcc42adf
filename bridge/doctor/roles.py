"""Which role this machine has, and its checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bridge import interpreter
from bridge.doctor import ci, client, runner
from bridge.doctor.finding import Check
from bridge.settings import Settings

ROLES = ("client", "runner", "ci")
_EXAMINE: dict[str, Callable[..., Iterator[Check]]] = {
    "client": client.examine,
    "runner": runner.examine,
    "ci": ci.examine,
}


def detect(environ: Mapping[str, str] | None = None) -> str:
    """``ci`` inside a workflow, ``runner`` where setup made this environment, else ``client``."""
    environ = os.environ if environ is None else environ
    if environ.get("GITHUB_ACTIONS") == "true":
        return "ci"
    return "runner" if interpreter.record_path().exists() else "client"


def examine(role: str, settings: Settings, repository: Path, *, allow_public: bool) -> Iterator[Check]:
    """The checks of a role, in turn.

    Args:
        role: One of `ROLES`.
        settings: Of this machine.
        repository: Where it is asked from.
        allow_public: A public repository is meant.
    """
    return _EXAMINE[role](settings, repository, allow_public=allow_public)
