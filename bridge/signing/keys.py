"""A public key as one reads it in a file: ``ssh-ed25519 AAAA… comment``. Parsing only; nothing is run."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import SignatureError
from bridge.protocol.sanitize import quoted

# DSA is left out: ssh-keygen no longer verifies it everywhere. `sk-` keys live in hardware.
KINDS = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
)
MIN_RSA_BITS = 2048
MAX_LINE = 8192
_WRITTEN = "a public key is written: ssh-ed25519 AAAA…"
_BASE64 = re.compile(r"[A-Za-z0-9+/]{16,}={0,2}")


@dataclass(frozen=True)
class PublicKey:
    """One public key: its kind, its base64 text in the one form there is, and its owner's words behind it."""

    kind: str
    text: str
    comment: str = ""

    @property
    def line(self) -> str:
        """The key without its comment: ``kind base64``."""
        return f"{self.kind} {self.text}"

    @property
    def fingerprint(self) -> str:
        """``SHA256:…``, as ``ssh-keygen -l`` shows it."""
        return "SHA256:" + base64.b64encode(
            hashlib.sha256(base64.b64decode(self.text)).digest()
        ).decode().rstrip("=")

    @property
    def in_hardware(self) -> bool:
        """Whether the private half is in a device that wants to be touched."""
        return self.kind.startswith("sk-")


def parse_key(line: str) -> PublicKey:
    """Read ``kind base64 [comment]``.

    Raises:
        SignatureError: It is no such line, the kind is not one of `KINDS`, the key within is of another kind,
            or it is an RSA key of fewer than 2048 bits.
    """
    words = line.strip().split(None, 2)
    if len(line) > MAX_LINE or len(words) < 2 or "\n" in line.strip() or _BASE64.fullmatch(words[1]) is None:
        raise SignatureError(f"{quoted(line, 60)} is not a public key", _WRITTEN)
    kind, text = words[:2]
    if "-cert-v01@" in kind:
        raise SignatureError(
            f"{quoted(kind)} is a certificate, and certificates are not supported",
            "list the plain key itself: its line begins with ssh-ed25519, without -cert-v01",
        )
    if kind not in KINDS:
        raise SignatureError(f"{quoted(kind)} is no kind of key that is taken", f"kinds: {', '.join(KINDS)}")
    try:
        blob = base64.b64decode(text, validate=True)
        fields = _fields(blob)
    except (binascii.Error, struct.error, ValueError):
        raise SignatureError(f"{quoted(line, 60)} is not a public key", _WRITTEN) from None
    if fields[0] != kind.encode():
        raise SignatureError(f"{quoted(line, 60)} is not a public key: it says it is another kind", _WRITTEN)
    if kind == "ssh-rsa" and (bits := int.from_bytes(fields[-1]).bit_length()) < MIN_RSA_BITS:
        raise SignatureError(
            f"an RSA key of {bits} bits is too short", f"at least {MIN_RSA_BITS}, or ed25519"
        )
    # Base64 has spare bits at its end: the same key in another spelling must be revoked with it.
    text = base64.b64encode(blob).decode()
    return PublicKey(kind, text, words[2].strip() if len(words) > 2 else "")


def read_key(given: str) -> PublicKey:
    """A public key that somebody names: the line itself, or the path of a file that holds it.

    Raises:
        SignatureError: It is neither, or the file is a private key.
    """
    if given.startswith(("ssh-", "ecdsa-", "sk-")):
        return parse_key(given)
    try:
        text = Path(given).expanduser().read_bytes()[: MAX_LINE + 1].decode("utf-8", "replace")
    except (OSError, ValueError):
        raise SignatureError(f"{quoted(given, 60)} is neither a public key nor a file", _WRITTEN) from None
    if "PRIVATE KEY" in text:
        raise SignatureError(f"{given} is a private key, which stays with its owner", f"give {given}.pub")
    return parse_key(text)


def _fields(blob: bytes) -> list[bytes]:
    """The length-prefixed fields of a key (RFC 4253, section 6.6).

    Raises:
        ValueError: They do not fill the blob exactly, or there are fewer than two.
    """
    fields, at = [], 0
    while at < len(blob):
        (length,) = struct.unpack_from(">I", blob, at)
        at += 4
        if length > len(blob) - at:
            raise ValueError("a field reaches beyond the key")
        fields.append(blob[at : at + length])
        at += length
    if len(fields) < 2:
        raise ValueError("too few fields")
    return fields
