"""``kakeya_mac key`` shows the key that would sign, and says so only when it really can."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge import settings, signing
from bridge.bus.requests import read_request
from bridge.cli.key import key
from bridge.cli.run import run
from bridge.proc import run_program
from tests.bridge.cli.calls import call
from tests.bridge.signing.keyring import private, public
from tests.fixtures.bus import BusFixture


def test_a_key_is_made_once_and_is_the_one_that_signs(
    here: BusFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    none = call(key, capsys, "--json")
    assert none.code == 2
    assert none.json["remedy"] == "make one: kakeya_mac key --make"
    first, second = call(key, capsys, "--make", "--json"), call(key, capsys, "--make", "--json")
    assert (first.code, second.code) == (0, 0)
    assert "made:" in first.err
    assert "already there:" in second.err
    assert first.json == second.json == call(key, capsys, "--json").json
    path = settings.load().own_key
    assert path.stat().st_mode & 0o777 == 0o600
    assert first.json["key"] in path.with_name("id_ed25519.pub").read_text()
    assert first.json["command"].startswith("kakeya_mac runner signers add ")
    assert first.json["key"] in first.json["command"]


def test_text_names_the_key_its_source_and_the_owners_command(
    here: BusFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAKEYA_REQUESTED_BY", "Ann O'Hara; rm -rf")
    done = call(key, capsys, "--signing-key", str(private("ann")))
    assert done.code == 0
    assert public("ann").fingerprint in done.out
    assert "--signing-key" in done.out
    command = done.out.splitlines()[-1].strip()
    assert command == f"kakeya_mac runner signers add Ann-O-Hara-rm--rf --key '{public('ann').line} ann'"


def test_a_key_that_cannot_sign_is_not_shown_as_one_that_does(
    here: BusFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-C", "", "-f", str(tmp_path / "locked")]
    assert run_program(argv, timeout_s=20).ok
    done = call(key, capsys, "--signing-key", str(tmp_path / "locked"))
    assert done.code == 2
    assert "cannot sign with" in done.err


def test_run_signs_with_gits_key_and_says_which(here: BusFixture, capsys: pytest.CaptureFixture[str]) -> None:
    here.repo.git("config", "gpg.format", "ssh")
    here.repo.git("config", "user.signingkey", str(private("ann")))
    done = call(run, capsys, "--preset", "probe", "--json").json
    assert (done["signed"], done["signed_with"]) == (True, f"{private('ann')} (git's user.signingkey)")
    here.git.fetch(here.remote, [done["ref"]])
    request = read_request(here.git, done["request_commit"])
    assert request.signature is not None
    signer = signing.signer_fingerprint(request.data, request.signature, signing.REQUEST_NAMESPACE)
    assert signer == public("ann").fingerprint
    text = call(run, capsys, "--preset", "probe").out
    assert "signed with" in text
    switched_off = call(run, capsys, "--preset", "probe", "--signing-key", "none", "--json").json
    assert (switched_off["signed"], switched_off["signed_with"]) == (False, None)


def test_run_goes_out_unsigned_with_a_warning_where_gits_key_is_locked(
    here: BusFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-C", "", "-f", str(tmp_path / "locked")]
    assert run_program(argv, timeout_s=20).ok
    here.repo.git("config", "gpg.format", "ssh")
    here.repo.git("config", "user.signingkey", str(tmp_path / "locked"))
    found = call(run, capsys, "--preset", "probe", "--json")
    assert (found.code, found.json["signed"]) == (0, False)
    assert "warning: nothing is signed: the key of git's user.signingkey cannot be used" in found.err
    before = here.repo.remote_refs()
    named = call(run, capsys, "--preset", "probe", "--signing-key", str(tmp_path / "locked"))
    assert named.code == 2
    assert here.repo.remote_refs() == before, "nothing was pushed"
