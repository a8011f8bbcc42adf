"""Keys for tests: made once a run, because making one starts a program."""

from __future__ import annotations

import struct
from base64 import b64encode
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from bridge import signing
from bridge.signing.ssh import PublicKey, read_key


@cache
def private(name: str) -> Path:
    """The private key of that name; the same one for the whole run."""
    return signing.ensure_key(Path(mkdtemp(prefix="keyring-")) / name, name)


def public(name: str) -> PublicKey:
    """Its public half."""
    return read_key(str(signing.public_key(private(name))))


def blob(*fields: bytes) -> str:
    """A public key's base64 text, of these fields."""
    return b64encode(b"".join(struct.pack(">I", len(field)) + field for field in fields)).decode()
