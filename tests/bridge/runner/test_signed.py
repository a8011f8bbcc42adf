"""Where signatures are required, each kind of wrong one is refused with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bridge import signing
from bridge.proc import run_program
from bridge.protocol.manifest import Manifest
from bridge.signing.keyfiles import AllowedSigner, KeyList
from tests.bridge.signing.keyring import private, public
from tests.fixtures.repo import RepoFixture
from tests.fixtures.runner import RunnerFixture

SPACE = signing.REQUEST_NAMESPACE


@pytest.fixture
def runner(repo: RepoFixture) -> RunnerFixture:
    """A machine that takes signed requests only, and lists ann and some whose keys do not count."""
    made = RunnerFixture(repo)
    made.install({"echo": "print('hello')"})
    made.policy("require_signature = true\n")
    now = datetime.now(UTC)
    lists = people(made)
    for name in ("ann", "bob", "robbed"):
        lists.add(name, public(name), valid_before=None, now=now)
    lists.revoke("robbed", None)
    hour, spaces = timedelta(hours=1), (SPACE,)
    for entry in (
        AllowedSigner("former", public("former"), spaces, None, now - hour),
        AllowedSigner("future", public("future"), spaces, now + hour, None),
        AllowedSigner("stopper", public("stopper"), (signing.CANCEL_NAMESPACE,)),
    ):
        with lists.allowed.open("a") as file:
            file.write(entry.text())
    return made


def people(runner: RunnerFixture) -> KeyList:
    uses = (signing.REQUEST_NAMESPACE, signing.CANCEL_NAMESPACE)
    return KeyList(runner.config / "allowed_signers", uses)


def push(runner: RunnerFixture, manifest: Manifest, signature: bytes | None) -> str:
    return runner.ask(signature=signature, **dict(manifest)).nonce


def signed(runner: RunnerFixture, key: Path, *, namespace: str = SPACE, **changes: Any) -> str:
    manifest = runner.manifest(**changes)
    return push(runner, manifest, signing.sign(key, namespace, manifest.to_bytes()))


def altered(runner: RunnerFixture) -> str:
    manifest = runner.manifest()
    return push(runner, manifest, signing.sign(private("ann"), SPACE, manifest.to_bytes() + b"\n"))


def of_another(runner: RunnerFixture) -> str:
    """Signed by ann, for what she asked elsewhere."""
    other, manifest = runner.manifest(), runner.manifest()
    return push(runner, manifest, signing.sign(private("ann"), SPACE, other.to_bytes()))


def expired(runner: RunnerFixture) -> str:
    created = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=2)
    nonce = f"{created:%Y%m%dt%H%M%Sz}" + runner.manifest().nonce[-12:]
    return signed(
        runner,
        private("ann"),
        nonce=nonce,
        result_ref=f"refs/heads/mac-bridge/echo-{nonce}",
        created_at=created,
        expires_at=created + timedelta(hours=1),
    )


def certified(runner: RunnerFixture) -> str:
    """Signed with ann's own key, in a certificate of an authority that is not listed."""
    folder = runner.repo.root / "certificate"
    folder.mkdir()
    for name in ("id", "id.pub"):
        (folder / name).write_bytes(private("ann").with_name("ann" + name[2:]).read_bytes())
        (folder / name).chmod(0o600)
    argv = [
        "ssh-keygen",
        "-q",
        "-s",
        str(private("authority")),
        "-I",
        "ann",
        "-n",
        "ann",
        str(folder / "id.pub"),
    ]
    assert run_program(argv, timeout_s=20).ok
    return signed(runner, folder / "id-cert.pub")


REFUSED = ("refused", "bad_signature")
ASKED: dict[str, tuple[Callable[[RunnerFixture], str], tuple[str, str], str]] = {
    # What is asked → the verdict, and a word by which its message is told from the others.
    "unsigned": (lambda b: push(b, b.manifest(), None), REFUSED, "unsigned"),
    "unknown key": (lambda b: signed(b, private("mallory")), REFUSED, public("mallory").fingerprint),
    "other namespace": (
        lambda b: signed(b, private("ann"), namespace=signing.CANCEL_NAMESPACE),
        REFUSED,
        "namespace",
    ),
    "altered": (altered, REFUSED, "verif"),
    "of another request": (of_another, REFUSED, "verif"),
    "no signature at all": (
        lambda b: push(b, b.manifest(), b"-----BEGIN SSH SIGNATURE-----\nrubbish\n"),
        REFUSED,
        "verif",
    ),
    "certificate": (certified, REFUSED, "certificate"),
    "revoked key": (lambda b: signed(b, private("robbed")), REFUSED, "of robbed"),
    "expired key": (lambda b: signed(b, private("former")), REFUSED, "of former"),
    "key of tomorrow": (lambda b: signed(b, private("future")), REFUSED, "of future"),
    "key for cancelling only": (lambda b: signed(b, private("stopper")), REFUSED, "of stopper"),
    "expired request": (expired, ("refused", "expired"), ""),
    "proper": (lambda b: signed(b, private("ann")), ("passed", "ok"), ""),
}


@pytest.mark.slow
def test_each_wrong_signature_is_refused_and_a_proper_one_passes(runner: RunnerFixture) -> None:
    asked = {what: ask(runner) for what, (ask, _, _) in ASKED.items()}
    daemon = runner.daemon()
    for _ in asked:
        assert daemon.serve(once=True, idle_timeout_s=20) == 1, runner.said
    found = {what: runner.verdict(nonce) for what, nonce in asked.items()}
    assert found == {what: verdict for what, (_, verdict, _) in ASKED.items()}
    for what, (_, _, word) in ASKED.items():
        assert word in runner.answer(asked[what]).result.verdict.message, what


def test_machine_that_cannot_check_signatures_takes_no_request(runner: RunnerFixture) -> None:
    asked = signed(runner, private("ann"))
    daemon = runner.daemon(config=dataclasses.replace(runner.config_of(), key=None))  # as without ssh-keygen
    assert daemon.serve(once=True, idle_timeout_s=20) == 1
    assert runner.verdict(asked) == REFUSED


@pytest.mark.slow
def test_key_that_is_added_or_revoked_counts_at_once(runner: RunnerFixture) -> None:
    """Rotation without a restart: the old key, then both, then the new one alone."""
    daemon, lists = runner.daemon(), people(runner)
    now = datetime.now(UTC)

    def answers(*keys: str) -> list[str]:
        asked = [signed(runner, private(key)) for key in keys]
        for _ in asked:
            assert daemon.serve(once=True, idle_timeout_s=20) == 1, runner.said
        return [runner.verdict(nonce)[1] for nonce in asked]

    assert answers("ann", "ann2") == ["ok", "bad_signature"]
    lists.add("ann", public("ann2"), valid_before=None, now=now)
    assert answers("ann", "ann2") == ["ok", "ok"]
    assert sum("for ann" in line for line in runner.said) == 3, "both keys are hers"
    lists.revoke("ann", public("ann").fingerprint)
    assert answers("ann", "ann2") == ["bad_signature", "ok"]


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("file", ["allowed_signers", "revoked_keys"])
@pytest.mark.parametrize("fault", ["writable", "garbled"])
def test_request_waits_while_a_list_of_keys_is_broken(runner: RunnerFixture, file: str, fault: str) -> None:
    path = runner.config / file
    daemon = runner.daemon()
    if fault == "writable":
        path.chmod(0o666)
    else:
        path.write_text(path.read_text() + "rubbish\n")
    asked = signed(runner, private("ann"))
    assert daemon.serve(once=True, idle_timeout_s=0.5) == 0, "it is not refused"
    assert any(file in line for line in runner.said), runner.said
    path.chmod(0o600)
    path.write_text(path.read_text().replace("rubbish\n", ""))
    assert daemon.serve(once=True, idle_timeout_s=20) == 1, runner.said
    assert runner.verdict(asked) == ("passed", "ok")
