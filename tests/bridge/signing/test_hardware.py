"""A signature from a security key counts like any other: ssh-keygen verifies it, and our lists judge it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge import signing
from bridge.errors import SignatureError
from bridge.signing.ssh import parse_key
from tests.bridge.signing import hardware

SEED, SPACE = b"\x07" * 32, signing.REQUEST_NAMESPACE


def test_a_listed_security_key_signs_and_nothing_else_passes_for_it(tmp_path: Path) -> None:
    line = hardware.public_line(SEED)
    allowed = tmp_path / "allowed_signers"
    allowed.write_text(f'ann namespaces="{SPACE}" {line} a token\n')
    signature = hardware.sign(SEED, SPACE, b"data")
    found = signing.identify(b"data", signature, SPACE, allowed)
    assert (found.name, found.fingerprint) == ("ann", parse_key(line).fingerprint)
    assert signing.identify(b"data", hardware.sign(b"\x08" * 32, SPACE, b"data"), SPACE, allowed).name is None
    for data, given in ((b"datum", signature), (b"data", hardware.sign(SEED, "other", b"data"))):
        with pytest.raises(SignatureError, match="does not verify"):
            signing.identify(data, given, SPACE, allowed)
