"""A Mac that sleeps takes no requests; `bridge.runner.awake` keeps it up only while a job runs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bridge.mac.action import Action, Run
from bridge.mac.options import Options
from bridge.mac.step import Look, State, answer

_SETTING = re.compile(r"^\s*(sleep|autorestart)\s+(\d+)", re.MULTILINE)
_WANTED = {"sleep": "0", "autorestart": "1"}


@dataclass(frozen=True)
class Power:
    """No system sleep, and a start by itself after a power failure."""

    options: Options
    name: str = "power"
    stops: bool = False

    def look(self) -> Look:
        """What pmset says."""
        found = dict(_SETTING.findall(_on_mains(answer("pmset", "-g", "custom") or "")))
        other = [
            f"{name} {found[name]}" for name, value in _WANTED.items() if found.get(name, value) != value
        ]
        if not found:
            return Look(
                State.ADVICE,
                "pmset -g custom",
                "no power settings to be read",
                "see that the Mac stays awake",
            )
        if not other:
            return Look(State.DONE, "pmset -g custom", "does not sleep")
        if self.options.sudo:
            return Look(State.TODO, "pmset -g custom", ", ".join(other))
        fix = f"setup with --sudo, or type: {self.actions()[0].said}"
        return Look(State.ADVICE, "pmset -g custom", f"{', '.join(other)}: it may sleep between jobs", fix)

    def actions(self) -> tuple[Action, ...]:
        """Set it, on mains power."""
        words = [word for pair in _WANTED.items() for word in pair]
        return (Run(("pmset", "-c", *words), is_administrators=True),)


def _on_mains(text: str) -> str:
    """The settings on mains power; on battery others hold, at this moment, too."""
    _, _, rest = text.partition("AC Power:")
    return re.split(r"^\S", rest, maxsplit=1, flags=re.MULTILINE)[0]
