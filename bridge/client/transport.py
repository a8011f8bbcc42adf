"""Who takes a request: the daemon of an embedded runner, or a workflow of GitHub Actions, and how one starts.

    embedded            a runner's daemon fetches it
    actions, a push     starts the workflow file of the pushed commit
    actions, a dispatch starts the default branch's file; needs a token, and is the only way inside a
                        workflow, for what is pushed with its token starts nothing

Two files may be there, the workload's and the default branch's. A push wants them to be the same, or the
workload to have none: then the request brings the default branch's, and no other, for servers want a special
permission of who pushes another, and the default branch's is the reviewed one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bridge.bus.requests import WORKFLOW_PATH, SubmitOptions
from bridge.client.remotes import Remote
from bridge.errors import ApiError, RevisionError
from bridge.git.repo import GitRepo
from bridge.github.api import GitHub
from bridge.github.dispatch import Dispatch
from bridge.github.repository import Repository, find_token, repository_of

Transport = Literal["embedded", "actions"]

_MAX_FILE = 256 * 1024
_PLAIN = SubmitOptions()
_WITHOUT_RUN = SubmitOptions(starts_run=False)
_EMBEDDED = "--transport embedded leaves the request to a runner's daemon"


@dataclass(frozen=True)
class Route:
    """How a request gets to a runner.

    Attributes:
        transport: Who takes it.
        why: Of the choice, for people.
        options: How it travels.
        dispatch: What starts its run; None: the push does, or no run is needed.
        warnings: One sentence each.
    """

    transport: Transport
    why: str
    options: SubmitOptions = _PLAIN
    dispatch: Dispatch | None = None
    warnings: tuple[str, ...] = ()

    @property
    def start(self) -> str:
        """What makes a runner take it: ``daemon``, ``push`` or ``dispatch``."""
        if self.transport == "embedded":
            return "daemon"
        return "push" if self.dispatch is None else "dispatch"


def choose_route(
    asked: str,
    git: GitRepo,
    remote: Remote,
    workload: str,
    *,
    environ: Mapping[str, str] | None = None,
) -> Route:
    """How a request for a workload gets to a runner of a remote.

    Args:
        asked: ``auto``, ``embedded`` or ``actions``.
        git: Has the workload.
        remote: The bus.
        workload: A commit.
        environ: Variables; None: the process's own.

    Raises:
        RevisionError: The workload has another workflow file than the default branch.
        ApiError: Inside a workflow: there is no token, or it does not do.
        RemoteUnreachable: The remote did not answer.
    """
    environ = os.environ if environ is None else environ
    if asked == "embedded":
        return Route("embedded", "it was asked for")
    repository = repository_of(remote.address, environ)
    if repository is None and asked == "auto":
        return Route("embedded", "the remote is on no GitHub server that is known here")
    if environ.get("GITHUB_ACTIONS") == "true" and repository is not None:
        return _inside(asked, git, remote, repository, environ)
    token = None if repository is None else find_token(environ, address=remote.address)
    github = None if repository is None or token is None else GitHub(repository, token)
    return _outside(asked, _file(git, workload), default_file(git, remote), github, workload)


def _inside(
    asked: str, git: GitRepo, remote: Remote, repository: Repository, environ: Mapping[str, str]
) -> Route:
    """In a workflow: by dispatch."""
    github = GitHub(repository, find_token(environ, address=remote.address))
    if github.token is None:
        raise ApiError(
            "inside a workflow a request is started through the API, and there is no token for it",
            "give the step `env: KAKEYA_GITHUB_TOKEN: ${{ github.token }}` and the job `actions: write` and"
            f" `contents: write`; or {_EMBEDDED}",
        )
    ref = github.facts().default_branch
    if asked == "auto" and default_file(git, remote) is None:
        return Route("embedded", f"{repository.slug} has no {WORKFLOW_PATH} on its branch {ref}")
    why = "this is a workflow, and what is pushed with its token starts no run"
    return Route("actions", why, _WITHOUT_RUN, Dispatch(github, ref))


def _outside(
    asked: str, own: bytes | None, default: bytes | None, github: GitHub | None, workload: str
) -> Route:
    """On anybody's machine: by a push, where the workload's file and the default branch's allow it."""
    if own is None and default is None:
        if asked == "auto":
            return Route("embedded", f"neither the workload nor the default branch has {WORKFLOW_PATH}")
        raise RevisionError(
            f"neither the workload {workload[:12]} nor the remote's default branch has {WORKFLOW_PATH}",
            f"commit that file to the default branch (docs/actions.md), or {_EMBEDDED}",
        )
    why = "it was asked for" if asked == "actions" else f"the repository has {WORKFLOW_PATH}"
    if own is None:
        return Route("actions", why, SubmitOptions(workflow=default))
    if default is None:
        said = f"only the workload has {WORKFLOW_PATH}, not the default branch: its runs are unreviewed"
        return Route("actions", why, warnings=(said,))
    if own == default:
        return Route("actions", why)
    if github is not None:
        why = f"the workload's {WORKFLOW_PATH} is not the default branch's, which a dispatch runs"
        return Route("actions", why, _WITHOUT_RUN, Dispatch(github, github.facts().default_branch))
    raise RevisionError(
        f"the workload {workload[:12]} has another {WORKFLOW_PATH} than the remote's default branch: a push"
        " would run the workload's, which is not the reviewed one",
        "rebase the workload; or set KAKEYA_GITHUB_TOKEN, with which the default branch's file is started;"
        f" or {_EMBEDDED}",
    )


def default_file(git: GitRepo, remote: Remote) -> bytes | None:
    """The workflow file of the remote's default branch; None: it has none, or there is no such branch.

    Args:
        git: Any checkout; nothing is left in it.
        remote: The bus.

    Raises:
        BusError: The remote did not answer.
    """
    head = git.list_refs(remote.address, "HEAD").get("HEAD")
    if head is None:
        return None
    if git.exists(head):
        return _file(git, head)
    with git.scratch() as scratch:
        scratch.fetch(remote.address, ["HEAD"])
        return _file(scratch, head)


def _file(git: GitRepo, commit: str) -> bytes | None:
    return git.read_file(commit, WORKFLOW_PATH, _MAX_FILE)
