"""What does this machine lack for its part in the bridge? One finding a check; checks change nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bridge import __version__, interpreter, signing
from bridge.bus.requests import ALL_REFS, WORKFLOW_PATH
from bridge.client.remotes import Remote, resolve_remote
from bridge.client.runners import read_runners
from bridge.client.signing_key import choose
from bridge.client.submit import choose_route, default_file
from bridge.errors import ApiConflict, ApiNotFound, BridgeError, MachineError, ScopeMissing
from bridge.git.errors import summary
from bridge.git.remote import for_git
from bridge.git.repo import GitRepo
from bridge.github.api import TOKEN_VARIABLES, GitHub, find_token, repository_of
from bridge.github.servers import server_of
from bridge.mac import options, setup
from bridge.presets import Preset
from bridge.proc import find_program
from bridge.protocol.refs import INBOX, request_ref
from bridge.runner import models
from bridge.runner.config import (
    OWN_SERVER,
    PUBLIC_HOST,
    RunnerConfig,
    attestation_key_path,
    survey_config,
    timing_of,
)
from bridge.runner.policy import FILE_NAME
from bridge.runner.sandbox import ITEMS, NOT_ENFORCED, NoSandbox, find_sandbox
from bridge.settings import Settings
from bridge.signing import dsse

OLDEST_GIT = (2, 31)  # config in variables
LEAST_FREE = 20 * 10**9
# What GitHub recommends for one repository (docs.github.com, "Repository limits").
MOST_PUSHES_PER_MINUTE = 6
MOST_READS_PER_SECOND = 15
_OBJECTS_PER_PUSH = 4  # commit, tree, file and signature of a heartbeat
_TIMEOUT_S = 15.0
_GROUP = re.compile(r"^[ \t]*concurrency[ \t]*:", re.MULTILINE)
_NO_RUN = 0  # no run has this id, so asking to cancel it changes nothing
# In a run for a fork the token of these events may write nothing, whatever the workflow says.
_FOREIGN = ("pull_request", "pull_request_review", "pull_request_review_comment")
_SETUP = "kakeya_mac runner setup"


class Level(StrEnum):
    """How bad a finding is: `fail` means that the role cannot be played from here."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, how bad it is, what was found, and what to do about it."""

    name: str
    level: Level
    looked_at: str
    finding: str
    fix: str = ""


class _Warning(BridgeError):
    """A finding with which the role can be played all the same."""


class _Failure(BridgeError):
    """A finding with which it cannot."""


def _check(
    name: str, looked_at: object, look: Callable[..., str], *args: Any, worst: Level = Level.FAIL
) -> Check:
    """Look at one thing: what it says is fine, and any other error is a finding of the level `worst`."""
    try:
        return Check(name, Level.OK, str(looked_at), look(*args))
    except BridgeError as error:
        level = {_Warning: Level.WARN, _Failure: Level.FAIL}.get(type(error), worst)
        fix = error.remedy or "correct it; see docs/operations.md"
        return Check(name, level, str(looked_at), error.message, fix)


def _test(
    name: str, looked_at: object, good: str, bad: str | None, fix: str, *, level: Level = Level.WARN
) -> Check:
    """A check that found something `bad`, which is of this level, or nothing (None)."""
    found = (Level.OK, str(looked_at), good) if bad is None else (level, str(looked_at), bad, fix)
    return Check(name, *found)


def examine(
    role: str, settings: Settings, repository: Path, *, allow_public: bool = False, prefix: Path | None = None
) -> Iterator[Check]:
    """Look at what a role needs: ``client`` and ``ci`` (a workflow's job) ask, ``runner`` serves.

    Later checks are left out when an earlier one makes them meaningless. `allow_public` says that a public
    repository is meant; `prefix` is where setup put everything: else around this environment, or in the home.
    """
    git = GitRepo(repository)
    version = _check("git", "git --version", _git, git)
    python = f"kakeya-mac {__version__} on Python {platform.python_version()}"
    yield from (Check("kakeya-mac", Level.OK, sys.executable, python), version)
    named, has_runner = settings.remote, False
    if role == "ci":
        yield _check("event", "GITHUB_EVENT_NAME", _event)
    else:
        lacking = "not found: requests go out unsigned and no result can be verified"
        good, fix = "signatures can be made and verified", "install OpenSSH's client (openssh-client)"
        yield _test("ssh-keygen", "PATH", good, None if signing.available() else lacking, fix)
        yield from _engine()
    if role == "runner":
        prefix = prefix or options.prefix_around(Path(sys.prefix)) or Path.home() / options.PREFIX
        has_runner, told = (prefix / options.ACTIONS_RUNNER).is_dir(), options.read_stored(prefix)
        # The owner's folders that setup was told, where this process is told none.
        for name, variable in options.FOLDERS.items():
            if name in told and not os.environ.get(variable):
                settings = settings.model_copy(update={f"{name}_dir": Path(told[name])})
        url = told.get("url")  # of a repository, or of an organisation
        named = named or (url if url and "/" in urlsplit(url).path.strip("/") else told.get("remote"))
        yield from _machine(settings, git, prefix, has_runner=has_runner)
    elif version.level is not Level.FAIL:
        inside = list(_checkout(role, settings, git))
        yield from inside
        if inside[0].level is Level.FAIL:
            return
    if version.level is Level.FAIL:
        return
    try:
        remote = resolve_remote(git, named)
    except BridgeError as error:
        # Of a machine that runs workflows it must be known whether strangers can propose them.
        level = Level.WARN if role == "runner" and not has_runner else Level.FAIL
        where = "--remote, KAKEYA_REMOTE, config.toml, setup, origin"
        finding, fix = error.message, error.remedy or "name it with --remote"
        if role == "runner" and not named:  # which need not be asked in a clone
            finding, fix = "no remote is named, so none was looked at", "name the one it serves with --remote"
        yield Check("remote", level, where, finding, fix)
        return
    answer = _check("remote", remote.shown, _reachable, git, remote)
    yield answer
    is_reachable = answer.level is not Level.FAIL
    if is_reachable and role != "runner":
        yield _check("push", f"git push --dry-run {remote.shown}", _pushing, git, remote)
    if is_reachable and role != "ci":
        yield from bus_load(settings, git, remote)
    yield from transports(
        role,
        settings,
        git,
        remote,
        has_runner=has_runner,
        allow_public=allow_public,
        is_reachable=is_reachable,
    )


def _checkout(role: str, settings: Settings, git: GitRepo) -> Iterator[Check]:
    head = git.attempt("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    bad = None if head.ok else "not inside a git repository that has a commit"
    good, fix = f"HEAD is {head.stdout.decode()[:12]}", "change into a clone"
    yield _test("repository", git.directory, good, bad, fix, level=Level.FAIL)
    if role == "client":
        places = "KAKEYA_SIGNING_KEY, config.toml, git config, SSH agent"
        yield _check("request key", places, _signing_key, settings, git)
    path = settings.trusted_runners
    yield _check("trusted runners", path, _trusted_runners, path, role)


def _git(git: GitRepo) -> str:
    text = git.run("--version").decode().split()[2]
    if tuple(int(part) for part in text.split(".")[:2]) < OLDEST_GIT:
        raise _Failure(f"git {text} is too old", "install git 2.31 or later")
    return f"git {text}"


def _engine() -> Iterator[Check]:
    where = "mlx, mlx-lm"
    if not all(importlib.util.find_spec(name) for name in ("mlx", "mlx_lm")):
        finding = "not installed: a client only; runners need the extra `engine`"
        yield Check("engine", Level.OK, where, finding)
        return
    yield Check("engine", Level.OK, where, "installed: this machine can run kakeya_engine and a runner")
    sandbox = find_sandbox()
    enforced, good = sandbox.enforced(network=False), "it works"
    bad = None
    if isinstance(sandbox, NoSandbox):
        bad = f"{sandbox.why}: presets that run code of the requested commit are refused"
    fix = "Linux: apt-get install bubblewrap, permit user namespaces; macOS: report it"
    yield _test("sandbox", "a trial", good, bad, fix)
    for item, what in ITEMS.items():
        how = enforced[f"isolation_{item}"]
        bad = f"nothing here keeps a job from {what}" if how == NOT_ENFORCED else None
        yield _test(
            f"jobs: {item}", "a trial", f"{how}: keeps a job from {what}", bad, "see docs/isolation.md"
        )


def _signing_key(settings: Settings, git: GitRepo) -> str:
    key = choose(settings, git).key
    if key is None:
        return "none: requests are unsigned; where a machine wants a signature: kakeya_mac key --make"
    return f"requests are signed with {signing.public_half(key.material).fingerprint} ({key.source})"


def _trusted_runners(path: Path, role: str) -> str:
    known = signing.read_keys(path)
    if known:
        return f"{len(known)} key(s); a result that none of them signed is not believed"
    fix = "kakeya_mac runners trust NAME --key 'ssh-ed25519 …' (the runner prints the line), or trust --first"
    if role == "ci":
        fix = "give the action its input trusted-runners, or set KAKEYA_TRUSTED_RUNNERS in the repository"
    finding = "none: anyone with push rights could have written a result; one that passed ends in exit code 7"
    raise _Warning(finding, fix)


def _reachable(git: GitRepo, remote: Remote) -> str:
    refs = git.list_refs(remote.address, *ALL_REFS, timeout_s=_TIMEOUT_S)
    pending = sum(ref.startswith(INBOX) for ref in refs)
    return f"reachable, {len(refs)} refs of the bridge, {pending} request(s) pending"


def _pushing(git: GitRepo, remote: Remote) -> str:
    address, secrets = for_git(remote.address)
    target = f"HEAD:{request_ref('probe', '20000101t000000z000000000000', None)}"
    flags = ("--dry-run", "--porcelain", "--no-verify")
    done = git.attempt("push", *flags, "--", address, target, timeout_s=_TIMEOUT_S, env=secrets)
    if done.exit_code == 0:
        return "the remote takes pushes (server-side rules are not run by a dry run)"
    said = summary(done.stderr)[:300] or "no answer"
    raise _Failure(f"cannot push: {said}", "ask for push rights, or use another --remote")


def bus_load(settings: Settings, git: GitRepo, remote: Remote) -> Iterator[Check]:
    """How often the live runners push and read, and what that leaves on a server of one's own."""
    where, usual = f"registrations on {remote.shown}", timing_of(remote.address)
    try:
        live = read_runners(settings, git, remote, timeout_s=_TIMEOUT_S).live(datetime.now(UTC))
    except BridgeError as error:
        yield Check("load", Level.WARN, where, error.message, error.remedy or "try again")
        return
    intervals = [seen.info.interval_s for seen in live]
    # Runners of an earlier version know no public hosts.
    timings = [OWN_SERVER if interval < usual.registration_s else usual for interval in intervals]
    pushes = sum(60 / each for each in (*intervals, *(timing.heartbeat_s for timing in timings)))
    reads = sum(60 / (timing.fast_s or min(timing.poll_s, timing.cancel_s)) for timing in timings)
    finding = (
        f"{len(live)} live runner(s): at most about {pushes:.1f} pushes and {reads:,.0f} reads a minute"
        " while all of them work, besides claims and results"
    )
    bad = None
    is_much = pushes > MOST_PUSHES_PER_MINUTE or reads / 60 > MOST_READS_PER_SECOND
    if usual is PUBLIC_HOST and is_much:
        limits = f"{MOST_PUSHES_PER_MINUTE} pushes a minute and {MOST_READS_PER_SECOND} reads a second"
        bad = f"{finding}; such hosts recommend at most {limits} for a repository"
    yield _test("load", where, finding, bad, "serve from fewer runners, or upgrade old ones")
    if usual is not PUBLIC_HOST:
        finding = (
            "a server of your own: heartbeats leave unreachable objects, here up to"
            f" {pushes * _OBJECTS_PER_PUSH * 1440:,.0f} a day, which plain `git gc` keeps as loose files"
        )
        fix = (
            "on the server: git config gc.cruftPacks true, git config gc.pruneExpire 1.day.ago, and nightly"
            " git gc, which packs the refs, too (docs/operations.md)"
        )
        yield Check("server", Level.OK, remote.shown, finding, fix)


def transports(
    role: str,
    settings: Settings,
    git: GitRepo,
    remote: Remote,
    *,
    has_runner: bool = False,
    allow_public: bool = False,
    is_reachable: bool = True,
) -> Iterator[Check]:
    """How requests travel, and what GitHub's API says where workflows take them.

    `has_runner` says that GitHub's runner is installed here. Of a remote that git cannot read only the server
    and the visibility are looked at.
    """
    asked, server = settings.transport, server_of(remote.address)
    bad = None
    if has_runner and not server.has_artifacts:
        bad = f"{server.summary}; and GitHub's runner is installed here"
    fix = f"have the daemon serve it: {_SETUP} --service serve --remote {remote.shown}"
    yield _test("git server", remote.shown, server.summary, bad, fix)
    if is_reachable and role != "runner":
        # Without a transport, `run` in a job ends with the same message.
        worst = Level.FAIL if role == "ci" else Level.WARN
        where = f"--transport {asked}, {remote.shown}"
        yield _check("transport", where, _transport, asked, git, remote, worst=worst)
    # Whether a runner of GitHub Actions may take what strangers propose.
    exposed = has_runner if role == "runner" else server.has_artifacts or asked == "actions"
    if not (server.has_artifacts or exposed):
        return
    try:
        repository = repository_of(remote.address)
        token = None if repository is None else find_token()
    except BridgeError as error:
        yield Check("github", Level.FAIL, ", ".join(TOKEN_VARIABLES), error.message, error.remedy or "")
        return
    if repository is None:
        return
    api = GitHub(repository, token, retries=0, timeout_s=_TIMEOUT_S)
    if is_reachable and server.has_artifacts:
        yield from _workflow(git, remote)
        where = token.source if token else ", ".join(TOKEN_VARIABLES)
        yield _check("token", where, _token, api)
    args = (role, api, allow_public, exposed)
    yield _check("repository visibility", repository.slug, _visibility, *args, worst=Level.WARN)


def _event() -> str:
    event = os.environ.get("GITHUB_EVENT_NAME", "")
    if os.environ.get("GITHUB_ACTIONS") != "true":
        raise _Warning("this is no job of a workflow", "run it in a step of the workflow that will ask")
    if event in _FOREIGN:
        finding = f"{event}: for a fork's pull request the token may only read, and nothing can be asked"
        fix = "ask on push or workflow_dispatch; never on pull_request_target with a fork's commit"
        raise _Warning(finding, fix)
    if event == "pull_request_target":
        fix = "ask on push: this event has a writing token and a stranger's text"
        raise _Failure("a stranger's commit could be asked for", fix)
    return event or "none"


def _transport(asked: str, git: GitRepo, remote: Remote) -> str:
    route = choose_route(asked, git, remote, git.resolve("HEAD"))
    by = {"daemon": "a runner's daemon takes it", "push": "its push starts a run", "dispatch": "dispatched"}
    finding = f"{route.transport} ({by[route.start]}): {route.why}"
    if route.warnings:
        raise _Warning(
            f"{finding}; {'; '.join(route.warnings)}", "see docs/actions.md, or ask with --transport embedded"
        )
    return finding


def _workflow(git: GitRepo, remote: Remote) -> Iterator[Check]:
    where = f"{WORKFLOW_PATH} of the default branch"
    try:
        data = default_file(git, remote)
    except BridgeError as error:
        yield Check("workflow", Level.WARN, where, error.message, error.remedy or "see docs/actions.md")
        return
    finding = (
        "there is none: requests are for a runner's daemon" if data is None else "the default branch has it"
    )
    yield Check("workflow", Level.OK, where, finding)
    if data is not None and _GROUP.search(data.decode("utf-8", "replace")):
        finding = (
            "it has a `concurrency` group: GitHub cancels waiting requests of a group, and their answers"
        )
        fix = "update the file to this version's, which has none"
        yield Check("concurrency", Level.WARN, where, finding, fix)


def _token(api: GitHub) -> str:
    slug = api.repository.slug
    needed = f"a token with actions: write and contents: write of {slug}"
    if api.token is None:
        finding = "none: runs and their progress cannot be seen, and none can be cancelled or dispatched"
        raise _Warning(finding, f"set {TOKEN_VARIABLES[0]} to {needed}")
    api.runs(limit=1)
    permissions, lacks = api.facts().permissions, ""
    if permissions is not None and not permissions.get("push", False):
        lacks = "it may not push: no request can be made with it"
    try:
        api.cancel(_NO_RUN)
    except ScopeMissing:
        lacks = lacks or "it lacks actions: write, so it cannot start or cancel runs"
    except (ApiConflict, ApiNotFound):
        pass  # the token passed, and the run was not found
    if lacks:
        raise _Warning(lacks, f"use {needed}")
    return f"reads the runs of {slug}, and may write actions"


def _visibility(role: str, api: GitHub, allow_public: bool, exposed: bool) -> str:
    """Whether strangers can see, and so fork and ask; `exposed`: a runner of GitHub Actions may take that."""
    if api.facts().private:
        return "private"
    if not exposed:
        return "public: everybody reads requests, logs and results; a daemon takes only what is pushed"
    if allow_public:
        return "public, as --allow-public says it is meant"
    finding = "public: a self-hosted runner on a public repository runs what strangers propose"
    fix = "make it private; or allow no workflow of forks, and say --allow-public"
    raise (_Failure if role == "runner" else _Warning)(finding, fix)


def _machine(settings: Settings, git: GitRepo, prefix: Path, *, has_runner: bool) -> Iterator[Check]:
    if (told := prefix / options.OPTIONS_FILE).exists():
        yield _check("setup", told, _setup, prefix)
    record, objection = interpreter.record_path(), interpreter.objection()
    level = Level.WARN if objection is None else Level.FAIL
    if objection is None and not record.exists():
        objection = "not recorded: a replacement under a running machine would go unnoticed"
    yield _test("interpreter", record, "as recorded", objection, _SETUP, level=level)
    yield from services(prefix)
    place = next(path for path in (settings.state_dir, *settings.state_dir.parents) if path.exists())
    free = shutil.disk_usage(place).free
    good, fix = f"{free / 1e9:.0f} GB free", f"make space: {LEAST_FREE / 1e9:.0f} GB for models and jobs"
    yield _test("disk", place, good, good if free < LEAST_FREE else None, fix)
    yield trust(has_runner)
    folder = settings.config_dir
    try:
        config = survey_config(settings.remote or "none", state_dir=settings.state_dir, config_dir=folder)
    except BridgeError as error:
        yield Check("policy", Level.FAIL, str(folder), error.message, error.remedy or "correct that file")
        return
    allowed = config.rulebook.summary()
    unsigned = f"{allowed}; unsigned requests are accepted from everyone who can push"
    bad = None if config.policy.require_signature else unsigned
    fix = f"kakeya_mac runner signers add NAME --key …, and require_signature = true in {FILE_NAME}"
    yield _test("policy", folder / FILE_NAME, f"{allowed}; only signed requests", bad, fix)
    if config.policy.attestations:
        yield _check(
            "attestations", settings.state_dir, _attestation_keys, settings.state_dir, worst=Level.WARN
        )
    for preset in config.presets.values():
        if preset.models and not preset.runs_repo_code:
            where = ", ".join(preset.models)
            yield _check(f"models: {preset.name}", where, _models, preset, config, worst=Level.WARN)
    yield _check("git-lfs", "git lfs version", _lfs, git, config.policy.lfs.endpoint)


def _setup(prefix: Path) -> str:
    """Whether `runner check` finds everything as setup made it: its steps are asked, so the two agree."""
    if unready := setup.unready(prefix):
        raise _Failure("; ".join(unready), "kakeya_mac runner check names the fix of each")
    return "everything is as setup made it"


def _attestation_keys(state_dir: Path) -> str:
    """Which runners of this machine can sign the attestations that the policy asks for."""
    dsse.require_library()
    names = sorted(path.parent.name for path in (state_dir / "runner").glob("*/id"))
    if lacking := [name for name in names if dsse.load_key(attestation_key_path(state_dir, name)) is None]:
        remedy = f"kakeya_mac runner key --attestation --make --name {lacking[0]}"
        raise MachineError(f"attestations = true, and no key is there for: {', '.join(lacking)}", remedy)
    return f"keys of: {', '.join(names)}" if names else "no runner has served here yet"


def trust(has_runner: bool) -> Check:
    """Who can run code as this account; `has_runner`: GitHub's runner is installed here."""
    name, where = "trust", "this process's user"
    if os.getuid() == 0:
        finding = "jobs and workflow runs would belong to root"
        return Check(name, Level.FAIL, where, finding, "use an account without rights of its own")
    good = "no runner of GitHub Actions here: requests come to this account's daemon alone"
    bad = "a runner of GitHub Actions: who can push to its repository can run code as this user"
    fix = "`kakeya_mac runner serve` instead: a daemon runs nothing but what its policy admits"
    return _test(name, where, good, bad if has_runner else None, fix)


def services(prefix: Path) -> Iterator[Check]:
    """Whether launchd runs what setup made below `prefix`, also after a restart without a login."""
    if find_program("launchctl") is None:
        finding = "not macOS: who keeps a daemon running is not known here"
        yield Check("service", Level.OK, "launchctl", finding)
        return
    for label in setup.SERVICE_LABELS:
        if setup.staged(prefix, label).exists():
            where, problem = f"launchctl print system/{label}", setup.service_problem(prefix, label)
            fix = f"{_SETUP} --sudo; or see why: tail {setup.log_file(prefix, label)}"
            good = "runs, and starts again after a restart"
            yield _test(f"service {label}", where, good, problem, fix, level=Level.FAIL)


def _models(preset: Preset, config: RunnerConfig) -> str:
    found = models.resolve(preset.models, config.model_places(workload=None))
    return f"whole: {', '.join(map(str, found.values()))}"


def _lfs(git: GitRepo, endpoint: str | None) -> str:
    done = git.attempt("lfs", "version")
    source = f"objects come from {endpoint}" if endpoint else "commits with pointers are refused"
    if done.exit_code == 0:
        return f"{done.stdout.decode().split(' ')[0]}; {source}"
    if endpoint is None:
        return f"not installed; {source}"
    raise _Failure(f"not installed, and {source}", "install git-lfs (macOS: brew install git-lfs)")
