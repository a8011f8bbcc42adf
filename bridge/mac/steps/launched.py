"""Services as launchd knows them: put in place, started again when they must be, and taken away."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.mac import launchd, names
from bridge.mac.action import Action, Run
from bridge.mac.options import Options
from bridge.mac.step import Look, State, succeeds
from bridge.mac.steps.services import EXIT_S, Wanted

# launchd has killed a service by then.
_GONE_S = EXIT_S + 60.0
# For a moment after a service has gone launchd still refuses one of its name.
_TRIES = 4


@dataclass(frozen=True)
class Service:
    """One service that is asked for."""

    options: Options
    service: Wanted
    stops: bool = False

    @property
    def name(self) -> str:
        """With its label."""
        return f"service {self.service.label}"

    def look(self) -> Look:
        """Whether launchd runs what the options ask for, with what they ask for."""
        label, prefix = self.service.label, self.options.prefix
        known = launchd.known(label)
        if (other := launchd.stranger(label, prefix, known)) is not None:
            fix = (
                "a machine has one service of a kind: run uninstall there, or ask for another --service here"
            )
            return Look(State.MISSING, str(names.installed(label)), f"it is of the setup in {other}", fix)
        is_ours = known is not None and succeeds("cmp", "-s", self._staged, str(names.installed(label)))
        is_due = names.due(prefix, label).exists()
        if known is not None and is_ours and not is_due:
            where = f"launchctl print system/{label}"
            if known.runs:
                return Look(State.DONE, where, "runs, also after a restart")
            fix = f"see why: tail {names.log(prefix, label)}; launchd tries again by itself"
            return Look(State.MISSING, where, f"launchd knows it, and it does not run: {known.said}", fix)
        finding = "launchd does not know it"
        if known is not None:
            finding = "it is to be started again" if is_ours else "another one runs"
        if self.options.sudo:
            return Look(State.TODO, str(names.installed(label)), finding)
        return Look(State.MISSING, str(names.installed(label)), finding, typed(self.actions()))

    def actions(self) -> tuple[Action, ...]:
        """Have launchd let go of it, put the property list in place, have it taken up, and see it run."""
        label, prefix = self.service.label, self.options.prefix
        own = ("install", "-o", "root", "-g", "wheel", "-m", "644", self._staged, str(names.installed(label)))
        up = ("launchctl", "bootstrap", "system", str(names.installed(label)))
        return (
            *let_go(self.options, label, Run(own, is_administrators=True)),
            Run(up, is_administrators=True, tries=_TRIES),
            launchd.Running(label, names.log(prefix, label)),
            # An administrator's, for it is one who types this where the account is none.
            Run(("rm", "-f", str(names.due(prefix, label))), is_administrators=True),
        )

    @property
    def _staged(self) -> str:
        return str(names.staged(self.options.prefix, self.service.label))


@dataclass(frozen=True)
class Nothing:
    """That no service is asked for."""

    name: str = "service"
    stops: bool = False

    def look(self) -> Look:
        """Say so."""
        fix = "--url URL for workflows of GitHub, --remote URL for the daemon; or start it by hand"
        return Look(State.ADVICE, "--service none", "nothing is kept running", fix)

    def actions(self) -> tuple[Action, ...]:
        """Nothing."""
        return ()


def let_go(options: Options, label: str, *before: Action) -> tuple[Action, ...]:
    """Have launchd let go of a service, and wait until it has: a daemon finishes its job first.

    Args:
        options: What setup is to make.
        label: Of the service.
        before: What else is done first.
    """
    remedy = "an administrator types the commands that setup prints without --sudo"
    idle = (launchd.Idle(options.actions_runner, _GONE_S),) if label == names.ACTIONS_LABEL else ()
    return (
        Run(("-v",), is_administrators=True, remedy=remedy),  # else a sudo that says no would be waited for
        *before,
        *idle,
        Run(("launchctl", "bootout", f"system/{label}"), is_administrators=True, may_fail=True),
        launchd.Gone(label, _GONE_S),
    )


def typed(actions: tuple[Action, ...]) -> str:
    """What a person types instead, who may."""
    return f"setup with --sudo, or an administrator types: {'; '.join(action.said for action in actions)}"
