"""What GitHub's runner says of the job it is about to start: read strictly, for the hook that may refuse it.

All of it was set by the platform before any step: https://docs.github.com/en/actions/reference/workflows-and-actions/variables
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.errors import RequestRefused
from bridge.protocol.sanitize import quoted
from bridge.workflow import environment
from bridge.workflow.asked import Asked

MAX_EVENT = 1 << 20
_SHA = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_WORKFLOW = re.compile(r"(?P<repository>[^/\s]+/[^/\s]+)/(?P<path>\.github/workflows/[^@\s]+)@(?P<ref>\S+)")


@dataclass(frozen=True)
class Started:
    """A job that is about to begin.

    Attributes:
        repository: ``owner/name`` of the run.
        event: What started it.
        actors: The account that started the run, and the one that started this attempt of it.
        ref: The run's own branch, full name.
        workflow: Path of its file.
        workflow_repository: ``owner/name`` of that file.
        workflow_sha: The commit it is taken from.
        asked: The request it is about.
        default_branch: Of the repository, as the event says; empty: it does not.
        server: The server's web address.
    """

    repository: str
    event: str
    actors: tuple[str, ...]
    ref: str
    workflow: str
    workflow_repository: str
    workflow_sha: str
    asked: Asked
    default_branch: str
    server: str


def read(environ: Mapping[str, str]) -> Started:
    """The job that this process's environment describes.

    Raises:
        RequestRefused: Something is missing, or is not what it should be.
    """
    event = _needed(environ, "GITHUB_EVENT_NAME")
    document = _document(Path(_needed(environ, "GITHUB_EVENT_PATH")))
    where = _needed(environ, "GITHUB_WORKFLOW_REF")
    workflow = _WORKFLOW.fullmatch(where)
    if workflow is None:
        raise RequestRefused(f"GITHUB_WORKFLOW_REF is {quoted(where)}, which names no workflow file")
    sha = _needed(environ, "GITHUB_WORKFLOW_SHA")
    if not _SHA.fullmatch(sha):
        raise RequestRefused(f"GITHUB_WORKFLOW_SHA is {quoted(sha)}, not a commit")
    repository = _needed(environ, "GITHUB_REPOSITORY")
    inputs = _table(document, "inputs") if event == "workflow_dispatch" else {}
    if event == "workflow_dispatch" and not inputs:
        raise RequestRefused("the run was started by hand and names no request")
    named = (
        {"GITHUB_SHA": _text(inputs, "commit"), "GITHUB_REF": _text(inputs, "branch")} if inputs else environ
    )
    only = {name: named[name] for name in ("GITHUB_SHA", "GITHUB_REF") if name in named}
    return Started(
        repository=repository,
        event=event,
        actors=tuple(
            dict.fromkeys((_needed(environ, "GITHUB_ACTOR"), _needed(environ, "GITHUB_TRIGGERING_ACTOR")))
        ),
        ref=_needed(environ, "GITHUB_REF"),
        workflow=workflow["path"],
        workflow_repository=workflow["repository"],
        workflow_sha=sha,
        asked=environment.read(only, remote="any").asked,
        default_branch=_text(_table(document, "repository"), "default_branch"),
        server=environ.get("GITHUB_SERVER_URL") or "https://github.com",
    )


def _needed(environ: Mapping[str, str], name: str) -> str:
    if value := environ.get(name):
        return value
    raise RequestRefused(
        f"the environment has no {name}", "this is for GitHub's runner: ACTIONS_RUNNER_HOOK_JOB_STARTED"
    )


def _document(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as handle:
            data = handle.read(MAX_EVENT + 1)
        found = json.loads(data) if len(data) <= MAX_EVENT else None
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestRefused("the event in GITHUB_EVENT_PATH cannot be read")
    return found


def _table(document: dict[str, Any], name: str) -> dict[str, Any]:
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def _text(document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    return value if isinstance(value, str) else ""
