"""Submit a request again as a new one, checked as if it had been typed.

A key signs it only where the old one carries a signature of the same key, or the caller names the commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from datetime import timedelta

from bridge import presets, signing
from bridge.bus.archive import find_archived
from bridge.bus.requests import RefValue, RequestCommit, bound_manifest, read_request
from bridge.bus.results import first_parents
from bridge.client.fetch import request_place, resolve
from bridge.client.remotes import Remote, open_cache
from bridge.client.signing_key import choose
from bridge.client.submit import Plan, find_preset, plan_request
from bridge.errors import (
    BusError,
    ManifestError,
    RemoteUnreachable,
    RequestGone,
    SignatureError,
    UnknownHandle,
)
from bridge.git.repo import GitRepo, Scratch
from bridge.protocol.manifest import Manifest
from bridge.settings import Settings


@contextlib.contextmanager
def plan_again(
    settings: Settings,
    git: GitRepo,
    remote: Remote,
    handle: str,
    *,
    words: Sequence[str] = (),
    ref: str | None = None,
    timeout_s: int | None = None,
    expires: timedelta | None = None,
    transport: str | None = None,
    on: str | None = None,
) -> Generator[tuple[Manifest, Plan, GitRepo], None, None]:
    """Check a request that was submitted before as a new one; what is given replaces what it asked.

    Yields what it asked, the plan, and a repository that has the workload, to be pushed from while this is
    open. `words` are parameters as typed, ``name=value``; with an empty `on` any machine may run it.
    """
    with git.scratch() as scratch:
        request, old = _find(settings, git, scratch, remote, handle)
        own = git
        if ref is None:
            own = git if all(map(git.exists, old.commits)) else _fetch_commits(scratch, remote, old)
            _require_own_signature(settings, own, request, old)
        preset = find_preset(settings, git, old.preset)
        params = presets.parse_cli(preset, words)
        plan = plan_request(
            settings,
            own,
            preset=preset,
            params={**old.params, **params},
            ref=ref or old.workload_sha,
            expires=expires,
            timeout_s=timeout_s or old.timeout_s,
            transport=transport or old.transport,
            on=(old.on if on is None else on) or None,
            against=None if old.against is None else old.against.workload_sha,
            against_params=None if old.against is None else old.against.params,
        )
        yield old, plan, own


def _find(
    settings: Settings, git: GitRepo, scratch: Scratch, remote: Remote, handle: str
) -> tuple[RequestCommit, Manifest]:
    """The request, from its inbox entry, its branch or the archive."""
    found, state, answer = resolve(git, remote, handle, settings.state_dir)
    nonce, place = state.nonce, request_place(state)
    names, asked = [branch.ref.removeprefix("refs/heads/") for branch in state.branches], handle.strip()
    is_named = asked != nonce and any(asked.endswith(name) or name.endswith(asked) for name in names[:1])
    if state.inbox is None and len(names) > 1 and not is_named:
        raise UnknownHandle(  # anyone may push another branch of its nonce
            f"{len(names)} branches carry the name of the request {nonce}: {', '.join(names[:5])}",
            "name the branch that is yours",
        )
    candidates: Iterable[RequestCommit | None] = () if place is None else _below(scratch, remote, place)
    if place is None:
        with contextlib.suppress(UnknownHandle):
            cache = open_cache(settings.state_dir, remote, git)
            candidates = [(answer or find_archived(cache, nonce, found=found)).asked]
    for request in candidates:
        if request is not None:
            with contextlib.suppress(ManifestError):
                return request, bound_manifest(request, nonce)
    raise RequestGone(
        f"what the request {nonce} asked is gone from the remote, or cannot be read",
        f"submit a new one with `kakeya_mac run`; `kakeya_mac result {nonce}` shows what its result says",
    )


def _below(scratch: Scratch, remote: Remote, place: RefValue) -> Iterator[RequestCommit]:
    """Commits of the shape of a request at the tip of a ref, or under what was put on top of it."""
    here = scratch.exists(place.commit)
    if not here or not all(map(scratch.exists, scratch.commit(place.commit).parents)):
        scratch.fetch(remote.address, [place.ref])
    for commit in first_parents(scratch, place.commit):
        with contextlib.suppress(ManifestError, BusError):
            yield read_request(scratch, commit)


def _fetch_commits(scratch: Scratch, remote: Remote, manifest: Manifest) -> Scratch:
    for commit in manifest.commits:
        if not scratch.exists(commit):
            with contextlib.suppress(RemoteUnreachable):  # it has just answered; it gives only what refs name
                scratch.fetch(remote.address, [commit])
        if scratch.kind_and_size(commit)[0] != "commit":
            raise RequestGone(
                f"the request {manifest.nonce} needs the commit {commit[:12]}, which neither this clone has"
                " nor the remote gives",
                f"in a clone that has it: kakeya_mac again {manifest.nonce}; or name another one with --ref",
            )
    return scratch


def _require_own_signature(
    settings: Settings, git: GitRepo, request: RequestCommit, manifest: Manifest
) -> None:
    """Refuse to sign what only others say was asked."""
    signer, namespace = choose(settings, git), signing.REQUEST_NAMESPACE
    mine = signer.sign(namespace, request.data)
    if signer.key is None or mine is None:
        return
    if request.signature is not None:
        own = signing.signer_fingerprint(request.data, mine, namespace)
        if signing.signer_fingerprint(request.data, request.signature, namespace) == own:
            return
    raise SignatureError(
        f"the request {manifest.nonce} is not signed with your key {signer.key.shown}; repeating it would"
        f" sign {manifest.workload_sha[:12]} in your name",
        f"look at that commit, then name it: --ref {manifest.workload_sha}",
    )
