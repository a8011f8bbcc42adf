"""What was asked of setup, kept in the prefix, so that `check` and `uninstall` need no flags."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.mac.action import Action, Remove, Write
from bridge.mac.options import REMEMBERED, Options
from bridge.mac.step import Look, State

NAME = "setup.json"


@dataclass(frozen=True)
class Remembered:
    """That file."""

    options: Options
    name: str = "what was asked"
    stops: bool = False

    @property
    def _file(self) -> Write:
        values = {name: getattr(self.options, name) for name in REMEMBERED}
        return Write(self.options.prefix / NAME, json.dumps(values, indent=2, sort_keys=True) + "\n")

    def look(self) -> Look:
        """Whether it says what is asked now."""
        if self._file.is_there:
            return Look(State.DONE, str(self._file.path), f"service {self.options.service}")
        return Look(State.TODO, str(self._file.path), "missing, or something else was asked")

    def actions(self) -> tuple[Action, ...]:
        """Write it."""
        return (self._file,)

    def undo(self) -> tuple[Action, ...]:
        """Remove it."""
        return (Remove(self._file.path),)


def recalled(prefix: Path) -> dict[str, Any]:
    """What was asked the last time, by name; empty: nothing was, or it is not readable."""
    try:
        found = json.loads((prefix / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: found[name] for name in REMEMBERED if name in found} if isinstance(found, dict) else {}
