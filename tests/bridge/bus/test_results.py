"""A result is believed only when every part of it fits the request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.requests import Submitted, resolve_handle
from bridge.bus.results import believe, fetch, pins_keys
from bridge.errors import KeyListError, MachineError, ResultError, UnknownHandle
from bridge.protocol import refs
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT, Status
from bridge.signing import trust
from bridge.signing.trust import TrustLevel
from tests.bridge.bus.reading import NOBODY, by_hand, read, trusting
from tests.bridge.bus.refusals import BAD_MANIFESTS, refusal
from tests.houses import allowed_line
from tests.objects import FOLDER, PLAIN, Objects
from tests.worlds import World


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("preset", ["tests", "no-such-preset", None])
def test_result_of_another_preset_is_no_answer(world: World, preset: str | None):
    submitted = world.submit()
    world.answer(submitted, result=world.result(world.expected(submitted), preset=preset))
    with pytest.raises(ResultError, match="preset"):
        read(world, submitted, known=False)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("inbox", ["deleted", "still there"])
@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_refusal_of_what_is_no_request_can_be_read(world: World, case: str, inbox: str):
    nonce = world.manifest().nonce
    commit = refusal(world, nonce, BAD_MANIFESTS[case])
    if inbox == "still there":
        world.point(refs.INBOX + nonce, commit)
    fetched = fetch(world.git, world.remote, resolve_handle(world.git, world.remote, nonce))
    assert fetched is not None
    believed = believe(fetched, trusted=NOBODY)
    assert believed.ref == refs.RESULTS + nonce
    assert believed.result.request_commit == commit
    assert believed.result.verdict.status is Status.REFUSED


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("case", ["passed", "another commit", "a request stands there"])
def test_parentless_result_must_answer_what_its_branch_holds(world: World, case: str):
    """Anyone can push a parentless result; without a trusted key it must fit the branch it is for."""
    submitted, nonce = None, world.manifest().nonce
    if case == "passed":
        changes: dict[str, object] = {"verdict": {"status": "passed", "reason": "ok"}}
    elif case == "another commit":
        changes = {"request_commit": "e" * 40}
    else:
        changes = {}
    refusal(world, nonce, {"README.md": b"changed"}, **changes)
    if case == "a request stands there":
        submitted = world.submit()
        world.point(refs.request_ref("probe", nonce, None), submitted.commit)
    fetched = fetch(world.git, world.remote, resolve_handle(world.git, world.remote, nonce))
    assert fetched is not None
    with pytest.raises(ResultError, match="no longer on the remote"):
        believe(fetched, trusted=NOBODY)


def test_result_of_a_deleted_branch_is_shown_as_such(world: World):
    submitted = world.submit()
    world.house.git("update-ref", "-d", submitted.ref, cwd=world.house.remote)
    world.answer(submitted)
    known, unknown = read(world, submitted), read(world, submitted, known=False)
    assert (known.request_gone, unknown.request_gone) == (False, True)
    assert "gone from the remote" in unknown.sentence
    assert "anyone with push rights" in unknown.sentence
    assert known.sentence == "unsigned: anyone with push rights could have written this"


def test_folder_of_too_many_files_is_not_read(world: World):
    submitted = world.submit()
    objects = Objects(world.house.remote)
    blob = objects.blob(b"x")
    tree = objects.tree((PLAIN, f"{number}.txt", blob) for number in range(1003))
    for name in (submitted.nonce, "results", ".mac-bridge"):
        tree = objects.tree([(FOLDER, name, tree)])
    world.point(submitted.ref, objects.commit(tree, [submitted.commit]))
    with pytest.raises(ResultError, match=r"holds 1003 files for .*; a result has at most 1002"):
        read(world, submitted)


def edited(data: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    document = json.loads(data)
    change(document)
    return json.dumps(document).encode()


def test_forged_answer_that_fits_is_shown_as_unsigned(world: World):
    submitted = world.submit()
    by_hand(world, submitted, {}, world.result(world.expected(submitted)))
    assert read(world, submitted).signature is TrustLevel.UNSIGNED


@pytest.mark.sampled(15, 1)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("what", ["the request", "a stranger's commit", "a forged answer"])
@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_another_branch_of_its_nonce_hides_no_answer(world: World, name: str, what: str, known: bool):
    submitted = world.submit()
    shade = f"{refs.BRANCHES}{name}-{submitted.nonce}"
    if what == "a forged answer":
        by_hand(world, submitted, {}, world.result(world.expected(submitted)).replace(b"testmac", b"mallory"))
        world.point(shade, resolve_handle(world.git, world.remote, submitted.nonce).branches[0].commit)
        world.point(submitted.ref, submitted.commit)
    else:
        commit = submitted.commit if what == "the request" else world.manifest().workload_sha
        world.point(shade, commit)
    state = resolve_handle(world.git, world.remote, submitted.nonce)
    asked = world.expected(submitted) if known else None
    if what != "a forged answer":
        assert fetch(world.git, world.remote, state, expected=asked) is None, "it waits"
    world.answer(submitted)
    found = read(world, submitted, known=known)
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
def test_forged_answer_that_does_not_fit_is_rejected(world: World, case: str):
    change, files, word = FORGERIES[case]
    submitted = world.submit()
    by_hand(world, submitted, files, edited(world.result(world.expected(submitted)), change))
    with pytest.raises(ResultError, match=word):
        read(world, submitted)


def test_altered_file_and_a_missing_trailer_are_rejected(world: World):
    submitted = world.submit()
    data = world.result(world.expected(submitted))
    folder = f"{RESULT_ROOT}/{submitted.nonce}"
    by_hand(world, submitted, {f"{folder}/report.json": b"{}"}, data)
    with pytest.raises(ResultError, match=r"EVIDENCE_DIGEST: .* altered"):
        read(world, submitted)
    by_hand(world, submitted, {f"{folder}/{RESULT_NAME}": data + b" "}, data)
    with pytest.raises(ResultError, match="commit message"):
        read(world, submitted)


def test_handle_is_a_nonce_a_branch_or_a_unique_prefix(world: World):
    first = world.submit(nonce="20260301t120000zaaaaaaaaaaaa")
    second = world.submit(nonce="20260301t120000zbbbbbbbbbbbb")
    for handle in (first.nonce, first.ref, first.ref.removeprefix("refs/heads/"), first.nonce[:17]):
        assert resolve_handle(world.git, world.remote, handle).nonce == first.nonce
    assert resolve_handle(world.git, world.remote, second.nonce).ahead == 1
    with pytest.raises(UnknownHandle, match="2 requests"):
        resolve_handle(world.git, world.remote, "20260301t12")
    with pytest.raises(UnknownHandle):
        resolve_handle(world.git, world.remote, "")


# Signatures ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A runner's key, the one it has later, and a stranger's."""
    folder = tmp_path_factory.mktemp("keys")
    return {name: signing.ensure_key(folder / name, "runner") for name in ("runner", "new", "stranger")}


def signed_answer(world: World, make: Callable[[bytes], bytes | None]) -> Submitted:
    submitted = world.submit()
    data = world.result(world.expected(submitted))
    world.answer(submitted, result=data, signature=make(data))
    return submitted


def by(key: Path, namespace: str = signing.RESULT_NAMESPACE, more: bytes = b"") -> Callable[[bytes], bytes]:
    return lambda data: signing.sign(key, namespace, data + more)


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("signed", ["by the runner", "by a stranger", "not at all"])
def test_client_that_trusts_a_runner_believes_its_results_alone(
    world: World, tmp_path: Path, keys: dict[str, Path], signed: str
):
    trusted = trusting(tmp_path / "trusted", keys["runner"])
    key = {"by the runner": keys["runner"], "by a stranger": keys["stranger"]}.get(signed)
    submitted = signed_answer(world, by(key) if key else lambda _: None)
    untrusted = read(world, submitted)
    assert untrusted.signature is (TrustLevel.UNTRUSTED_KEY if key else TrustLevel.UNSIGNED)
    if signed == "by the runner":
        believed = read(world, submitted, trusted)
        assert (believed.signature, believed.signer) == (TrustLevel.TRUSTED, "testmac")
        by_hand(world, submitted, {}, world.result(world.expected(submitted)))  # without its signature
    with pytest.raises(ResultError, match=r"no signature|SHA256:\S+, which is not listed") as refused:
        read(world, submitted, trusted)
    assert "kakeya_mac runners trust" in (refused.value.remedy or "")
    shown = read(world, submitted, trusted, allow_unsigned=True).signature
    assert shown is (TrustLevel.UNTRUSTED_KEY if signed == "by a stranger" else TrustLevel.UNSIGNED)


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("what", ["another namespace", "other bytes", "rubbish"])
@pytest.mark.parametrize("allow_unsigned", [True, False])
def test_signature_that_does_not_verify_is_worse_than_none(
    world: World, keys: dict[str, Path], what: str, allow_unsigned: bool
):
    rubbish = b"-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n"
    make: dict[str, Callable[[bytes], bytes | None]] = {
        "another namespace": by(keys["runner"], signing.REQUEST_NAMESPACE),
        "other bytes": by(keys["runner"], more=b" "),
        "rubbish": lambda _: rubbish,
    }
    with pytest.raises(ResultError, match=r"result\.json\.sig"):
        read(world, signed_answer(world, make[what]), allow_unsigned=allow_unsigned)


def test_signature_that_cannot_be_checked_is_not_believed(
    world: World, tmp_path: Path, keys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    submitted = signed_answer(world, by(keys["runner"]))
    monkeypatch.setattr("bridge.signing.ssh.available", lambda: False)
    with pytest.raises(ResultError, match="ssh-keygen"):
        read(world, submitted, trusting(tmp_path / "trusted", keys["runner"]))
    assert read(world, submitted).signature is TrustLevel.UNCHECKED


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
    world: World, tmp_path: Path, keys: dict[str, Path]
):
    submitted, trusted = signed_answer(world, by(keys["runner"])), tmp_path / "trusted_runners"
    old, new = (signing.public_key(keys[name]) for name in ("runner", "new"))
    for key in (new, old):
        trust.pin(trusted, "studio", str(key))
    believed = read(world, submitted, trusted)
    assert (believed.signature, believed.signer) == (TrustLevel.TRUSTED, "studio")
    [gone] = trust.runner_keys(trusted).revoke("studio", str(old))
    with pytest.raises(ResultError, match="of studio, which was revoked") as refused:
        read(world, submitted, trusted)
    assert (gone.fingerprint in refused.value.message, refused.value.exit_code) == (True, 3)
    shown = read(world, submitted, trusted, allow_unsigned=True)
    assert shown.signature is TrustLevel.REVOKED
    assert "worthless" in shown.sentence
    trusted.with_name("revoked_keys").unlink()
    line = allowed_line(old, "studio", signing.RESULT_NAMESPACE)
    trusted.write_text(line.replace(" ssh-", ',valid-before="20260101Z" ssh-'))
    with pytest.raises(ResultError, match="of studio, which expired at 2026-01-01"):
        read(world, submitted, trusted)
    trusted.chmod(0o666)
    with pytest.raises(KeyListError, match="can be written by others"):
        read(world, submitted, trusted)
