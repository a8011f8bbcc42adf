"""Cancel a request by its handle: is there still something to stop, and did the cancel request get there?

Whether the machine honours it shows in the result. A request in the archive has finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bridge import signing
from bridge.bus.cancels import CancelOutcome, request_cancel
from bridge.bus.requests import RefValue, resolve_handle
from bridge.bus.results import Believed, FetchedResult
from bridge.client.fetch import Lookup, believe_answer, look_up, read_open_request, request_place
from bridge.client.remotes import Remote, open_cache
from bridge.client.signing_key import RequestSigner
from bridge.errors import BusError, ResultError, UnknownHandle
from bridge.git.repo import GitRepo
from bridge.protocol.manifest import new_cancel
from bridge.settings import Settings

_TRIES = 3


class Outcome(StrEnum):
    """What became of a request to cancel. A closed set."""

    CANCELLING = "cancelling"
    ALREADY_ASKED = "already-asked"
    ALREADY_FINISHED = "already-finished"


@dataclass(frozen=True)
class Cancelled:
    """What came of cancelling a request."""

    nonce: str
    outcome: Outcome
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
    """Ask for a request to be stopped; the `reason`, at most 500 characters, appears in its result.

    Raises:
        UnknownHandle: It names no request, or nothing of it is left that could be stopped.
        ResultError: What is where a result belongs cannot be believed, and nothing else is left.
        PushRejected: The remote takes no cancel requests; deleting the request's branch stops it, too.
    """
    for _ in range(_TRIES):
        found = _look_up(settings, git, remote, handle)
        handle = found.nonce
        finished = _read_result(settings, found)
        if finished is not None:
            return Cancelled(found.nonce, Outcome.ALREADY_FINISHED, finished=finished)
        target = _find_target(git, remote, found)
        request = new_cancel(found.nonce, target.commit, requested_by=settings.requested_by, reason=reason)
        signature = signer.sign(signing.CANCEL_NAMESPACE, request.to_bytes())
        cache = open_cache(settings.state_dir, remote, git)
        outcome = request_cancel(cache, request, target, signature=signature)
        if outcome is not CancelOutcome.TOO_LATE:
            shown = Outcome.CANCELLING if outcome is CancelOutcome.ASKED else Outcome.ALREADY_ASKED
            return Cancelled(found.nonce, shown, signature is not None)
    raise BusError(f"the request {handle} keeps moving on the remote", "try again")


def _look_up(settings: Settings, git: GitRepo, remote: Remote, handle: str) -> Lookup:
    """The request and its result; rubbish in the result's place does not keep one that waits from a stop."""
    try:
        return look_up(git, remote, handle, settings.state_dir)
    except ResultError:
        state = resolve_handle(git, remote.address, handle)
        if state.inbox is None:
            raise
        return Lookup(state.nonce, state, None)


def _read_result(settings: Settings, found: Lookup) -> tuple[Believed, FetchedResult] | None:
    """Its result, if it has one. What cannot be believed does not keep a request from being stopped."""
    if found.answer is None:
        return None
    try:
        return believe_answer(settings, found.answer), found.answer
    except ResultError:
        if found.state.inbox is None:
            raise
        return None


def _find_target(git: GitRepo, remote: Remote, found: Lookup) -> RefValue:
    """The ref that holds the request alone, as it was asked."""
    place = request_place(found.state)
    if place is None:
        raise UnknownHandle(
            f"nothing of the request {found.nonce} is left that could be stopped",
            "its branch is gone: a runner that sees that stops by itself",
        )
    if found.state.inbox is None and read_open_request(git, remote, found.state) is None:
        raise UnknownHandle(
            f"the branch {place.ref} no longer holds the request {found.nonce} alone",
            "deleting that branch stops the request, too",
        )
    return place
