"""The policy to begin with: the safe default, for one repository."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.mac.action import Action, Run
from bridge.mac.options import Options
from bridge.mac.step import Look, State


@dataclass(frozen=True)
class PolicyFile:
    """The owner's policy; one that is there is never touched."""

    options: Options
    name: str = "policy"
    stops: bool = False

    def look(self) -> Look:
        """Whether there is one."""
        if self.options.policy.exists():
            return Look(State.DONE, str(self.options.policy), "the owner's; `runner policy check` reads it")
        return Look(State.TODO, str(self.options.policy), "there is none")

    def actions(self) -> tuple[Action, ...]:
        """Write the default."""
        slug = self.options.slug
        only = ("--repository", slug) if slug is not None and "/" in slug else ()
        folder = {"KAKEYA_CONFIG": str(self.options.policy.parent)}
        return (Run((str(self.options.program), "runner", "policy", "init", *only), env=folder),)

    def undo(self) -> tuple[Action, ...]:
        """Nothing: it is the owner's."""
        return ()
