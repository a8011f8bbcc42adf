"""A revoked key counts nowhere, in either form of its list; a damaged list lets nobody through."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge import signing
from bridge.errors import KeyListError
from bridge.proc import run_program
from bridge.signing.keyfiles import check_revoked, is_revoked, revoke
from bridge.signing.ssh import parse_key
from tests.bridge.signing.keyring import blob, private, public


def krl(path: Path, *names: str) -> Path:
    files = [str(signing.public_key(private(name))) for name in names]
    assert run_program(["ssh-keygen", "-k", "-f", str(path), *files], timeout_s=20).ok
    return path


@pytest.mark.parametrize("form", ["plain", "krl"])
def test_a_revoked_key_counts_no_longer_and_the_others_do(tmp_path: Path, form: str) -> None:
    path = tmp_path / "revoked_keys"
    assert not is_revoked(path, public("ann"))
    if form == "krl":
        krl(path, "carol")
    revoke(path, (public("ann"),))
    before = path.read_bytes()
    revoke(path, (public("ann"),))
    assert path.read_bytes() == before
    assert is_revoked(path, public("ann"))
    assert not is_revoked(path, public("bob"))
    assert is_revoked(path, public("carol")) is (form == "krl")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"serial: 3\n", ":1: .*not a supported kind of key"),
        (b"ssh-ed25519 AAAA\n", ":1: .*not a public key"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"SSHKRL\n\0 and then rubbish", "no key revocation list"),
    ],
    ids=["specification", "cut-off", "bytes", "broken-krl"],
)
def test_a_damaged_list_is_an_error_and_no_pass(tmp_path: Path, data: bytes, words: str) -> None:
    path, allowed = tmp_path / "revoked_keys", tmp_path / "allowed_signers"
    path.write_bytes(data)
    allowed.write_text(f"ann {public('ann').line}\n")
    signature = signing.sign(private("ann"), signing.REQUEST_NAMESPACE, b"x")
    with pytest.raises(KeyListError, match=words):
        signing.identify(b"x", signature, signing.REQUEST_NAMESPACE, allowed, revoked=path)
    with pytest.raises(KeyListError, match=words):
        check_revoked(path)


@pytest.mark.parametrize("form", ["none", "plain", "krl"])
def test_a_list_that_is_right_is_found_so(tmp_path: Path, form: str) -> None:
    path = tmp_path / "revoked_keys"
    if form == "krl":
        krl(path, "carol")
    elif form == "plain":
        revoke(path, (public("carol"),))
    check_revoked(path)


def test_a_list_that_others_may_write_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "revoked_keys"
    revoke(path, (public("ann"),))
    path.chmod(0o666)
    with pytest.raises(KeyListError, match="can be written by others"):
        is_revoked(path, public("bob"))


def test_a_list_that_is_a_link_to_nothing_lets_nobody_through(tmp_path: Path) -> None:
    (tmp_path / "revoked_keys").symlink_to(tmp_path / "unmounted")
    with pytest.raises(KeyListError, match="a link to a file that does not exist"):
        is_revoked(tmp_path / "revoked_keys", public("ann"))


def test_another_spelling_of_a_revoked_key_is_revoked_with_it(tmp_path: Path) -> None:
    kind, text = "ecdsa-sha2-nistp256", blob(b"ecdsa-sha2-nistp256", b"nistp256", b"\x04" * 65)
    assert text.endswith("Q=")
    other = parse_key(f"{kind} {text[:-2]}R=")
    (tmp_path / "revoked_keys").write_text(f"{kind} {text}\n")
    assert is_revoked(tmp_path / "revoked_keys", other)
