"""Cancel a request by its handle; whether the machine honours it shows in the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bridge import signing
from bridge.bus.cancels import CancelOutcome, request_cancel
from bridge.bus.requests import RefValue, RequestState, resolve_handle
from bridge.bus.results import Believed, FetchedResult
from bridge.client.fetch import believe_answer, look_up, read_open_request, request_place
from bridge.client.remotes import Remote, open_cache
from bridge.client.signing_key import RequestSigner
from bridge.errors import BusError, ResultError, UnknownHandle
from bridge.git.repo import GitRepo
from bridge.protocol.manifest import new_cancel
from bridge.settings import Settings

_TRIES = 3


@dataclass(frozen=True)
class Cancelled:
    """What came of cancelling a request."""

    nonce: str
    outcome: Literal["cancelling", "already-asked", "already-finished"]
    signed: bool = False  # whether the cancel request carries a signature
    finished: tuple[Believed, FetchedResult] | None = None  # its result, where it had finished before


def cancel(
    settings: Settings,
    git: GitRepo,
    remote: Remote,
    handle: str,
    *,
    reason: str | None = None,
    signer: RequestSigner,
) -> Cancelled:
    """Ask for a request to be stopped; the `reason`, at most 500 characters, appears in its result."""
    for _ in range(_TRIES):
        state, finished = _find(settings, git, remote, handle)
        handle = state.nonce
        if finished is not None:
            return Cancelled(handle, "already-finished", finished=finished)
        target = _find_target(git, remote, state)
        request = new_cancel(handle, target.commit, requested_by=settings.requested_by, reason=reason)
        signature = signer.sign(signing.CANCEL_NAMESPACE, request.to_bytes())
        cache = open_cache(settings.state_dir, remote, git)
        outcome = request_cancel(cache, request, target, signature=signature)
        if outcome is not CancelOutcome.TOO_LATE:
            is_new = outcome is CancelOutcome.ASKED
            return Cancelled(handle, "cancelling" if is_new else "already-asked", signature is not None)
    raise BusError(f"the request {handle} keeps moving on the remote", "try again")


def _find(
    settings: Settings, git: GitRepo, remote: Remote, handle: str
) -> tuple[RequestState, tuple[Believed, FetchedResult] | None]:
    """The request, and its result if it has one; what cannot be believed hides no request that waits."""
    try:
        state, answer = look_up(git, remote, handle, settings.state_dir)
        return state, None if answer is None else (believe_answer(settings, answer), answer)
    except ResultError:
        state = resolve_handle(git, remote.address, handle)
        if state.inbox is None:
            raise
        return state, None


def _find_target(git: GitRepo, remote: Remote, state: RequestState) -> RefValue:
    """The ref that holds the request alone, as it was asked."""
    place = request_place(state)
    if place is None or (state.inbox is None and read_open_request(git, remote, state) is None):
        raise UnknownHandle(
            f"nothing of the request {state.nonce} is left that could be stopped",
            "its branch is gone, or holds more than the request; deleting the branch stops a request, too",
        )
    return place
