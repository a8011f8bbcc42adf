"""Can this checkout, or this job of a workflow, ask a Mac? Each check says what it looked at and what to do.

Checks read; what touches a write side changes nothing: a push with ``--dry-run``, a start of the run 0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from bridge import doctor, signing
from bridge.bus.requests import WORKFLOW_NAME, WORKFLOW_PATH
from bridge.bus.state import ALL_REFS
from bridge.client.remotes import Remote, resolve_remote
from bridge.client.runners import read_runners
from bridge.client.signing_key import choose
from bridge.client.transport import choose_route, default_file
from bridge.doctor import Check, Level, fail, failed, ok, warn
from bridge.errors import ApiConflict, ApiError, ApiNotFound, BridgeError, BusError, ScopeMissing
from bridge.git.credentials import for_git
from bridge.git.errors import summary
from bridge.git.repo import GitRepo
from bridge.github.api import GitHub
from bridge.github.repository import TOKEN_VARIABLES, Repository, Token, find_token, repository_of
from bridge.protocol.refs import INBOX, request_ref
from bridge.protocol.runner_info import RunnerCard
from bridge.runner.config import PUBLIC_HOST, Timing, timing_of
from bridge.settings import Settings

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


def examine(
    settings: Settings,
    repository: Path,
    *,
    allow_public: bool = False,
    is_job: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Check]:
    """Every check in turn; later ones are left out when an earlier one makes them meaningless.

    Args:
        settings: The client's settings.
        repository: Where it is asked from.
        allow_public: A public repository is meant.
        is_job: A job of a workflow asks.
        environ: Variables; None: the process's own.
    """
    environ = os.environ if environ is None else environ
    yield doctor.python()
    git = GitRepo(repository)
    version = doctor.git_version(git)
    yield version
    if is_job:
        yield from _workflow_job(environ)
    if version.level is Level.FAIL:
        return
    inside = _checkout(git)
    yield inside
    if not is_job:
        yield doctor.ssh_keygen()
        yield _signing_key(settings, git)
        yield from doctor.engine()
    yield _trusted_runners(settings, is_job=is_job)
    if inside.level is Level.FAIL:
        return
    yield _work_tree(git)
    try:
        remote = resolve_remote(git, settings.remote)
    except BridgeError as error:
        yield failed("remote", "--remote, KAKEYA_REMOTE, config.toml, origin", error, "name it")
        return
    answer = reachable(git, remote)
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


def reachable(git: GitRepo, remote: Remote) -> Check:
    """Whether the remote answers."""
    try:
        refs = git.list_refs(remote.address, *ALL_REFS, timeout_s=_NETWORK_TIMEOUT_S)
    except BusError as error:
        return failed("remote", remote.shown, error, "check the address, the network and your credentials")
    pending = sum(ref.startswith(INBOX) for ref in refs)
    found = f"reachable, {len(refs)} refs of the bridge, {pending} request(s) pending"
    return ok("remote", remote.shown, found)


def bus_load(settings: Settings, git: GitRepo, remote: Remote) -> Iterator[Check]:
    """How often the live runners push and read, and what that leaves on a server of one's own.

    Args:
        settings: The client's settings.
        git: Any checkout.
        remote: The bus.
    """
    where = f"registrations on {remote.shown}"
    try:
        live = read_runners(settings, git, remote, timeout_s=_NETWORK_TIMEOUT_S).live(datetime.now(UTC))
    except BridgeError as error:
        yield failed("load", where, error, "try again", Level.WARN)
        return
    timings = [_timing(seen.card, remote) for seen in live]
    pushes = sum(60 / timing.registration_s + 60 / timing.heartbeat_s for timing in timings)
    reads = sum(60 / (timing.fast_s or min(timing.poll_s, timing.cancel_s)) for timing in timings)
    found = (
        f"{len(live)} live runner(s): at most about {pushes:.1f} pushes and {reads:,.0f} reads a minute,"
        " while all of them work"
    )
    kind = timing_of(remote.address)
    if kind is not PUBLIC_HOST:
        yield ok("load", where, found)
        yield ok(
            "server",
            remote.shown,
            "a server of your own: heartbeats leave unreachable objects, here up to"
            f" {pushes * _OBJECTS_PER_PUSH * 1440:,.0f} a day, which plain `git gc` keeps as loose files",
            "on the server: git config gc.cruftPacks true, git config gc.pruneExpire 1.day.ago, and nightly"
            " git gc, which packs the refs, too (docs/operations.md)",
        )
    elif pushes > MOST_PUSHES_PER_MINUTE or reads / 60 > MOST_READS_PER_SECOND:
        limits = f"{MOST_PUSHES_PER_MINUTE} pushes a minute and {MOST_READS_PER_SECOND} reads a second"
        fix = "serve from fewer runners, upgrade old ones, or serve them with --lease 600 --beat 200"
        yield warn("load", where, f"{found}; such hosts recommend at most {limits} for a repository", fix)
    else:
        yield ok("load", where, found)


def _timing(card: RunnerCard, remote: Remote) -> Timing:
    """How often a runner talks to the remote, as far as its registration tells."""
    usual = timing_of(remote.address)
    if card.interval_s < usual.registration_s:  # an earlier version, which knew no public hosts
        usual = timing_of("ssh://git@own.invalid/")
    return replace(usual, registration_s=card.interval_s)


def github(
    settings: Settings,
    git: GitRepo,
    remote: Remote,
    *,
    allow_public: bool,
    environ: Mapping[str, str] | None = None,
    is_reachable: bool = True,
    is_dangerous: bool = False,
) -> Iterator[Check]:
    """How requests travel, and every check of a remote that is a repository of a GitHub server.

    Args:
        settings: For the transport.
        git: A checkout.
        remote: The bus.
        allow_public: A public repository is meant.
        environ: Variables; None: the process's own.
        is_reachable: Git can read the remote; else only its visibility is looked at.
        is_dangerous: A public repository is more than a warning: this is the machine that runs its workflows.
    """
    if is_reachable:
        yield _transport(settings, git, remote)
    try:
        repository = repository_of(remote.address, environ)
        token = None if repository is None else find_token(environ, address=remote.address)
    except ApiError as error:
        yield failed("github", ", ".join(TOKEN_VARIABLES), error, "correct it")
        return
    if repository is None:
        return
    if is_reachable:
        yield from _workflow(git, remote)
        yield _token(repository, token)
    yield _visibility(repository, token, allow_public=allow_public, is_dangerous=is_dangerous)


def _checkout(git: GitRepo) -> Check:
    """Whether there is a commit to ask for."""
    where = str(git.directory)
    done = git.attempt("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    if done.exit_code == 0:
        return ok("repository", where, f"HEAD is {done.stdout.decode().strip()[:12]}")
    if git.attempt("rev-parse", "--git-dir").exit_code != 0:
        return fail("repository", where, "not inside a git repository", "change into a clone")
    return fail("repository", where, "the repository has no commit yet", "commit something first")


def _work_tree(git: GitRepo) -> Check:
    """Whether what the job should see is committed."""
    where = "git diff-index HEAD"
    done = git.attempt("diff-index", "--quiet", "HEAD", "--", timeout_s=5)
    if done.exit_code == 0 and not done.timed_out:
        return ok("work tree", where, "no uncommitted changes to tracked files")
    finding = "there may be uncommitted changes; a request carries only commits"
    return warn("work tree", where, finding, "commit what the job should see")


def _signing_key(settings: Settings, git: GitRepo) -> Check:
    where = "KAKEYA_SIGNING_KEY, config.toml, git config, SSH agent"
    try:
        key = choose(settings, git).key
        if key is None:
            found = "none: requests are unsigned; where a machine wants a signature: kakeya_mac key --make"
            return ok("request key", where, found)
        found = f"requests are signed with {key.public().fingerprint} ({key.source})"
    except BridgeError as error:
        return failed("request key", where, error, "correct the path")
    return ok("request key", where, found)


def _trusted_runners(settings: Settings, *, is_job: bool) -> Check:
    """Whose results are believed here."""
    fix = (
        "give the action its input trusted-runners, or set KAKEYA_TRUSTED_RUNNERS in the repository"
        if is_job
        else "kakeya_mac runners trust NAME --key 'ssh-ed25519 …' (the runner prints the line),"
        " or kakeya_mac runners trust --first"
    )
    name, path = "trusted runners", settings.trusted_runners
    try:
        known = signing.read_keys(path)
    except BridgeError as error:
        return failed(name, str(path), error, "mend that line")
    if known:
        return ok(name, str(path), f"{len(known)} key(s); a result that none of them signed is not believed")
    finding = "none: anyone with push rights could have written a result; one that passed ends in exit code 7"
    return warn(name, str(path), finding, fix)


def _pushing(git: GitRepo, remote: Remote) -> Check:
    """Whether the remote takes pushes, as far as a dry run tells."""
    where = f"git push --dry-run {remote.shown}"
    address, secrets = for_git(remote.address)
    target = f"HEAD:{request_ref('probe', '20000101t000000z000000000000', None)}"
    flags = ("--dry-run", "--porcelain", "--no-verify")
    done = git.attempt("push", *flags, "--", address, target, timeout_s=_NETWORK_TIMEOUT_S, env=secrets)
    if done.exit_code == 0:
        return ok("push", where, "the remote takes pushes (server-side rules are not run by a dry run)")
    said = summary(done.stderr)[:300] or "no answer"
    return fail("push", where, f"cannot push: {said}", "ask for push rights, or use another --remote")


def _workflow_job(environ: Mapping[str, str]) -> Iterator[Check]:
    """Whether this is a job of a workflow, and what its event permits."""
    if environ.get("GITHUB_ACTIONS") == "true":
        job = f"{environ.get('GITHUB_WORKFLOW', 'a workflow')} / {environ.get('GITHUB_JOB', 'a job')}"
        yield ok("workflow job", "GITHUB_ACTIONS", job)
    else:
        fix = "run it in a step of the workflow that will ask"
        yield warn("workflow job", "GITHUB_ACTIONS", "this is no job of a workflow", fix)
    where, event = "GITHUB_EVENT_NAME", environ.get("GITHUB_EVENT_NAME", "")
    if event in _FOREIGN:
        finding = f"{event}: for a fork's pull request the token may only read, and nothing can be asked"
        fix = "ask on push or workflow_dispatch; never on pull_request_target with a fork's commit"
        yield warn("event", where, finding, fix)
    elif event == "pull_request_target":
        fix = "ask on push: this event has a writing token and a stranger's text"
        yield fail("event", where, "a stranger's commit could be asked for", fix)
    else:
        yield ok("event", where, event or "none")


def _transport(settings: Settings, git: GitRepo, remote: Remote) -> Check:
    where = f"--transport {settings.transport}, {remote.shown}"
    try:
        route = choose_route(settings.transport, git, remote, git.resolve("HEAD"))
    except BridgeError as error:
        return failed("transport", where, error, "see docs/actions.md", Level.WARN)
    by = {"daemon": "a runner's daemon takes it", "push": "its push starts a run", "dispatch": "dispatched"}
    return ok("transport", where, f"{route.transport} ({by[route.start]}): {route.why}")


def _workflow(git: GitRepo, remote: Remote) -> Iterator[Check]:
    """The workflow file of the default branch, and its queue."""
    where = f"{WORKFLOW_PATH} of the default branch"
    try:
        data = default_file(git, remote)
    except BridgeError as error:
        yield failed("workflow", where, error, "see docs/actions.md", Level.WARN)
        return
    if data is None:
        yield ok("workflow", where, "there is none: requests are for a runner's daemon")
        return
    yield ok("workflow", where, "the default branch has it")
    if _QUEUE.search(data.decode("utf-8", "replace")):
        yield ok("queue", where, "queue: max, so that a waiting run evicts no other")
        return
    finding = "no `queue: max`: of three requests at once one is cancelled; a client that waits re-runs it"
    fix = "add `queue: max` under concurrency (GitHub since May 2026), without cancel-in-progress"
    yield warn("queue", where, finding, fix)


def _token(repository: Repository, token: Token | None) -> Check:
    """What the token may do, for how long, how often."""
    if token is None:
        finding = "none: runs and their progress cannot be seen, and evicted runs are not re-run"
        fix = f"set {TOKEN_VARIABLES[0]} to a token with actions and contents: write of {repository.slug}"
        return warn("token", ", ".join(TOKEN_VARIABLES), finding, fix)
    api = GitHub(repository, token, retries=0, timeout_s=_API_TIMEOUT_S)
    try:
        api.runs(workflow=WORKFLOW_NAME, limit=1)
        missing = _missing_permission(api)
    except ApiError as error:
        return failed("token", token.source, error, "use another token")
    found = f"reads the runs of {repository.slug}"
    if missing is None:
        return ok("token", token.source, f"{found}, and may write actions")
    fix = f"use one with actions: write and contents: write of {repository.slug}"
    return warn("token", token.source, f"{found}, but {missing}", fix)


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
    name, where = "repository visibility", repository.url
    try:
        facts = GitHub(repository, token, retries=0, timeout_s=_API_TIMEOUT_S).facts()
    except ApiError as error:
        return failed(name, where, error, "set a token", Level.WARN)
    if facts.private:
        return ok(name, where, facts.visibility or "private")
    if allow_public:
        return ok(name, where, "public, as --allow-public says it is meant")
    finding = "public: a self-hosted runner on a public repository runs what strangers propose"
    fix = "make it private; or allow no workflow of forks, and say --allow-public"
    return Check(name, Level.FAIL if is_dangerous else Level.WARN, where, finding, fix)
