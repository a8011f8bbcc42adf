"""Cancel requests on the bus: pushed by a client, read and checked by the runner that has the request.

A cancel request is a ref that holds a parentless commit with ``cancel.json`` and, where its author has a key,
a detached signature of those bytes. It names the request commit, so that it cannot be copied to another
request. Whose counts is the machine's policy: with required signatures only the requester's own, else that of
anyone with push rights.
"""

from __future__ import annotations

import secrets
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from bridge import signing
from bridge.bus.requests import RefValue
from bridge.errors import (
    KeyListError,
    LeaseLost,
    MachineError,
    ManifestError,
    PushRejected,
    RemoteUnreachable,
    SignatureError,
)
from bridge.git.cache import GitCache
from bridge.git.repo import GitRepo, RefUpdate
from bridge.protocol import refs
from bridge.protocol.manifest import (
    CANCEL_NAME,
    CANCEL_SIGNATURE_NAME,
    MAX_CANCEL_BYTES,
    CancelRequest,
    parse_cancel,
)
from bridge.protocol.sanitize import clean_line

_PUSH_TIMEOUT_S = 30.0
_TRIES = 4


class CancelOutcome(StrEnum):
    """What became of a cancel request. A closed set."""

    ASKED = "asked"
    ALREADY_ASKED = "already-asked"
    TOO_LATE = "too-late"


def request_cancel(
    cache: GitCache, cancel: CancelRequest, target: RefValue, *, signature: bytes | None = None
) -> CancelOutcome:
    """Push a cancel request, if `target` (the request's branch or inbox ref) still holds it. Idempotent.

    One that is there already is replaced unless it does as well: it is about the same commit, and signed by
    the same key if this one is signed.
    """
    # Git pushes no ref, not even unchanged, without its object.
    if cache.bring({target.ref: target.commit}, [target.ref]):
        return CancelOutcome.TOO_LATE
    try:
        return _push(cache, cancel, target, signature, refs.CANCELS)
    except PushRejected:
        return _push(cache, cancel, target, signature, refs.BRANCH_CANCELS)


def read_cancel(git: GitRepo, commit: str) -> CancelRequest | None:
    """A cancel request from a commit that is in this repository; None when it is not one."""
    try:
        return parse_cancel(git.try_read_file(commit, CANCEL_NAME, MAX_CANCEL_BYTES) or b"")
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
    revoked_keys: Path | None = None,
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
    data, signature = _signed(git, commit)
    if signature is None:
        return "the cancel request is unsigned, and this machine lets only the requester stop a request"
    try:
        signer = signing.identify(
            data, signature, signing.CANCEL_NAMESPACE, allowed_signers, revoked=revoked_keys, now=now
        )
    except (SignatureError, KeyListError) as error:
        return clean_line(error.message)
    if signer.name is None:
        return f"the cancel request is signed by {signer.objection}; only the requester may stop a request"
    if signer.name != requester:
        return f"the cancel request is signed by {signer.name}, who did not ask for this request"
    return None


def _signed(git: GitRepo, commit: str) -> tuple[bytes, bytes | None]:
    """A cancel request's bytes and their signature."""
    signature = git.try_read_file(commit, CANCEL_SIGNATURE_NAME, signing.MAX_SIGNATURE_BYTES)
    return git.try_read_file(commit, CANCEL_NAME, MAX_CANCEL_BYTES) or b"", signature


def _push(
    cache: GitCache, cancel: CancelRequest, target: RefValue, signature: bytes | None, prefix: str
) -> CancelOutcome:
    ref, found = prefix + cancel.nonce, ""
    files = {CANCEL_NAME: cancel.to_bytes(), CANCEL_SIGNATURE_NAME: signature}
    # Git calls a push of what a ref already holds a success; no two cancel requests are the same object.
    message = f"kakeya-mac cancel: {cancel.nonce} {secrets.token_hex(8)} [skip ci]\n"
    with cache.scratch() as scratch:
        commit = scratch.commit_files(None, files, message)
        for _ in range(_TRIES):
            updates = [RefUpdate(ref, commit, found), RefUpdate(target.ref, target.commit, target.commit)]
            try:
                scratch.push(cache.remote, updates, timeout_s=_PUSH_TIMEOUT_S)
            except (LeaseLost, RemoteUnreachable) as error:
                shown = cache.list_remote(target.ref, ref, timeout_s=_PUSH_TIMEOUT_S)
                if shown.get(ref) == commit:  # the answer was lost, not the push
                    return CancelOutcome.ASKED
                if isinstance(error, RemoteUnreachable):
                    raise
            else:
                return CancelOutcome.ASKED
            if shown.get(target.ref) != target.commit:
                return CancelOutcome.TOO_LATE
            found = shown.get(ref, "")
            if found and _does_as_well(cache, ref, found, cancel, signature):
                return CancelOutcome.ALREADY_ASKED
    raise LeaseLost(f"others keep changing {ref}", "try again")


def _does_as_well(
    cache: GitCache, ref: str, commit: str, cancel: CancelRequest, signature: bytes | None
) -> bool:
    """Whether the cancel request on the remote is as good as ours."""
    if cache.bring({ref: commit}, [ref], depth=1):
        return False  # gone again, which the next try finds out; or more than any cancel request has
    other = read_cancel(cache, commit)
    if other is None or (other.nonce, other.request_commit) != (cancel.nonce, cancel.request_commit):
        return False
    if signature is None:
        return True
    data, theirs = _signed(cache, commit)
    ours = signing.signer_fingerprint(cancel.to_bytes(), signature, signing.CANCEL_NAMESPACE)
    try:
        return signing.signer_fingerprint(data, theirs or b"", signing.CANCEL_NAMESPACE) == ours
    except (SignatureError, MachineError):
        return False
