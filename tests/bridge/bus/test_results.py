"""Exactly one result, in one place; believed only when every part of it fits the request."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus import refs
from bridge.bus.handles import resolve_handle
from bridge.bus.publish import TRAILER, publish
from bridge.bus.requests import Submitted
from bridge.bus.results import Asked, Believed, Standing, believe, fetch, pins_keys
from bridge.errors import LeaseLost, MachineError, PushRejected, ResultError, UnknownHandle
from bridge.manifest import MAX_BYTES, REQUEST_PATH
from bridge.result import RESULT_NAME, RESULT_ROOT, Status
from tests.worlds import FILES, World

NOBODY = Path("/nonexistent")


def read(
    world: World,
    submitted: Submitted,
    trusted: Path = NOBODY,
    *,
    known: bool = True,
    allow_unsigned: bool = False,
) -> Believed:
    asked = world.asked(submitted) if known else None
    fetched = fetch(
        world.git, world.remote, resolve_handle(world.git, world.remote, submitted.nonce), asked=asked
    )
    assert fetched is not None
    return believe(fetched, trusted=trusted, asked=asked, allow_unsigned=allow_unsigned)


def test_a_result_is_one_commit_that_clears_inbox_and_claim(world: World):
    submitted = world.submit()
    [pending] = world.mirror.refresh()
    published = world.answer(submitted, held=world.claim(pending))
    assert published.ref == submitted.ref
    believed = read(world, submitted, known=False)
    assert dict(believed.files) == FILES
    assert believed.signature is Standing.UNSIGNED
    assert "anyone with push rights" in believed.sentence
    assert not [ref for ref in world.house.remote_refs() if ref.startswith("refs/mac-bridge/")]
    assert world.mirror.refresh() == []


def test_a_second_result_is_refused(world: World):
    submitted = world.submit()
    first = world.answer(submitted)
    other = {"report.json": b"other"}
    second = world.result(world.asked(submitted), other)
    with pytest.raises(LeaseLost):
        world.answer(submitted, result=second, files=other)
    assert read(world, submitted).commit == first.commit


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("where", ["on its branch", "on a ref of its own"])
def test_the_same_result_brought_again_is_the_one_that_stands(world: World, where: str):
    """A runner that died between the push and taking note of it pushes its spool again."""
    submitted = world.submit()
    if where == "on a ref of its own":
        world.point(submitted.ref, world.commit(submitted.commit, {"README.md": b"mine now"}))
    result = world.result(world.asked(submitted))
    first = world.answer(submitted, result=result)
    world.point(refs.inbox_ref(submitted.nonce), submitted.commit)  # as if deleting it had failed
    time.sleep(1.1)  # git dates commits by the second
    assert world.answer(submitted, result=result) == first
    assert refs.inbox_ref(submitted.nonce) not in world.house.remote_refs()
    with pytest.raises(LeaseLost):
        world.answer(submitted, result=result, signature=b"another")


@pytest.mark.parametrize("commits", [1, 4])
def test_a_result_under_somebodys_own_commits_is_still_the_result(world: World, commits: int):
    submitted = world.submit()
    result = world.result(world.asked(submitted))
    tip = world.answer(submitted, result=result).commit
    for number in range(commits):
        tip = world.commit(tip, {"README.md": f"number {number}\n".encode()})
    world.point(submitted.ref, tip)
    with pytest.raises(LeaseLost, match="already has a result"):
        world.answer(submitted, result=result)
    assert refs.result_ref(submitted.nonce) not in world.house.remote_refs()


@pytest.mark.parametrize("preset", ["tests", "no-such-preset", None])
def test_a_result_of_another_preset_is_no_answer(world: World, preset: str | None):
    submitted = world.submit()
    world.answer(submitted, result=world.result(world.asked(submitted), preset=preset))
    with pytest.raises(ResultError, match="preset"):
        read(world, submitted, known=False)


def test_a_result_goes_to_no_branch_but_the_requests_own(world: World):
    submitted = world.submit()
    world.mirror.refresh()
    with pytest.raises(ResultError, match="not a branch of the request"):
        publish(
            world.mirror.git,
            world.remote,
            request_commit=world.house.git("rev-parse", "main"),
            nonce=submitted.nonce,
            result_ref="refs/heads/main",
            files=FILES,
            result=world.result(world.asked(submitted)),
            signature=None,
            claim=None,
        )


def test_a_push_that_fails_changes_nothing_and_can_be_brought_again(world: World):
    submitted = world.submit()
    [pending] = world.mirror.refresh()
    held = world.claim(pending)
    before = world.house.git("show-ref", cwd=world.house.remote)
    world.hook("pre-receive", "echo no; exit 1")
    with pytest.raises(PushRejected, match="no"):
        world.answer(submitted, held=held)
    assert world.house.git("show-ref", cwd=world.house.remote) == before
    (world.house.remote / "hooks" / "pre-receive").unlink()
    assert world.answer(submitted, held=held).ref == submitted.ref
    assert read(world, submitted).signature is Standing.UNSIGNED


def test_a_network_that_fails_for_a_while_is_waited_out(world: World):
    submitted = world.submit()
    world.mirror.refresh()
    away = world.house.remote.with_name("away.git")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            away.rename(world.house.remote)

    world.house.remote.rename(away)
    published = publish(
        world.mirror.git,
        world.remote,
        request_commit=submitted.commit,
        nonce=submitted.nonce,
        result_ref=submitted.ref,
        files=FILES,
        result=world.result(world.asked(submitted)),
        signature=None,
        claim=None,
        sleep=pause,
    )
    assert pauses == [0.5, 1.0]
    assert read(world, submitted).commit == published.commit


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_branch_that_moved_or_vanished_leaves_the_result_a_ref_of_its_own(world: World, how: str):
    submitted = world.submit()
    if how == "moved":
        world.point(submitted.ref, world.commit(submitted.commit, {"README.md": b"mine now"}))
    else:
        world.house.git("update-ref", "-d", submitted.ref, cwd=world.house.remote)
    published = world.answer(submitted)
    assert published.ref == refs.result_ref(submitted.nonce)
    assert read(world, submitted).commit == published.commit


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


def trusting(path: Path, key: Path) -> Path:
    """A client's list that trusts one key."""
    path.write_text(signing.allowed_line(signing.public_key(key), "testmac", signing.RESULT_NAMESPACE))
    return path


@pytest.mark.parametrize("signed", ["not at all", "by an unknown key"])
def test_a_client_that_trusts_a_runner_believes_no_other_result(world: World, tmp_path: Path, signed: str):
    trusted = trusting(tmp_path / "trusted", signing.ensure_key(tmp_path / "key", "runner"))
    submitted = world.submit()
    data = world.result(world.asked(submitted))
    stranger = signing.ensure_key(tmp_path / "stranger", "runner")
    signature = signing.sign(stranger, signing.RESULT_NAMESPACE, data) if "unknown" in signed else None
    world.answer(submitted, result=data, signature=signature)
    with pytest.raises(ResultError, match=r"no signature|unknown key, SHA256:") as refused:
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


BAD_MANIFESTS: dict[str, dict[str, bytes | None]] = {
    "no JSON": {REQUEST_PATH: b"{"},
    "more bytes than are read": {REQUEST_PATH: b" " * (MAX_BYTES + 1)},
    "of another request": {},
    "another file changed": {REQUEST_PATH: b"{", "README.md": b"changed"},
    "no manifest at all": {"README.md": b"changed"},
}


def refusal(world: World, nonce: str, files: dict[str, bytes | None], **changes: object) -> str:
    """Push a commit that is no request as one, and refuse it as a runner does; returns the commit."""
    workload = world.house.git("rev-parse", "HEAD")
    if not files:
        files = {REQUEST_PATH: world.manifest().to_bytes()}
    commit = world.commit(workload, files)
    world.point(refs.request_ref("probe", nonce, None), commit)
    world.point(refs.inbox_ref(nonce), commit)
    world.mirror.refresh()
    verdict = {"status": "refused", "reason": "bad_manifest", "message": "not one"}
    named: dict[str, object] = {"workload_sha": None, "preset": None, "verdict": verdict, **changes}
    publish(
        world.mirror.git,
        world.remote,
        request_commit=commit,
        nonce=nonce,
        result_ref=None,
        files={},
        result=world.result(Asked(nonce, commit, None), {}, **named),
        signature=None,
        claim=None,
    )
    return commit


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("inbox", ["deleted", "still there"])
@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_a_refusal_of_what_is_no_request_can_be_read(world: World, case: str, inbox: str):
    nonce = world.manifest().nonce
    commit = refusal(world, nonce, BAD_MANIFESTS[case])
    if inbox == "still there":
        world.point(refs.inbox_ref(nonce), commit)
    fetched = fetch(world.git, world.remote, resolve_handle(world.git, world.remote, nonce))
    assert fetched is not None
    believed = believe(fetched, trusted=NOBODY)
    assert believed.ref == refs.result_ref(nonce)
    assert believed.result.request_commit == commit
    assert believed.result.verdict.status is Status.REFUSED


@pytest.mark.parametrize("case", ["passed", "another commit", "a request stands there"])
def test_a_result_beside_a_branch_must_answer_what_stands_on_it(world: World, case: str):
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


def test_a_result_beside_a_branch_that_moved_is_read_from_any_clone(world: World):
    submitted = world.submit()
    world.point(submitted.ref, world.commit(submitted.commit, {"README.md": b"mine now"}))
    published = world.answer(submitted)
    assert published.ref == refs.result_ref(submitted.nonce)
    assert read(world, submitted, known=False).commit == published.commit


def by_hand(world: World, submitted: Submitted, files: dict[str, bytes | None], data: bytes) -> None:
    """Replace the answer by a commit of our own with a matching trailer, as anyone with push rights could."""
    folder = f"{RESULT_ROOT}/{submitted.nonce}"
    message = f"forged\n\n{TRAILER}: {hashlib.sha256(data).hexdigest()}\n"
    tree = {f"{folder}/{path}": content for path, content in FILES.items()} | {
        f"{folder}/{RESULT_NAME}": data
    }
    commit = world.commit(submitted.commit, {**tree, **files}, message)
    world.point(submitted.ref, commit)


def edited(data: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    document = json.loads(data)
    change(document)
    return json.dumps(document).encode()


def test_a_forged_answer_that_fits_is_shown_as_unsigned(world: World):
    submitted = world.submit()
    by_hand(world, submitted, {}, world.result(world.asked(submitted)))
    assert read(world, submitted).signature is Standing.UNSIGNED


FORGERIES: dict[str, tuple[Callable[[dict[str, object]], None], dict[str, bytes | None], str]] = {
    "another nonce": (lambda d: d.update(nonce="20200101t000000z000000000000"), {}, "copied"),
    "another request": (lambda d: d.update(request_commit="e" * 40), {}, "request commit"),
    "another workload": (lambda d: d.update(workload_sha="e" * 40), {}, "workload"),
    "no workload": (lambda d: d.update(workload_sha=None), {}, "workload"),
    "a file unlisted": (lambda d: d.update(files=[]), {}, "lists"),
    "unknown field": (lambda d: d.update(extra=1), {}, "extra"),
    "outside the folder": (lambda d: None, {"README.md": b"changed"}, "outside"),
}


@pytest.mark.parametrize("case", FORGERIES)
def test_a_forged_answer_that_does_not_fit_is_rejected(world: World, case: str):
    change, files, word = FORGERIES[case]
    submitted = world.submit()
    by_hand(world, submitted, files, edited(world.result(world.asked(submitted)), change))
    with pytest.raises(ResultError, match=word):
        read(world, submitted)


def test_an_altered_file_and_a_missing_trailer_are_rejected(world: World):
    submitted = world.submit()
    data = world.result(world.asked(submitted))
    folder = f"{RESULT_ROOT}/{submitted.nonce}"
    by_hand(world, submitted, {f"{folder}/report.json": b"{}"}, data)
    with pytest.raises(ResultError, match=r"EVIDENCE_DIGEST: .* altered"):
        read(world, submitted)
    by_hand(world, submitted, {f"{folder}/{RESULT_NAME}": data + b" "}, data)
    with pytest.raises(ResultError, match="commit message"):
        read(world, submitted)


def test_a_handle_is_a_nonce_a_branch_or_a_unique_prefix(world: World):
    first = world.submit(nonce="20260301t120000zaaaaaaaaaaaa")
    second = world.submit(nonce="20260301t120000zbbbbbbbbbbbb")
    for handle in (first.nonce, first.ref, first.ref.removeprefix("refs/heads/"), first.nonce[:17]):
        assert resolve_handle(world.git, world.remote, handle).nonce == first.nonce
    assert resolve_handle(world.git, world.remote, second.nonce).ahead == 1
    with pytest.raises(UnknownHandle, match="2 requests"):
        resolve_handle(world.git, world.remote, "20260301t12")
    with pytest.raises(UnknownHandle):
        resolve_handle(world.git, world.remote, "")
