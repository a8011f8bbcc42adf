"""Signatures hold for the exact bytes, one namespace and the listed keys; nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge import signing
from bridge.errors import SignatureError
from tests.fixtures.repo import allowed_line

DATA = b'{"nonce": "1"}\n'


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return signing.ensure_key(tmp_path / "keys" / "id_ed25519", "a test key")


def allowed(folder: Path, key: Path, namespace: str = signing.RESULT_NAMESPACE) -> Path:
    path = folder / "allowed"
    path.write_text(allowed_line(signing.public_key(key), "studio", namespace))
    return path


def test_a_listed_key_verifies_as_its_principal(tmp_path: Path, key: Path):
    signature = signing.sign(key, signing.RESULT_NAMESPACE, DATA)
    assert (
        signing.identify(DATA, signature, signing.RESULT_NAMESPACE, allowed(tmp_path, key)).name == "studio"
    )
    fingerprint = signing.signer_fingerprint(DATA, signature, signing.RESULT_NAMESPACE)
    assert fingerprint.startswith("SHA256:")


def test_unlisted_key_has_no_name(tmp_path: Path, key: Path):
    other = signing.ensure_key(tmp_path / "other", "another")
    signature = signing.sign(other, signing.RESULT_NAMESPACE, DATA)
    assert signing.identify(DATA, signature, signing.RESULT_NAMESPACE, allowed(tmp_path, key)).name is None
    assert signing.identify(DATA, signature, signing.RESULT_NAMESPACE, tmp_path / "nothing").name is None


def test_other_bytes_namespace_or_a_mangled_signature_do_not_verify(tmp_path: Path, key: Path):
    signature = signing.sign(key, signing.RESULT_NAMESPACE, DATA)
    lines = signature.split(b"\n")
    lines[3] = bytes(reversed(lines[3]))
    cases = [
        (DATA + b" ", signature, signing.RESULT_NAMESPACE),
        (DATA, signature, signing.REQUEST_NAMESPACE),
        (DATA, b"\n".join(lines), signing.RESULT_NAMESPACE),
        (DATA, b"not a signature", signing.RESULT_NAMESPACE),
        (DATA, signature + b"x" * 20_000, signing.RESULT_NAMESPACE),
    ]
    for data, given, namespace in cases:
        with pytest.raises(SignatureError):
            signing.identify(data, given, namespace, allowed(tmp_path, key))


def test_a_key_pinned_for_results_cannot_speak_for_requests(tmp_path: Path, key: Path):
    signature = signing.sign(key, signing.REQUEST_NAMESPACE, DATA)
    assert signing.identify(DATA, signature, signing.REQUEST_NAMESPACE, allowed(tmp_path, key)).name is None


def test_the_key_is_made_once_and_is_its_owners_alone(tmp_path: Path, key: Path):
    before = key.read_bytes()
    assert signing.ensure_key(key, "again") == key
    public = signing.public_key(key)
    written = public.read_text()
    public.unlink()  # as a crash between the two files leaves it
    signing.ensure_key(key, "a test key")
    assert public.read_text() == written
    assert key.read_bytes() == before
    assert key.stat().st_mode & 0o077 == 0


def test_without_ssh_keygen_nothing_can_be_signed_and_that_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not signing.available()
