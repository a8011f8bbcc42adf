"""Cancel requests on the bus: pushed by a client, read and checked by the runner that has the request.

Each names the request commit, so that it cannot be copied to another request. With required signatures only
the requester's own counts, else that of anyone with push rights.
"""

from __future__ import annotations

import secrets
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from bridge import signing
from bridge.bus.requests import RefValue
from bridge.errors import KeyListError, LeaseLost, ManifestError, PushRejected, SignatureError
from bridge.git.cache import GitCache
from bridge.git.repo import GitRepo, RefUpdate
from bridge.protocol import manifest, refs
from bridge.protocol.sanitize import clean_line

_TRIES = 4


class CancelOutcome(StrEnum):
    """What became of a cancel request. A closed set."""

    ASKED = "asked"
    ALREADY_ASKED = "already-asked"
    TOO_LATE = "too-late"


def request_cancel(
    cache: GitCache, cancel: manifest.CancelRequest, target: RefValue, *, signature: bytes | None = None
) -> CancelOutcome:
    """Push a cancel request, if `target` (the request's branch or inbox ref) still holds it. Idempotent.

    One that is there already is replaced, unless it is about the same commit and this one is unsigned, too.
    """
    # Git pushes no ref, not even unchanged, without its object.
    if cache.bring({target.ref: target.commit}, [target.ref]):
        return CancelOutcome.TOO_LATE
    try:
        return _push(cache, cancel, target, signature, refs.CANCELS)
    except PushRejected:
        return _push(cache, cancel, target, signature, refs.BRANCH_CANCELS)


def read_cancel(git: GitRepo, commit: str) -> manifest.CancelRequest | None:
    """A cancel request from a commit that is in this repository; None when it is not one."""
    data = git.try_read_file(commit, manifest.CANCEL_NAME, manifest.MAX_CANCEL_BYTES)
    try:
        return manifest.parse_cancel(data or b"")
    except ManifestError:
        return None


def objection(
    git: GitRepo,
    commit: str,
    *,
    nonce: str,
    request_commit: str,
    require_signature: bool,
    requester: str | None,
    allowed_signers: Path,
    now: datetime | None = None,
) -> str | None:
    """Why a cancel request is not honoured, in one sentence; None: it is.

    Where the machine takes only signed requests (`require_signature`), only their signer may stop them:
    `requester`, by the same `allowed_signers`, each of whose keys must be good for the cancel namespace, too.
    """
    cancel = read_cancel(git, commit)
    if cancel is None:
        return f"the cancel request {commit[:12]} cannot be read"
    if (cancel.nonce, cancel.request_commit) != (nonce, request_commit):
        return f"the cancel request {commit[:12]} is about another request, {cancel.nonce}"
    if not require_signature:
        return None
    data = git.try_read_file(commit, manifest.CANCEL_NAME, manifest.MAX_CANCEL_BYTES) or b""
    signature = git.try_read_file(commit, manifest.CANCEL_SIGNATURE_NAME, signing.MAX_SIGNATURE_BYTES)
    if signature is None:
        return "the cancel request is unsigned, and this machine lets only the requester stop a request"
    try:
        signer = signing.identify(data, signature, signing.CANCEL_NAMESPACE, allowed_signers, now=now)
    except (SignatureError, KeyListError) as error:
        return clean_line(error.message)
    if signer.name is None:
        return f"the cancel request is signed by {signer.objection}; only the requester may stop a request"
    if signer.name != requester:
        return f"the cancel request is signed by {signer.name}, who did not ask for this request"
    return None


def _push(
    cache: GitCache, cancel: manifest.CancelRequest, target: RefValue, signature: bytes | None, prefix: str
) -> CancelOutcome:
    ref, expected = prefix + cancel.nonce, ""
    files = {manifest.CANCEL_NAME: cancel.to_bytes(), manifest.CANCEL_SIGNATURE_NAME: signature}
    # Git calls a push of what a ref already holds a success; no two cancel requests are the same object.
    message = f"kakeya-mac cancel: {cancel.nonce} {secrets.token_hex(8)} [skip ci]\n"
    same = [RefUpdate(target.ref, target.commit, target.commit)]
    with cache.scratch() as scratch:
        commit = scratch.commit_files(None, files, message)
        for _ in range(_TRIES):
            found = scratch.swap(cache.remote, RefUpdate(ref, commit, expected), same)
            if found is None:
                return CancelOutcome.ASKED
            if found.get(target.ref) != target.commit:
                return CancelOutcome.TOO_LATE
            expected = found.get(ref, "")
            failures = cache.bring({ref: expected}, [ref], depth=1) if expected else {}
            there = read_cancel(cache, expected) if expected and not failures else None
            same_request = there is not None and there.request_commit == cancel.request_commit
            if signature is None and same_request:
                return CancelOutcome.ALREADY_ASKED
    raise LeaseLost(f"others keep changing {ref}", "try again")
