"""A request asked for again: the same preset, parameters and workload as a new request, some of it changed.

What was asked is read from the request's own branch, or out of the archive, so any clone will do, also long
after the answer. The workload is fetched into a scratch store where this clone lacks it; where nobody has it,
or only a result is left, the error says what to type (`bridge.client.anew`). Nothing of the old request is
trusted: the new one is checked as if it had been typed, and a key signs it only where the old one carries a
signature of the same key, or the caller names the commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from bridge import presets, signing
from bridge.bus.answers import FetchedResult
from bridge.bus.archived import find_request
from bridge.bus.git import Git
from bridge.bus.handles import Held, RequestState, resolve_handle
from bridge.bus.requests import ReadRequest, bound_manifest, read_request
from bridge.bus.results import believe
from bridge.client.anew import AS_IT_WAS, Changes, asked_anew, result_anew
from bridge.client.keys import Pen, choose
from bridge.client.lookup import look_up
from bridge.client.remotes import Remote
from bridge.client.submit import Plan, plan_request
from bridge.errors import (
    BusError,
    ManifestError,
    RemoteUnreachable,
    ResultError,
    SignatureError,
    UnknownHandle,
)
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.settings import Settings

# How many commits may lie on top of a request that is still found.
_WALK = 32

_GONE = "the branch of the request {} is gone, and with it the workload and what was asked"
_UNREADABLE = "the request {} is in the archive, but what was asked is not there in a form that can be read"
_ANEW = "ask anew with `kakeya_mac run`"


@dataclass(frozen=True)
class Original:
    """A request that was asked before.

    Attributes:
        request: Its commit, with the exact bytes and signature; from the archive the commit itself is gone.
        manifest: What was asked.
        git: Has the workload: the checkout, or a view of it with what was fetched; for as long as the context
            of `recall` is open.
    """

    request: ReadRequest
    manifest: Manifest
    git: Git


@contextlib.contextmanager
def recall(
    settings: Settings, git: Git, remote: Remote, handle: str, changes: Changes = AS_IT_WAS
) -> Generator[Original, None, None]:
    """Find a request as it was asked.

    Args:
        settings: The client's settings: where caches live, for the archive, and whose results count.
        git: Any checkout; nothing is left in it.
        remote: The bus.
        handle: Nonce, branch name or a unique prefix.
        changes: What will be asked otherwise: with another workload the old one need not be here.

    Raises:
        UnknownHandle: It names no request, or what was asked, or its workload, cannot be had any more.
        RemoteUnreachable: The remote did not answer.
    """
    nonce, place = _place(git, remote, handle, settings.state_dir)
    with git.scratch() as scratch:
        if isinstance(place, Held):
            request, manifest = _on_branch(scratch, remote, nonce, place)
        else:
            request, manifest = _beside_answer(settings, git, remote, place, changes)
        here = changes.ref is not None or git.exists(manifest.workload_sha)
        if not here:
            _bring(scratch, remote, manifest, changes)
        yield Original(request, manifest, git if here else scratch)


def plan_again(settings: Settings, original: Original, changes: Changes = AS_IT_WAS) -> Plan:
    """Check the same request as a new one. Push it with `submit_request` while `recall` is open.

    Args:
        settings: The client's settings; its remote is where the request goes.
        original: From `recall`.
        changes: What is asked otherwise; parameters that are not named stay.

    Raises:
        SignatureError: It would be signed, and nobody vouched for its commits.
        RequestRefused: It can no longer be asked like this; see `plan_request`.
        NoRemote: There is no remote to talk to.
    """
    old = original.manifest
    preset = presets.get(old.preset, settings.presets)
    params = presets.parse_cli(preset, changes.words)
    if changes.ref is None:
        _require_vouched(settings, original)
    return plan_request(
        settings,
        repository=original.git,
        preset=old.preset,
        params={**old.params, **params},
        ref=changes.ref or old.workload_sha,
        expires=changes.expires,
        timeout_s=changes.timeout_s or old.timeout_s,
        transport=changes.transport or old.transport,
    )


def _place(git: Git, remote: Remote, handle: str, folder: Path) -> tuple[str, Held | FetchedResult]:
    """The nonce, and where the request can be read: the inbox while it waits, its branch ever after.

    Returns:
        With the nonce a ref, or the answer where that is all that is left among the refs or in the archive.

    Raises:
        UnknownHandle: It names no request, or one of which nothing is left.
    """
    named = handle
    try:
        state = resolve_handle(git, remote.address, handle)
    except UnknownHandle:  # no ref knows it; the archive may
        pass
    else:
        if state.inbox is not None:
            return state.nonce, Held(refs.inbox_ref(state.nonce), state.inbox)
        if state.branch is not None:
            _require_one(state, handle.strip())
            return state.nonce, state.branch
        named = state.nonce
    found = look_up(git, remote.address, named, folder)
    if found.answer is not None:
        return found.nonce, found.answer
    raise UnknownHandle(_GONE.format(found.nonce), _ANEW)


def _require_one(state: RequestState, handle: str) -> None:
    """Refuse to guess which of several branches of a nonce is the request's: anybody may have pushed others.

    Raises:
        UnknownHandle: There are several, and the handle is not the name of one.
    """
    names = [held.ref.removeprefix("refs/heads/") for held in state.branches]
    named = handle.endswith(names[0]) or (handle != state.nonce and names[0].endswith(handle))
    if len(names) > 1 and not named:
        raise UnknownHandle(
            f"{len(names)} branches carry the name of the request {state.nonce}: {', '.join(names[:5])}",
            "name the branch that is yours",
        )


def _on_branch(scratch: Git, remote: Remote, nonce: str, place: Held) -> tuple[ReadRequest, Manifest]:
    if not _has_workload(scratch, place.commit):
        scratch.fetch(remote.address, [place.ref])
    found = _find(scratch, place.commit, nonce)
    if found is None:
        raise UnknownHandle(
            f"{place.ref} holds no request {nonce} that can be read",
            f"it cannot be repeated; {_ANEW}",
        )
    return found


def _beside_answer(
    settings: Settings, git: Git, remote: Remote, answer: FetchedResult, changes: Changes
) -> tuple[ReadRequest, Manifest]:
    """The request that the archive keeps beside an answer, held against the same rules as one on a branch.

    Raises:
        UnknownHandle: Only the answer is left; the error says what to type by what that says.
    """
    nonce, archived = answer.nonce, answer.ref == refs.ARCHIVE
    request = find_request(settings.state_dir, remote.address, nonce, origin=git) if archived else None
    if request is not None:
        with contextlib.suppress(ManifestError):  # anybody may have written it; the result is left
            return request, bound_manifest(request, nonce)
    said = _UNREADABLE.format(nonce) if archived else _GONE.format(nonce)
    try:
        believed = believe(answer, trusted=settings.trusted_runners)
    except ResultError as error:
        why = f"what stands in its result's place is not believed ({error.message})"
        raise UnknownHandle(said, f"{why}; {_ANEW}") from None
    command = result_anew(believed.result, changes)
    if command is None:
        raise UnknownHandle(said, f"its result does not say what was asked; {_ANEW}")
    by = f"by what its result says ({believed.sentence})"
    raise UnknownHandle(said, f"in a clone that has the commit, {by}: {command}")


def _bring(scratch: Git, remote: Remote, manifest: Manifest, changes: Changes) -> None:
    """Fetch the workload, which is not here.

    Raises:
        UnknownHandle: The remote does not give it; the error says what to type elsewhere.
        RemoteUnreachable: The remote did not answer.
    """
    commit = manifest.workload_sha
    if not scratch.exists(commit):
        try:
            scratch.fetch(remote.address, [commit])
        except RemoteUnreachable:
            # A remote that lists its refs is well: it lacks this commit, or gives only what refs name.
            scratch.ls_remote(remote.address)
    if scratch.kind_and_size(commit)[0] != "commit":
        raise UnknownHandle(
            f"the request {manifest.nonce} needs the commit {commit[:12]}, which this clone does not have"
            " and the remote does not give",
            f"in a clone that has it: {asked_anew(manifest, changes)}",
        )


def _has_workload(git: Git, commit: str) -> bool:
    """Whether a commit and what it stands on are here already."""
    return git.exists(commit) and all(git.exists(parent) for parent in git.commit(commit).parents)


def _find(git: Git, tip: str, nonce: str) -> tuple[ReadRequest, Manifest] | None:
    """The request itself, at the tip or under what was put on top of it."""
    at = tip
    for _ in range(_WALK):
        if git.kind_and_size(at)[0] != "commit":
            return None
        try:
            request = read_request(git, at)
            return request, bound_manifest(request, nonce)
        except (ManifestError, BusError):
            parents = git.commit(at).parents
        if not parents:
            return None
        at = parents[0]
    return None


def _require_vouched(settings: Settings, original: Original) -> None:
    """Refuse to sign what only somebody with push rights says was asked.

    Raises:
        SignatureError: The request is not signed with this client's key.
    """
    pen, old, namespace = Pen(choose(settings, original.git)), original.request, signing.REQUEST_NAMESPACE
    mine = pen.sign(namespace, old.data)
    if pen.key is None or mine is None:
        return
    if old.signature is not None:
        own = signing.signer_fingerprint(old.data, mine, namespace)
        if signing.signer_fingerprint(old.data, old.signature, namespace) == own:
            return
    asked = original.manifest
    said = f"the request {asked.nonce} is not signed with your key {pen.key.shown}"
    remedy = f"look at that commit, then name it: --ref {asked.workload_sha}"
    message = f"{said}; repeating it would sign {asked.workload_sha[:12]} in your name"
    raise SignatureError(message, remedy)
