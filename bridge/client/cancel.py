"""Cancel a request by its handle: is there still something to stop, and did the cancel request get there?

Whether the machine honours it shows in the result. A request in the archive has finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bridge import signing
from bridge.bus.cancels import CancelOutcome, request_cancel
from bridge.bus.results import Believed, FetchedResult
from bridge.bus.state import RefValue, resolve_handle
from bridge.client.fetch import Lookup, believe_answer, look_up, read_open_request
from bridge.client.remotes import Remote, open_cache
from bridge.client.signing_key import RequestSigner
from bridge.errors import BusError, ResultError, UnknownHandle
from bridge.git.repo import GitRepo
from bridge.protocol import refs
from bridge.protocol.cancel import new_cancel
from bridge.settings import Settings

_TRIES = 3


class Outcome(StrEnum):
    """What became of a request to cancel. A closed set."""

    CANCELLING = "cancelling"
    ALREADY_ASKED = "already-asked"
    ALREADY_FINISHED = "already-finished"


@dataclass(frozen=True)
class Cancelled:
    """What came of cancelling a request.

    Attributes:
        nonce: The request.
        outcome: What happened.
        signed: Whether the cancel request carries a signature.
        finished: Its result, where it had finished before.
    """

    nonce: str
    outcome: Outcome
    signed: bool = False
    finished: tuple[Believed, FetchedResult] | None = None


def cancel(
    settings: Settings,
    git: GitRepo,
    remote: Remote,
    handle: str,
    *,
    reason: str | None = None,
    signer: RequestSigner,
) -> Cancelled:
    """Ask for a request to be stopped.

    Args:
        settings: The client's settings.
        git: Any checkout; nothing is left in it.
        remote: The bus.
        handle: Nonce, branch name or a unique prefix.
        reason: Why, for the result; at most 500 characters.
        signer: Signs the cancel request.

    Raises:
        UnknownHandle: It names no request, or nothing of it is left that could be stopped.
        ManifestError: The reason is too long.
        ResultError: What is where a result belongs cannot be believed, and nothing else is left.
        SignatureError: The key that the user named cannot sign.
        PushRejected: The remote takes no cancel requests; deleting the request's branch stops it, too.
        RemoteUnreachable: The remote did not answer.
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
    """The ref that holds the request as it was asked: its branch, or its inbox entry."""
    inbox, branch = found.state.inbox, found.state.branch
    if inbox is not None:
        is_on_branch = branch is not None and branch.commit == inbox
        return branch if branch and is_on_branch else RefValue(refs.inbox_ref(found.nonce), inbox)
    if branch is None:
        raise UnknownHandle(
            f"nothing of the request {found.nonce} is left that could be stopped",
            "its branch is gone: a runner that sees that stops by itself",
        )
    if read_open_request(git, remote, found.state) is None:
        raise UnknownHandle(
            f"the branch {branch.ref} no longer holds the request {found.nonce} alone",
            "deleting that branch stops the request, too",
        )
    return branch
