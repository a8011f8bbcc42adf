"""A request stopped, by its handle: is it still there to stop, and is the wish on the remote?

One that was retired into the archive has finished, and is said to have.

Only says that the wish is there. Whether the machine honours it shows in the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bridge import signing
from bridge.bus import cancels
from bridge.bus.cancels import Wished
from bridge.bus.git import Git
from bridge.bus.handles import Held, resolve_handle
from bridge.bus.requests import bound_manifest, read_request
from bridge.bus.results import Believed, FetchedResult, believe
from bridge.client.keys import Pen, choose
from bridge.client.lookup import Lookup, look_up
from bridge.client.remotes import Remote
from bridge.errors import BusError, ManifestError, ResultError, UnknownHandle
from bridge.protocol import refs
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
    settings: Settings,
    git: Git,
    remote: Remote,
    handle: str,
    *,
    reason: str | None = None,
    pen: Pen | None = None,
) -> Cancelled:
    """Ask for a request to be stopped.

    Args:
        settings: The client's settings.
        git: Any checkout; nothing is left in it.
        remote: The bus.
        handle: Nonce, branch name or a unique prefix.
        reason: Why, for whoever reads the result; at most 500 characters.
        pen: Signs the wish; None: with the key that `bridge.client.keys` chooses.

    Raises:
        UnknownHandle: It names no request, or nothing of it is left that could be stopped.
        ManifestError: The reason is too long.
        ResultError: What stands where a result belongs cannot be believed, and nothing else is left.
        SignatureError: The key that the user named cannot sign.
        PushRejected: The remote takes no wishes; deleting the request's branch stops it, too.
        RemoteUnreachable: The remote did not answer.
    """
    pen = pen or Pen(choose(settings, git))
    named = handle
    for _ in range(_TRIES):
        found = _look(git, remote, named, settings.state_dir)
        named = found.nonce
        finished = _finished(settings, found)
        if finished is not None:
            return Cancelled(found.nonce, Outcome.ALREADY_FINISHED, finished=finished)
        standing = _standing(git, remote, found)
        cancel = cancels.draft(
            found.nonce, standing.commit, requested_by=settings.requested_by, reason=reason
        )
        signature = pen.sign(signing.CANCEL_NAMESPACE, cancel.to_bytes())
        wished = cancels.wish(git, remote.address, cancel, standing, signature=signature)
        if wished is not Wished.TOO_LATE:
            outcome = Outcome.CANCELLING if wished is Wished.ASKED else Outcome.ALREADY_ASKED
            return Cancelled(found.nonce, outcome, signature is not None, tuple(pen.warnings))
    raise BusError(f"the request {named} keeps moving on the remote", "try again")


def _look(git: Git, remote: Remote, handle: str, folder: Path) -> Lookup:
    """The request and its answer; rubbish in the answer's place does not keep one that waits from a stop."""
    try:
        return look_up(git, remote.address, handle, folder)
    except ResultError:
        state = resolve_handle(git, remote.address, handle)
        if state.inbox is None:
            raise
        return Lookup(state.nonce, state, None)


def _finished(settings: Settings, found: Lookup) -> tuple[Believed, FetchedResult] | None:
    """Its result, if it has one. What cannot be believed does not keep a request from being stopped."""
    if found.answer is None:
        return None
    try:
        believed = believe(
            found.answer,
            trusted=settings.trusted_runners,
            allow_unsigned=settings.allow_unsigned,
            bound=False,
        )
    except ResultError:
        if found.state is None or found.state.inbox is None:
            raise
        return None
    return believed, found.answer


def _standing(git: Git, remote: Remote, found: Lookup) -> Held:
    """The ref that holds the request as it was asked: its branch, or its inbox entry."""
    inbox, branch = (None, None) if found.state is None else (found.state.inbox, found.state.branch)
    if inbox is not None:
        if branch is not None and branch.commit == inbox:
            return branch
        return Held(refs.inbox_ref(found.nonce), inbox)
    if branch is not None:
        return _alone(git, remote, found.nonce, branch)
    raise UnknownHandle(
        f"nothing of the request {found.nonce} is left that could be stopped",
        "its branch is gone: a runner that sees that stops by itself",
    )


def _alone(git: Git, remote: Remote, nonce: str, branch: Held) -> Held:
    """The branch, when it holds the request and nothing else."""
    with git.scratch() as scratch:
        if not scratch.exists(branch.commit):
            scratch.fetch(remote.address, [branch.ref])
        try:
            bound_manifest(read_request(scratch, branch.commit), nonce)
        except (ManifestError, BusError):
            raise UnknownHandle(
                f"the branch {branch.ref} no longer holds the request {nonce} alone",
                "deleting that branch stops the request, too",
            ) from None
    return branch
