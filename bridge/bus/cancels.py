"""A wish to stop a request: made by a client, read and weighed by the runner that has the request.

A wish is a ref holding a parentless commit with ``cancel.json`` and, where its author has a key, a detached
signature of those bytes. It names the request commit, so that one cannot be copied to another request. Whose
wish counts is the machine's policy: with required signatures only the requester's own, else that of anybody
with push rights. Stopping the job and clearing the ref away is the runner's.
"""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from bridge import signing
from bridge.bus.git import Git, Update
from bridge.bus.handles import Held
from bridge.bus.objects import Entry
from bridge.errors import (
    BusError,
    KeyListError,
    LeaseLost,
    MachineError,
    ManifestError,
    PushRejected,
    RemoteUnreachable,
    SignatureError,
)
from bridge.protocol import refs
from bridge.protocol.manifest import Nonce, Sha, Utc, first_fault, format_time, load_strict
from bridge.protocol.sanitize import clean_line, one_line, quoted, unsafe_character

CANCEL_NAME = "cancel.json"
SIGNATURE_NAME = "cancel.json.sig"
SCHEMA_VERSION = 1
MAX_BYTES = 8 * 1024
MAX_REASON = 500

_PREFIXES = (refs.CANCELS, refs.BRANCH_CANCELS)
_PUSH_TIMEOUT_S = 30.0
_MAX_FETCH_BYTES = 16 * 1024 * 1024
_TRIES = 4


class Cancel(BaseModel):
    """One wish to stop one request. Who is named in it is for people to read; only a signature counts."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    schema_version: Annotated[int, Field(ge=1, le=1)] = SCHEMA_VERSION
    nonce: Nonce
    request_commit: Sha
    requested_by: Annotated[str, Field(max_length=200, description="display only, never trusted")] = ""
    reason: Annotated[str, Field(max_length=MAX_REASON)] | None = None
    created_at: Utc

    @field_validator("requested_by", "reason")
    @classmethod
    def _plain_text(cls, value: str | None) -> str | None:
        character = None if value is None else unsafe_character(value)
        if character is not None:
            raise ValueError(f"the character U+{ord(character):04X} is not allowed in a text")
        return value

    def to_bytes(self) -> bytes:
        """The exact bytes that are committed and signed: UTF-8 JSON, sorted keys, one trailing newline."""
        document = self.model_dump(mode="json", exclude_none=True)
        document["created_at"] = format_time(self.created_at)
        return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()

    @property
    def sentence(self) -> str:
        """Who wishes it and why, as they say, on one line."""
        by = f" by {self.requested_by}" if self.requested_by else ""
        return clean_line(f"cancelled{by}" + (f": {self.reason}" if self.reason else ""), limit=1000)


class Wished(StrEnum):
    """What became of a wish. A closed set."""

    ASKED = "asked"
    ALREADY_ASKED = "already-asked"
    TOO_LATE = "too-late"


def draft(
    nonce: str,
    request_commit: str,
    *,
    requested_by: str = "",
    reason: str | None = None,
    now: datetime | None = None,
) -> Cancel:
    """A wish, its texts brought onto one line without control characters.

    Raises:
        ManifestError: A text is too long, or a name is not one of a request.
    """
    created = (now or datetime.now(UTC)).astimezone(UTC).replace(microsecond=0)
    try:
        return Cancel(
            nonce=nonce,
            request_commit=request_commit,
            requested_by=one_line(requested_by)[:200],
            reason=None if reason is None else one_line(reason).strip() or None,
            created_at=created,
        )
    except ValidationError as error:
        raise ManifestError(f"cancel: {first_fault(error, 'the wish')}") from None


def parse(data: bytes) -> Cancel:
    """Read a wish from the bytes of a commit.

    Raises:
        ManifestError: The bytes are too many, not strict JSON, or break a rule of the schema.
    """
    document = load_strict(data, what=CANCEL_NAME, limit=MAX_BYTES)
    try:
        return Cancel.model_validate(document)
    except ValidationError as error:
        value = quoted(error.errors()[0]["input"])
        raise ManifestError(f"{CANCEL_NAME}: {first_fault(error, 'the wish')} (got {value})") from None


def wish(git: Git, remote: str, cancel: Cancel, standing: Held, *, signature: bytes | None = None) -> Wished:
    """Push a wish, if its request still stands.

    The same push asks that `standing` still holds the request: a client's git compares that with what the
    remote shows when the push begins, so an answered request keeps no stray wish (but for an answer in the
    instant between).

    A wish of somebody else's that stands already is replaced where it would not do as well as this one: it
    is about another commit, cannot be read, or this one is signed and that one not by the same key. Nobody
    can keep a requester from cancelling by being first.

    Args:
        git: Any checkout; nothing is left in it, and it need not have the request.
        remote: Address of the bus.
        cancel: From `draft`.
        standing: The branch or inbox ref that holds the request commit.
        signature: A detached one of the wish; None: it goes unsigned.

    Returns:
        `Wished.TOO_LATE` when `standing` moved or went: the request was answered, or its branch was touched.

    Raises:
        PushRejected: The remote takes the wish neither as a ref of its own nor as a branch.
        RemoteUnreachable: It did not answer.
    """
    with git.scratch() as scratch:
        wisher = _Wisher(scratch, remote, cancel, standing, signature)
        if not wisher.has_request():
            return Wished.TOO_LATE
        try:
            return wisher.push(refs.CANCELS)
        except PushRejected:
            return wisher.push(refs.BRANCH_CANCELS)


def read_cancel(git: Git, commit: str) -> Cancel | None:
    """A wish from a commit that is in this repository; None when it is not one."""
    try:
        data = git.read_blob(commit, CANCEL_NAME, MAX_BYTES)
        return None if data is None else parse(data)
    except (ManifestError, BusError):  # not ours, or too large to be
        return None


def objection(
    git: Git,
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
    """Why a wish is not honoured, in one sentence; None: it is.

    Args:
        git: A repository that holds the wish.
        commit: The wish.
        nonce: The request it was found for.
        request_commit: The commit of that request.
        require_signature: The machine takes only signed requests; then only their signer may stop them.
        requester: Who signed the request, by `allowed_signers`.
        allowed_signers: The keys this machine knows. Each must be good for the cancel namespace, too.
        revoked_keys: Those of them that count no longer.
        now: The time by which keys are judged (aware); None: the clock's.

    Raises:
        MachineError: A signature must be checked and there is no ``ssh-keygen``.
    """
    cancel = read_cancel(git, commit)
    if cancel is None:
        return f"the wish {commit[:12]} cannot be read"
    if cancel.nonce != nonce or cancel.request_commit != request_commit:
        return f"the wish {commit[:12]} is about another request, {cancel.nonce}"
    if not require_signature:
        return None
    signature = _signature(git, commit)
    if signature is None:
        return "the wish is unsigned, and this machine lets only the requester stop a request"
    data = git.read_blob(commit, CANCEL_NAME, MAX_BYTES) or b""
    try:
        signer = signing.identify(
            data, signature, signing.CANCEL_NAMESPACE, allowed_signers, revoked=revoked_keys, now=now
        )
    except (SignatureError, KeyListError) as error:
        return clean_line(error.message)
    if signer.name is None:
        return f"the wish is signed by {signer.objection}, and only the requester may stop a request"
    if signer.name != requester:
        return f"the wish is signed by {signer.name}, who did not ask for this request"
    return None


class _Wisher:
    """One wish on its way, with what is needed to tell it from one that stands already."""

    def __init__(
        self, git: Git, remote: str, cancel: Cancel, standing: Held, signature: bytes | None
    ) -> None:
        self._git = git
        self._remote = remote
        self._cancel = cancel
        self._standing = standing
        self._signature = signature
        files = {CANCEL_NAME: cancel.to_bytes()}
        if signature is not None:
            files[SIGNATURE_NAME] = signature
        rows = [Entry("100644", "blob", git.write_blob(data), name) for name, data in sorted(files.items())]
        # Git calls a push of what a ref already holds a success; no two wishes are the same object.
        message = f"kakeya-mac cancel: {cancel.nonce} {secrets.token_hex(8)} [skip ci]\n"
        self._commit = git.commit_tree(git.write_tree(rows), [], message)

    def has_request(self) -> bool:
        """Fetch the request commit if need be: git pushes no ref, not even unchanged, without its object."""
        standing = self._standing
        if not self._git.exists(standing.commit):
            try:
                self._git.fetch(self._remote, [standing.ref])
            except RemoteUnreachable:  # said of a ref that is gone, too
                if standing.ref in self._look():
                    raise
                return False
        return self._git.exists(standing.commit)

    def push(self, prefix: str) -> Wished:
        ref = prefix + self._cancel.nonce
        found = ""
        for _ in range(_TRIES):
            updates = [Update(ref, self._commit, found), self._stays()]
            try:
                self._git.push(self._remote, updates, timeout_s=_PUSH_TIMEOUT_S)
            except LeaseLost:
                pass
            except RemoteUnreachable:
                # The answer may have been lost, not the push.
                if self._look().get(ref) != self._commit:
                    raise
                return Wished.ASKED
            else:
                return Wished.ASKED
            shown = self._look()
            if shown.get(ref) == self._commit:
                return Wished.ASKED
            if shown.get(self._standing.ref) != self._standing.commit:
                return Wished.TOO_LATE
            found = shown.get(ref, "")
            if found and self._does_as_well(ref, found):
                return Wished.ALREADY_ASKED
        raise LeaseLost(f"others keep changing {ref}", "try again")

    def _stays(self) -> Update:
        """The request where it is: nothing to send, but the whole push fails when that is no longer true."""
        return Update(self._standing.ref, self._standing.commit, self._standing.commit)

    def _look(self) -> dict[str, str]:
        mine = [prefix + self._cancel.nonce for prefix in _PREFIXES]
        return self._git.ls_remote(self._remote, self._standing.ref, *mine, timeout_s=_PUSH_TIMEOUT_S)

    def _does_as_well(self, ref: str, commit: str) -> bool:
        """Whether the wish that stands there is as good as ours."""
        try:
            self._git.fetch(self._remote, [ref], timeout_s=_PUSH_TIMEOUT_S, limit_bytes=_MAX_FETCH_BYTES)
        except BusError:
            return False  # gone again, which the next try finds out; or more than any wish has
        other = read_cancel(self._git, commit)
        wanted = (self._cancel.nonce, self._cancel.request_commit)
        if other is None or (other.nonce, other.request_commit) != wanted:
            return False
        if self._signature is None:
            return True
        theirs = _signature(self._git, commit)
        if theirs is None:
            return False
        ours = signing.signer_fingerprint(self._cancel.to_bytes(), self._signature, signing.CANCEL_NAMESPACE)
        data = self._git.read_blob(commit, CANCEL_NAME, MAX_BYTES) or b""
        try:
            return signing.signer_fingerprint(data, theirs, signing.CANCEL_NAMESPACE) == ours
        except (SignatureError, MachineError):
            return False


def _signature(git: Git, commit: str) -> bytes | None:
    try:
        return git.read_blob(commit, SIGNATURE_NAME, signing.MAX_SIGNATURE_BYTES)
    except BusError:  # too large to be one
        return None
