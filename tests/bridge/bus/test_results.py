"""A result is believed only when every part of it fits the request."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from bridge.bus.git import Git
from bridge.bus.handles import resolve_handle
from bridge.bus.objects import Entry
from bridge.bus.publish import publish
from bridge.bus.results import Asked, Standing, believe, fetch
from bridge.errors import ResultError, UnknownHandle
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_BYTES, REQUEST_PATH
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT, Status
from tests.bridge.bus.reading import NOBODY, by_hand, read
from tests.worlds import World


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("preset", ["tests", "no-such-preset", None])
def test_a_result_of_another_preset_is_no_answer(world: World, preset: str | None):
    submitted = world.submit()
    world.answer(submitted, result=world.result(world.asked(submitted), preset=preset))
    with pytest.raises(ResultError, match="preset"):
        read(world, submitted, known=False)


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


@pytest.mark.sampled(6, 1)
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


@pytest.mark.sampled(2, 1)
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


def test_a_result_of_a_deleted_branch_is_believed_as_one_of_no_known_request(world: World):
    submitted = world.submit()
    world.house.git("update-ref", "-d", submitted.ref, cwd=world.house.remote)
    world.answer(submitted)
    known, unknown = read(world, submitted), read(world, submitted, known=False)
    assert (known.request_gone, unknown.request_gone) == (False, True)
    assert "gone from the remote" in unknown.sentence
    assert "anyone with push rights" in unknown.sentence
    assert known.sentence == "unsigned: anyone with push rights could have written this"


def test_a_folder_of_more_files_than_a_result_lists_is_not_read(world: World):
    submitted = world.submit()
    git = Git(world.house.remote)
    blob = git.write_blob(b"x")
    tree = git.write_tree([Entry("100644", "blob", blob, f"{number}.txt") for number in range(1003)])
    for name in (submitted.nonce, "results", ".mac-bridge"):
        tree = git.write_tree([Entry("040000", "tree", tree, name)])
    world.point(submitted.ref, git.commit_tree(tree, [submitted.commit], "many\n"))
    with pytest.raises(ResultError, match=r"holds 1003 files for .*; a result has at most 1002"):
        read(world, submitted)


def edited(data: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    document = json.loads(data)
    change(document)
    return json.dumps(document).encode()


def test_a_forged_answer_that_fits_is_shown_as_unsigned(world: World):
    submitted = world.submit()
    by_hand(world, submitted, {}, world.result(world.asked(submitted)))
    assert read(world, submitted).signature is Standing.UNSIGNED


@pytest.mark.sampled(5, 1)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("what", ["the request", "a stranger's commit", "a forged answer"])
@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_another_branch_of_its_nonce_hides_no_answer(world: World, name: str, what: str, known: bool):
    submitted = world.submit()
    shade = f"{refs.BRANCHES}{name}-{submitted.nonce}"
    if what == "a forged answer":
        by_hand(world, submitted, {}, world.result(world.asked(submitted)).replace(b"testmac", b"mallory"))
        world.point(shade, resolve_handle(world.git, world.remote, submitted.nonce).branches[0].commit)
        world.point(submitted.ref, submitted.commit)
    else:
        commit = submitted.commit if what == "the request" else world.manifest().workload_sha
        world.point(shade, commit)
    state = resolve_handle(world.git, world.remote, submitted.nonce)
    asked = world.asked(submitted) if known else None
    if what != "a forged answer":
        assert fetch(world.git, world.remote, state, asked=asked) is None, "it waits"
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


@pytest.mark.sampled(2, 1)
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
