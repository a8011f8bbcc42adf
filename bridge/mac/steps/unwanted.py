"""What is there and not wanted: for uninstall everything, for setup what only an earlier run asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bridge.mac import launchd, names
from bridge.mac.action import Action, Remove, Run
from bridge.mac.options import Options
from bridge.mac.step import Look, State, succeeds
from bridge.mac.steps.actions_runner import ActionsRunner
from bridge.mac.steps.launched import let_go, typed


@dataclass(frozen=True)
class Unwanted:
    """One service."""

    options: Options
    label: str
    stops: bool = False

    @property
    def name(self) -> str:
        """With its label."""
        return f"service {self.label}"

    @property
    def is_there(self) -> bool:
        """Whether there is anything of it."""
        return self.is_launchds or bool(self._ours())

    @property
    def is_launchds(self) -> bool:
        """Whether launchd knows it, or would after a restart."""
        known = launchd.known(self.label)
        if launchd.stranger(self.label, self.options.prefix, known) is not None:
            return False
        return known is not None or succeeds("test", "-e", str(names.installed(self.label)))

    def look(self) -> Look:
        """Whether anything of it is left; another setup's is left alone."""
        installed = str(names.installed(self.label))
        if not self.is_there:
            return Look(State.DONE, installed, "there is none of this setup's")
        if self.options.sudo or not self.is_launchds:
            return Look(State.TODO, installed, "there, and not wanted")
        finding = "there, and not wanted; that needs an administrator"
        return Look(State.MISSING, installed, finding, typed(self.actions()))

    def actions(self) -> tuple[Action, ...]:
        """Have launchd let go of it and forget it."""
        gone = Run(("rm", "-f", str(names.installed(self.label))), is_administrators=True)
        launchds = (*let_go(self.options, self.label), gone) if self.is_launchds else ()
        return (*launchds, *self._ours())

    def _ours(self) -> tuple[Remove, ...]:
        prefix = self.options.prefix
        files = (names.staged(prefix, self.label), names.due(prefix, self.label))
        return tuple(Remove(file) for file in files if file.exists())


@dataclass(frozen=True)
class Unregistered:
    """GitHub's runner, and the hook with its key."""

    options: Options
    name: str = "actions runner"
    stops: bool = False

    @property
    def is_there(self) -> bool:
        """Whether there is anything of them."""
        return self.options.actions_runner.exists() or self.options.hook.parent.exists()

    def look(self) -> Look:
        """Whether they can be taken away."""
        where = str(self.options.actions_runner)
        if not self.is_there:
            return Look(State.DONE, where, "there is none")
        if Unwanted(self.options, names.ACTIONS_LABEL).is_launchds:
            fix = f"stop the service {names.ACTIONS_LABEL} first, as is said there"
            return Look(State.MISSING, where, "there, not wanted, and it runs", fix)
        return Look(State.TODO, where, "there, and not wanted")

    def actions(self) -> tuple[Action, ...]:
        """Take the registration back, and remove both."""
        return (*ActionsRunner(self.options).taken_back(), Remove(self.options.hook.parent))


@dataclass(frozen=True)
class Removed:
    """Files and folders of setup's.

    Attributes:
        name: For people.
        paths: Which.
    """

    name: str
    paths: tuple[Path, ...]
    stops: bool = False

    def look(self) -> Look:
        """Whether any of them is there."""
        there = [str(path) for path in self.paths if os.path.lexists(path)]
        if there:
            return Look(State.TODO, there[0], "there, and not wanted")
        return Look(State.DONE, str(self.paths[0]), "there is none")

    def actions(self) -> tuple[Action, ...]:
        """Remove them."""
        return tuple(Remove(path) for path in self.paths)
