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
from pathlib import Path

from bridge import mac
from bridge.errors import MachineError
from bridge.mac.options import SetupOptions
from bridge.proc import run_in_terminal

log = logging.getLogger(__name__)

ACTIONS_LABEL = "org.kakeya-mac.actions-runner"
SERVE_LABEL = "org.kakeya-mac.serve"
SERVICE_LABELS = (ACTIONS_LABEL, SERVE_LABEL)
# A daemon that is told to stop may finish its job for so long, before launchd kills it.
EXIT_S = 7200
_PROGRESS_S = 30


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
    options = ("-oIdentitiesOnly=yes", "-oIdentityAgent=none", "-oBatchMode=yes", f"-o{trust}")
    return shlex.join(["ssh", "-F", "/dev/null", "-i", str(key), *options])


def property_list(options: SetupOptions, label: str) -> str:
    """What launchd is told of a service: see launchd.plist(5)."""
    user, output = options.user, str(log_file(options.prefix, label))
    variables = {"HOME": str(options.home), "USER": user, "LOGNAME": user, "LANG": "en_US.UTF-8"}
    variables |= {"PATH": options.services_path, **options.folders}
    # A service is restarted when its property list changes, so what it reads at its start is in KAKEYA_SETUP.
    if label == ACTIONS_LABEL:
        argv, folder = [str(options.actions_runner / "run.sh")], options.actions_runner
        digest = hashlib.sha256(repr(runner_settings(options)).encode()).hexdigest()
        variables["KAKEYA_SETUP"] = digest[:12]
        variables["RUNNER_MANUALLY_TRAP_SIG"] = "1"  # its shell passes signals on, as in GitHub's own service
    else:
        serve = ("runner", "serve", "--remote", options.bus or "", "--name", options.name)
        argv, folder = [str(options.program), *serve], options.prefix
        variables["KAKEYA_SETUP"] = options.environment.resolve().name
        if options.ssh_remote and options.deploy_key.exists():
            variables["GIT_SSH_COMMAND"] = ssh_command(options.deploy_key)
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
    return mac.answer("cat", installed(label))


def is_current(prefix: Path, label: str) -> bool:
    """Whether the installed property list is the staged one, so that launchd runs what setup wants."""
    path = staged(prefix, label)
    return path.is_file() and path.read_text(encoding="utf-8").strip() == read_installed(label)


def query(label: str) -> LaunchdService | None:
    """Ask launchd for a service; None if it does not know the label."""
    said = mac.answer("launchctl", "print", f"system/{label}")
    return None if said is None else parse_print(said)


def parse_print(text: str) -> LaunchdService:
    """Parse ``launchctl print system/LABEL``: the first line of each name is the service's own."""
    lines = re.findall(r"^\s*(state|last exit code) = (.+?)\s*$", text, re.MULTILINE)
    first = dict(reversed(lines))
    return LaunchdService(first.get("state", "not known"), first.get("last exit code", "not known"))


def _foreign_prefix(label: str, prefix: Path) -> Path | None:
    """The prefix of another setup that this service belongs to; None if it is ours or not there."""
    found = re.search(r"<key>StandardOutPath</key>\s*<string>(.*?)</string>", read_installed(label) or "")
    output = log_file(prefix, label) if found is None else Path(html.unescape(found[1]))
    return None if output == log_file(prefix, label) else output.parent.parent


def is_present(label: str, prefix: Path) -> bool:
    """Whether launchd knows our service, or will after a restart."""
    is_there = query(label) is not None or read_installed(label) is not None
    return is_there and _foreign_prefix(label, prefix) is None


def service_file(options: SetupOptions, label: str) -> mac.StepReport:
    """Have a service's property list in the prefix, and the folder of its log."""
    path, text = staged(options.prefix, label), property_list(options, label)
    if mac.is_written(path, text):
        return mac.done(path, "as it should be")
    logs = mac.make_folder(log_file(options.prefix, label).parent)
    return mac.todo(path, "missing, or not what is wanted now", logs, mac.write(path, text))


def service(options: SetupOptions, label: str) -> mac.StepReport:
    """Have launchd run a service with what the options ask for."""
    prefix, target, found = options.prefix, installed(label), query(label)
    if (other := _foreign_prefix(label, prefix)) is not None:
        fix = "a machine has one service of a kind: run uninstall there, or choose another --service here"
        return mac.missing(target, f"it is of the setup in {other}", fix)
    if found is None or not is_current(prefix, label):
        finding = "it has to be restarted with what is wanted now" if found else "launchd does not know it"
        return mac.todo(target, finding, *_start_actions(options, label))
    where = f"launchctl print system/{label}"
    if found.runs:
        return mac.done(where, "runs, also after a restart")
    fix = f"see why: tail {log_file(prefix, label)}; launchd tries again by itself"
    return mac.missing(where, f"launchd knows it, and it does not run: {found.said}", fix)


def unwanted_service(options: SetupOptions, label: str) -> mac.StepReport:
    """Remove our service; that of another setup is left alone."""
    target, own = installed(label), staged(options.prefix, label)
    actions = [mac.remove(own)] if own.exists() else []
    if is_present(label, options.prefix):
        actions = [*_stop_actions(options, label), mac.command("rm", "-f", target, sudo=True), *actions]
    if not actions:
        return mac.done(target, "none of ours")
    return mac.todo(target, "there, and not wanted", *actions)


def _start_actions(options: SetupOptions, label: str) -> list[mac.Action]:
    """Stop a service, install its property list and start it."""
    source, target = staged(options.prefix, label), installed(label)
    return [
        *_stop_actions(options, label),
        mac.command("install", "-o", "root", "-g", "wheel", "-m", "644", source, target, sudo=True),
        # For a moment after a service has gone, launchd refuses another of that name.
        mac.command("launchctl", "bootstrap", "system", target, sudo=True, tries=4),
        # A program that ends at once runs for a moment, too; then the service is looked at again.
        mac.command("sleep", "5"),
    ]


def _stop_actions(options: SetupOptions, label: str) -> list[mac.Action]:
    """Stop a service once it has no job: our daemon finishes its own, GitHub's runner would cancel it."""
    remedy = "an administrator types the commands that setup prints without --sudo"
    # Ask sudo first: a refusal halfway would leave the Mac without its service.
    actions = [mac.command("-v", sudo=True, remedy=remedy)]
    if label == ACTIONS_LABEL:
        runner = re.sub(r"([][().*+?{}|^$\\])", r"\\\1", str(options.actions_runner))
        pgrep, busy = ("pgrep", "-f", f"{runner}/bin[^/]*/Runner.Worker"), "GitHub's runner has a job"
        line = f"while {shlex.join(pgrep)} >/dev/null; do sleep 5; done"
        actions.append(mac.Action(line, lambda: wait_while(lambda: mac.answer(*pgrep) is not None, busy)))
    line = f"while launchctl print system/{label} >/dev/null 2>&1; do sleep 1; done"
    return [
        *actions,
        mac.command("launchctl", "bootout", f"system/{label}", sudo=True, may_fail=True),
        mac.Action(line, lambda: wait_while(lambda: query(label) is not None, f"{label} finishes its job")),
    ]


def wait_while(is_busy: Callable[[], bool], what: str) -> None:
    """Wait until a job has ended; `what` says which, in the log and in the error."""
    for waited_s in range(EXIT_S + 60):
        if not is_busy():
            return
        if waited_s % _PROGRESS_S == _PROGRESS_S - 1:
            log.info("      %s; waiting for %d s", what, waited_s + 1)
            # Keep the password valid: there may be no person to type it a second time.
            with contextlib.suppress(MachineError):
                run_in_terminal(["sudo", "-n", "-v"], env=mac.owners_environment(), cwd=mac.ROOT)
        time.sleep(1.0)
    raise MachineError(f"{what}, still after {EXIT_S} s", "run this again later")
