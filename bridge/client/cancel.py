"""A request stopped, by its handle: is it still there to stop, and is the wish on the remote?

Only says that the wish is there. Whether the machine honours it shows in the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bridge import signing
from bridge.bus import cancels, refs
from bridge.bus.cancels import Wished
from bridge.bus.git import Git
from bridge.bus.handles import Held, RequestState, resolve_handle
from bridge.bus.requests import bound_manifest, read_request
from bridge.bus.results import Believed, FetchedResult, believe, fetch
from bridge.client.remotes import Remote
from bridge.errors import BusError, ManifestError, ResultError, UnknownHandle
from bridge.settings import Settings

_TRIES = 3


class Outcome(StrEnum):
    """What a wish to stop met. A closed set."""

    CANCELLING = "cancelling"
    ALREADY_ASKED = "already-asked"
    ALREADY_FINISHED = "already-finished"


@dataclass(frozen=True)
class Cancelled:
    """What came of a wish to stop a request.

    Attributes:
        nonce: The request.
        outcome: What the wish met.
        signed: Whether the wish carries a signature.
        warnings: One sentence each, for people.
        finished: Its result, where it had finished before.
    """

    nonce: str
    outcome: Outcome
    signed: bool = False
    warnings: tuple[str, ...] = ()
    finished: tuple[Believed, FetchedResult] | None = None


def cancel_request(
    settings: Settings, git: Git, remote: Remote, handle: str, *, reason: str | None = None
) -> Cancelled:
    """Ask for a request to be stopped.

    Args:
        settings: The client's settings; `signing_key` decides whether the wish is signed.
        git: Any checkout; nothing is left in it.
        remote: The bus.
        handle: Nonce, branch name or a unique prefix.
        reason: Why, for whoever reads the result; at most 500 characters.

    Raises:
        UnknownHandle: It names no request, or nothing of it is left that could be stopped.
        ManifestError: The reason is too long.
        ResultError: What stands where a result belongs cannot be believed, and nothing else is left.
        SignatureError: The configured key cannot sign.
        PushRejected: The remote takes no wishes; deleting the request's branch stops it, too.
        RemoteUnreachable: The remote did not answer.
    """
    key, warnings = settings.signing_key, tuple[str, ...]()
    if key is not None and not signing.available():
        key, warnings = None, ("the wish is unsigned: ssh-keygen is not installed",)
    state = resolve_handle(git, remote.address, handle)
    for _ in range(_TRIES):
        finished = _finished(settings, git, remote, state)
        if finished is not None:
            return Cancelled(state.nonce, Outcome.ALREADY_FINISHED, finished=finished)
        standing = _standing(git, remote, state)
        cancel = cancels.draft(
            state.nonce, standing.commit, requested_by=settings.requested_by, reason=reason
        )
        wished = cancels.wish(git, remote.address, cancel, standing, key=key)
        if wished is not Wished.TOO_LATE:
            outcome = Outcome.CANCELLING if wished is Wished.ASKED else Outcome.ALREADY_ASKED
            return Cancelled(state.nonce, outcome, key is not None, warnings)
        state = resolve_handle(git, remote.address, state.nonce)
    raise BusError(f"the request {state.nonce} keeps moving on the remote", "try again")


def _finished(
    settings: Settings, git: Git, remote: Remote, state: RequestState
) -> tuple[Believed, FetchedResult] | None:
    """Its result, if it has one. What cannot be believed does not keep a request from being stopped."""
    try:
        fetched = fetch(git, remote.address, state)
        return None if fetched is None else (believe(fetched, trusted=settings.trusted_runners), fetched)
    except ResultError:
        if state.inbox is None:
            raise
        return None


def _standing(git: Git, remote: Remote, state: RequestState) -> Held:
    """The ref that holds the request as it was asked: its branch, or its inbox entry."""
    if state.inbox is not None:
        if state.branch is not None and state.branch.commit == state.inbox:
            return state.branch
        return Held(refs.inbox_ref(state.nonce), state.inbox)
    if state.branch is not None:
        with git.scratch() as scratch:
            if not scratch.exists(state.branch.commit):
                scratch.fetch(remote.address, [state.branch.ref])
            try:
                bound_manifest(read_request(scratch, state.branch.commit), state.nonce)
            except (ManifestError, BusError):
                raise UnknownHandle(
                    f"the branch {state.branch.ref} no longer holds the request {state.nonce} alone",
                    "deleting that branch stops the request, too",
                ) from None
        return state.branch
    raise UnknownHandle(
        f"nothing of the request {state.nonce} is left that could be stopped",
        "its branch is gone: a runner that sees that stops by itself",
    )
