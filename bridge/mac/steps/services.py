"""What launchd is told to keep running: from a restart on, without a login, and children left alone.

A LaunchAgent would wait for a login on the screen, so these are LaunchDaemons that run as the account's user.
Keys of property lists: launchd.plist(5).
"""

from __future__ import annotations

import plistlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.mac import names
from bridge.mac.action import Action, Folder, Write
from bridge.mac.options import Options
from bridge.mac.step import Look, State

# So long a daemon that is told to stop may finish its job, before launchd kills it.
EXIT_S = 7200
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
    log = str(names.log(options.prefix, service.label))
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
            **options.folders,
            **dict(service.variables),
        },
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": _THROTTLE_S,
        "AbandonProcessGroup": True,
        "ExitTimeOut": EXIT_S,
        "ProcessType": "Interactive",
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }


def staged(options: Options, service: Wanted) -> Write:
    """Its property list in the prefix, where nobody needs to be an administrator."""
    data = plistlib.dumps(property_list(options, service)).decode("utf-8")
    return Write(names.staged(options.prefix, service.label), data)


def is_due(options: Options, label: str) -> Write:
    """A mark that a service is to be started again, written before what it reads at its start changes."""
    return Write(names.due(options.prefix, label), "what it reads when it starts has changed\n")


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
        return (Folder(self.options.prefix / names.LOGS), staged(self.options, self.service))
