"""Which key signs is decided by what the user said, then by what git and ssh have; nothing ever asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge import settings, signing
from bridge.client.signing_key import RequestSigner, choose
from bridge.errors import SignatureError
from bridge.git.repo import GitRepo
from bridge.proc import run_program
from tests.bridge.signing.keyring import private, public
from tests.fixtures.bus import BusFixture
from tests.fixtures.repo import wait_for

SPACE = signing.REQUEST_NAMESPACE


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, bus: BusFixture) -> Iterator[Path]:
    """An SSH agent of this test's own, without keys."""
    folder = tempfile.mkdtemp(prefix="agent-", dir="/tmp")
    socket = Path(folder) / "s"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
    wait_for(
        lambda: subprocess.run(["ssh-add", "-l"], capture_output=True).returncode < 2,
        what="an answer of the agent",
    )
    yield socket
    process.terminate()
    process.wait()
    shutil.rmtree(folder)


def load(key: Path) -> None:
    subprocess.run(["ssh-add", "-q", str(key)], check=True)


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    """A private key with a passphrase."""
    path = tmp_path / "locked"
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-C", "locked", "-f", str(path)]
    assert run_program(argv, timeout_s=20).ok
    return path


def chosen(bus: BusFixture, **flags: str) -> RequestSigner:
    return choose(settings.load(**flags), GitRepo(bus.repo.clone))


def signs(choice: RequestSigner) -> str:
    """The fingerprint of the key that really signs."""
    signature = choice.sign(SPACE, b"data")
    assert signature is not None
    return signing.signer_fingerprint(b"data", signature, SPACE)


def config(bus: BusFixture, **values: str) -> None:
    for name, value in values.items():
        bus.repo.git("config", name.replace("__", "."), value)


def test_without_any_key_nothing_is_signed(bus: BusFixture) -> None:
    choice = chosen(bus)
    assert choice == RequestSigner(None)
    signer = choice
    assert signer.sign(SPACE, b"data") is None
    assert signer.warnings == []


def test_each_place_gives_way_to_the_one_before_it(
    bus: BusFixture, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flag, environment, config.toml, the key made for this, git, the agent: removed one by one."""
    found = []
    load(private("agent"))
    config(bus, gpg__format="ssh", user__signingkey=str(private("git")))
    folder = settings.config_dir()
    shutil.copytree(private("own").parent, folder)
    (folder / "own").rename(folder / "id_ed25519")
    (folder / "own.pub").rename(folder / "id_ed25519.pub")
    (folder / "config.toml").write_text(f'signing_key = "{private("file")}"\n')
    monkeypatch.setenv("KAKEYA_SIGNING_KEY", str(private("environment")))
    found.append(signs(chosen(bus, signing_key=str(private("flag")))))
    found.append(signs(chosen(bus)))
    monkeypatch.delenv("KAKEYA_SIGNING_KEY")
    found.append(signs(chosen(bus)))
    (folder / "config.toml").unlink()
    found.append(signs(chosen(bus)))
    (folder / "id_ed25519").unlink()
    found.append(signs(chosen(bus)))
    bus.repo.git("config", "--unset", "user.signingkey")
    found.append(signs(chosen(bus)))
    names = ("flag", "environment", "file", "own", "git", "agent")
    assert found == [public(name).fingerprint for name in names]


@pytest.mark.parametrize("written", ["key::{line}", "{line}"], ids=["literal", "bare-literal"])
@pytest.mark.parametrize("where", ["git", "named"])
def test_a_public_key_in_place_of_a_file_signs_through_the_agent(
    bus: BusFixture, agent: Path, written: str, where: str
) -> None:
    load(private("other"))
    load(private("ann"))
    text = written.format(line=public("ann").line)
    if where == "git":
        config(bus, gpg__format="ssh", user__signingkey=text)
        assert signs(chosen(bus)) == public("ann").fingerprint
    else:
        assert signs(chosen(bus, signing_key=text)) == public("ann").fingerprint


def test_the_file_of_a_public_key_signs_through_the_agent(
    bus: BusFixture, agent: Path, tmp_path: Path
) -> None:
    load(private("ann"))
    file = tmp_path / "ann.pub"
    file.write_text(public("ann").line)
    assert signs(chosen(bus, signing_key=str(file))) == public("ann").fingerprint


def test_locked_key_that_was_named_is_an_error_without_a_prompt(bus: BusFixture, locked: Path) -> None:
    with pytest.raises(SignatureError, match=r"cannot sign with .*locked") as caught:
        chosen(bus, signing_key=str(locked)).sign(SPACE, b"data")
    assert "without a prompt" in (caught.value.remedy or "")


def test_a_locked_key_signs_once_the_agent_has_it(
    bus: BusFixture, agent: Path, locked: Path, tmp_path: Path
) -> None:
    ask = tmp_path / "ask"
    ask.write_text("#!/bin/sh\necho secret\n")
    ask.chmod(0o700)
    env = {**os.environ, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}
    subprocess.run(["ssh-add", "-q", str(locked)], check=True, env=env, stdin=subprocess.DEVNULL)
    choice = chosen(bus, signing_key=str(locked))
    assert choice.key is not None
    assert signs(choice) == signing.public_half(choice.key.material).fingerprint


def test_a_program_of_gits_configuration_is_not_run(bus: BusFixture, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    script = tmp_path / "program"
    script.write_text(f"#!/bin/sh\ntouch {canary}\necho key::{public('ann').line}\n")
    script.chmod(0o700)
    config(bus, gpg__format="ssh")
    config(bus, gpg__ssh__defaultKeyCommand=str(script), gpg__ssh__program=str(script))
    choice = chosen(bus)
    assert choice.key is None
    assert len(choice.notes) == 2
    assert all("is not run" in note for note in choice.notes)
    config(bus, user__signingkey=str(private("ann")))
    assert signs(chosen(bus)) == public("ann").fingerprint
    assert not canary.exists()


@pytest.mark.parametrize("form", [None, "openpgp", "x509"])
def test_a_key_that_git_uses_otherwise_is_left_alone(bus: BusFixture, form: str | None) -> None:
    config(bus, user__signingkey="0123456789ABCDEF")
    if form is not None:
        config(bus, gpg__format=form)
    choice = chosen(bus)
    assert choice.key is None
    assert "gpg.format is not ssh" in choice.notes[0]


def test_none_switches_signing_off(bus: BusFixture) -> None:
    config(bus, gpg__format="ssh", user__signingkey=str(private("git")))
    assert chosen(bus).key is not None
    assert chosen(bus, signing_key="none").key is None


def test_of_several_keys_in_the_agent_the_first_signs_and_that_is_said(bus: BusFixture, agent: Path) -> None:
    load(private("first"))
    load(private("second"))
    choice = chosen(bus)
    assert signs(choice) == public("first").fingerprint
    assert any("2 usable keys" in note for note in choice.notes)


def test_an_agent_that_is_gone_is_no_error(bus: BusFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nonexistent/agent")
    assert chosen(bus) == RequestSigner(None)


@pytest.mark.parametrize(
    ("given", "words"),
    [("key::ssh-ed25519 AAAA", "not a public key"), ("/no/such/key", "cannot sign with /no/such/key")],
    ids=["literal", "file"],
)
def test_a_named_key_that_is_none_is_an_error(bus: BusFixture, given: str, words: str) -> None:
    with pytest.raises(SignatureError, match=words):
        chosen(bus, signing_key=given).sign(SPACE, b"data")


def test_without_ssh_keygen_nothing_is_signed_and_that_is_said(
    bus: BusFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.signing.available", lambda: False)
    signer = chosen(bus, signing_key=str(private("ann")))
    assert signer.sign(SPACE, b"data") is None
    assert signer.warnings == ["nothing is signed: ssh-keygen is not installed"]
