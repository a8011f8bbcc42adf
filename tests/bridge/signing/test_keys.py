"""A public key is read strictly: it accepts what ssh-keygen accepts, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge import signing
from bridge.errors import SignatureError
from bridge.proc import run_program
from bridge.signing.ssh import KINDS, parse_key, read_key
from tests.bridge.signing.keyring import blob, private, public

KEY = blob(b"ssh-ed25519", b"\x01" * 32)


def test_a_key_is_read_with_its_comment_and_fingerprint() -> None:
    file = signing.public_key(private("ann"))
    key = read_key(str(file))
    assert key == read_key(file.read_text())
    assert key.comment == "ann"
    shown = run_program(["ssh-keygen", "-l", "-f", str(file)], timeout_s=20).stdout.decode()
    assert key.fingerprint == shown.split()[1]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("ecdsa-sha2-nistp256", ("-t", "ecdsa")), ("ssh-rsa", ("-t", "rsa", "-b", "2048"))],
    ids=["ecdsa", "rsa"],
)
def test_other_kinds_are_read_too(tmp_path: Path, kind: str, options: tuple[str, ...]) -> None:
    done = run_program(
        ["ssh-keygen", "-q", *options, "-N", "", "-C", "", "-f", str(tmp_path / "k")], timeout_s=60
    )
    assert done.ok
    assert read_key(str(tmp_path / "k.pub")).kind == kind


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "neither a public key nor a file"),
        ("ssh-ed25519", "not a public key"),
        ("ssh-ed25519 ----", "not a public key"),
        (f"ssh-ed25519 {KEY[:-8]}", "not a public key"),
        (f"ssh-rsa {KEY}", "not a public key"),
        (f"ssh-ed25519 {KEY}\nssh-ed25519 {KEY}", "not a public key"),
        (f"ssh-dss {blob(b'ssh-dss', b'1' * 20)}", "not a supported kind of key"),
        (f"ssh-ed25519-cert-v01@openssh.com {KEY}", "not a supported kind of key"),
        (f"ssh-rsa {blob(b'ssh-rsa', b'3', bytes([255]) * 128)}", "1024 bits"),
        (f"ssh-ed25519 {KEY} {'x' * 9000}", "not a public key"),
        ("/nowhere/at/all.pub", "neither a public key nor a file"),
    ],
    ids=[
        *("empty", "kind-alone", "no-base64", "cut-off", "other-kind", "two-lines", "dsa", "certificate"),
        *("short-rsa", "long", "no-file"),
    ],
)
def test_what_is_no_key_is_refused_in_words(line: str, words: str) -> None:
    with pytest.raises(SignatureError, match=words):
        read_key(line)


def test_private_key_is_not_accepted_as_a_public_key() -> None:
    with pytest.raises(SignatureError, match="private key") as caught:
        read_key(str(private("ann")))
    assert ".pub" in (caught.value.remedy or "")


def test_only_keys_in_hardware_want_to_be_touched() -> None:
    assert not public("ann").in_hardware
    sk = parse_key(f"sk-ssh-ed25519@openssh.com {blob(b'sk-ssh-ed25519@openssh.com', b'1' * 32, b'ssh:')}")
    assert sk.in_hardware
    assert [kind for kind in KINDS if kind.startswith("sk-")] == [*KINDS[-2:]]
