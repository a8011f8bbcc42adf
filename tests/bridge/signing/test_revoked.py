"""A revoked key counts nowhere; a damaged list lets no key through."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from bridge import signing
from bridge.errors import KeyListError
from bridge.signing.keyfiles import KeyList, read_revoked
from bridge.signing.ssh import parse_key
from tests.bridge.signing.keyring import blob, private, public


def test_a_revoked_key_counts_no_longer_and_the_others_do(tmp_path: Path) -> None:
    keys = KeyList(tmp_path / "allowed_signers", (signing.REQUEST_NAMESPACE,))
    for name in ("ann", "bob"):
        keys.add(name, public(name), valid_before=None, now=datetime.now(UTC))
    keys.revoke("ann")
    assert read_revoked(keys.allowed).keys() == {public("ann").text}
    assert [entry.state for entry in keys.all(datetime.now(UTC))] == ["revoked", "counts"]
    assert keys.revoked.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"serial: 3\n", ":1: .*not a supported kind of key"),
        (b"ssh-ed25519 AAAA\n", ":1: .*not a public key"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"SSHKRL\n\0 and then rubbish", ":1: .*not a public key"),
    ],
    ids=["specification", "cut-off", "bytes", "binary-list"],
)
def test_a_damaged_list_is_an_error_and_no_pass(tmp_path: Path, data: bytes, words: str) -> None:
    path, allowed = tmp_path / "revoked_keys", tmp_path / "allowed_signers"
    path.write_bytes(data)
    allowed.write_text(f"ann {public('ann').line}\n")
    signature = signing.sign(private("ann"), signing.REQUEST_NAMESPACE, b"x")
    with pytest.raises(KeyListError, match=words):
        signing.identify(b"x", signature, signing.REQUEST_NAMESPACE, allowed)
    with pytest.raises(KeyListError, match=words):
        read_revoked(allowed)


def test_another_spelling_of_a_revoked_key_is_revoked_with_it(tmp_path: Path) -> None:
    kind, text = "ecdsa-sha2-nistp256", blob(b"ecdsa-sha2-nistp256", b"nistp256", b"\x04" * 65)
    assert text.endswith("Q=")
    other = parse_key(f"{kind} {text[:-2]}R=")
    (tmp_path / "revoked_keys").write_text(f"{kind} {text}\n")
    assert other.text in read_revoked(tmp_path / "allowed_signers")
