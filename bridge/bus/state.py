"""From what a person types to one request and its state, read from a remote's refs alone.

A handle is a nonce, a branch name or a unique prefix of either. It works from any clone, days later, because
nothing is looked up locally.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.errors import UnknownHandle
from bridge.git.repo import GitRepo
from bridge.protocol import refs

CLAIMS = (refs.CLAIMS, refs.BRANCH_CLAIMS)
CANCELS = (refs.CANCELS, refs.BRANCH_CANCELS)
RESULTS = (refs.RESULTS, refs.BRANCH_RESULTS)
_CUSTOM = "refs/mac-bridge/"
OWN_REFS = (refs.INBOX, *CLAIMS, *CANCELS, *RESULTS)
# Prefixes of everything that the bridge has on a remote.
ALL_REFS = (_CUSTOM, "refs/heads/mac-bridge", refs.AGENT_BRANCHES)


@dataclass(frozen=True)
class RefValue:
    """A ref and the commit it holds."""

    ref: str
    commit: str

    @property
    def name(self) -> str:
        """The last part of the ref."""
        return self.ref.rpartition("/")[2]


@dataclass(frozen=True)
class RequestState:
    """The state of one request, by the refs that exist for it."""

    nonce: str  # the request
    preset: str | None  # from the branch name; None when the branch is gone
    branch: RefValue | None  # the request branch: the request commit, later the result on top of it
    inbox: str | None  # the request commit, while it is pending
    claim: RefValue | None  # who runs it, and its heartbeat
    cancel: RefValue | None  # a request to stop it
    result: RefValue | None  # a result that could not go on the branch
    # Older requests that wait, too. None: not known, because requests wait on their branches alone, and
    # branches do not tell which ones wait.
    ahead: int | None
    # More branches of its nonce; a request needs one, and anyone may push another
    others: tuple[RefValue, ...] = ()

    @property
    def branches(self) -> tuple[RefValue, ...]:
        """Every branch that may be the request's."""
        return self.others if self.branch is None else (self.branch, *self.others)

    def is_open(self, commit: str) -> bool:
        """Whether the request `commit` still waits for its one answer."""
        waits = self.inbox == commit or (self.branch is not None and self.branch.commit == commit)
        return waits and self.result is None

    @property
    def gone(self) -> bool:
        """Whether nothing of it is left on the remote."""
        return self.branch is None and self.inbox is None and self.claim is None and self.result is None


def resolve_handle(git: GitRepo, remote: str, handle: str) -> RequestState:
    """Find the request that a handle names on this remote; `UnknownHandle`: none, or several."""
    found = git.list_refs(remote, *ALL_REFS)
    return state_of(found, find(found, handle), handle)


def find(found: Mapping[str, str], handle: str) -> str:
    """The nonce that a handle names among a remote's refs; `UnknownHandle`: it names none, or several."""
    asked = _spelled(handle)
    matches: set[str] = set()
    for ref in found:
        nonce, names = names_of(ref)
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
    """The state of a request, from a remote's refs; of several branches it is the one that `handle` names."""
    asked = _spelled(handle)
    names = {ref: named for ref in found if (named := refs.parse_request_ref(ref)) and named.nonce == nonce}
    order = sorted(names, key=lambda ref: (asked not in names_of(ref)[1][1:], ref))
    branches = tuple(RefValue(ref, found[ref]) for ref in order)
    branch = branches[0] if branches else None
    return RequestState(
        nonce=nonce,
        preset=None if branch is None else names[branch.ref].preset,
        branch=branch,
        inbox=found.get(refs.inbox_ref(nonce)),
        claim=_first_held(found, CLAIMS, nonce),
        cancel=_first_held(found, CANCELS, nonce),
        result=_first_held(found, RESULTS, nonce),
        ahead=_ahead(found, nonce, branch),
        others=branches[1:],
    )


def _ahead(found: Mapping[str, str], nonce: str, branch: RefValue | None) -> int | None:
    """Older unclaimed requests of the inbox; None: the inbox does not tell."""
    branches_only = any(ref.startswith(ALL_REFS) for ref in found) and not any(
        ref.startswith(_CUSTOM) for ref in found
    )
    if refs.inbox_ref(nonce) not in found and (branch is not None or branches_only):
        return None
    waiting = _nonces(found, refs.INBOX) - _nonces(found, *CLAIMS)
    return sum(other < nonce for other in waiting)


def _nonces(found: Mapping[str, str], *prefixes: str) -> set[str]:
    return {nonce for ref in found for prefix in prefixes if (nonce := refs.nonce_of(ref, prefix))}


def _first_held(found: Mapping[str, str], prefixes: tuple[str, ...], nonce: str) -> RefValue | None:
    for prefix in prefixes:
        if (commit := found.get(prefix + nonce)) is not None:
            return RefValue(prefix + nonce, commit)
    return None


def _spelled(handle: str) -> str:
    return handle.strip().removeprefix("refs/heads/").removeprefix("origin/")


def names_of(ref: str) -> tuple[str | None, tuple[str, ...]]:
    """The nonce a ref belongs to and the names a person may call it by."""
    named = refs.parse_request_ref(ref)
    if named is not None:
        branch = ref.removeprefix("refs/heads/")
        return named.nonce, (named.nonce, branch, branch.rpartition("/")[2].removeprefix("mac-bridge-"))
    for prefix in OWN_REFS:
        if nonce := refs.nonce_of(ref, prefix):
            return nonce, (nonce,)
    return None, ()
