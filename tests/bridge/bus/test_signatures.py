"""A result's signature is what tells who wrote it; a client that trusts a key believes no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.requests import Submitted
from bridge.bus.results import Standing, pins_keys
from bridge.client import trust
from bridge.errors import KeyListError, MachineError, ResultError
from tests.bridge.bus.reading import by_hand, read, trusting
from tests.worlds import World


def test_signatures_are_trusted_untrusted_or_absent(world: World, tmp_path: Path):
    key = signing.ensure_key(tmp_path / "key", "runner")
    submitted = world.submit()
    data = world.result(world.asked(submitted))
    world.answer(submitted, result=data, signature=signing.sign(key, signing.RESULT_NAMESPACE, data))
    assert read(world, submitted).signature is Standing.UNTRUSTED_KEY
    allowed = tmp_path / "trusted"
    allowed.write_text(signing.allowed_line(signing.public_key(key), "testmac", signing.RESULT_NAMESPACE))
    believed = read(world, submitted, allowed)
    assert (believed.signature, believed.signer) == (Standing.TRUSTED, "testmac")


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("what", ["request namespace", "other bytes", "rubbish"])
def test_a_signature_that_does_not_verify_is_worse_than_none(world: World, tmp_path: Path, what: str):
    key = signing.ensure_key(tmp_path / "key", "runner")
    submitted = world.submit()
    data = world.result(world.asked(submitted))
    signature = {
        "request namespace": signing.sign(key, signing.REQUEST_NAMESPACE, data),
        "other bytes": signing.sign(key, signing.RESULT_NAMESPACE, data + b" "),
        "rubbish": b"-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n",
    }[what]
    world.answer(submitted, result=data, signature=signature)
    with pytest.raises(ResultError, match=r"result\.json\.sig"):
        read(world, submitted)


@pytest.mark.parametrize("signed", ["not at all", "by an unknown key"])
def test_a_client_that_trusts_a_runner_believes_no_other_result(world: World, tmp_path: Path, signed: str):
    trusted = trusting(tmp_path / "trusted", signing.ensure_key(tmp_path / "key", "runner"))
    submitted = world.submit()
    data = world.result(world.asked(submitted))
    stranger = signing.ensure_key(tmp_path / "stranger", "runner")
    signature = signing.sign(stranger, signing.RESULT_NAMESPACE, data) if "unknown" in signed else None
    world.answer(submitted, result=data, signature=signature)
    with pytest.raises(ResultError, match=r"no signature|SHA256:\S+, which is not listed") as refused:
        read(world, submitted, trusted)
    assert "kakeya_mac runners trust" in (refused.value.remedy or "")
    shown = read(world, submitted, trusted, allow_unsigned=True)
    assert shown.signature is (Standing.UNTRUSTED_KEY if signature else Standing.UNSIGNED)


def test_a_genuine_result_without_its_signature_is_not_believed(world: World, tmp_path: Path):
    key = signing.ensure_key(tmp_path / "key", "runner")
    trusted = trusting(tmp_path / "trusted", key)
    submitted = world.submit()
    data = world.result(world.asked(submitted))
    world.answer(submitted, result=data, signature=signing.sign(key, signing.RESULT_NAMESPACE, data))
    assert read(world, submitted, trusted).signature is Standing.TRUSTED
    by_hand(world, submitted, {}, data)
    with pytest.raises(ResultError, match="no signature"):
        read(world, submitted, trusted)


def test_a_signature_that_cannot_be_checked_is_not_one_that_was(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    key = signing.ensure_key(tmp_path / "key", "runner")
    trusted = trusting(tmp_path / "trusted", key)
    submitted = world.submit()
    data = world.result(world.asked(submitted))
    world.answer(submitted, result=data, signature=signing.sign(key, signing.RESULT_NAMESPACE, data))
    monkeypatch.setattr(signing, "available", lambda: False)
    with pytest.raises(ResultError, match="ssh-keygen"):
        read(world, submitted, trusted)
    assert read(world, submitted).signature is Standing.UNCHECKED


def test_a_signature_that_does_not_verify_is_refused_even_where_unsigned_results_are_shown(
    world: World, tmp_path: Path
):
    key = signing.ensure_key(tmp_path / "key", "runner")
    submitted = world.submit()
    data = world.result(world.asked(submitted))
    signature = signing.sign(key, signing.RESULT_NAMESPACE, data + b" ")
    world.answer(submitted, result=data, signature=signature)
    with pytest.raises(ResultError, match=r"result\.json\.sig"):
        read(world, submitted, trusting(tmp_path / "trusted", key), allow_unsigned=True)


@pytest.mark.parametrize(
    ("text", "pins"), [("", False), ("# none yet\n\n", False), ("half a line\n", True), ("\xff\n", True)]
)
def test_a_list_with_any_line_in_it_trusts_somebody(tmp_path: Path, text: str, pins: bool):
    (tmp_path / "trusted").write_bytes(text.encode("latin-1"))
    assert pins_keys(tmp_path / "trusted") is pins
    assert not pins_keys(tmp_path / "absent")
    with pytest.raises(MachineError, match="cannot read"):
        pins_keys(tmp_path)


@pytest.fixture
def answered(world: World, tmp_path: Path) -> tuple[Submitted, Path, Path]:
    """A request answered with an old key, the public halves of that one and of a new one."""
    keys = [signing.ensure_key(tmp_path / name, "runner") for name in ("old", "new")]
    submitted = world.submit()
    data = world.result(world.asked(submitted))
    world.answer(submitted, result=data, signature=signing.sign(keys[0], signing.RESULT_NAMESPACE, data))
    return submitted, signing.public_key(keys[0]), signing.public_key(keys[1])


def test_a_runner_may_have_several_keys(world: World, tmp_path: Path, answered: tuple[Submitted, Path, Path]):
    submitted, old, new = answered
    trusted = tmp_path / "trusted_runners"
    for key in (new, old):
        trust.add(trusted, "studio", str(key))
    believed = read(world, submitted, trusted)
    assert (believed.signature, believed.signer) == (Standing.TRUSTED, "studio")


def test_what_a_revoked_key_signed_is_refused_in_its_own_words(
    world: World, tmp_path: Path, answered: tuple[Submitted, Path, Path]
):
    submitted, old, new = answered
    trusted = tmp_path / "trusted_runners"
    trust.add(trusted, "studio", str(old))
    trust.add(trusted, "studio", str(new))
    [gone] = trust.ring(trusted).revoke("studio", str(old))
    with pytest.raises(ResultError, match="of studio, which was revoked") as refused:
        read(world, submitted, trusted)
    assert gone.fingerprint in refused.value.message
    assert refused.value.exit_code == 3
    shown = read(world, submitted, trusted, allow_unsigned=True)
    assert shown.signature is Standing.REVOKED
    assert "worthless" in shown.sentence
    assert "revoked" in shown.sentence


def test_a_key_whose_time_is_over_signs_no_result(
    world: World, tmp_path: Path, answered: tuple[Submitted, Path, Path]
):
    submitted, old, _ = answered
    trusted = tmp_path / "trusted_runners"
    line = signing.allowed_line(old, "studio", signing.RESULT_NAMESPACE)
    trusted.write_text(line.replace(" ssh-", ',valid-before="20260101Z" ssh-'))
    with pytest.raises(ResultError, match="of studio, which expired at 2026-01-01"):
        read(world, submitted, trusted)
    trusted.chmod(0o666)
    with pytest.raises(KeyListError, match="can be written by others"):
        read(world, submitted, trusted)
