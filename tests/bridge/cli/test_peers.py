"""``runner peers`` and ``runner key``: Macs that share a bus come to know each other by command."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge import signing
from bridge.cli.peers import peers
from bridge.cli.runner import key
from bridge.cli.runners import runners
from bridge.runner.config import key_path
from bridge.signing.trust import names_that_count, pinned_keys
from tests.bridge.cli.calls import call


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("config", "state"):
        monkeypatch.setenv(f"KAKEYA_{name.upper()}", str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(command: str) -> list[str]:
    """The arguments behind the group's name in a printed command."""
    head, _, key = command.partition(" --key ")
    return [*head.split()[3 if "peers" in head else 2 :], "--key", key.strip("'")]


def test_the_printed_commands_make_others_believe_this_runner(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        call(key, capsys, "--name", "studio").code
        == call(key, capsys, "--name", "studio", "--renew").code
        == 2
    )
    assert list(folder.iterdir()) == [], "it is made when told so alone"
    shown = call(key, capsys, "--name", "studio", "--make", "--json").json
    assert call(key, capsys, "--name", "studio", "--json").json == shown
    assert call(key, capsys, "--name", "studio", "--make", "--json").json == shown, "it is made once"
    assert call(peers, capsys, *words(shown["macs"])).code == 0
    assert call(runners, capsys, *words(shown["clients"])).code == 0
    trust = folder / "config" / "known_runners"
    assert names_that_count(trust, signing.CLAIM_NAMESPACE) == {shown["fingerprint"]: "studio"}
    [entry] = pinned_keys(folder / "config" / "trusted_runners")
    assert (entry.listed.name, entry.listed.key.fingerprint) == ("studio", shown["fingerprint"])
    assert call(key, capsys, "--name", "no name").code == 6


def test_key_that_cannot_be_renewed_stays(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = call(key, capsys, "--name", "studio", "--make", "--json").json
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nonexistent")
        assert call(key, capsys, "--name", "studio", "--renew").code == 6
    assert call(key, capsys, "--name", "studio", "--json").json == old


def test_renewed_key_replaces_and_revokes_the_old_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = call(key, capsys, "--name", "studio", "--make", "--json").json
    assert call(runners, capsys, *words(old["clients"])).code == 0
    told = call(key, capsys, "--name", "studio", "--renew").out
    assert f"kakeya_mac runners revoke studio --key {old['fingerprint']}" in told
    fresh = call(key, capsys, "--name", "studio", "--json").json
    assert fresh["key"] != old["key"]
    path = key_path(folder / "state", "studio")
    assert path.stat().st_mode & 0o077 == 0
    signature = signing.sign(path, signing.RESULT_NAMESPACE, b"x")
    assert signing.signer_fingerprint(b"x", signature, signing.RESULT_NAMESPACE) == fresh["fingerprint"]
    assert sorted(each.name for each in path.parent.iterdir()) == ["id_ed25519", "id_ed25519.pub"]
    assert call(runners, capsys, *words(fresh["clients"])).code == 0
    assert "has 2 keys" in call(runners, capsys, "revoke", "studio").err
    assert call(runners, capsys, "revoke", "studio", "--key", old["fingerprint"]).code == 0
    states = {
        each.listed.key.fingerprint: each.state for each in pinned_keys(folder / "config" / "trusted_runners")
    }
    assert states == {old["fingerprint"]: "revoked", fresh["fingerprint"]: "counts"}
    again = call(runners, capsys, *words(old["clients"]))
    assert again.code == 2
    assert "was revoked" in again.err
    assert "was revoked" in call(runners, capsys).out
