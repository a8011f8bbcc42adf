"""GitHub's side of a remote: the workflow file of its default branch, the token, who may see it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bridge.bus.carriage import WORKFLOW_NAME, WORKFLOW_PATH
from bridge.bus.git import Git
from bridge.client.remotes import Remote
from bridge.client.transport import choose_route, default_file
from bridge.doctor.finding import Check, Level
from bridge.errors import ApiConflict, ApiError, ApiNotFound, BridgeError, ScopeMissing
from bridge.github import GitHub, find_token, repository_of
from bridge.github.client import TokenFacts
from bridge.github.repository import Repository
from bridge.github.token import NAMES, Token
from bridge.settings import Settings

SHIPPED = Path(__file__).parents[1] / "workflow" / WORKFLOW_NAME
_QUEUE = re.compile(r"^concurrency:\n(?:[ \t].*\n|\n|#.*\n)*?[ \t]+queue:[ \t]*max\b", re.MULTILINE)
_SCOPES = ("repo", "workflow")
_NO_RUN = 0
_SOON = timedelta(days=7)
_FEW_CALLS = 100
_TIMEOUT_S = 10.0


def examine(
    settings: Settings,
    git: Git,
    remote: Remote,
    *,
    allow_public: bool,
    environ: Mapping[str, str] | None = None,
    dangerous: bool = False,
) -> Iterator[Check]:
    """Every check of a remote that may be a repository of a GitHub server.

    Args:
        settings: For the transport.
        git: A checkout.
        remote: The bus.
        allow_public: A public repository is meant.
        environ: Variables; None: the process's own.
        dangerous: A public repository is more than a warning: this is the machine that runs its workflows.
    """
    yield _transport(settings, git, remote)
    try:
        repository = repository_of(remote.address, environ)
        token = None if repository is None else find_token(environ, address=remote.address)
    except ApiError as error:
        yield Check("github", Level.FAIL, ", ".join(NAMES), error.message, error.remedy or "correct it")
        return
    if repository is None:
        return
    yield from workflow(git, remote)
    yield from _token(repository, token)
    yield visibility(repository, token, allow_public=allow_public, dangerous=dangerous)


def seen_by(remote: Remote, *, allow_public: bool) -> Iterator[Check]:
    """Who may see the repository of a machine that runs its workflows, where git cannot read it.

    Args:
        remote: The bus.
        allow_public: A public repository is meant.
    """
    try:
        repository = repository_of(remote.address)
        token = None if repository is None else find_token(address=remote.address)
    except ApiError as error:
        yield Check("github", Level.FAIL, ", ".join(NAMES), error.message, error.remedy or "correct it")
        return
    if repository is not None:
        yield visibility(repository, token, allow_public=allow_public, dangerous=True)


def _transport(settings: Settings, git: Git, remote: Remote) -> Check:
    where = f"--transport {settings.transport}, {remote.shown}"
    try:
        route = choose_route(settings.transport, git, remote, git.resolve("HEAD"))
    except BridgeError as error:
        return Check("transport", Level.WARN, where, error.message, error.remedy or "see docs/actions.md")
    starts = {
        "daemon": "a runner's daemon takes it",
        "push": "its push starts a run",
        "dispatch": "dispatched",
    }
    return Check("transport", Level.OK, where, f"{route.transport} ({starts[route.start]}): {route.why}")


def workflow(git: Git, remote: Remote) -> Iterator[Check]:
    """The workflow file of the default branch, and its queue."""
    where = f"{WORKFLOW_PATH} of the default branch"
    try:
        data = default_file(git, remote)
    except BridgeError as error:
        yield Check("workflow", Level.WARN, where, error.message, error.remedy or "see docs/actions.md")
        return
    if data is None:
        yield Check("workflow", Level.OK, where, "there is none: requests are for a runner's daemon")
        return
    if data == SHIPPED.read_bytes():
        yield Check("workflow", Level.OK, where, "the one that came with this version")
    else:
        yield Check(
            "workflow",
            Level.WARN,
            where,
            "another one than came with this version: a Mac refuses files that its policy does not name",
            "commit the file of the Mac's version, or have its owner add the digest to workflow_sha256",
        )
    if _QUEUE.search(data.decode("utf-8", "replace")):
        yield Check("queue", Level.OK, where, "queue: max, so that a waiting run evicts no other")
    else:
        yield Check(
            "queue",
            Level.WARN,
            where,
            "no `queue: max`: of three requests at once one is cancelled; who waits for it starts it again",
            "add `queue: max` under concurrency (GitHub since May 2026), without cancel-in-progress",
        )


def _token(repository: Repository, token: Token | None) -> Iterator[Check]:
    """What the token may do, for how long, how often."""
    where = ", ".join(NAMES) if token is None else token.source
    if token is None:
        yield Check(
            "token",
            Level.WARN,
            where,
            "none: runs, their live step and evictions cannot be seen; evicted runs are pushed again late",
            f"set {NAMES[0]} to a token with actions: write and contents: write of {repository.slug}",
        )
        return
    github = GitHub(repository, token, patience_s=0.0, timeout_s=_TIMEOUT_S)
    try:
        facts = github.token_facts()
        next(iter(github.runs(workflow=WORKFLOW_NAME, limit=1)), None)
        may_not = _may_not(github, facts)
    except ApiError as error:
        yield Check("token", Level.FAIL, where, error.message, error.remedy or "use another token")
        return
    found = f"reads the runs of {repository.slug}"
    if facts.scopes is not None and (missing := [name for name in _SCOPES if name not in facts.scopes]):
        yield Check(
            "token",
            Level.WARN,
            where,
            f"lacks the scope {', '.join(missing)}; it has {', '.join(facts.scopes) or 'none'}",
            "make a token with the scopes repo and workflow, or a fine-grained one",
        )
    elif may_not is not None:
        fix = f"use one with actions: write and contents: write of {repository.slug}"
        yield Check("token", Level.WARN, where, f"{found}, but {may_not}", fix)
    elif facts.expires_at is not None and facts.expires_at - datetime.now(UTC) < _SOON:
        yield Check(
            "token", Level.WARN, where, f"ends at {facts.expires_at:%Y-%m-%d %H:%M} UTC", "make a new one"
        )
    elif facts.remaining is not None and facts.remaining < _FEW_CALLS:
        fix = "wait for the hour to end, or use a token of somebody else"
        yield Check("token", Level.WARN, where, f"has {facts.remaining} calls left in this hour", fix)
    else:
        may = "and may write actions" if facts.scopes is None else "and its scopes fit"
        yield Check("token", Level.OK, where, f"{found}, {may}")


def _may_not(github: GitHub, facts: TokenFacts) -> str | None:
    """What a client needs and the token may not do; None: it may, or does not say."""
    permissions = github.facts().permissions
    if permissions is not None and not permissions.push:
        return "may not push: no request can be made with it"
    # Other tokens than classic ones do not say what they may. No run has this number, so nothing begins.
    if facts.scopes is not None:
        return None
    try:
        github.rerun(_NO_RUN)
    except ScopeMissing:
        return "lacks actions: write, so it can start and stop no runs"
    except (ApiConflict, ApiNotFound):
        return None  # it was let through to look for the run
    return None


def visibility(repository: Repository, token: Token | None, *, allow_public: bool, dangerous: bool) -> Check:
    """Whether strangers can see, and so fork and ask."""
    where = repository.url
    try:
        facts = GitHub(repository, token, patience_s=0.0, timeout_s=_TIMEOUT_S).facts()
    except ApiError as error:
        return Check("repository visibility", Level.WARN, where, error.message, error.remedy or "set a token")
    if facts.private:
        return Check("repository visibility", Level.OK, where, facts.visibility or "private")
    if allow_public:
        return Check("repository visibility", Level.OK, where, "public, as --allow-public says it is meant")
    return Check(
        "repository visibility",
        Level.FAIL if dangerous else Level.WARN,
        where,
        "public: a self-hosted runner on a public repository runs what strangers propose",
        "make it private; or allow no workflow of forks, and say --allow-public",
    )
