"""Submit a request again: the same preset, parameters and workload as a new request, some of it changed.

What was asked is read from the request's own branch, or out of the archive, so any clone will do, also long
after the answer. The workload is fetched into a scratch store where this clone lacks it. Nothing of the old
request is trusted: the new one is checked as if it had been typed, and a key signs it only where the old one
carries a signature of the same key, or the caller names the commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from datetime import timedelta

from bridge import presets, signing
from bridge.bus.archive import find_archived, find_request
from bridge.bus.requests import (
    ALL_REFS,
    RefValue,
    RequestCommit,
    RequestState,
    bound_manifest,
    find,
    read_request,
    state_of,
)
from bridge.bus.results import first_parents
from bridge.client.fetch import request_place
from bridge.client.remotes import Remote, open_cache
from bridge.client.signing_key import choose
from bridge.client.submit import Plan, plan_request
from bridge.errors import BusError, ManifestError, RemoteUnreachable, SignatureError, UnknownHandle
from bridge.git.repo import GitRepo, Scratch
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.settings import Settings

_SUBMIT_NEW = "submit a new request with `kakeya_mac run`"


@dataclass(frozen=True)
class Changes:
    """What the new request changes; None: as before."""

    words: tuple[str, ...] = ()  # parameters as typed, ``name=value``; the others stay
    ref: str | None = None  # another workload
    timeout_s: int | None = None
    expires: timedelta | None = None  # how long the new request may wait; None: the setting
    transport: str | None = None
    on: str | None = None  # which machines may run it; an empty text: any


@dataclass(frozen=True)
class Original:
    """A request that was submitted before."""

    request: RequestCommit
    manifest: Manifest
    git: GitRepo  # has the workload: the checkout, or a scratch of it while `recall` is open


@contextlib.contextmanager
def recall(
    settings: Settings, git: GitRepo, remote: Remote, handle: str, changes: Changes
) -> Generator[Original, None, None]:
    """Find a request, by nonce, branch name or a unique prefix, as it was asked.

    Raises:
        UnknownHandle: It names no request, or what was asked, or its workload, is no longer available.
    """
    with git.scratch() as scratch:
        request, manifest = _find(settings, git, scratch, remote, handle)
        is_here = changes.ref is not None or git.exists(manifest.workload_sha)
        if not is_here:
            _fetch_workload(scratch, remote, manifest)
        yield Original(request, manifest, git if is_here else scratch)


def plan_again(settings: Settings, original: Original, changes: Changes) -> Plan:
    """Check the same request as a new one. Push it with `submit_request` while `recall` is open.

    Raises:
        SignatureError: It would be signed although only others say that this was asked.
    """
    old = original.manifest
    params = presets.parse_cli(presets.get(old.preset, settings.presets), changes.words)
    if changes.ref is None:
        _require_own_signature(settings, original)
    return plan_request(
        settings,
        original.git,
        preset=old.preset,
        params={**old.params, **params},
        ref=changes.ref or old.workload_sha,
        expires=changes.expires,
        timeout_s=changes.timeout_s or old.timeout_s,
        transport=changes.transport or old.transport,
        on=(old.on if changes.on is None else changes.on) or None,
    )


def _find(
    settings: Settings, git: GitRepo, scratch: Scratch, remote: Remote, handle: str
) -> tuple[RequestCommit, Manifest]:
    """The request, from its inbox entry, its branch or the archive."""
    found = git.list_refs(remote.address, *ALL_REFS)
    try:
        nonce = find(found, handle)
    except UnknownHandle:
        if refs.ARCHIVE not in found:
            raise
        answer = find_archived(open_cache(settings.state_dir, remote, git), handle, found=found)
        return _read_from_archive(settings, git, remote, answer.nonce)
    state = state_of(found, nonce, handle)
    place = request_place(state)
    if place is None:
        return _read_from_archive(settings, git, remote, nonce)
    if state.inbox is None:
        _require_one_branch(state, handle.strip())
    return _read_from_branch(scratch, remote, nonce, place)


def _require_one_branch(state: RequestState, handle: str) -> None:
    """Refuse to guess which of several branches of a nonce is the request's: anyone may push others."""
    names = [branch.ref.removeprefix("refs/heads/") for branch in state.branches]
    is_named = handle.endswith(names[0]) or (handle != state.nonce and names[0].endswith(handle))
    if len(names) > 1 and not is_named:
        raise UnknownHandle(
            f"{len(names)} branches carry the name of the request {state.nonce}: {', '.join(names[:5])}",
            "name the branch that is yours",
        )


def _read_from_branch(
    scratch: Scratch, remote: Remote, nonce: str, place: RefValue
) -> tuple[RequestCommit, Manifest]:
    """The request at the tip of a ref, or under what was put on top of it."""
    if not (
        scratch.exists(place.commit)
        and all(scratch.exists(parent) for parent in scratch.commit(place.commit).parents)
    ):
        scratch.fetch(remote.address, [place.ref])
    for commit in first_parents(scratch, place.commit):
        with contextlib.suppress(ManifestError, BusError):
            request = read_request(scratch, commit)
            return request, bound_manifest(request, nonce)
    raise UnknownHandle(
        f"{place.ref} holds no request {nonce} that can be read", f"it cannot be repeated; {_SUBMIT_NEW}"
    )


def _read_from_archive(
    settings: Settings, git: GitRepo, remote: Remote, nonce: str
) -> tuple[RequestCommit, Manifest]:
    """The request that the archive keeps with a result, if anyone with push rights left one to read."""
    request = find_request(open_cache(settings.state_dir, remote, git), nonce)
    if request is not None:
        with contextlib.suppress(ManifestError):
            return request, bound_manifest(request, nonce)
    raise UnknownHandle(
        f"what the request {nonce} asked is gone from the remote, or cannot be read",
        f"{_SUBMIT_NEW}; `kakeya_mac result {nonce}` shows what its result says",
    )


def _fetch_workload(scratch: Scratch, remote: Remote, manifest: Manifest) -> None:
    commit = manifest.workload_sha
    if not scratch.exists(commit):
        try:
            scratch.fetch(remote.address, [commit])
        except RemoteUnreachable:
            # A remote that lists its refs is well: it lacks this commit, or gives only what refs name.
            scratch.list_refs(remote.address, refs.INBOX)
    if scratch.kind_and_size(commit)[0] != "commit":
        raise UnknownHandle(
            f"the request {manifest.nonce} needs the commit {commit[:12]}, which neither this clone has"
            " nor the remote gives",
            f"in a clone that has it: kakeya_mac again {manifest.nonce}; or name another one with --ref",
        )


def _require_own_signature(settings: Settings, original: Original) -> None:
    """Refuse to sign what only others say was asked."""
    signer, old = choose(settings, original.git), original.request
    namespace = signing.REQUEST_NAMESPACE
    mine = signer.sign(namespace, old.data)
    if signer.key is None or mine is None:
        return
    if old.signature is not None:
        own = signing.signer_fingerprint(old.data, mine, namespace)
        if signing.signer_fingerprint(old.data, old.signature, namespace) == own:
            return
    manifest = original.manifest
    raise SignatureError(
        f"the request {manifest.nonce} is not signed with your key {signer.key.shown}; repeating it would"
        f" sign {manifest.workload_sha[:12]} in your name",
        f"look at that commit, then name it: --ref {manifest.workload_sha}",
    )
