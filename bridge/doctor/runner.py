"""Can this machine serve requests, and how far can it be trusted to be left alone?"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from bridge import interpreter
from bridge.bus.git import Git
from bridge.client import remotes
from bridge.doctor import actions, basics, client, installed
from bridge.doctor.finding import Check, Level
from bridge.errors import BridgeError
from bridge.mac import names
from bridge.proc import find_program
from bridge.runner import models
from bridge.runner.awake import PROGRAM
from bridge.runner.check import places
from bridge.runner.policy import FILE_NAME, Policy
from bridge.runner.policy.types import ActionsRule
from bridge.runner.station import Station, survey_station
from bridge.settings import Settings
from bridge.workflow.access import using_key

LEAST_FREE = 20 * 10**9


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
    prefix = prefix or installed.prefix()
    settings = installed.as_set_up(settings, prefix)
    yield basics.python()
    git = Git(repository)
    version = basics.git_version(git)
    yield version
    yield basics.ssh_keygen()
    yield basics.engine()
    yield _interpreter()
    station = None
    try:
        station = survey_station(
            settings.remote or "none", state_dir=settings.state_dir, config_dir=settings.config_dir
        )
    except BridgeError as error:
        yield Check("policy", Level.FAIL, str(settings.config_dir), error.message, error.remedy or "mend it")
    if station is not None:
        yield _policy(station.policy, station.rulebook.rules.summary())
        yield _trust(station.policy, has_runner=installed.has_runner(prefix))
        yield from _models(station)
        yield _lfs(git, station.policy)
    yield from installed.memory(prefix)
    yield installed.hook(prefix)
    yield from installed.access(settings, prefix)
    yield from installed.services(prefix)
    yield _awake()
    yield _disk(settings.state_dir)
    if basics.has_engine():
        yield from basics.isolation()
    policy = None if station is None else station.policy
    yield from _bus(settings, git, prefix, policy, allow_public=allow_public)


def _bus(
    settings: Settings, git: Git, prefix: Path, policy: Policy | None, *, allow_public: bool
) -> Iterator[Check]:
    own = installed.address(prefix, policy) if settings.remote is None else None
    rule = ActionsRule() if policy is None or own is None else policy.actions
    # Of the repository that the hook judges it knows how to read it.
    slug = (rule.repository or "").lower()
    is_the_hooks = own is not None and slug != "" and own.lower().endswith(f"/{slug}")
    if is_the_hooks and rule.key is not None and rule.key.is_file():
        with using_key(rule):
            yield from _remote(settings, git, prefix, rule.fetch or own, allow_public=allow_public)
    else:
        yield from _remote(settings, git, prefix, settings.remote or own, allow_public=allow_public)


def _remote(
    settings: Settings, git: Git, prefix: Path, named: str | None, *, allow_public: bool
) -> Iterator[Check]:
    try:
        remote = remotes.resolve_remote(git, named)
    except BridgeError as error:
        where = f"--remote, KAKEYA_REMOTE, config.toml, {names.ASKED}, the policy, origin"
        fix = "name it: --remote, or `remote` in config.toml"
        # Of a machine that runs workflows it must be known whether strangers can propose them.
        level = Level.FAIL if installed.has_runner(prefix) else Level.WARN
        yield Check("remote", level, where, f"not looked at: {error.message}", fix)
        return
    reachable = client.reachable(git, remote)
    yield reachable
    if reachable.level is Level.FAIL:
        yield from actions.seen_by(remote, allow_public=allow_public)
    else:
        yield from actions.examine(settings, git, remote, allow_public=allow_public, dangerous=True)


def _interpreter() -> Check:
    path = interpreter.record_path()
    try:
        recorded, seen = interpreter.read(path), interpreter.observe()
    except BridgeError as error:
        return Check(
            "interpreter", Level.FAIL, str(path), error.message, error.remedy or "kakeya_mac runner setup"
        )
    if recorded is None:
        return Check(
            "interpreter",
            Level.WARN,
            str(path),
            "not recorded: nobody would notice that it was replaced under a running machine",
            "kakeya_mac runner setup (or scripts/setup_mac.sh)",
        )
    if found := interpreter.differences(recorded, seen):
        fix = "kakeya_mac runner setup, if that is meant"
        return Check("interpreter", Level.FAIL, str(path), f"{'; '.join(found)}: requests are refused", fix)
    return Check("interpreter", Level.OK, str(path), f"as recorded: Python {seen.version}, {seen.realpath}")


def _policy(policy: Policy, summary: str) -> Check:
    if policy.require_signature:
        return Check("policy", Level.OK, str(policy.source), f"{summary}; only signed requests")
    return Check(
        "policy",
        Level.WARN,
        str(policy.source),
        f"{summary}; unsigned requests are taken: whoever can push may ask",
        f"kakeya_mac runner signers add NAME --key …, and require_signature = true in {FILE_NAME}",
    )


def _trust(policy: Policy, *, has_runner: bool = False) -> Check:
    where = f"[actions] execute in {policy.source}"
    if os.getuid() == 0:
        fix = "let an account without rights of its own run it"
        return Check("trust", Level.FAIL, "this process's user", "jobs and runs would belong to root", fix)
    if policy.actions.repository is None and has_runner:
        return Check(
            "trust",
            Level.FAIL,
            f"[actions] repository in {policy.source}",
            "a runner of GitHub Actions is installed, and the policy names no repository: no job may begin",
            'repository = "OWNER/NAME" under [actions]',
        )
    if policy.actions.execute == "daemon":
        return Check(
            "trust",
            Level.OK,
            where,
            "level 2, walled: workflow runs only wait, and the daemon of another account does the requests"
            " with its own policy, engine, models and key",
        )
    if policy.actions.repository is None:
        return Check(
            "trust",
            Level.OK,
            where,
            "no workflow run may begin here ([actions] names no repository); this account's daemon serves",
        )
    return Check(
        "trust",
        Level.WARN,
        where,
        "level 1, trusted contributors: whoever can push to the repository can run code as this user; the"
        " allowlist prevents mistakes, the hook adds depth",
        'execute = "daemon", and `runner serve --transport actions` under another account',
    )


def _models(station: Station) -> Iterator[Check]:
    for name, value in sorted(station.environment.items()):
        if name.startswith("KAKEYA_MODEL_") and value and not os.path.isdir(os.path.expanduser(value)):
            fix = "correct it, or unset it"
            yield Check(f"models: {name}", Level.FAIL, name, f"it is {value!r}, which is no folder", fix)
    for preset in station.presets.values():
        if not preset.models or preset.runs_repo_code:
            continue
        where = ", ".join(need.name for need in preset.models)
        try:
            found = models.resolve(preset.models, places(station, workload=None))
        except models.ModelMissing as error:
            yield Check(f"models: {preset.name}", Level.WARN, where, error.message, error.remedy or "")
        else:
            said = ", ".join(str(each) for each in found.values())
            yield Check(f"models: {preset.name}", Level.OK, where, f"whole: {said}")


def _lfs(git: Git, policy: Policy) -> Check:
    done = git.attempt("lfs", "version")
    endpoint = policy.lfs.endpoint
    if done.exit_code == 0:
        said = (
            f"objects come from {endpoint}"
            if endpoint
            else "commits with pointers are refused: [lfs] endpoint"
        )
        return Check("git-lfs", Level.OK, "git lfs version", f"{done.stdout.decode().split(' ')[0]}; {said}")
    level = Level.OK if endpoint is None else Level.FAIL
    fix = "" if endpoint is None else "install git-lfs (macOS: brew install git-lfs)"
    return Check("git-lfs", level, "git lfs version", "not installed; commits with pointers are refused", fix)


def _awake() -> Check:
    if sys.platform != "darwin":
        return Check("awake", Level.OK, sys.platform, "nothing is needed here")
    if find_program(PROGRAM) is None:
        return Check(
            "awake", Level.WARN, "PATH", f"no {PROGRAM}: the Mac may sleep under a job", "use macOS's own"
        )
    return Check("awake", Level.OK, PROGRAM, "keeps the machine awake while a job runs")


def _disk(folder: Path) -> Check:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    level = Level.WARN if free < LEAST_FREE else Level.OK
    fix = "" if level is Level.OK else f"make room: {LEAST_FREE / 1e9:.0f} GB are needed for models and jobs"
    return Check("disk", level, str(folder), f"{free / 1e9:.0f} GB free", fix)
