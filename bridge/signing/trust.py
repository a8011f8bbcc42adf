"""Whose signature it is, by the lists of this machine and its clock, and how far it can be trusted.

``ssh-keygen -Y find-principals`` and ``-Y verify -r`` decide, on copies of the lists that were read and
checked here: dates written in a request or a commit have no influence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from bridge.protocol.sanitize import clean_line
from bridge.signing import ssh
from bridge.signing.keyfiles import (
    AllowedSigner,
    KeyList,
    KeyState,
    ListedKey,
    format_moment,
    is_revoked,
    read_keys,
    read_revoked,
)
from bridge.signing.ssh import read_key

REQUEST_NAMESPACE = "kakeya-mac-request"
RESULT_NAMESPACE = "kakeya-mac-result"
CANCEL_NAMESPACE = "kakeya-mac-cancel"
CLAIM_NAMESPACE = "kakeya-mac-claim"
RUNNER_NAMESPACE = "kakeya-mac-runner"
VERIFICATION_NAMESPACE = "kakeya-mac-verification"


class TrustLevel(StrEnum):
    """What a runner's signature is worth on this machine. A closed set."""

    TRUSTED = "trusted"
    REVOKED = "revoked"
    UNTRUSTED_KEY = "untrusted-key"
    UNSIGNED = "unsigned"
    UNCHECKED = "unchecked"


@dataclass(frozen=True)
class Signer:
    """Who made a signature that verifies."""

    fingerprint: str  # of the key
    name: str | None  # whose key it is, if it counts here and now; None: it does not
    objection: str | None = None  # why it does not count, for people, after "signed by"; None: it does
    revoked: bool = False  # it does not count because it was revoked here


@dataclass(frozen=True)
class Signature:
    """What a signature of a runner is worth."""

    trust: TrustLevel
    signer: str | None = None  # the trusted name, or another key's fingerprint; None: unsigned or unchecked
    objection: str | None = None  # why a key does not count, after "signed by"

    def to_json(self) -> dict[str, str | None]:
        """Level and signer, as commands show them with ``--json``."""
        return {"standing": self.trust.value, "signer": self.signer}


@dataclass(frozen=True)
class Trust:
    """Which runner keys count on this machine."""

    keys: Path  # list of allowed signers; it need not exist
    revoked: Path  # list of those that no longer count, whatever `keys` says; it need not exist

    @classmethod
    def by(cls, keys: Path) -> Trust:
        """A list of keys with the revoked ones next to it."""
        return cls(keys, keys.with_name("revoked_keys"))

    def names(self, namespace: str, now: datetime | None = None) -> Mapping[str, str]:
        """The names whose keys count now for a kind of document, by fingerprint."""
        entries = KeyList(self.keys, self.revoked, (namespace,)).all(now or datetime.now(UTC))
        lines = [entry.listed for entry in entries if entry.state is KeyState.COUNTS]
        return {line.key.fingerprint: line.name for line in lines}


def runner_keys(path: Path) -> KeyList:
    """The list of runner keys at this path, with the revoked ones next to it.

    A key is listed for what runners sign, so that a runner's key cannot sign requests in its name.
    """
    trust = Trust.by(path)
    return KeyList(trust.keys, trust.revoked, (RESULT_NAMESPACE, CLAIM_NAMESPACE, RUNNER_NAMESPACE))


def pinned_keys(path: Path) -> list[ListedKey]:
    """The pinned runner keys in file order, each once, and whether they count."""
    return list({entry.listed.key.text: entry for entry in runner_keys(path).all(datetime.now(UTC))}.values())


def pin(path: Path, name: str, key: str, *, valid_before: datetime | None = None) -> bool:
    """Pin a runner's key, given as a line or the path of a ``.pub`` file; False when it already was."""
    return runner_keys(path).add(name, read_key(key), valid_before=valid_before, now=datetime.now(UTC))


def identify(
    data: bytes,
    signature: bytes,
    namespace: str,
    allowed: Path,
    *,
    revoked: Path | None = None,
    now: datetime | None = None,
) -> Signer:
    """Who signed these bytes, by a list of allowed signers; and if that does not count, why.

    Raises:
        SignatureError: The signature is not one, or does not fit these bytes and this namespace.
        KeyListError: A list could have been written by others, or is not understood.
    """
    entries = read_keys(allowed)
    gone = b"" if revoked is None else read_revoked(revoked)
    moment = now or datetime.now(UTC)
    with ssh.signature_file(signature) as path:
        listed, revocations = path.with_name("allowed"), path.with_name("revoked")
        listed.write_text("".join(entry.text("") for entry in entries), encoding="utf-8")
        revocations.write_bytes(gone)
        common = ["-f", str(listed), "-s", str(path), f"-Overify-time={format_moment(moment)}"]
        found = ssh.run("-Y", "find-principals", *common)
        for name in found.stdout.decode("utf-8", "replace").split() if found.ok else ():
            checks = ["-I", name, "-n", namespace, *(["-r", str(revocations)] if gone else [])]
            done = ssh.run("-Y", "verify", *common, *checks, input_bytes=data)
            if (fingerprint := ssh.good_fingerprint(done, namespace)) is not None:
                return Signer(fingerprint, name)
    fingerprint = ssh.signer_fingerprint(data, signature, namespace)
    lines = [entry for entry in entries if entry.key.fingerprint == fingerprint]
    if not lines:
        return Signer(fingerprint, None, f"the key {fingerprint}, which is not listed here")
    is_gone = revoked is not None and is_revoked(revoked, lines[-1].key)
    why = "was revoked" if is_gone else _why(lines[-1], namespace, moment)
    return Signer(fingerprint, None, f"the key {fingerprint} of {lines[-1].name}, which {why}", is_gone)


def weigh(data: bytes, signature: bytes | None, namespace: str, trust: Trust) -> Signature:
    """What a runner's signature is worth, and whose it is; errors are those of `identify`."""
    if signature is None:
        return Signature(TrustLevel.UNSIGNED)
    if not ssh.available():
        return Signature(TrustLevel.UNCHECKED)
    found = identify(data, signature, namespace, trust.keys, revoked=trust.revoked)
    if found.name is not None:
        return Signature(TrustLevel.TRUSTED, found.name)
    level = TrustLevel.REVOKED if found.revoked else TrustLevel.UNTRUSTED_KEY
    return Signature(level, found.fingerprint, found.objection)


def _why(line: AllowedSigner, namespace: str, now: datetime) -> str:
    match line.state(namespace, now):
        case KeyState.OTHER_USE:
            return f"is not listed for {clean_line(namespace)}"
        case KeyState.NOT_YET:
            return f"counts only from {line.valid_after:%Y-%m-%d %H:%M:%S %Z} on"
        case KeyState.EXPIRED:
            return f"expired at {line.valid_before:%Y-%m-%d %H:%M:%S %Z}"
    return "ssh-keygen does not accept"
