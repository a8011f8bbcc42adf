"""Can this machine serve requests, and how far can it be trusted to be left alone?"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bridge import doctor, interpreter
from bridge.client.remotes import resolve_remote
from bridge.doctor import Check, Level, client, fail, failed, ok, warn
from bridge.errors import BridgeError
from bridge.git.repo import GitRepo
from bridge.mac import launchd, options
from bridge.mac.options import FOLDERS, OPTIONS_FILE, SetupUsage, read_stored
from bridge.proc import find_program
from bridge.runner import models
from bridge.runner.config import RunnerConfig, survey_config
from bridge.runner.machine import CAFFEINATE
from bridge.runner.policy import FILE_NAME, Policy
from bridge.settings import Settings

LEAST_FREE = 20 * 10**9
_SERVER = "https://github.com"
_SETUP = "kakeya_mac runner setup"


def examine(
    settings: Settings, repository: Path, *, allow_public: bool = False, prefix: Path | None = None
) -> Iterator[Check]:
    """Every check in turn.

    Args:
        settings: Where state and the owner's files lie, and the remote.
        repository: Where it is asked from; need not be a checkout.
        allow_public: A public repository is meant.
        prefix: Where setup put everything; None: around this environment, or in the home.
    """
    prefix = prefix or options.prefix_around(Path(sys.prefix)) or Path.home() / options.PREFIX
    told: Mapping[str, Any] = {}
    damaged = None
    try:
        told = read_stored(prefix)
    except SetupUsage as error:
        damaged = failed("setup", str(prefix / OPTIONS_FILE), error, _SETUP)
    has_runner = (prefix / options.ACTIONS_RUNNER).is_dir()
    settings = _as_set_up(settings, told)
    yield doctor.python()
    git = GitRepo(repository)
    version = doctor.git_version(git)
    yield version
    yield doctor.ssh_keygen()
    yield _interpreter()
    yield from _owner(settings, git, has_runner=has_runner)
    if damaged is not None:
        yield damaged
    yield from services(prefix)
    yield _awake()
    yield _disk(settings.state_dir)
    yield from doctor.engine()
    named = settings.remote or _address(told)
    yield from _remote(settings, git, named, has_runner=has_runner, allow_public=allow_public)


def _as_set_up(settings: Settings, told: Mapping[str, Any]) -> Settings:
    """The settings with the owner's folders that setup was told, where this process is told none."""
    folders = {
        f"{name}_dir": Path(told[name])
        for name, variable in FOLDERS.items()
        if told.get(name) is not None and not os.environ.get(variable)
    }
    return settings.model_copy(update=folders)


def _address(told: Mapping[str, Any]) -> str | None:
    """The repository that this machine was set up for; None: setup was not told one."""
    url, remote = told.get("url"), told.get("remote")
    if "/" in urlsplit(url or _SERVER).path.strip("/"):
        return str(url)
    return None if remote is None else str(remote)


def _owner(settings: Settings, git: GitRepo, *, has_runner: bool) -> Iterator[Check]:
    """What the owner's files allow, and who can run code here."""
    remote, folder = settings.remote or "none", settings.config_dir
    try:
        config = survey_config(remote, state_dir=settings.state_dir, config_dir=folder)
    except BridgeError as error:
        yield failed("policy", str(folder), error)
        return
    summary = config.rulebook.rules.summary()
    if config.policy.require_signature:
        yield ok("policy", FILE_NAME, f"{summary}; only signed requests")
    else:
        fix = f"kakeya_mac runner signers add NAME --key …, and require_signature = true in {FILE_NAME}"
        yield warn(
            "policy", FILE_NAME, f"{summary}; unsigned requests are taken: whoever can push may ask", fix
        )
    yield trust(has_runner=has_runner)
    yield from _models(config)
    yield _lfs(git, config.policy)


def trust(*, has_runner: bool) -> Check:
    """Who can run code as this account.

    Args:
        has_runner: GitHub's runner is installed here.
    """
    where = "this process's user"
    if os.getuid() == 0:
        finding = "jobs and workflow runs would belong to root"
        return fail("trust", where, finding, "use an account without rights of its own")
    if not has_runner:
        finding = "no runner of GitHub Actions here: requests come to this account's daemon alone"
        return ok("trust", where, finding)
    finding = (
        "a runner of GitHub Actions: whoever can push to its repository can run code as this user; the policy"
        " prevents mistakes, not attacks"
    )
    fix = "`kakeya_mac runner serve` instead: a daemon runs nothing but what its policy admits"
    return warn("trust", where, finding, fix)


def services(prefix: Path) -> Iterator[Check]:
    """Whether launchd runs what setup made, which outlives a restart without anybody who logs in.

    Args:
        prefix: Where setup put everything.
    """
    if find_program("launchctl") is None:
        yield ok("service", "launchctl", "not macOS: who keeps a daemon running is not known here")
        return
    for label in launchd.SERVICE_LABELS:
        if not launchd.staged(prefix, label).exists():
            continue
        name, where, known = f"service {label}", f"launchctl print system/{label}", launchd.query(label)
        if known is None:
            yield fail(name, where, "launchd does not know it", f"{_SETUP} --sudo")
        elif not known.runs:
            fix = f"see why: tail {launchd.log_file(prefix, label)}"
            yield fail(name, where, f"it does not run: {known.said}", fix)
        elif not launchd.is_current(prefix, label):
            yield warn(name, where, "it has to be restarted with what setup wants now", f"{_SETUP} --sudo")
        else:
            yield ok(name, where, "runs, and starts again after a restart")


def _remote(
    settings: Settings, git: GitRepo, named: str | None, *, has_runner: bool, allow_public: bool
) -> Iterator[Check]:
    try:
        remote = resolve_remote(git, named)
    except BridgeError as error:
        where = f"--remote, KAKEYA_REMOTE, config.toml, {OPTIONS_FILE}, the policy, origin"
        fix = "name it: --remote, or `remote` in config.toml"
        # Of a machine that runs workflows it must be known whether strangers can propose them.
        level = Level.FAIL if has_runner else Level.WARN
        yield Check("remote", level, where, f"not looked at: {error.message}", fix)
        return
    answer = client.reachable(git, remote)
    yield answer
    is_reachable = answer.level is not Level.FAIL
    if is_reachable:
        yield from client.bus_load(settings, git, remote)
    yield from client.github(
        settings, git, remote, allow_public=allow_public, is_reachable=is_reachable, is_dangerous=True
    )


def _interpreter() -> Check:
    path = interpreter.record_path()
    try:
        recorded, seen = interpreter.read(path), interpreter.observe()
    except BridgeError as error:
        return failed("interpreter", str(path), error, _SETUP)
    if recorded is None:
        finding = "not recorded: a replacement under a running machine would go unnoticed"
        return warn("interpreter", str(path), finding, f"{_SETUP} (or scripts/setup_mac.sh)")
    if found := interpreter.differences(recorded, seen):
        finding = f"{'; '.join(found)}: requests are refused"
        return fail("interpreter", str(path), finding, f"{_SETUP}, if that is meant")
    return ok("interpreter", str(path), f"as recorded: Python {seen.version}, {seen.realpath}")


def _models(config: RunnerConfig) -> Iterator[Check]:
    for name, value in sorted(config.environment.items()):
        if name.startswith("KAKEYA_MODEL_") and value and not os.path.isdir(os.path.expanduser(value)):
            finding = f"it is {value!r}, which is no folder"
            yield fail(f"models: {name}", name, finding, "correct it, or unset it")
    for preset in config.presets.values():
        if not preset.models or preset.runs_repo_code:
            continue
        name, where = f"models: {preset.name}", ", ".join(need.name for need in preset.models)
        try:
            found = models.resolve(preset.models, config.model_places(workload=None))
        except models.ModelMissing as error:
            yield failed(name, where, error, "", Level.WARN)
        else:
            yield ok(name, where, f"whole: {', '.join(map(str, found.values()))}")


def _lfs(git: GitRepo, policy: Policy) -> Check:
    where, endpoint = "git lfs version", policy.lfs.endpoint
    done = git.attempt("lfs", "version")
    if done.exit_code == 0:
        source = f"objects come from {endpoint}" if endpoint else "commits with pointers are refused"
        return ok("git-lfs", where, f"{done.stdout.decode().split(' ')[0]}; {source}")
    finding = "not installed; commits with pointers are refused"
    if endpoint is None:
        return ok("git-lfs", where, finding)
    return fail("git-lfs", where, finding, "install git-lfs (macOS: brew install git-lfs)")


def _awake() -> Check:
    if sys.platform != "darwin":
        return ok("awake", sys.platform, "nothing is needed here")
    if find_program(CAFFEINATE) is None:
        return warn("awake", "PATH", f"no {CAFFEINATE}: the Mac may sleep under a job", "use macOS's own")
    return ok("awake", CAFFEINATE, "keeps the machine awake while a job runs")


def _disk(folder: Path) -> Check:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    finding = f"{free / 1e9:.0f} GB free"
    if free >= LEAST_FREE:
        return ok("disk", str(folder), finding)
    fix = f"make space: {LEAST_FREE / 1e9:.0f} GB are needed for models and jobs"
    return warn("disk", str(folder), finding, fix)
