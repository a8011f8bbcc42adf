"""Whose signature it is, by checked copies of this machine's lists and its clock, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from bridge.signing import ssh
from bridge.signing.keyfiles import KeyList, KeyState, ListedKey, format_moment, read_keys, read_revoked
from bridge.signing.ssh import read_key

REQUEST_NAMESPACE = "kakeya-mac-request"
RESULT_NAMESPACE = "kakeya-mac-result"
CANCEL_NAMESPACE = "kakeya-mac-cancel"
CLAIM_NAMESPACE = "kakeya-mac-claim"
RUNNER_NAMESPACE = "kakeya-mac-runner"
VERIFICATION_NAMESPACE = "kakeya-mac-verification"


class TrustLevel(StrEnum):
    """What a signature is worth on this machine. A closed set."""

    TRUSTED = "trusted"
    REVOKED = "revoked"
    UNTRUSTED_KEY = "untrusted-key"
    UNSIGNED = "unsigned"
    UNCHECKED = "unchecked"


@dataclass(frozen=True)
class Signature:
    """What a signature is worth, and whose it is."""

    trust: TrustLevel
    name: str | None = None  # whose key it is, if it counts here and now; None: it does not
    fingerprint: str | None = None  # of its key; None: unsigned or unchecked
    objection: str | None = None  # why the key does not count, for people, after "signed by"

    @property
    def signer(self) -> str | None:
        """The trusted name, or another key's fingerprint."""
        return self.name or self.fingerprint

    def to_json(self) -> dict[str, str | None]:
        """Level and signer, as commands show them with ``--json``."""
        return {"standing": self.trust.value, "signer": self.signer}


def names_that_count(keys: Path, namespace: str, now: datetime | None = None) -> Mapping[str, str]:
    """The names of a list whose keys count now for a kind of document, by fingerprint."""
    entries = KeyList(keys, (namespace,)).all(now or datetime.now(UTC))
    lines = [entry.listed for entry in entries if entry.state is KeyState.COUNTS]
    return {line.key.fingerprint: line.name for line in lines}


def runner_keys(path: Path) -> KeyList:
    """The list of runner keys at this path.

    A key is listed for what runners sign, so that a runner's key cannot sign requests in its name.
    """
    return KeyList(path, (RESULT_NAMESPACE, CLAIM_NAMESPACE, RUNNER_NAMESPACE))


def pinned_keys(path: Path) -> list[ListedKey]:
    """The pinned runner keys in file order, each once, and whether they count."""
    return list({entry.listed.key.text: entry for entry in runner_keys(path).all(datetime.now(UTC))}.values())


def pin(path: Path, name: str, key: str, *, valid_before: datetime | None = None) -> bool:
    """Pin a runner's key, given as a line or the path of a ``.pub`` file; False when it already was."""
    return runner_keys(path).add(name, read_key(key), valid_before=valid_before, now=datetime.now(UTC))


def identify(
    data: bytes, signature: bytes, namespace: str, allowed: Path, *, now: datetime | None = None
) -> Signature:
    """Who signed these bytes, by a list of allowed signers; and if that does not count, why.

    Raises:
        SignatureError: The signature is not one, or does not fit these bytes and this namespace.
        KeyListError: A list could have been written by others, or is not understood.
    """
    moment, gone = now or datetime.now(UTC), read_revoked(allowed)
    key, lines = ssh.signing_key(signature).text, read_keys(allowed)
    own = [line for line in lines if line.key.text == key]
    listed = "".join(line.text("") for line in own).encode()
    revoked = "".join(f"{each.line}\n" for each in gone.values()).encode()
    with ssh.temporary_files(signature=signature, allowed=listed, revoked=revoked) as folder:
        common = ["-s", str(folder / "signature"), "-f", str(folder / "allowed")]
        common += ["-r", str(folder / "revoked")] if gone else []
        for name in dict.fromkeys(line.name for line in own):
            said = ["-I", name, "-n", namespace, f"-Overify-time={format_moment(moment)}"]
            if ssh.run("-Y", "verify", *common, *said, input_bytes=data).ok:
                return Signature(TrustLevel.TRUSTED, name, own[0].key.fingerprint)
    fingerprint = ssh.signer_fingerprint(data, signature, namespace)
    level, objection = TrustLevel.UNTRUSTED_KEY, f"the key {fingerprint}, which is not listed here"
    if own and own[-1].key.fingerprint == fingerprint:
        last = own[-1].judge(namespace, moment, revoked=key in gone)
        level = TrustLevel.REVOKED if last.state is KeyState.REVOKED else level
        why = "ssh-keygen does not accept" if last.state is KeyState.COUNTS else last.words
        objection = f"the key {fingerprint} of {last.listed.name}, which {why}"
    return Signature(level, None, fingerprint, objection)


def weigh(data: bytes, signature: bytes | None, namespace: str, trusted: Path) -> Signature:
    """Like `identify`, also where there is no signature, or no ``ssh-keygen`` to check it."""
    if signature is None:
        return Signature(TrustLevel.UNSIGNED)
    if not ssh.available():
        return Signature(TrustLevel.UNCHECKED)
    return identify(data, signature, namespace, trusted)
