"""What a claim says, and who says it: the heartbeat in a claim commit, and what its signature is worth.

The signature covers the exact bytes of ``status.json``: nonce, request commit, attempt, the number of the
beat and its time. So one cannot be put on another request, and an old one is known to be old.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.bus.git import Git
from bridge.bus.objects import Entry
from bridge.bus.standing import Signature, Standing, Trust, weigh
from bridge.errors import BusError, MachineError, ResultError, SignatureError
from bridge.protocol.result import MAX_BYTES, STATUS_NAME, STATUS_SIGNATURE_NAME, RunStatus, parse_status
from bridge.protocol.sanitize import clean_line
from bridge.signing import CLAIM_NAMESPACE, MAX_SIGNATURE_BYTES


@dataclass(frozen=True)
class Claimed:
    """A claim that could be read.

    Attributes:
        status: What it says, its texts cleaned.
        signature: What its signature is worth here; one that does not hold is worth nothing.
    """

    status: RunStatus
    signature: Signature


def write_claim(git: Git, status: RunStatus, signature: bytes | None) -> str:
    """Write a claim commit and return its name.

    Args:
        git: Where to.
        status: What it says.
        signature: Of the bytes of that; None: it is unsigned.
    """
    files = {STATUS_NAME: status.to_bytes()}
    if signature is not None:
        files[STATUS_SIGNATURE_NAME] = signature
    tree = git.write_tree(
        [Entry("100644", "blob", git.write_blob(data), name) for name, data in files.items()]
    )
    return git.commit_tree(tree, [], f"kakeya-mac claim: {status.nonce} [skip ci]\n")


def read_status(git: Git, commit: str) -> RunStatus | None:
    """A claim's heartbeat, from a commit that is in this repository; None when it is not one of ours.

    Anyone with push rights can write one, so its texts come back without anything a terminal would obey.
    """
    data = _blob(git, commit, STATUS_NAME, MAX_BYTES)
    return None if data is None else _status(data)


def read_claim(git: Git, commit: str, nonce: str, trust: Trust) -> Claimed | None:
    """A claim from a commit that is in this repository; None when it is none, or another request's.

    Args:
        git: The repository.
        commit: The claim.
        nonce: The request it was found for.
        trust: The runner keys that count here.

    Raises:
        KeyListError: A list of keys could have been written by others, or is not understood.
    """
    data = _blob(git, commit, STATUS_NAME, MAX_BYTES)
    status = None if data is None else _status(data)
    if data is None or status is None or status.nonce != nonce:
        return None
    signature = _blob(git, commit, STATUS_SIGNATURE_NAME, MAX_SIGNATURE_BYTES)
    try:
        return Claimed(status, weigh(data, signature, CLAIM_NAMESPACE, trust))
    except (SignatureError, MachineError):  # worth as much as none
        return Claimed(status, Signature(Standing.UNSIGNED))


def _blob(git: Git, commit: str, name: str, limit: int) -> bytes | None:
    try:
        return git.read_blob(commit, name, limit)
    except BusError:  # not ours, or too large to be
        return None


def _status(data: bytes) -> RunStatus | None:
    try:
        status = parse_status(data)
    except ResultError:
        return None
    shown = status.progress and status.progress.model_copy(update={"step": clean_line(status.progress.step)})
    tail = tuple(clean_line(line) for line in status.log_tail)
    return status.model_copy(
        update={"runner": clean_line(status.runner), "progress": shown, "log_tail": tail}
    )
