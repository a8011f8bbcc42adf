"""Whose signature is it, by lists on this machine and at its *now*?

``ssh-keygen -Y check-novalidate`` does the cryptography: it says which key signed exactly these bytes in this
namespace, whoever's key that is. Whether the key counts is decided here, from lists that were read once, by
`now` of whoever asks: dates written in a request or a commit have no say.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bridge.protocol.sanitize import clean_line
from bridge.signing.keygen import signer_fingerprint
from bridge.signing.listed import Listed, read_keys
from bridge.signing.revoked import is_revoked


@dataclass(frozen=True)
class Signer:
    """Who made a signature that verifies.

    Attributes:
        fingerprint: Of the key.
        name: Whose key it is, if it counts here and now; None: it does not.
        objection: Why it does not count, after "signed by"; None: it does.
        revoked: That is because it was revoked here.
    """

    fingerprint: str
    name: str | None
    objection: str | None = None
    revoked: bool = False


def identify(
    data: bytes,
    signature: bytes,
    namespace: str,
    allowed: Path,
    *,
    revoked: Path | None = None,
    now: datetime | None = None,
) -> Signer:
    """Who signed these bytes, by an allowed-signers file; and if that does not count, why.

    Args:
        data: The exact bytes.
        signature: The detached signature of them.
        namespace: What they were signed as.
        allowed: The list of keys that count. Without the file none does.
        revoked: The list of those that count no longer, whatever else says so.
        now: The verifier's time (aware); None: its clock's.

    Raises:
        SignatureError: The signature is not one, or does not fit these bytes and this namespace.
        KeyListError: A list could have been written by others, or is not understood.
        MachineError: There is no ``ssh-keygen``.
    """
    fingerprint = signer_fingerprint(data, signature, namespace)
    lines = [line for line in read_keys(allowed) if line.key.fingerprint == fingerprint]
    if not lines:
        return Signer(fingerprint, None, f"the key {fingerprint}, which is not listed here")
    if revoked is not None and is_revoked(revoked, lines[0].key):
        words = f"the key {fingerprint} of {lines[0].name}, which was revoked"
        return Signer(fingerprint, None, words, revoked=True)
    moment = now or datetime.now(UTC)
    objections = [_objection(line, namespace, moment) for line in lines]
    for line, objection in zip(lines, objections, strict=True):
        if objection is None:
            return Signer(fingerprint, line.name)
    return Signer(fingerprint, None, f"the key {fingerprint} of {lines[0].name}, which {objections[-1]}")


def verify(
    data: bytes, signature: bytes, namespace: str, allowed: Path, *, revoked: Path | None = None
) -> str | None:
    """Whose key made a signature, as `identify` says; None: nobody's that counts."""
    return identify(data, signature, namespace, allowed, revoked=revoked).name


def _objection(line: Listed, namespace: str, now: datetime) -> str | None:
    if not line.speaks_in(namespace):
        return f"is not listed for {clean_line(namespace)}"
    if not line.has_begun(now):
        return f"counts only from {line.valid_after:%Y-%m-%d %H:%M:%S %Z} on"
    if line.is_over(now):
        return f"expired at {line.valid_before:%Y-%m-%d %H:%M:%S %Z}"
    return None
