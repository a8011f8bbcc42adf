"""A result is believed only when every part of it fits the request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.requests import Submitted, resolve_handle
from bridge.bus.results import MAX_RESULT_FILES, NO_RUNNER_ID, believe, fetch, pins_keys
from bridge.errors import KeyListError, MachineError, ResultError, UnknownHandle
from bridge.protocol import refs
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT, RunnerFacts, Status
from bridge.signing import trust
from bridge.signing.trust import TrustLevel
from tests.bridge.bus.reading import NO_TRUSTED_KEYS, by_hand, read, trusting
from tests.bridge.bus.refusals import BAD_MANIFESTS, refusal
from tests.fixtures.bus import BusFixture
from tests.fixtures.repo import allowed_line
from tests.objects import FOLDER, PLAIN, Objects


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("preset", ["tests", "no-such-preset", None])
def test_result_of_another_preset_is_no_answer(bus: BusFixture, preset: str | None):
    submitted = bus.submit()
    bus.answer(submitted, result=bus.result(bus.expected(submitted), preset=preset))
    with pytest.raises(ResultError, match="preset"):
        read(bus, submitted, known=False)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("inbox", ["deleted", "still there"])
@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_refusal_of_what_is_no_request_can_be_read(bus: BusFixture, case: str, inbox: str):
    nonce = bus.manifest().nonce
    commit = refusal(bus, nonce, BAD_MANIFESTS[case])
    if inbox == "still there":
        bus.point(refs.INBOX + nonce, commit)
    fetched = fetch(bus.git, bus.remote, resolve_handle(bus.git, bus.remote, nonce))
    assert fetched is not None
    believed = believe(fetched, trusted=NO_TRUSTED_KEYS)
    assert believed.ref == refs.RESULTS + nonce
    assert believed.result.request_commit == commit
    assert believed.result.verdict.status is Status.REFUSED


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("case", ["passed", "another commit", "a request is there"])
def test_parentless_result_must_answer_what_its_branch_holds(bus: BusFixture, case: str):
    """Anyone can push a parentless result; without a trusted key it must fit the branch it is for."""
    submitted, nonce = None, bus.manifest().nonce
    if case == "passed":
        changes: dict[str, object] = {"verdict": {"status": "passed", "reason": "ok"}}
    elif case == "another commit":
        changes = {"request_commit": "e" * 40}
    else:
        changes = {}
    refusal(bus, nonce, {"README.md": b"changed"}, **changes)
    if case == "a request is there":
        submitted = bus.submit()
        bus.point(refs.request_ref("probe", nonce, None), submitted.commit)
    fetched = fetch(bus.git, bus.remote, resolve_handle(bus.git, bus.remote, nonce))
    assert fetched is not None
    with pytest.raises(ResultError, match="answers is not on the remote"):
        believe(fetched, trusted=NO_TRUSTED_KEYS)


def test_result_of_a_deleted_branch_is_shown_as_such(bus: BusFixture):
    submitted = bus.submit()
    bus.repo.git("update-ref", "-d", submitted.ref, cwd=bus.repo.remote)
    bus.answer(submitted)
    known, unknown = read(bus, submitted), read(bus, submitted, known=False)
    assert (known.request_gone, unknown.request_gone) == (False, True)
    assert "gone from the remote" in unknown.sentence
    assert "anyone with push rights" in unknown.sentence
    assert known.sentence == "unsigned: anyone with push rights could have written this"


def withdrawn(bus: BusFixture, submitted: Submitted, status: str = "cancelled", **changes: object) -> bytes:
    """A result as a client or a workflow's `publish` writes it."""
    reasons = {"cancelled": "requested", "lost": "run_lost", "rejected": "tampered", "failed": "timeout"}
    verdict = {"status": status, "reason": reasons.get(status, "policy")}
    author = RunnerFacts(name="client", id=NO_RUNNER_ID, version="0.1.0")
    return bus.result(bus.expected(submitted), {}, verdict=verdict, **{"runner": author, **changes})


@pytest.mark.parametrize("status", ["cancelled", "lost", "failed", "rejected"])
def test_unsigned_result_of_no_runner_needs_no_key(bus: BusFixture, tmp_path: Path, status: str):
    submitted = bus.submit()
    trusted = trusting(tmp_path / "trusted", signing.ensure_key(tmp_path / "key", "runner"))
    bus.answer(submitted, result=withdrawn(bus, submitted, status), files={})
    believed = read(bus, submitted, trusted)
    assert believed.result.verdict.status == status
    assert believed.signature is TrustLevel.UNSIGNED
    assert "anyone with push rights" in believed.sentence


@pytest.mark.parametrize(
    ("status", "runner"), [("passed", NO_RUNNER_ID), ("failed", "1" * 16), ("cancelled", "1" * 16)]
)
def test_any_other_result_needs_a_trusted_key(bus: BusFixture, tmp_path: Path, status: str, runner: str):
    submitted = bus.submit()
    trusted = trusting(tmp_path / "trusted", signing.ensure_key(tmp_path / "key", "runner"))
    author = RunnerFacts(name="mac", id=runner, version="0.1.0")
    bus.answer(submitted, result=withdrawn(bus, submitted, status, runner=author), files={})
    with pytest.raises(ResultError, match="no signature but those"):
        read(bus, submitted, trusted)


@pytest.mark.parametrize("how", ["a log", "a command", "a stranger's key", "a broken signature"])
def test_a_cancelled_result_that_claims_more_needs_a_trusted_key(bus: BusFixture, tmp_path: Path, how: str):
    submitted = bus.submit()
    trusted = trusting(tmp_path / "trusted", signing.ensure_key(tmp_path / "key", "runner"))
    command = {"argv": ("true",), "exit_code": 0, "seconds": 1.0, "log": "log.txt"}
    changes = {"commands": (command,)} if how == "a command" else {}
    data, files, signature = withdrawn(bus, submitted, **changes), dict[str, bytes](), None
    if how == "a log":
        verdict = {"status": "cancelled", "reason": "requested"}
        files = {"log.txt": b"up"}
        data = bus.result(bus.expected(submitted), files, verdict=verdict)
    elif how == "a stranger's key":
        stranger = signing.ensure_key(tmp_path / "stranger", "runner")
        signature = signing.sign(stranger, signing.RESULT_NAMESPACE, data)
    elif how == "a broken signature":
        signature = b"nonsense"
    bus.answer(submitted, result=data, signature=signature, files=files)
    with pytest.raises(ResultError):
        read(bus, submitted, trusted)


def test_withdrawal_of_a_moved_branch_is_believed(bus: BusFixture, tmp_path: Path):
    submitted = bus.submit()
    bus.point(submitted.ref, bus.repo.head())
    trusted = trusting(tmp_path / "trusted", signing.ensure_key(tmp_path / "key", "runner"))
    bus.answer(submitted, result=withdrawn(bus, submitted), files={})
    believed = read(bus, submitted, trusted, known=False)
    assert (believed.ref, believed.request_gone) == (refs.RESULTS + submitted.nonce, True)


def test_folder_of_too_many_files_is_not_read(bus: BusFixture):
    submitted = bus.submit()
    objects = Objects(bus.repo.remote)
    blob = objects.blob(b"x")
    tree = objects.tree((PLAIN, f"{number}.txt", blob) for number in range(MAX_RESULT_FILES + 1))
    for name in (submitted.nonce, "results", ".mac-bridge"):
        tree = objects.tree([(FOLDER, name, tree)])
    bus.point(submitted.ref, objects.commit(tree, [submitted.commit]))
    with pytest.raises(
        ResultError,
        match=rf"holds {MAX_RESULT_FILES + 1} files for .*; a result has at most {MAX_RESULT_FILES}",
    ):
        read(bus, submitted)


def edited(data: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    document = json.loads(data)
    change(document)
    return json.dumps(document).encode()


def test_forged_answer_that_fits_is_shown_as_unsigned(bus: BusFixture):
    submitted = bus.submit()
    by_hand(bus, submitted, {}, bus.result(bus.expected(submitted)))
    assert read(bus, submitted).signature is TrustLevel.UNSIGNED


@pytest.mark.sampled(15, 1)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("what", ["the request", "a stranger's commit", "a forged answer"])
@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_another_branch_of_its_nonce_hides_no_answer(bus: BusFixture, name: str, what: str, known: bool):
    submitted = bus.submit()
    shade = f"{refs.BRANCHES}{name}-{submitted.nonce}"
    if what == "a forged answer":
        by_hand(bus, submitted, {}, bus.result(bus.expected(submitted)).replace(b"testmac", b"mallory"))
        bus.point(shade, resolve_handle(bus.git, bus.remote, submitted.nonce).branches[0].commit)
        bus.point(submitted.ref, submitted.commit)
    else:
        commit = submitted.commit if what == "the request" else bus.manifest().workload_sha
        bus.point(shade, commit)
    state = resolve_handle(bus.git, bus.remote, submitted.nonce)
    asked = bus.expected(submitted) if known else None
    if what != "a forged answer":
        assert fetch(bus.git, bus.remote, state, expected=asked) is None, "it waits"
    bus.answer(submitted)
    found = read(bus, submitted, known=known)
    assert found.ref == submitted.ref
    assert found.result.runner.name == "testmac"


FORGERIES: dict[str, tuple[Callable[[dict[str, object]], None], dict[str, bytes | None], str]] = {
    "another nonce": (lambda d: d.update(nonce="20200101t000000z000000000000"), {}, "copied"),
    "another request": (lambda d: d.update(request_commit="e" * 40), {}, "request commit"),
    "another workload": (lambda d: d.update(workload_sha="e" * 40), {}, "workload"),
    "no workload": (lambda d: d.update(workload_sha=None), {}, "workload"),
    "a file unlisted": (lambda d: d.update(files=[]), {}, "lists"),
    "unknown field": (lambda d: d.update(extra=1), {}, "extra"),
    "outside the folder": (lambda d: None, {"README.md": b"changed"}, "outside"),
}


@pytest.mark.sampled(8, 1)
@pytest.mark.parametrize("case", FORGERIES)
def test_forged_answer_that_does_not_fit_is_rejected(bus: BusFixture, case: str):
    change, files, word = FORGERIES[case]
    submitted = bus.submit()
    by_hand(bus, submitted, files, edited(bus.result(bus.expected(submitted)), change))
    with pytest.raises(ResultError, match=word):
        read(bus, submitted)


def test_altered_file_and_a_missing_trailer_are_rejected(bus: BusFixture):
    submitted = bus.submit()
    data = bus.result(bus.expected(submitted))
    folder = f"{RESULT_ROOT}/{submitted.nonce}"
    by_hand(bus, submitted, {f"{folder}/report.json": b"{}"}, data)
    with pytest.raises(ResultError, match=r"EVIDENCE_DIGEST: .* altered"):
        read(bus, submitted)
    by_hand(bus, submitted, {f"{folder}/{RESULT_NAME}": data + b" "}, data)
    with pytest.raises(ResultError, match="commit message"):
        read(bus, submitted)


def test_handle_is_a_nonce_a_branch_or_a_unique_prefix(bus: BusFixture):
    first = bus.submit(nonce="20260301t120000zaaaaaaaaaaaa")
    second = bus.submit(nonce="20260301t120000zbbbbbbbbbbbb")
    for handle in (first.nonce, first.ref, first.ref.removeprefix("refs/heads/"), first.nonce[:17]):
        assert resolve_handle(bus.git, bus.remote, handle).nonce == first.nonce
    assert resolve_handle(bus.git, bus.remote, second.nonce).ahead == 1
    with pytest.raises(UnknownHandle, match="2 requests"):
        resolve_handle(bus.git, bus.remote, "20260301t12")
    with pytest.raises(UnknownHandle):
        resolve_handle(bus.git, bus.remote, "")


# Signatures ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A runner's key, the one it has later, and a stranger's."""
    folder = tmp_path_factory.mktemp("keys")
    return {name: signing.ensure_key(folder / name, "runner") for name in ("runner", "new", "stranger")}


def signed_answer(bus: BusFixture, make: Callable[[bytes], bytes | None]) -> Submitted:
    submitted = bus.submit()
    data = bus.result(bus.expected(submitted))
    bus.answer(submitted, result=data, signature=make(data))
    return submitted


def by(key: Path, namespace: str = signing.RESULT_NAMESPACE, more: bytes = b"") -> Callable[[bytes], bytes]:
    return lambda data: signing.sign(key, namespace, data + more)


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("signed", ["by the runner", "by a stranger", "not at all"])
def test_client_that_trusts_a_runner_believes_its_results_alone(
    bus: BusFixture, tmp_path: Path, keys: dict[str, Path], signed: str
):
    trusted = trusting(tmp_path / "trusted", keys["runner"])
    key = {"by the runner": keys["runner"], "by a stranger": keys["stranger"]}.get(signed)
    submitted = signed_answer(bus, by(key) if key else lambda _: None)
    untrusted = read(bus, submitted)
    assert untrusted.signature is (TrustLevel.UNTRUSTED_KEY if key else TrustLevel.UNSIGNED)
    if signed == "by the runner":
        believed = read(bus, submitted, trusted)
        assert (believed.signature, believed.signer) == (TrustLevel.TRUSTED, "testmac")
        by_hand(bus, submitted, {}, bus.result(bus.expected(submitted)))  # without its signature
    with pytest.raises(ResultError, match=r"no signature|SHA256:\S+, which is not listed") as refused:
        read(bus, submitted, trusted)
    assert "kakeya_mac runners trust" in (refused.value.remedy or "")
    shown = read(bus, submitted, trusted, allow_unsigned=True).signature
    assert shown is (TrustLevel.UNTRUSTED_KEY if signed == "by a stranger" else TrustLevel.UNSIGNED)


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("what", ["another namespace", "other bytes", "rubbish"])
@pytest.mark.parametrize("allow_unsigned", [True, False])
def test_signature_that_does_not_verify_is_worse_than_none(
    bus: BusFixture, keys: dict[str, Path], what: str, allow_unsigned: bool
):
    rubbish = b"-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n"
    make: dict[str, Callable[[bytes], bytes | None]] = {
        "another namespace": by(keys["runner"], signing.REQUEST_NAMESPACE),
        "other bytes": by(keys["runner"], more=b" "),
        "rubbish": lambda _: rubbish,
    }
    with pytest.raises(ResultError, match=r"result\.json\.sig"):
        read(bus, signed_answer(bus, make[what]), allow_unsigned=allow_unsigned)


def test_signature_that_cannot_be_checked_is_not_believed(
    bus: BusFixture, tmp_path: Path, keys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    submitted = signed_answer(bus, by(keys["runner"]))
    monkeypatch.setattr("bridge.signing.ssh.available", lambda: False)
    with pytest.raises(ResultError, match="ssh-keygen"):
        read(bus, submitted, trusting(tmp_path / "trusted", keys["runner"]))
    assert read(bus, submitted).signature is TrustLevel.UNCHECKED


@pytest.mark.parametrize(
    ("text", "pins"), [("", False), ("# none yet\n\n", False), ("half a line\n", True), ("\xff\n", True)]
)
def test_list_with_any_line_trusts_a_key(tmp_path: Path, text: str, pins: bool):
    (tmp_path / "trusted").write_bytes(text.encode("latin-1"))
    assert pins_keys(tmp_path / "trusted") is pins
    assert not pins_keys(tmp_path / "absent")
    with pytest.raises(MachineError, match="cannot read"):
        pins_keys(tmp_path)


def test_keys_of_a_runner_count_until_they_are_revoked_or_expired(
    bus: BusFixture, tmp_path: Path, keys: dict[str, Path]
):
    submitted, trusted = signed_answer(bus, by(keys["runner"])), tmp_path / "trusted_runners"
    old, new = (signing.public_key(keys[name]) for name in ("runner", "new"))
    for key in (new, old):
        trust.pin(trusted, "studio", str(key))
    believed = read(bus, submitted, trusted)
    assert (believed.signature, believed.signer) == (TrustLevel.TRUSTED, "studio")
    [gone] = trust.runner_keys(trusted).revoke("studio", str(old))
    with pytest.raises(ResultError, match="of studio, which was revoked") as refused:
        read(bus, submitted, trusted)
    assert (gone.fingerprint in refused.value.message, refused.value.exit_code) == (True, 3)
    shown = read(bus, submitted, trusted, allow_unsigned=True)
    assert shown.signature is TrustLevel.REVOKED
    assert "worthless" in shown.sentence
    trusted.with_name("revoked_keys").unlink()
    line = allowed_line(old, "studio", signing.RESULT_NAMESPACE)
    trusted.write_text(line.replace(" ssh-", ',valid-before="20260101Z" ssh-'))
    with pytest.raises(ResultError, match="of studio, which expired at 2026-01-01"):
        read(bus, submitted, trusted)
    trusted.chmod(0o666)
    with pytest.raises(KeyListError, match="can be written by others"):
        read(bus, submitted, trusted)
