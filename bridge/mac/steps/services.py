"""What launchd keeps running: from a restart on, without anybody who logs in, and children left alone.

A LaunchAgent would wait for a login on the screen, so these are LaunchDaemons that run as the account's user.
Keys of property lists: launchd.plist(5).
"""

from __future__ import annotations

import plistlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.mac import names
from bridge.mac.action import Action, Folder, Remove, Run, Write
from bridge.mac.options import Options
from bridge.mac.step import Look, State, succeeds

# So long a daemon that is told to stop may finish its job, before launchd kills it.
_EXIT_S = 7200
_THROTTLE_S = 10


@dataclass(frozen=True)
class Wanted:
    """A service.

    Attributes:
        label: Its name for launchd.
        argv: What it runs.
        folder: Where.
        variables: Beside HOME, PATH and the like.
    """

    label: str
    argv: tuple[str, ...]
    folder: Path
    variables: tuple[tuple[str, str], ...] = ()


def wanted(options: Options) -> tuple[Wanted, ...]:
    """The services that the options ask for."""
    found = []
    if options.is_actions:
        runner = options.actions_runner
        # Has the runner's shell pass signals on to it, as its own service does.
        own = (("RUNNER_MANUALLY_TRAP_SIG", "1"),)
        found.append(Wanted(names.ACTIONS_LABEL, (str(runner / "run.sh"),), runner, own))
    if options.is_serving:
        argv = (
            str(options.program),
            "runner",
            "serve",
            "--remote",
            options.bus or "",
            "--name",
            options.name,
        )
        found.append(Wanted(names.SERVE_LABEL, argv, options.prefix))
    return tuple(found)


def property_list(options: Options, service: Wanted) -> dict[str, Any]:
    """What launchd is told."""
    kept = {
        name: options.environ[name] for name in ("KAKEYA_CONFIG", "KAKEYA_STATE") if name in options.environ
    }
    log = str(options.prefix / "logs" / f"{service.label}.log")
    return {
        "Label": service.label,
        "ProgramArguments": list(service.argv),
        "WorkingDirectory": str(service.folder),
        "UserName": options.user,
        "EnvironmentVariables": {
            "HOME": str(options.home),
            "USER": options.user,
            "LOGNAME": options.user,
            "PATH": options.services_path,
            "LANG": "en_US.UTF-8",
            **kept,
            **dict(service.variables),
        },
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": _THROTTLE_S,
        "AbandonProcessGroup": True,
        "ExitTimeOut": _EXIT_S,
        "ProcessType": "Interactive",
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }


def staged(options: Options, service: Wanted) -> Write:
    """Its property list in the prefix, where nobody needs to be an administrator."""
    data = plistlib.dumps(property_list(options, service)).decode("utf-8")
    return Write(options.prefix / "services" / f"{service.label}.plist", data)


@dataclass(frozen=True)
class ServiceFile:
    """The property list of one service, ready to be put in place."""

    options: Options
    service: Wanted
    stops: bool = False

    @property
    def name(self) -> str:
        """With its label."""
        return f"service file {self.service.label}"

    def look(self) -> Look:
        """Whether it says what the options ask for."""
        file = staged(self.options, self.service)
        if file.is_there:
            return Look(State.DONE, str(file.path), "as it should be")
        return Look(State.TODO, str(file.path), "missing, or another one")

    def actions(self) -> tuple[Action, ...]:
        """Write it."""
        return (Folder(self.options.prefix / "logs"), staged(self.options, self.service))

    def undo(self) -> tuple[Action, ...]:
        """Remove it."""
        return (Remove(staged(self.options, self.service).path),)


@dataclass(frozen=True)
class Service:
    """One service, as launchd knows it."""

    options: Options
    service: Wanted
    stops: bool = False

    @property
    def name(self) -> str:
        """With its label."""
        return f"service {self.service.label}"

    @property
    def _installed(self) -> str:
        return str(names.DAEMONS / f"{self.service.label}.plist")

    @property
    def _staged(self) -> str:
        return str(staged(self.options, self.service).path)

    def look(self) -> Look:
        """Whether launchd runs what the options ask for."""
        known = succeeds("launchctl", "print", f"system/{self.service.label}")
        if known and succeeds("cmp", "-s", self._staged, self._installed):
            return Look(
                State.DONE, f"launchctl print system/{self.service.label}", "runs, also after a restart"
            )
        finding = "another one runs" if known else "launchd does not know it"
        if self.options.sudo:
            return Look(State.TODO, self._installed, finding)
        typed = "; ".join(action.said for action in self.actions())
        return Look(State.MISSING, self._installed, finding, f"setup with --sudo, or type: {typed}")

    def actions(self) -> tuple[Action, ...]:
        """Put the property list in place and have launchd take it up, as an administrator."""
        own = ("install", "-o", "root", "-g", "wheel", "-m", "644", self._staged, self._installed)
        return (
            self._forget,
            Run(own, is_administrators=True),
            Run(("launchctl", "bootstrap", "system", self._installed), is_administrators=True),
        )

    def undo(self) -> tuple[Action, ...]:
        """Have launchd forget it."""
        return (self._forget, Run(("rm", "-f", self._installed), is_administrators=True))

    @property
    def _forget(self) -> Run:
        argv = ("launchctl", "bootout", f"system/{self.service.label}")
        return Run(argv, is_administrators=True, may_fail=True)
