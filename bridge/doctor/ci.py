"""Can this job of a workflow ask a Mac, and gate on the answer?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from bridge.bus.git import Git
from bridge.client.remotes import resolve_remote
from bridge.doctor import actions, basics, client
from bridge.doctor.finding import Check, Level
from bridge.errors import BridgeError
from bridge.settings import Settings

# Of these a fork's run has a token that may write nothing, whatever the workflow says.
_FOREIGN = ("pull_request", "pull_request_review", "pull_request_review_comment")


def examine(
    settings: Settings,
    repository: Path,
    *,
    allow_public: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Check]:
    """Every check in turn.

    Args:
        settings: The client's settings.
        repository: The job's checkout.
        allow_public: A public repository is meant.
        environ: Variables; None: the process's own.
    """
    environ = os.environ if environ is None else environ
    yield basics.python()
    git = Git(repository)
    version = basics.git_version(git)
    yield version
    yield _workflow_job(environ)
    yield _event(environ)
    if version.level is Level.FAIL:
        return
    inside = client.checkout(git)
    yield inside
    yield _trusted(settings)
    if inside.level is Level.FAIL:
        return
    yield client.work_tree(git)
    try:
        remote = resolve_remote(git, settings.remote)
    except BridgeError as error:
        where = "--remote, KAKEYA_REMOTE, origin"
        yield Check("remote", Level.FAIL, where, error.message, error.remedy or "name it")
        return
    reachable = client.reachable(git, remote)
    yield reachable
    if reachable.level is not Level.FAIL:
        yield client.pushing(git, remote)
        for check in actions.examine(settings, git, remote, allow_public=allow_public, environ=environ):
            # Without a way to go, `run` ends with the same message.
            blocked = check.name == "transport" and check.level is Level.WARN
            yield replace(check, level=Level.FAIL) if blocked else check


def _workflow_job(environ: Mapping[str, str]) -> Check:
    if environ.get("GITHUB_ACTIONS") == "true":
        job = f"{environ.get('GITHUB_WORKFLOW', 'a workflow')} / {environ.get('GITHUB_JOB', 'a job')}"
        return Check("workflow job", Level.OK, "GITHUB_ACTIONS", job)
    fix = "run it in a step of the workflow that will ask"
    return Check("workflow job", Level.WARN, "GITHUB_ACTIONS", "this is no job of a workflow", fix)


def _event(environ: Mapping[str, str]) -> Check:
    event = environ.get("GITHUB_EVENT_NAME", "")
    if event in _FOREIGN:
        return Check(
            "event",
            Level.WARN,
            "GITHUB_EVENT_NAME",
            f"{event}: for a fork's pull request the token may only read, and nothing can be asked",
            "ask on push or workflow_dispatch; never on pull_request_target with a fork's commit",
        )
    if event == "pull_request_target":
        fix = "ask on push: this event has a writing token and a stranger's text"
        return Check("event", Level.FAIL, "GITHUB_EVENT_NAME", "a stranger's commit could be asked for", fix)
    return Check("event", Level.OK, "GITHUB_EVENT_NAME", event or "none")


def _trusted(settings: Settings) -> Check:
    found = client.trusted_runners(settings)
    if found.level is not Level.WARN:
        return found
    fix = "give the action its input trusted-runners, or the repository the variable KAKEYA_TRUSTED_RUNNERS"
    return Check(found.name, found.level, found.looked_at, found.finding, fix)
