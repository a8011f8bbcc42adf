"""One request by its handle, wherever it is: on the remote's refs, or retired into the archive.

What still has refs is found first; the archive is opened for a handle that no ref knows, and for a request of
which the refs hold no answer and which neither waits nor runs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from bridge.bus.answers import FetchedResult, fetch
from bridge.bus.archived import find_archived
from bridge.bus.git import Git
from bridge.bus.handles import RequestState, find, state_of
from bridge.errors import ResultError, UnknownHandle
from bridge.protocol import refs


@dataclass(frozen=True)
class Lookup:
    """What a handle names.

    Attributes:
        nonce: The request.
        state: Where it stands by its refs; None: it has none any more.
        answer: Its result, unjudged; None: there is none yet.
    """

    nonce: str
    state: RequestState | None
    answer: FetchedResult | None


def look_up(git: Git, remote: str, handle: str, folder: Path | None) -> Lookup:
    """The request that a handle names and its answer, if it has one.

    Args:
        git: Any checkout; nothing is left in it.
        remote: Address of the bus.
        handle: A nonce, a branch name or a unique prefix of either.
        folder: Where caches live (the state folder), for the archive; None: nothing is kept.

    Raises:
        UnknownHandle: It names no request, or several.
        ResultError: Something stands where the result belongs and cannot be one.
        RemoteUnreachable: The remote did not answer.
    """
    found = git.ls_remote(remote)
    try:
        nonce = find(found, handle)
    except UnknownHandle:
        spelled = handle.strip()
        if refs.ARCHIVE not in found or not spelled or any(spelled in ref for ref in found):
            raise
        archived = find_archived(folder, remote, handle, found=found, origin=git)
        return Lookup(archived.nonce, None, archived)
    state = state_of(found, nonce, handle)
    retired = refs.ARCHIVE in found and state.inbox is None and state.claim is None
    try:
        answer = fetch(git, remote, state)
    except ResultError:
        if not retired or state.result is not None:
            raise
        with contextlib.suppress(UnknownHandle):
            return Lookup(nonce, state, find_archived(folder, remote, nonce, found=found, origin=git))
        raise
    if answer is None and retired:
        with contextlib.suppress(UnknownHandle):
            answer = find_archived(folder, remote, nonce, found=found, origin=git)
    return Lookup(nonce, state, answer)
