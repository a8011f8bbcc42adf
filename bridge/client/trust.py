"""The runner keys that count on this client: an allowed-signers file, one line a key.

A key is pinned for what runners sign (results, claims, cards), so a runner's key cannot sign requests in its
name. A revoked one stays in the list, so that what it signed is refused with the reason.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from bridge.bus.standing import Trust
from bridge.signing import CLAIM_NAMESPACE, RESULT_NAMESPACE, RUNNER_NAMESPACE
from bridge.signing.keyring import Entry, Keyring
from bridge.signing.keys import read_key

NAMESPACES = (RESULT_NAMESPACE, CLAIM_NAMESPACE, RUNNER_NAMESPACE)


def ring(path: Path) -> Keyring:
    """The list of keys at this path, with the revoked ones beside it."""
    trust = Trust.by(path)
    return Keyring(trust.keys, trust.revoked, NAMESPACES)


def trusted(path: Path) -> list[Entry]:
    """The pinned keys in file order, each once, and whether they count; none where there is no file.

    Raises:
        KeyListError: The list cannot be believed.
    """
    entries = {entry.listed.key.text: entry for entry in ring(path).all(datetime.now(UTC))}
    return list(entries.values())


def add(path: Path, name: str, key: str, *, valid_before: datetime | None = None) -> bool:
    """Pin a key; False when it already was.

    Args:
        path: The allowed-signers file; made when missing.
        name: The runner's name.
        key: A public key line, or the path of a ``.pub`` file.
        valid_before: It does not count from then on (aware); None: no such bound.

    Raises:
        SignatureError: The name or the key is not one, or the key was revoked.
        KeyListError: The list cannot be believed.
        MachineError: The file cannot be written.
    """
    return ring(path).add(name, read_key(key), valid_before=valid_before, now=datetime.now(UTC))
