"""What commands need of a request's workflow run. The API only informs, so its failures are warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from bridge.errors import ApiError

if TYPE_CHECKING:
    from bridge.bus.state import RequestState
    from bridge.client.remotes import Remote
    from bridge.git.repo import GitRepo
    from bridge.github.api import GitHub
    from bridge.github.dispatch import RequestRef, RunView, RunWatcher


def warn_api(error: ApiError) -> None:
    """Print an API failure on standard error."""
    click.echo(f"warning: {error.message}", err=True)
    if error.remedy:
        click.echo(f"  {error.remedy}", err=True)


def api_or_none(remote: Remote) -> GitHub | None:
    """The API of the remote's repository; None: it is no GitHub repository, or there is no token."""
    from bridge.github.dispatch import api_of

    try:
        return api_of(remote.address)
    except ApiError as error:
        warn_api(error)
        return None


def find_run(git: GitRepo, remote: Remote, state: RequestState | None) -> RunView | None:
    """The workflow run of a request; None: none is known.

    Raises:
        RemoteUnreachable: The remote did not answer.
    """
    from bridge.github import dispatch

    github = None if state is None else api_or_none(remote)
    request = None if github is None or state is None else _actions_request(git, remote, state)
    if github is None or request is None:
        return None
    try:
        return dispatch.find_run(github, request)
    except ApiError as error:
        warn_api(error)
        return None


def watch_run(git: GitRepo, remote: Remote, state: RequestState | None) -> RunWatcher | None:
    """A watcher of the workflow run of a request; None: the request has none.

    Raises:
        RemoteUnreachable: The remote did not answer.
    """
    from bridge.github.dispatch import RunWatcher
    from bridge.github.repository import repository_of

    try:
        if state is None or repository_of(remote.address) is None:
            return None
    except ApiError as error:
        warn_api(error)
        return None
    request = _actions_request(git, remote, state)
    return None if request is None else RunWatcher(api_or_none(remote), request)


def _actions_request(git: GitRepo, remote: Remote, state: RequestState) -> RequestRef | None:
    """The request as its workflow run names it; None: no workflow takes it."""
    from bridge.client.fetch import read_open_request
    from bridge.github.dispatch import RequestRef

    manifest = read_open_request(git, remote, state)
    if manifest is None or manifest.transport != "actions":
        return None
    commit = state.inbox or (state.branch.commit if state.branch is not None else "")
    return RequestRef(state.nonce, manifest.result_ref, commit)
