"""Where signatures are required, one runner answers every kind of wrong one with its reason, and goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.git import Git
from bridge.bus.mirror import Mirror
from bridge.bus.requests import build
from bridge.proc import run_program
from bridge.protocol.manifest import Manifest
from bridge.runner.check import examine
from bridge.signing import listed
from bridge.signing.keyring import Keyring
from bridge.signing.listed import Listed
from tests.bridge.runner.bench import Bench
from tests.bridge.signing.keyring import private, public
from tests.houses import House

SPACE = signing.REQUEST_NAMESPACE


@pytest.fixture
def bench(house: House) -> Bench:
    """A machine that takes signed requests only, and lists ann and some whose keys do not count."""
    made = Bench(house)
    made.install({"echo": "print('hello')"})
    made.policy("require_signature = true\n")
    now = datetime.now(UTC)
    lists = people(made)
    for name in ("ann", "bob", "robbed"):
        lists.add(name, public(name), valid_before=None, now=now)
    lists.revoke("robbed", None)
    hour, spaces = timedelta(hours=1), (SPACE,)
    for entry in (
        Listed("former", public("former"), spaces, None, now - hour),
        Listed("future", public("future"), spaces, now + hour, None),
        Listed("stopper", public("stopper"), (signing.CANCEL_NAMESPACE,)),
    ):
        listed.add(lists.allowed, entry)
    return made


def people(bench: Bench) -> Keyring:
    uses = (signing.REQUEST_NAMESPACE, signing.CANCEL_NAMESPACE)
    return Keyring(bench.config / "allowed_signers", bench.config / "revoked_keys", uses)


def push(bench: Bench, manifest: Manifest, signature: bytes | None) -> str:
    bench.push_commit(manifest, build(Git(bench.house.clone), manifest, signature))
    return manifest.nonce


def signed(bench: Bench, key: Path, *, namespace: str = SPACE, **changes: object) -> str:
    manifest = bench.manifest(**changes)
    return push(bench, manifest, signing.sign(key, namespace, manifest.to_bytes()))


def altered(bench: Bench) -> str:
    manifest = bench.manifest()
    return push(bench, manifest, signing.sign(private("ann"), SPACE, manifest.to_bytes() + b"\n"))


def of_another(bench: Bench) -> str:
    """Signed by ann, for what she asked elsewhere."""
    other, manifest = bench.manifest(), bench.manifest()
    return push(bench, manifest, signing.sign(private("ann"), SPACE, other.to_bytes()))


def expired(bench: Bench) -> str:
    created = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=2)
    nonce = f"{created:%Y%m%dt%H%M%Sz}" + bench.manifest().nonce[-12:]
    return signed(
        bench,
        private("ann"),
        nonce=nonce,
        result_ref=f"refs/heads/mac-bridge/echo-{nonce}",
        created_at=created,
        expires_at=created + timedelta(hours=1),
    )


def certified(bench: Bench) -> str:
    """Signed with ann's own key, dressed as a certificate by an authority that nobody listed."""
    folder = bench.house.root / "certificate"
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
    return signed(bench, folder / "id-cert.pub")


# What is asked → the verdict, and what its message must say.
ASKED: dict[str, tuple[Callable[[Bench], str], tuple[str, str], str]] = {
    "unsigned": (lambda b: push(b, b.manifest(), None), ("refused", "bad_signature"), "is unsigned"),
    "unknown key": (
        lambda b: signed(b, private("mallory")),
        ("refused", "bad_signature"),
        f"the key {public('mallory').fingerprint}, which is not listed here",
    ),
    "other namespace": (
        lambda b: signed(b, private("ann"), namespace=signing.CANCEL_NAMESPACE),
        ("refused", "bad_signature"),
        "namespace does not match",
    ),
    "altered": (altered, ("refused", "bad_signature"), "incorrect signature"),
    "of another request": (of_another, ("refused", "bad_signature"), "incorrect signature"),
    "no signature at all": (
        lambda b: push(b, b.manifest(), b"-----BEGIN SSH SIGNATURE-----\nrubbish\n"),
        ("refused", "bad_signature"),
        "does not verify",
    ),
    "certificate": (certified, ("refused", "bad_signature"), "certificates do not count"),
    "revoked key": (
        lambda b: signed(b, private("robbed")),
        ("refused", "bad_signature"),
        "of robbed, which was revoked",
    ),
    "expired key": (
        lambda b: signed(b, private("former")),
        ("refused", "bad_signature"),
        "of former, which expired at",
    ),
    "key of tomorrow": (
        lambda b: signed(b, private("future")),
        ("refused", "bad_signature"),
        "of future, which counts only from",
    ),
    "key for wishes only": (
        lambda b: signed(b, private("stopper")),
        ("refused", "bad_signature"),
        f"of stopper, which is not listed for {SPACE}",
    ),
    "expired request": (expired, ("refused", "expired"), "the request expired at"),
    "proper": (lambda b: signed(b, private("ann")), ("passed", "ok"), ""),
}


@pytest.mark.slow
def test_each_wrong_signature_is_told_from_the_others(bench: Bench) -> None:
    station = bench.station()
    mirror, now = Mirror(station.folder / "mirror.git", station.remote), datetime.now(UTC)
    asked = {ask(bench): what for what, (ask, _, _) in ASKED.items()}
    for pending in mirror.refresh():
        checked = examine(mirror.git, pending, station, now=now, answered=())
        _, (_, reason), words = ASKED[what := asked.pop(pending.nonce)]
        if checked.refusal is None:
            assert (reason, checked.requester) == ("ok", "ann"), what
        else:
            assert (checked.refusal.reason, what) == (reason, what)
            assert words in checked.refusal.message
    assert not asked


def test_a_machine_that_cannot_check_signatures_takes_none_for_checked(bench: Bench) -> None:
    station = dataclasses.replace(bench.station(), key=None)  # as without ssh-keygen
    mirror = Mirror(station.folder / "mirror.git", station.remote)
    signed(bench, private("ann"))
    [pending] = mirror.refresh()
    checked = examine(mirror.git, pending, station, now=datetime.now(UTC), answered=())
    assert checked.refusal is not None
    assert "ssh-keygen is not installed" in checked.refusal.message


@pytest.mark.slow
def test_each_wrong_signature_is_refused_with_its_reason_and_a_proper_one_passes(bench: Bench) -> None:
    asked = {what: ask(bench) for what, (ask, _, _) in ASKED.items()}
    runner = bench.runner()
    for _ in asked:
        assert runner.serve(once=True, idle_timeout_s=20) == 1, bench.said
    found = {what: bench.verdict(nonce) for what, nonce in asked.items()}
    assert found == {what: verdict for what, (_, verdict, _) in ASKED.items()}
    for what, (_, _, words) in ASKED.items():
        assert words in (bench.answer(asked[what]).result.verdict.message or ""), what


@pytest.mark.slow
def test_a_running_runner_heeds_a_key_that_is_added_changed_or_revoked(bench: Bench) -> None:
    """Rotation without a restart: the old key, then both, then the new one alone."""
    runner, lists = bench.runner(), people(bench)
    now = datetime.now(UTC)

    def answers(*keys: str) -> list[str]:
        asked = [signed(bench, private(key)) for key in keys]
        for _ in asked:
            assert runner.serve(once=True, idle_timeout_s=20) == 1, bench.said
        return [bench.verdict(nonce)[1] for nonce in asked]

    assert answers("ann", "ann2") == ["ok", "bad_signature"]
    lists.add("ann", public("ann2"), valid_before=None, now=now)
    assert answers("ann", "ann2") == ["ok", "ok"]
    assert sum("for ann" in line for line in bench.said) == 3, "both keys are hers"
    lists.revoke("ann", public("ann").fingerprint)
    assert answers("ann", "ann2") == ["bad_signature", "ok"]


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("file", ["allowed_signers", "revoked_keys"])
@pytest.mark.parametrize("fault", ["writable", "garbled"])
def test_where_the_lists_cannot_be_believed_nobody_is_let_in(bench: Bench, file: str, fault: str) -> None:
    path = bench.config / file
    runner = bench.runner()
    if fault == "writable":
        path.chmod(0o666)
    else:
        path.write_text(path.read_text() + "rubbish\n")
    asked = signed(bench, private("ann"))
    assert runner.serve(once=True, idle_timeout_s=0.5) == 0, "a pause, no refusal: the request can wait"
    assert any(file in line for line in bench.said), bench.said
    path.chmod(0o600)
    path.write_text(path.read_text().replace("rubbish\n", ""))
    assert runner.serve(once=True, idle_timeout_s=20) == 1, bench.said
    assert bench.verdict(asked) == ("passed", "ok")
