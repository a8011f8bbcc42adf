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
        options, only = self.options, list[str]()
        if options.page is not None and options.slug is not None:
            only += ["--repository", options.slug]
        if options.is_actions and options.fetch is not None:
            only += ["--fetch", options.fetch, "--key", str(options.deploy_key)]
        folder = {"KAKEYA_CONFIG": str(options.policy.parent)}
        return (Run((str(options.program), "runner", "policy", "init", *only), env=folder),)
