"""What was asked of setup, kept in the prefix, so that `check` and `uninstall` need no flags."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.mac import names
from bridge.mac.action import Action, Write
from bridge.mac.options import REMEMBERED, Options, SetupUsage
from bridge.mac.step import Look, State

_TEXT = (str,)
_MAYBE = (str, type(None))
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "service", "runner_version", "runner_sha256"), _TEXT),
    **dict.fromkeys(("url", "remote", "config", "state"), _MAYBE),
    "labels": (list,),
    "tailnet": (bool,),
}


@dataclass(frozen=True)
class Remembered:
    """That file."""

    options: Options
    name: str = "what was asked"
    stops: bool = False

    @property
    def _file(self) -> Write:
        values = {name: getattr(self.options, name) for name in REMEMBERED}
        return Write(self.options.prefix / names.ASKED, json.dumps(values, indent=2, sort_keys=True) + "\n")

    def look(self) -> Look:
        """Whether it says what is asked now."""
        if self._file.is_there:
            return Look(State.DONE, str(self._file.path), f"service {self.options.service}")
        return Look(State.TODO, str(self._file.path), "missing, or something else was asked")

    def actions(self) -> tuple[Action, ...]:
        """Write it."""
        return (self._file,)


def recalled(prefix: Path) -> dict[str, Any]:
    """What was asked the last time, by name; empty: nothing was.

    Raises:
        SetupUsage: It is there and cannot be read. To take it for nothing would take services away.
    """
    path = prefix / names.ASKED
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    known = {name: found[name] for name in REMEMBERED if name in found} if isinstance(found, dict) else None
    if known is None or not _fits(known):
        raise SetupUsage(
            f"{path} is damaged, so nobody knows what was asked the last time",
            "remove it, and give --url, --remote, --service and the others again",
        )
    return known


def _fits(known: dict[str, Any]) -> bool:
    texts = known.get("labels", ())
    fits = all(isinstance(value, _KINDS[name]) for name, value in known.items())
    return fits and all(isinstance(text, str) for text in texts)
