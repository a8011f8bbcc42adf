"""Services of launchd: what it is told, what it says, and how a service is started and stopped.

A LaunchAgent would wait for a login on the screen, so these are LaunchDaemons that run as the account's user.
A label belongs to the whole machine, so a service is ours only if its output goes to our prefix.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import logging
import plistlib
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bridge.errors import MachineError
from bridge.mac.actions import ROOT, Action, answer, command, owners_environment, remove, succeeds
from bridge.mac.options import SetupOptions
from bridge.proc import run_in_terminal

log = logging.getLogger(__name__)

ACTIONS_LABEL = "org.kakeya-mac.actions-runner"
SERVE_LABEL = "org.kakeya-mac.serve"
SERVICE_LABELS = (ACTIONS_LABEL, SERVE_LABEL)
# A daemon that is told to stop may finish its job for so long, before launchd kills it.
EXIT_S = 7200
_START_S = 20.0
_PAUSE_S = 0.5
_PROGRESS_S = 30.0
# A program that ends at once runs for a moment, too, so it has to be seen so many times in a row.
_STEADY = 6


@dataclass(frozen=True)
class LaunchdService:
    """A service as launchd describes it: its state and its last exit code."""

    state: str
    last_exit: str

    @property
    def runs(self) -> bool:
        """Whether it has a process."""
        return self.state == "running"

    @property
    def said(self) -> str:
        """The state in one line."""
        return f"its state is {self.state}, its last exit code {self.last_exit}"


def staged(prefix: Path, label: str) -> Path:
    """A property list in the prefix, where it needs no administrator."""
    return prefix / "services" / f"{label}.plist"


def installed(label: str) -> Path:
    """Where launchd finds a property list when the machine starts."""
    return Path("/Library/LaunchDaemons") / f"{label}.plist"


def log_file(prefix: Path, label: str) -> Path:
    """Output of a service."""
    return prefix / "logs" / f"{label}.log"


def runner_settings(options: SetupOptions) -> dict[Path, str]:
    """The files that GitHub's runner reads when it starts: its variables, and the PATH of jobs."""
    folder = options.actions_runner
    return {folder / ".env": "LANG=en_US.UTF-8\n", folder / ".path": f"{options.services_path}\n"}


def ssh_command(key: Path) -> str:
    """Have git's ssh use this key only, and the list of servers that lies with it if there is one."""
    hosts = key.with_name("known_hosts")
    trust = f'UserKnownHostsFile="{hosts}"' if hosts.is_file() else "StrictHostKeyChecking=accept-new"
    options = ("IdentitiesOnly=yes", "IdentityAgent=none", "BatchMode=yes", trust)
    words = [word for option in options for word in ("-o", option)]
    return shlex.join(["ssh", "-F", "/dev/null", "-i", str(key), *words])


def property_list(options: SetupOptions, label: str) -> str:
    """What launchd is told of a service: see launchd.plist(5)."""
    user, output, key = options.user, str(log_file(options.prefix, label)), options.deploy_key
    variables = {"HOME": str(options.home), "USER": user, "LOGNAME": user, "LANG": "en_US.UTF-8"}
    variables |= {"PATH": options.services_path, **options.folders}
    if label == ACTIONS_LABEL:
        argv, folder = [str(options.actions_runner / "run.sh")], options.actions_runner
        reads = hashlib.sha256(repr(runner_settings(options)).encode()).hexdigest()[:12]
        variables["RUNNER_MANUALLY_TRAP_SIG"] = "1"  # its shell passes signals on, as in GitHub's own service
    else:
        serve = ("runner", "serve", "--remote", options.bus or "", "--name", options.name)
        argv, folder, reads = (
            [str(options.program), *serve],
            options.prefix,
            options.environment.resolve().name,
        )
        if options.ssh_remote and key.exists():
            variables["GIT_SSH_COMMAND"] = ssh_command(key)
    # A service whose property list has changed is restarted, so what it reads at its start is in here.
    variables["KAKEYA_SETUP"] = reads
    document = {
        "Label": label,
        "ProgramArguments": argv,
        "WorkingDirectory": str(folder),
        "UserName": user,
        "EnvironmentVariables": variables,
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": 10,
        "AbandonProcessGroup": True,  # a job's supervisor outlives a restart of its runner
        "ExitTimeOut": EXIT_S,
        "ProcessType": "Interactive",
        "StandardOutPath": output,
        "StandardErrorPath": output,
    }
    return plistlib.dumps(document).decode()


def read_installed(label: str) -> str | None:
    """The text of the installed property list; None if there is none."""
    return answer("cat", str(installed(label)))


def is_current(prefix: Path, label: str) -> bool:
    """Whether the installed property list is the staged one, so that launchd runs what setup wants."""
    path = staged(prefix, label)
    return path.is_file() and path.read_text(encoding="utf-8").strip() == read_installed(label)


def query(label: str) -> LaunchdService | None:
    """Ask launchd for a service; None if it does not know the label."""
    said = answer("launchctl", "print", f"system/{label}")
    return None if said is None else parse_print(said)


def parse_print(text: str) -> LaunchdService:
    """Parse ``launchctl print system/LABEL``: the first line of each name is the service's own."""
    lines = re.findall(r"^\s*(state|last exit code) = (.+?)\s*$", text, re.MULTILINE)
    first = dict(reversed(lines))
    return LaunchdService(first.get("state", "not known"), first.get("last exit code", "not known"))


def foreign_prefix(label: str, prefix: Path) -> Path | None:
    """The prefix of another setup that this service belongs to; None if it is ours or not there."""
    found = re.search(r"<key>StandardOutPath</key>\s*<string>(.*?)</string>", read_installed(label) or "")
    output = html.unescape(found[1]) if found else str(log_file(prefix, label))
    return None if output == str(log_file(prefix, label)) else Path(output).parent.parent


def is_present(label: str, prefix: Path) -> bool:
    """Whether launchd knows our service, or will after a restart."""
    is_there = query(label) is not None or read_installed(label) is not None
    return is_there and foreign_prefix(label, prefix) is None


def start_actions(options: SetupOptions, label: str) -> list[Action]:
    """Stop a service, install its property list, start it and see that it runs."""
    source, target = str(staged(options.prefix, label)), str(installed(label))
    failure = f"{label} does not run; see why: tail {log_file(options.prefix, label)}"

    def runs() -> bool:
        found = query(label)
        return found is not None and found.runs

    see = partial(wait_until, runs, failure, limit_s=_START_S, in_a_row=_STEADY)
    former_hook = options.prefix / "hook"  # of earlier versions: a running runner fails without it
    return [
        *stop_actions(options, label),
        command("install", "-o", "root", "-g", "wheel", "-m", "644", source, target, sudo=True),
        # For a moment after a service has gone, launchd refuses another of that name.
        command("launchctl", "bootstrap", "system", target, sudo=True, tries=4),
        Action(f"launchctl print system/{label} | grep -m1 state", see),
        *([remove(former_hook)] if label == ACTIONS_LABEL and former_hook.exists() else []),
    ]


def stop_actions(options: SetupOptions, label: str) -> list[Action]:
    """Stop a service once it has no job: our daemon finishes its own, GitHub's runner would cancel it."""
    remedy = "an administrator types the commands that setup prints without --sudo"
    # Ask sudo first: a refusal halfway would leave the Mac without its service.
    actions = [command("-v", sudo=True, remedy=remedy)]
    if label == ACTIONS_LABEL:
        runner = re.sub(r"([][().*+?{}|^$\\])", r"\\\1", str(options.actions_runner))
        pgrep, busy = ("pgrep", "-f", f"{runner}/bin[^/]*/Runner.Worker"), "GitHub's runner has a job"
        line = f"while {shlex.join(pgrep)} >/dev/null; do sleep 5; done"
        actions.append(Action(line, lambda: wait_until(lambda: not succeeds(*pgrep), busy)))
    line = f"while launchctl print system/{label} >/dev/null 2>&1; do sleep 1; done"
    return [
        *actions,
        command("launchctl", "bootout", f"system/{label}", sudo=True, may_fail=True),
        Action(line, lambda: wait_until(lambda: query(label) is None, f"{label} finishes its job")),
    ]


def wait_until(
    holds: Callable[[], bool],
    what: str,
    *,
    limit_s: float = EXIT_S + 60.0,
    in_a_row: int = 1,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until something holds, some times in a row; `what` says why not, in the log and in the error."""
    began = told = clock()
    seen = 0
    while (seen := seen + 1 if holds() else 0) < in_a_row:
        now = clock()
        if not seen and now - began >= limit_s:
            raise MachineError(f"{what}, still after {limit_s:.0f} s", "run this again later")
        if now - told >= _PROGRESS_S:
            log.info("      %s; waiting since %.0f s", what, now - began)
            # Keep the password valid: there may be no person to type it a second time.
            with contextlib.suppress(MachineError):
                run_in_terminal(["sudo", "-n", "-v"], env=owners_environment(), cwd=ROOT)
            told = now
        sleep(_PAUSE_S)
