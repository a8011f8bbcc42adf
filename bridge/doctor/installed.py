"""What setup made on this machine: GitHub's runner and its hook, services, and for which repository."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bridge.doctor.finding import Check, Level
from bridge.errors import BridgeError
from bridge.mac import launchd, names
from bridge.mac.options import FOLDERS, SetupUsage
from bridge.mac.steps.access import is_meant
from bridge.mac.steps.deploy_key import advice
from bridge.mac.steps.remembered import recalled
from bridge.proc import find_program
from bridge.runner.policy import Policy
from bridge.settings import Settings
from bridge.workflow.access import probe

_SERVER = "https://github.com"
_SETUP = "kakeya_mac runner setup"


def prefix() -> Path:
    """Where setup put everything: around this environment, or in the home."""
    return names.prefix_around(Path(sys.prefix)) or Path.home() / names.PREFIX


def has_runner(prefix: Path) -> bool:
    """Whether GitHub's runner is installed there."""
    return (prefix / names.ACTIONS_RUNNER).is_dir()


def as_set_up(settings: Settings, prefix: Path, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings with the owner's folders that setup was told, where this process is told none."""
    environ, kept = os.environ if environ is None else environ, _asked(prefix)
    told = {name: kept.get(name) for name, variable in FOLDERS.items() if not environ.get(variable)}
    config, state = told.get("config"), told.get("state")
    return dataclasses.replace(
        settings,
        config_dir=settings.config_dir if config is None else Path(config),
        state_dir=settings.state_dir if state is None else Path(state),
    )


def address(prefix: Path, policy: Policy | None) -> str | None:
    """The repository that this machine was set up for, or that its policy names; None: neither says."""
    kept = _asked(prefix)
    url, remote = kept.get("url"), kept.get("remote")
    parts = urlsplit(url or _SERVER)
    if "/" in parts.path.strip("/"):
        return str(url)
    if remote is not None:
        return str(remote)
    named = None if policy is None else policy.actions.repository
    return None if named is None else f"{parts.scheme}://{parts.netloc}/{named}"


def memory(prefix: Path) -> Iterator[Check]:
    """Whether what setup was asked can be read, where it is damaged."""
    try:
        recalled(prefix)
    except SetupUsage as error:
        yield Check("setup", Level.FAIL, str(prefix / names.ASKED), error.message, error.remedy or _SETUP)


def _asked(prefix: Path) -> dict[str, Any]:
    """What setup was asked; nothing where that cannot be read, which `memory` says."""
    try:
        return recalled(prefix)
    except SetupUsage:
        return {}


def hook(prefix: Path) -> Check:
    """Whether GitHub's runner asks before each job."""
    settings = prefix / names.ACTIONS_RUNNER / ".env"
    if not has_runner(prefix):
        return Check("hook", Level.OK, str(settings.parent), "there is no runner of GitHub Actions here")
    try:
        lines = settings.read_text().splitlines()
    except OSError:
        lines = []
    named = next((line.partition("=")[2] for line in lines if line.startswith(f"{names.HOOK_VARIABLE}=")), "")
    if not named:
        return Check(
            "hook", Level.FAIL, str(settings), f"no {names.HOOK_VARIABLE}: every job may begin", _SETUP
        )
    if not re.fullmatch(names.UNQUOTED, named):
        finding = f"{named!r} goes unquoted through a shell, which would start something else"
        fix = f"{_SETUP} --prefix with a path of letters, digits and . _ - /"
        return Check("hook", Level.FAIL, str(settings), finding, fix)
    if not os.access(named, os.X_OK):
        return Check("hook", Level.FAIL, str(settings), f"{named} is not there, or is no program", _SETUP)
    return Check("hook", Level.OK, str(settings), f"called before each job: {named}")


def access(settings: Settings, prefix: Path) -> Iterator[Check]:
    """Whether the hook can read the repository whose jobs it judges."""
    if not has_runner(prefix):
        return
    where = "kakeya_mac runner hook --probe"
    try:
        found = probe(state_dir=settings.state_dir, config_dir=settings.config_dir)
    except BridgeError as error:
        yield Check("hook access", Level.FAIL, where, error.message, error.remedy or "mend the policy")
        return
    url = _asked(prefix).get("url")
    asked = urlsplit(url or "")
    if found.repository is None:
        yield Check("hook access", Level.FAIL, where, found.said, found.remedy or "name it in the policy")
    elif url is not None and not is_meant(found.repository, asked.path):
        finding = f"the policy lets runs of {found.repository} begin, and the runner is registered for {url}"
        yield Check("hook access", Level.FAIL, where, finding, "name that repository in the policy")
    elif not found.reads:
        server = f"{asked.scheme}://{asked.netloc}" if asked.netloc else _SERVER
        fix = advice(f"{server}/{found.repository}", found.key)
        yield Check("hook access", Level.FAIL, where, found.said, fix)
    else:
        yield Check("hook access", Level.OK, where, found.said)


def services(prefix: Path) -> Iterator[Check]:
    """Whether launchd runs what setup made, which outlives a restart without anybody who logs in."""
    if find_program("launchctl") is None:
        yield Check(
            "service", Level.OK, "launchctl", "not macOS: who keeps a daemon running is not known here"
        )
        return
    for label in names.LABELS:
        if not names.staged(prefix, label).exists():
            continue
        name, where, known = f"service {label}", f"launchctl print system/{label}", launchd.known(label)
        if known is None:
            yield Check(name, Level.FAIL, where, "launchd does not know it", f"{_SETUP} --sudo")
        elif not known.runs:
            fix = f"see why: tail {names.log(prefix, label)}"
            yield Check(name, Level.FAIL, where, f"it does not run: {known.said}", fix)
        elif names.due(prefix, label).exists():
            finding = "it runs with what it read before that changed"
            yield Check(name, Level.WARN, where, finding, f"{_SETUP} --sudo")
        else:
            yield Check(name, Level.OK, where, "runs, and begins again after a restart")
