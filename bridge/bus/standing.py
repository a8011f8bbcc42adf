"""What a signature of a runner is worth on this machine: a result's, a card's, a claim's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from bridge import signing
from bridge.signing.revoked import is_revoked


class Standing(StrEnum):
    """What a signature is worth on this machine. A closed set."""

    TRUSTED = "trusted"
    REVOKED = "revoked"
    UNTRUSTED_KEY = "untrusted-key"
    UNSIGNED = "unsigned"
    UNCHECKED = "unchecked"


@dataclass(frozen=True)
class Trust:
    """Which runner keys count on this machine.

    Attributes:
        keys: Allowed-signers file of those that do; it need not exist.
        revoked: List of those that count no longer, whatever `keys` says; it need not exist.
    """

    keys: Path
    revoked: Path

    @classmethod
    def by(cls, keys: Path) -> Trust:
        """A list of keys with the revoked ones beside it."""
        return cls(keys, keys.with_name("revoked_keys"))

    def names(self, namespace: str, now: datetime | None = None) -> Mapping[str, str]:
        """Whose keys count now for a kind of thing: names by fingerprint.

        Raises:
            KeyListError: A list could have been written by others, or is not understood.
        """
        moment = now or datetime.now(UTC)
        return {
            line.key.fingerprint: line.name
            for line in signing.read_keys(self.keys)
            if line.speaks_in(namespace)
            and line.has_begun(moment)
            and not line.is_over(moment)
            and not is_revoked(self.revoked, line.key)
        }


@dataclass(frozen=True)
class Signature:
    """What a signature is worth.

    Attributes:
        standing: That.
        signer: The trusted name, or the fingerprint of another key; None: unsigned or unchecked.
        objection: Why a key does not count, after "signed by"; None: it does, or none signed.
    """

    standing: Standing
    signer: str | None = None
    objection: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """Standing and signer, as commands show them with ``--json``."""
        return {"standing": self.standing.value, "signer": self.signer}


def weigh(data: bytes, signature: bytes | None, namespace: str, trust: Trust) -> Signature:
    """What a signature is worth, and whose it is.

    Args:
        data: The exact bytes that were signed.
        signature: Detached; None: there is none.
        namespace: What kind of thing it was made for.
        trust: The keys that count.

    Raises:
        SignatureError: There is one, and it is none of these bytes in this namespace.
        KeyListError: A list could have been written by others, or is not understood.
    """
    if signature is None:
        return Signature(Standing.UNSIGNED)
    if not signing.available():
        return Signature(Standing.UNCHECKED)
    found = signing.identify(data, signature, namespace, trust.keys, revoked=trust.revoked)
    if found.name is not None:
        return Signature(Standing.TRUSTED, found.name)
    standing = Standing.REVOKED if found.revoked else Standing.UNTRUSTED_KEY
    return Signature(standing, found.fingerprint, found.objection)
