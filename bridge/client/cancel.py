"""Cancel a request by its handle: withdraw one that no runner has, ask the runner to stop one that it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bridge import signing
from bridge.bus.cancels import CancelOutcome, request_cancel
from bridge.bus.publish import AlreadyAnswered, ResultFiles, publish, result_without_runner
from bridge.bus.requests import RefValue, RequestState, resolve_handle
from bridge.bus.results import Believed, FetchedResult
from bridge.client.fetch import believe_answer, look_up, read_open_request, request_place
from bridge.client.remotes import Remote, open_cache
from bridge.client.signing_key import RequestSigner
from bridge.errors import BusError, RequestGone, ResultError
from bridge.git.cache import GitCache
from bridge.git.repo import GitRepo
from bridge.protocol.manifest import CancelRequest, Manifest, new_cancel
from bridge.protocol.refs import parse_request_ref
from bridge.protocol.result import Reason, Status, Verdict
from bridge.settings import Settings

_TRIES = 3


@dataclass(frozen=True)
class Cancelled:
    """What came of cancelling a request."""

    nonce: str
    outcome: Literal["withdrawn", "cancelling", "already-asked", "already-finished"]
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
    is_on_machine: Callable[[RequestState], bool] = lambda _: False,
) -> Cancelled:
    """Withdraw a request, or ask for it to be stopped where a runner has it.

    The `reason`, at most 500 characters, appears in the result. A runner has a request when it is claimed, or
    when `is_on_machine` says so, for workflows, which claim nothing.
    """
    may_withdraw = True
    for _ in range(_TRIES):
        state, finished = _find(settings, git, remote, handle)
        handle = state.nonce
        if finished is not None:
            return Cancelled(handle, "already-finished", finished=finished)
        target, asked = _find_target(git, remote, state)
        request = new_cancel(handle, target.commit, requested_by=settings.requested_by, reason=reason)
        cache = open_cache(settings.state_dir, remote, git)
        if cache.bring({target.ref: target.commit}, [target.ref]):
            continue  # it moved
        if may_withdraw and state.claim is None and not is_on_machine(state):
            try:
                _withdraw(cache, target, asked, request)
            except AlreadyAnswered:
                may_withdraw = False  # by a result that was pushed just now, or one that is not believed
                continue
            return Cancelled(handle, "withdrawn")
        signature = signer.sign(signing.CANCEL_NAMESPACE, request.to_bytes())
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


def _find_target(git: GitRepo, remote: Remote, state: RequestState) -> tuple[RefValue, Manifest | None]:
    """The ref that holds the request alone, as it was asked, and what it asks; None: it cannot be read."""
    place = request_place(state)
    asked = None if place is None else read_open_request(git, remote, state)
    if place is not None and (state.inbox is not None or asked is not None):
        return place, asked
    where = "its branch is not on the remote: it was deleted, or never pushed"
    if state.branch is not None:
        where = f"its branch {state.branch.ref} holds {state.branch.commit[:12]}, which is not the request"
    raise RequestGone(
        f"there is nothing to cancel of the request {state.nonce}: it is not in the inbox, and {where}",
        "check the handle: kakeya_mac status",
    )


def _withdraw(cache: GitCache, target: RefValue, asked: Manifest | None, request: CancelRequest) -> None:
    """Publish that the request was withdrawn, in the push that takes it out of the inbox.

    A runner that claims it meanwhile sees the result and stops, and its own result is not published.
    """
    result_ref = target.ref if parse_request_ref(target.ref) else None
    if asked is not None:
        result_ref = asked.result_ref
    verdict = Verdict(status=Status.CANCELLED, reason=Reason.REQUESTED, message=request.withdrawal)
    result = result_without_runner(request.nonce, target.commit, asked, verdict, author="client")
    files = ResultFiles(request.nonce, target.commit, result_ref, result.to_bytes(), None, {})
    publish(cache, cache.remote, files, claim=None)
