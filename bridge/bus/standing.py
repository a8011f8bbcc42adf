"""What a signature of a runner is worth on this machine: a result's, a card's, a claim's."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from bridge import signing


class Standing(StrEnum):
    """What a signature is worth on this machine. A closed set."""

    TRUSTED = "trusted"
    UNTRUSTED_KEY = "untrusted-key"
    UNSIGNED = "unsigned"
    UNCHECKED = "unchecked"


def standing_of(
    data: bytes, signature: bytes | None, namespace: str, trusted: Path
) -> tuple[Standing, str | None]:
    """What a signature is worth, and whose it is: the trusted principal, or the fingerprint of another key.

    Args:
        data: The exact bytes that were signed.
        signature: Detached; None: there is none.
        namespace: What kind of thing it was made for.
        trusted: Allowed-signers file of the keys that count here; it need not exist.

    Raises:
        SignatureError: There is one, and it is none of these bytes in this namespace.
    """
    if signature is None:
        return Standing.UNSIGNED, None
    if not signing.available():
        return Standing.UNCHECKED, None
    principal = signing.verify(data, signature, namespace, trusted)
    if principal is not None:
        return Standing.TRUSTED, principal
    return Standing.UNTRUSTED_KEY, signing.signer_fingerprint(data, signature, namespace)
