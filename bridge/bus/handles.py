"""From what a person types to one request and where it stands, read from a remote's refs alone.

A handle is a nonce, a branch name or a unique prefix of either. It works from any clone, days later, because
nothing is looked up locally.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.bus.git import Git
from bridge.errors import UnknownHandle
from bridge.protocol import refs

_CLAIMS = (refs.CLAIMS, refs.BRANCH_CLAIMS)
_CANCELS = (refs.CANCELS, refs.BRANCH_CANCELS)
_RESULTS = (refs.RESULTS, refs.BRANCH_RESULTS)
_CUSTOM = "refs/mac-bridge/"
_BRIDGE_BRANCHES = ("refs/heads/mac-bridge", refs.AGENT_BRANCHES)
OWN_REFS = (refs.INBOX, *_CLAIMS, *_CANCELS, *_RESULTS)


@dataclass(frozen=True)
class Held:
    """A ref and the commit it holds."""

    ref: str
    commit: str


@dataclass(frozen=True)
class RequestState:
    """Where one request stands, by the refs that exist for it.

    Attributes:
        nonce: The request.
        preset: From the branch name; None when the branch is gone.
        branch: The request branch: the request commit, later the result on top of it.
        inbox: The request commit, while it is pending.
        claim: Who runs it, and its heartbeat.
        cancel: A wish to stop it.
        result: A result that could not go on the branch.
        others: More branches of its nonce. It needs one, but anybody may push another to stand in its light.
        ahead: Requests that wait, too, and are older than this one. None: not known, because this one, or
            every one on this remote, waits on its branch alone, and branches do not tell who waits.
    """

    nonce: str
    preset: str | None
    branch: Held | None
    inbox: str | None
    claim: Held | None
    cancel: Held | None
    result: Held | None
    ahead: int | None
    others: tuple[Held, ...] = ()

    @property
    def branches(self) -> tuple[Held, ...]:
        """Every branch that may be the request's."""
        return self.others if self.branch is None else (self.branch, *self.others)

    def is_open(self, commit: str) -> bool:
        """Whether the request `commit` still waits for its one answer."""
        standing = self.inbox == commit or (self.branch is not None and self.branch.commit == commit)
        return standing and self.result is None

    @property
    def gone(self) -> bool:
        """Whether nothing of it is left on the remote."""
        return self.branch is None and self.inbox is None and self.claim is None and self.result is None


def resolve_handle(git: Git, remote: str, handle: str) -> RequestState:
    """The request that a handle names on this remote.

    Raises:
        UnknownHandle: It names none, or more than one.
        RemoteUnreachable: The remote did not answer.
    """
    found = git.ls_remote(remote)
    return state_of(found, find(found, handle), handle)


def find(found: Mapping[str, str], handle: str) -> str:
    """The nonce that a handle names among a remote's refs.

    Raises:
        UnknownHandle: None does, or several do.
    """
    asked = _spelled(handle)
    matches: set[str] = set()
    for ref in found:
        nonce, names = _names(ref)
        if nonce is None or not asked:
            continue
        if asked in names:
            return nonce
        if any(name.startswith(asked) for name in names):
            matches.add(nonce)
    if len(matches) == 1:
        return matches.pop()
    if not matches:
        raise UnknownHandle(
            f"no request on this remote is called {handle!r}",
            "check the handle, and name its remote with --remote",
        )
    some = ", ".join(sorted(matches)[:5])
    raise UnknownHandle(f"{handle!r} names {len(matches)} requests: {some}", "give more of the name")


def state_of(found: Mapping[str, str], nonce: str, handle: str = "") -> RequestState:
    """Where the request of this nonce stands, from a remote's refs.

    Args:
        found: The refs.
        nonce: The request.
        handle: What a person typed. Of several branches it is the one that this names.
    """
    asked = _spelled(handle)
    names = {ref: named for ref in found if (named := refs.parse_request_ref(ref)) and named.nonce == nonce}
    order = sorted(names, key=lambda ref: (asked not in _names(ref)[1][1:], ref))
    branches = tuple(Held(ref, found[ref]) for ref in order)
    branch = branches[0] if branches else None
    return RequestState(
        nonce=nonce,
        preset=None if branch is None else names[branch.ref].preset,
        branch=branch,
        inbox=found.get(refs.inbox_ref(nonce)),
        claim=_first_held(found, _CLAIMS, nonce),
        cancel=_first_held(found, _CANCELS, nonce),
        result=_first_held(found, _RESULTS, nonce),
        ahead=_ahead(found, nonce, branch),
        others=branches[1:],
    )


def running(found: Mapping[str, str]) -> frozenset[str]:
    """Nonces of the claimed requests that the refs do not show to be answered.

    Where branches serve as claims there is no inbox to tell: a claim that the server did not delete counts.
    """
    pending, answered = _nonces(found, refs.INBOX), _nonces(found, *_RESULTS)
    return frozenset((_nonces(found, refs.CLAIMS) & pending | _nonces(found, refs.BRANCH_CLAIMS)) - answered)


def _ahead(found: Mapping[str, str], nonce: str, branch: Held | None) -> int | None:
    """Older requests of the inbox that nobody has claimed; None: the inbox does not tell."""
    if refs.inbox_ref(nonce) not in found and (branch is not None or _has_branches_only(found)):
        return None
    waiting = _nonces(found, refs.INBOX) - _nonces(found, *_CLAIMS)
    return sum(other < nonce for other in waiting)


def _has_branches_only(found: Mapping[str, str]) -> bool:
    """Whether all that the bridge has on this remote, and it has something, are branches."""
    if any(ref.startswith(_CUSTOM) for ref in found):
        return False
    return any(ref.startswith(_BRIDGE_BRANCHES) for ref in found)


def _nonces(found: Mapping[str, str], *prefixes: str) -> set[str]:
    return {nonce for ref in found for prefix in prefixes if (nonce := refs.nonce_of(ref, prefix))}


def _first_held(found: Mapping[str, str], prefixes: tuple[str, ...], nonce: str) -> Held | None:
    for prefix in prefixes:
        if (commit := found.get(prefix + nonce)) is not None:
            return Held(prefix + nonce, commit)
    return None


def _spelled(handle: str) -> str:
    return handle.strip().removeprefix("refs/heads/").removeprefix("origin/")


def _names(ref: str) -> tuple[str | None, tuple[str, ...]]:
    """The nonce a ref belongs to and the names a person may call it by."""
    named = refs.parse_request_ref(ref)
    if named is not None:
        branch = ref.removeprefix("refs/heads/")
        return named.nonce, (named.nonce, branch, branch.rpartition("/")[2].removeprefix("mac-bridge-"))
    for prefix in OWN_REFS:
        if nonce := refs.nonce_of(ref, prefix):
            return nonce, (nonce,)
    return None, ()
