"""What does this machine lack for its part in the bridge? One finding a check, for each of three roles.

A client asks, a workflow's job asks, a runner serves. Checks read; what touches a write side changes nothing:
a push with ``--dry-run``, a start of the run 0.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bridge import __version__, interpreter, signing
from bridge.bus.requests import ALL_REFS, WORKFLOW_NAME, WORKFLOW_PATH
from bridge.client.remotes import Remote, resolve_remote
from bridge.client.runners import read_runners
from bridge.client.signing_key import choose
from bridge.client.submit import choose_route, default_file
from bridge.errors import ApiConflict, ApiError, ApiNotFound, BridgeError, BusError, ScopeMissing
from bridge.git.errors import summary
from bridge.git.remote import for_git
from bridge.git.repo import GitRepo
from bridge.github.api import TOKEN_VARIABLES, GitHub, Repository, Token, find_token, repository_of
from bridge.mac import options, setup
from bridge.mac.options import FOLDERS, OPTIONS_FILE, SetupUsage, read_stored
from bridge.proc import find_program
from bridge.protocol.refs import INBOX, request_ref
from bridge.protocol.runner_info import RunnerInfo
from bridge.runner import models
from bridge.runner.config import PUBLIC_HOST, RunnerConfig, Timing, survey_config, timing_of
from bridge.runner.machine import CAFFEINATE, find_sandbox
from bridge.runner.policy import FILE_NAME
from bridge.runner.sandbox.base import ITEMS, NOT_ENFORCED, NoSandbox
from bridge.settings import Settings

OLDEST_GIT = (2, 31)  # config in variables
LEAST_FREE = 20 * 10**9
# What GitHub recommends for one repository (docs.github.com, "Repository limits").
MOST_PUSHES_PER_MINUTE = 6
MOST_READS_PER_SECOND = 15
_OBJECTS_PER_PUSH = 4  # commit, tree, file and signature of a heartbeat
_NETWORK_TIMEOUT_S = 15.0
_API_TIMEOUT_S = 10.0
_QUEUE = re.compile(r"^concurrency:\n(?:[ \t].*\n|\n|#.*\n)*?[ \t]+queue:[ \t]*max\b", re.MULTILINE)
_NO_RUN = 0  # no run has this id, so asking to re-run it starts nothing
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


class _Look(NamedTuple):
    """What a check looks at; its methods make the finding."""

    name: str
    at: str

    def ok(self, finding: str, advice: str = "") -> Check:
        return Check(self.name, Level.OK, self.at, finding, advice)

    def warn(self, finding: str, fix: str) -> Check:
        return Check(self.name, Level.WARN, self.at, finding, fix)

    def fail(self, finding: str, fix: str) -> Check:
        return Check(self.name, Level.FAIL, self.at, finding, fix)

    def error(self, error: BridgeError, fix: str, level: Level = Level.FAIL) -> Check:
        """An error as a finding; `fix` where the error has no remedy of its own."""
        return Check(self.name, level, self.at, error.message, error.remedy or fix)


# The roles ------------------------------------------------------------------------------------------------


def examine_client(
    settings: Settings,
    repository: Path,
    *,
    allow_public: bool = False,
    is_job: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Check]:
    """Can this checkout, or (`is_job`) this job of a workflow, ask a Mac?

    Later checks are left out when an earlier one makes them meaningless. `allow_public` says that a public
    repository is meant.
    """
    git = GitRepo(repository)
    version = _git_version(git)
    yield from (_python(), version)
    if is_job:
        yield from _workflow_job(environ)
    if version.level is Level.FAIL:
        return
    inside = _checkout(git)
    yield inside
    if not is_job:
        yield from (_ssh_keygen(), _signing_key(settings, git))
        yield from _engine()
    yield _trusted_runners(settings, is_job=is_job)
    if inside.level is Level.FAIL:
        return
    yield _work_tree(git)
    try:
        remote = resolve_remote(git, settings.remote)
    except BridgeError as error:
        yield _Look("remote", "--remote, KAKEYA_REMOTE, config.toml, origin").error(error, "name it")
        return
    answer = _reachable(git, remote)
    yield answer
    if answer.level is Level.FAIL:
        return
    yield _pushing(git, remote)
    if not is_job:
        yield from bus_load(settings, git, remote)
    for check in github(settings, git, remote, allow_public=allow_public, environ=environ):
        # Without a transport, `run` in a job ends with the same message.
        is_blocked = is_job and check.name == "transport" and check.level is Level.WARN
        yield replace(check, level=Level.FAIL) if is_blocked else check


def examine_runner(
    settings: Settings, repository: Path, *, allow_public: bool = False, prefix: Path | None = None
) -> Iterator[Check]:
    """Can this machine serve requests, and how far can it be trusted to be left alone?

    `repository` need not be a checkout. `prefix` is where setup put everything; None: around this
    environment, or in the home.
    """
    prefix = prefix or options.prefix_around(Path(sys.prefix)) or Path.home() / options.PREFIX
    told: Mapping[str, Any] = {}
    damage = None
    try:
        told = read_stored(prefix)
    except SetupUsage as error:
        damage = _Look("setup", str(prefix / OPTIONS_FILE)).error(error, _SETUP)
    # The owner's folders that setup was told, where this process is told none.
    told_folders = {
        f"{name}_dir": Path(told[name])
        for name, variable in FOLDERS.items()
        if told.get(name) is not None and not os.environ.get(variable)
    }
    settings = settings.model_copy(update=told_folders)
    has_runner = (prefix / options.ACTIONS_RUNNER).is_dir()
    git = GitRepo(repository)
    yield from (_python(), _git_version(git), _ssh_keygen(), _interpreter())
    yield from _owner(settings, git, has_runner=has_runner)
    if damage is not None:
        yield damage
    yield from services(prefix)
    yield from (_awake(), _disk(settings.state_dir))
    yield from _engine()
    try:
        remote = resolve_remote(git, settings.remote or _set_up_for(told))
    except BridgeError as error:
        where = f"--remote, KAKEYA_REMOTE, config.toml, {OPTIONS_FILE}, the policy, origin"
        fix = "name it: --remote, or `remote` in config.toml"
        # Of a machine that runs workflows it must be known whether strangers can propose them.
        level = Level.FAIL if has_runner else Level.WARN
        yield Check("remote", level, where, f"not looked at: {error.message}", fix)
        return
    answer = _reachable(git, remote)
    yield answer
    is_reachable = answer.level is not Level.FAIL
    if is_reachable:
        yield from bus_load(settings, git, remote)
    yield from github(
        settings, git, remote, allow_public=allow_public, is_reachable=is_reachable, is_dangerous=True
    )


# Programs -------------------------------------------------------------------------------------------------


def _python() -> Check:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return _Look("kakeya-mac", sys.executable).ok(f"kakeya-mac {__version__} on Python {version}")


def _git_version(git: GitRepo) -> Check:
    look, install = _Look("git", "git --version"), "install git 2.31 or later"
    try:
        text = git.run("--version").decode().split()[2]
    except BridgeError as error:
        return look.error(error, install)
    if tuple(int(part) for part in text.split(".")[:2]) < OLDEST_GIT:
        return look.fail(f"git {text} is too old", install)
    return look.ok(f"git {text}")


def _ssh_keygen() -> Check:
    look = _Look("ssh-keygen", "PATH")
    if signing.available():
        return look.ok("signatures can be made and verified")
    finding = "not found: requests go out unsigned and no result can be verified"
    return look.warn(finding, "install OpenSSH's client (openssh-client)")


def _engine() -> Iterator[Check]:
    """What the engine's presence means; with it, the sandbox, and what it keeps a job from."""
    look = _Look("engine", "mlx, mlx-lm")
    if any(importlib.util.find_spec(name) is None for name in ("mlx", "mlx_lm")):
        yield look.ok("not installed: a client only; runners need the extra `engine`")
        return
    yield look.ok("installed: this machine can run kakeya_engine and a runner")
    where, sandbox = "a trial", find_sandbox()
    enforced = sandbox.enforcement(network=False)
    look = _Look("sandbox", where)
    if isinstance(sandbox, NoSandbox):
        finding = f"{sandbox.why}: presets that run code of the requested commit are refused"
        yield look.warn(
            finding, "macOS: report it; Linux: apt-get install bubblewrap, and permit user namespaces"
        )
    else:
        yield look.ok(f"{enforced.sandbox} works")
    for item, what in ITEMS.items():
        look = _Look(f"jobs: {item}", where)
        if (how := getattr(enforced, item)) == NOT_ENFORCED:
            yield look.warn(f"nothing here keeps a job from {what}", "see docs/isolation.md")
        else:
            yield look.ok(f"{how}: keeps a job from {what}")


# The checkout and its remote ------------------------------------------------------------------------------


def _checkout(git: GitRepo) -> Check:
    """Whether there is a commit to ask for."""
    look = _Look("repository", str(git.directory))
    done = git.attempt("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    if done.exit_code == 0:
        return look.ok(f"HEAD is {done.stdout.decode().strip()[:12]}")
    if git.attempt("rev-parse", "--git-dir").exit_code != 0:
        return look.fail("not inside a git repository", "change into a clone")
    return look.fail("the repository has no commit yet", "commit something first")


def _work_tree(git: GitRepo) -> Check:
    look = _Look("work tree", "git diff-index HEAD")
    if git.attempt("diff-index", "--quiet", "HEAD", "--", timeout_s=5).ok:
        return look.ok("no uncommitted changes to tracked files")
    finding = "there may be uncommitted changes; a request carries only commits"
    return look.warn(finding, "commit what the job should see")


def _signing_key(settings: Settings, git: GitRepo) -> Check:
    look = _Look("request key", "KAKEYA_SIGNING_KEY, config.toml, git config, SSH agent")
    try:
        key = choose(settings, git).key
        if key is not None:
            return look.ok(f"requests are signed with {key.public().fingerprint} ({key.source})")
    except BridgeError as error:
        return look.error(error, "correct the path")
    return look.ok("none: requests are unsigned; where a machine wants a signature: kakeya_mac key --make")


def _trusted_runners(settings: Settings, *, is_job: bool) -> Check:
    look = _Look("trusted runners", str(settings.trusted_runners))
    try:
        known = signing.read_keys(settings.trusted_runners)
    except BridgeError as error:
        return look.error(error, "mend that line")
    if known:
        return look.ok(f"{len(known)} key(s); a result that none of them signed is not believed")
    finding = "none: anyone with push rights could have written a result; one that passed ends in exit code 7"
    fix = (
        "give the action its input trusted-runners, or set KAKEYA_TRUSTED_RUNNERS in the repository"
        if is_job
        else "kakeya_mac runners trust NAME --key 'ssh-ed25519 …' (the runner prints the line),"
        " or kakeya_mac runners trust --first"
    )
    return look.warn(finding, fix)


def _reachable(git: GitRepo, remote: Remote) -> Check:
    look = _Look("remote", remote.shown)
    try:
        refs = git.list_refs(remote.address, *ALL_REFS, timeout_s=_NETWORK_TIMEOUT_S)
    except BusError as error:
        return look.error(error, "check the address, the network and your credentials")
    pending = sum(ref.startswith(INBOX) for ref in refs)
    return look.ok(f"reachable, {len(refs)} refs of the bridge, {pending} request(s) pending")


def _pushing(git: GitRepo, remote: Remote) -> Check:
    """Whether the remote takes pushes, as far as a dry run tells."""
    look = _Look("push", f"git push --dry-run {remote.shown}")
    address, secrets = for_git(remote.address)
    target = f"HEAD:{request_ref('probe', '20000101t000000z000000000000', None)}"
    flags = ("--dry-run", "--porcelain", "--no-verify")
    done = git.attempt("push", *flags, "--", address, target, timeout_s=_NETWORK_TIMEOUT_S, env=secrets)
    if done.exit_code == 0:
        return look.ok("the remote takes pushes (server-side rules are not run by a dry run)")
    said = summary(done.stderr)[:300] or "no answer"
    return look.fail(f"cannot push: {said}", "ask for push rights, or use another --remote")


def bus_load(settings: Settings, git: GitRepo, remote: Remote) -> Iterator[Check]:
    """How often the live runners push and read, and what that leaves on a server of one's own."""
    look = _Look("load", f"registrations on {remote.shown}")
    try:
        live = read_runners(settings, git, remote, timeout_s=_NETWORK_TIMEOUT_S).live(datetime.now(UTC))
    except BridgeError as error:
        yield look.error(error, "try again", Level.WARN)
        return
    timings = [_timing(seen.info, remote) for seen in live]
    pushes = sum(60 / timing.registration_s + 60 / timing.heartbeat_s for timing in timings)
    reads = sum(60 / (timing.fast_s or min(timing.poll_s, timing.cancel_s)) for timing in timings)
    found = (
        f"{len(live)} live runner(s): at most about {pushes:.1f} pushes and {reads:,.0f} reads a minute while"
        " all of them work, beside claims and results"
    )
    is_public = timing_of(remote.address) is PUBLIC_HOST
    if is_public and (pushes > MOST_PUSHES_PER_MINUTE or reads / 60 > MOST_READS_PER_SECOND):
        limits = f"{MOST_PUSHES_PER_MINUTE} pushes a minute and {MOST_READS_PER_SECOND} reads a second"
        fix = "serve from fewer runners, or upgrade old ones"
        yield look.warn(f"{found}; such hosts recommend at most {limits} for a repository", fix)
    else:
        yield look.ok(found)
    if not is_public:
        yield _Look("server", remote.shown).ok(
            "a server of your own: heartbeats leave unreachable objects, here up to"
            f" {pushes * _OBJECTS_PER_PUSH * 1440:,.0f} a day, which plain `git gc` keeps as loose files",
            "on the server: git config gc.cruftPacks true, git config gc.pruneExpire 1.day.ago, and nightly"
            " git gc, which packs the refs, too (docs/operations.md)",
        )


def _timing(info: RunnerInfo, remote: Remote) -> Timing:
    """How often a runner talks to the remote, as far as its registration tells."""
    usual = timing_of(remote.address)
    if info.interval_s < usual.registration_s:  # an earlier version, which knew no public hosts
        usual = timing_of("ssh://git@own.invalid/")
    return replace(usual, registration_s=info.interval_s)


# GitHub ---------------------------------------------------------------------------------------------------


def github(
    settings: Settings,
    git: GitRepo,
    remote: Remote,
    *,
    allow_public: bool,
    environ: Mapping[str, str] = os.environ,
    is_reachable: bool = True,
    is_dangerous: bool = False,
) -> Iterator[Check]:
    """How requests travel, and every check of a remote that is a repository of a GitHub server.

    Of one that git cannot read only the visibility is looked at. `is_dangerous`: a public repository is more
    than a warning, because this is the machine that runs its workflows.
    """
    if is_reachable:
        yield _transport(settings, git, remote)
    try:
        repository = repository_of(remote.address, environ)
        token = None if repository is None else find_token(environ)
    except ApiError as error:
        yield _Look("github", ", ".join(TOKEN_VARIABLES)).error(error, "correct it")
        return
    if repository is None:
        return
    if is_reachable:
        yield from _workflow(git, remote)
        yield _token(repository, token)
    yield _visibility(repository, token, allow_public=allow_public, is_dangerous=is_dangerous)


def _workflow_job(environ: Mapping[str, str]) -> Iterator[Check]:
    """Whether this is a job of a workflow, and what its event permits."""
    look = _Look("workflow job", "GITHUB_ACTIONS")
    if environ.get("GITHUB_ACTIONS") == "true":
        workflow, job = environ.get("GITHUB_WORKFLOW", "a workflow"), environ.get("GITHUB_JOB", "a job")
        yield look.ok(f"{workflow} / {job}")
    else:
        yield look.warn("this is no job of a workflow", "run it in a step of the workflow that will ask")
    look, event = _Look("event", "GITHUB_EVENT_NAME"), environ.get("GITHUB_EVENT_NAME", "")
    if event in _FOREIGN:
        finding = f"{event}: for a fork's pull request the token may only read, and nothing can be asked"
        fix = "ask on push or workflow_dispatch; never on pull_request_target with a fork's commit"
        yield look.warn(finding, fix)
    elif event == "pull_request_target":
        fix = "ask on push: this event has a writing token and a stranger's text"
        yield look.fail("a stranger's commit could be asked for", fix)
    else:
        yield look.ok(event or "none")


def _transport(settings: Settings, git: GitRepo, remote: Remote) -> Check:
    look = _Look("transport", f"--transport {settings.transport}, {remote.shown}")
    try:
        route = choose_route(settings.transport, git, remote, git.resolve("HEAD"))
    except BridgeError as error:
        return look.error(error, "see docs/actions.md", Level.WARN)
    by = {"daemon": "a runner's daemon takes it", "push": "its push starts a run", "dispatch": "dispatched"}
    return look.ok(f"{route.transport} ({by[route.start]}): {route.why}")


def _workflow(git: GitRepo, remote: Remote) -> Iterator[Check]:
    """The workflow file of the default branch, and its queue."""
    where = f"{WORKFLOW_PATH} of the default branch"
    look = _Look("workflow", where)
    try:
        data = default_file(git, remote)
    except BridgeError as error:
        yield look.error(error, "see docs/actions.md", Level.WARN)
        return
    if data is None:
        yield look.ok("there is none: requests are for a runner's daemon")
        return
    yield look.ok("the default branch has it")
    look = _Look("queue", where)
    if _QUEUE.search(data.decode("utf-8", "replace")):
        yield look.ok("queue: max, so that a waiting run evicts no other")
        return
    finding = "no `queue: max`: of three requests at once one is cancelled; a client that waits re-runs it"
    fix = "add `queue: max` under concurrency (GitHub since May 2026), without cancel-in-progress"
    yield look.warn(finding, fix)


def _token(repository: Repository, token: Token | None) -> Check:
    """What the token may do."""
    if token is None:
        finding = "none: runs and their progress cannot be seen, and evicted runs are not re-run"
        fix = f"set {TOKEN_VARIABLES[0]} to a token with actions and contents: write of {repository.slug}"
        return _Look("token", ", ".join(TOKEN_VARIABLES)).warn(finding, fix)
    look = _Look("token", token.source)
    api = GitHub(repository, token, retries=0, timeout_s=_API_TIMEOUT_S)
    try:
        api.runs(workflow=WORKFLOW_NAME, limit=1)
        missing = _missing_permission(api)
    except ApiError as error:
        return look.error(error, "use another token")
    found = f"reads the runs of {repository.slug}"
    if missing is None:
        return look.ok(f"{found}, and may write actions")
    fix = f"use one with actions: write and contents: write of {repository.slug}"
    return look.warn(f"{found}, but {missing}", fix)


def _missing_permission(api: GitHub) -> str | None:
    """What a client needs and the token lacks; None: nothing, as far as the API tells."""
    permissions = api.facts().permissions
    if permissions is not None and not permissions.push:
        return "may not push: no request can be made with it"
    try:
        api.rerun(_NO_RUN)
    except ScopeMissing:
        return "lacks actions: write, so it cannot start or cancel runs"
    except (ApiConflict, ApiNotFound):
        pass  # the token passed, and the run was not found
    return None


def _visibility(
    repository: Repository, token: Token | None, *, allow_public: bool, is_dangerous: bool
) -> Check:
    """Whether strangers can see, and so fork and ask."""
    look = _Look("repository visibility", repository.url)
    try:
        facts = GitHub(repository, token, retries=0, timeout_s=_API_TIMEOUT_S).facts()
    except ApiError as error:
        return look.error(error, "set a token", Level.WARN)
    if facts.private:
        return look.ok(facts.visibility or "private")
    if allow_public:
        return look.ok("public, as --allow-public says it is meant")
    finding = "public: a self-hosted runner on a public repository runs what strangers propose"
    fix = "make it private; or allow no workflow of forks, and say --allow-public"
    return look.fail(finding, fix) if is_dangerous else look.warn(finding, fix)


# The machine that serves ----------------------------------------------------------------------------------


def _set_up_for(told: Mapping[str, Any]) -> str | None:
    """The repository that this machine was set up for; None: setup was not told one."""
    url, remote = told.get("url"), told.get("remote")
    if url and "/" in urlsplit(url).path.strip("/"):
        return str(url)
    return None if remote is None else str(remote)


def _owner(settings: Settings, git: GitRepo, *, has_runner: bool) -> Iterator[Check]:
    """What the owner's files allow, who can run code here, and whether models are there."""
    remote, folder = settings.remote or "none", settings.config_dir
    try:
        config = survey_config(remote, state_dir=settings.state_dir, config_dir=folder)
    except BridgeError as error:
        yield _Look("policy", str(folder)).error(error, "mend it")
        return
    look, allowed = _Look("policy", FILE_NAME), config.rulebook.summary()
    if config.policy.require_signature:
        yield look.ok(f"{allowed}; only signed requests")
    else:
        fix = f"kakeya_mac runner signers add NAME --key …, and require_signature = true in {FILE_NAME}"
        yield look.warn(f"{allowed}; unsigned requests are accepted from everyone who can push", fix)
    yield trust(has_runner=has_runner)
    yield from _models(config)
    yield _lfs(git, config.policy.lfs.endpoint)


def trust(*, has_runner: bool) -> Check:
    """Who can run code as this account; `has_runner`: GitHub's runner is installed here."""
    look = _Look("trust", "this process's user")
    if os.getuid() == 0:
        finding = "jobs and workflow runs would belong to root"
        return look.fail(finding, "use an account without rights of its own")
    if not has_runner:
        return look.ok("no runner of GitHub Actions here: requests come to this account's daemon alone")
    return look.warn(
        "a runner of GitHub Actions: who can push to its repository can run code as this user; the policy"
        " prevents mistakes, not attacks",
        "`kakeya_mac runner serve` instead: a daemon runs nothing but what its policy admits",
    )


def services(prefix: Path) -> Iterator[Check]:
    """Whether launchd runs what setup made below `prefix`, also after a restart without a login."""
    if find_program("launchctl") is None:
        look = _Look("service", "launchctl")
        yield look.ok("not macOS: who keeps a daemon running is not known here")
        return
    for label in setup.SERVICE_LABELS:
        if not setup.staged(prefix, label).exists():
            continue
        look, known = _Look(f"service {label}", f"launchctl print system/{label}"), setup.query(label)
        if known is None:
            yield look.fail("launchd does not know it", f"{_SETUP} --sudo")
        elif known != "running":
            fix = f"see why: tail {setup.log_file(prefix, label)}"
            yield look.fail(f"it does not run: {known}", fix)
        elif not setup.is_current(prefix, label):
            yield look.warn("it has to be restarted with what setup wants now", f"{_SETUP} --sudo")
        else:
            yield look.ok("runs, and starts again after a restart")


def _interpreter() -> Check:
    path = interpreter.record_path()
    look = _Look("interpreter", str(path))
    try:
        recorded, seen = interpreter.read(path), interpreter.observe()
    except BridgeError as error:
        return look.error(error, _SETUP)
    if recorded is None:
        finding = "not recorded: a replacement under a running machine would go unnoticed"
        return look.warn(finding, f"{_SETUP} (or scripts/setup_mac.sh)")
    if found := interpreter.differences(recorded, seen):
        return look.fail(f"{'; '.join(found)}: requests are refused", f"{_SETUP}, if that is meant")
    return look.ok(f"as recorded: Python {seen.version}, {seen.realpath}")


def _models(config: RunnerConfig) -> Iterator[Check]:
    for name, value in sorted(config.environment.items()):
        if name.startswith("KAKEYA_MODEL_") and value and not os.path.isdir(os.path.expanduser(value)):
            look = _Look(f"models: {name}", name)
            yield look.fail(f"it is {value!r}, which is no folder", "correct it, or unset it")
    for preset in config.presets.values():
        if not preset.models or preset.runs_repo_code:
            continue
        look = _Look(f"models: {preset.name}", ", ".join(need.name for need in preset.models))
        try:
            found = models.resolve(preset.models, config.model_places(workload=None))
        except models.ModelMissing as error:
            yield look.error(error, "", Level.WARN)
        else:
            yield look.ok(f"whole: {', '.join(map(str, found.values()))}")


def _lfs(git: GitRepo, endpoint: str | None) -> Check:
    look, done = _Look("git-lfs", "git lfs version"), git.attempt("lfs", "version")
    if done.exit_code == 0:
        source = f"objects come from {endpoint}" if endpoint else "commits with pointers are refused"
        return look.ok(f"{done.stdout.decode().split(' ')[0]}; {source}")
    finding = "not installed; commits with pointers are refused"
    if endpoint is None:
        return look.ok(finding)
    return look.fail(finding, "install git-lfs (macOS: brew install git-lfs)")


def _awake() -> Check:
    if sys.platform != "darwin":
        return _Look("awake", sys.platform).ok("nothing is needed here")
    if find_program(CAFFEINATE) is None:
        finding = f"no {CAFFEINATE}: the Mac may sleep under a job"
        return _Look("awake", "PATH").warn(finding, "use macOS's own")
    return _Look("awake", CAFFEINATE).ok("keeps the machine awake while a job runs")


def _disk(folder: Path) -> Check:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    look, finding = _Look("disk", str(folder)), f"{free / 1e9:.0f} GB free"
    if free >= LEAST_FREE:
        return look.ok(finding)
    return look.warn(finding, f"make space: {LEAST_FREE / 1e9:.0f} GB are needed for models and jobs")
