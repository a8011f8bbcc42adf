"""A prune archives first, deletes then, touches nothing unfinished and loses nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.archive import Archive, Pruned, open_archive
from bridge.bus.requests import Submitted
from bridge.bus.results import believe
from bridge.errors import (
    BusError,
    PushRejected,
    RemoteUnreachable,
    ResultError,
    UnknownHandle,
)
from bridge.git.cache import GitCache
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_BYTES
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT
from bridge.signing.trust import TrustLevel
from tests.bridge.bus.archives import (
    NOBODY,
    NOW,
    answered,
    archive_files,
    archived,
    bridge_refs,
    copy_into_archive,
    index_lines,
    live,
    many_answered,
    new_cache,
    nonce_of_age,
    pruned,
)
from tests.houses import allowed_line
from tests.objects import FOLDER, LINK, PLAIN, PROGRAM, Objects
from tests.worlds import World, snapshot


def opened(world: World) -> Archive:
    cache = new_cache(world)
    archive = open_archive(cache, cache.list_remote(refs.ARCHIVE))
    assert archive is not None
    return archive


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("version", ["first", "this"])
def test_archived_result_is_believed_as_before_and_survives_gc(world: World, version: str):
    submitted = answered(world)
    before, checkout = live(world, submitted.nonce), snapshot(world.house.clone)
    if version == "first":
        copy_into_archive(world, submitted.nonce)
    else:
        done = pruned(world)
        assert (done.archived, done.deleted, done.left) == ([submitted.nonce], [submitted.ref], [])
        assert archive_files(world) == ["index/2026-03.jsonl"]
    world.house.git("gc", "--quiet", "--prune=now", cwd=world.house.remote)
    assert bridge_refs(world) == set()
    for handle in (submitted.nonce, submitted.ref, submitted.ref[11:], f"probe-{submitted.nonce[:15]}"):
        after = archived(world, handle)
        assert (after.expected, after.files, after.commit) == (before.expected, before.files, before.commit)
    then, now = believe(before, trusted=NOBODY), believe(after, trusted=NOBODY)
    assert (then.result, then.files, then.signature) == (now.result, now.files, now.signature)
    assert now.ref == refs.ARCHIVE
    assert snapshot(world.house.clone) == checkout
    kept = after.asked
    assert kept is not None
    head = world.house.head()
    assert (kept.commit, kept.parent, kept.signature) == (submitted.commit, head, None)
    assert json.loads(kept.data)["nonce"] == submitted.nonce
    with pytest.raises(UnknownHandle, match="holds none"):
        archived(world, nonce_of_age())


@pytest.mark.slow
def test_archive_of_the_first_version_is_continued(world: World):
    old, older = answered(world), answered(world, timedelta(days=70))
    for one in (old, older):
        copy_into_archive(world, one.nonce)
    new = answered(world)
    assert pruned(world).archived == [new.nonce]
    assert [entry.nonce for entry in opened(world).newest()] == sorted(
        (old.nonce, older.nonce, new.nonce), reverse=True
    )
    for one in (old, older, new):
        entry = opened(world).get(one.nonce)
        assert entry is not None
        assert (entry.preset, entry.summary and entry.summary.runner) == ("probe", "testmac")
        assert believe(archived(world, one.nonce), trusted=NOBODY).result.nonce == one.nonce


def test_signature_counts_in_the_archive_as_it_did(world: World, tmp_path: Path):
    key = signing.ensure_key(tmp_path / "key", "runner")
    trusted = tmp_path / "trusted"
    trusted.write_text(allowed_line(signing.public_key(key), "testmac", signing.RESULT_NAMESPACE))
    signed = world.submit(nonce=nonce_of_age())
    data = world.result(world.expected(signed))
    world.answer(signed, result=data, signature=signing.sign(key, signing.RESULT_NAMESPACE, data))
    unsigned = answered(world)
    assert set(pruned(world).archived) == {signed.nonce, unsigned.nonce}
    assert believe(archived(world, signed.nonce), trusted=trusted).signature is TrustLevel.TRUSTED
    with pytest.raises(ResultError, match="no signature"):
        believe(archived(world, unsigned.nonce), trusted=trusted)


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("how", ["deleted", "moved", "refused"])
def test_result_on_a_ref_of_its_own_is_archived(world: World, how: str):
    submitted = world.submit(nonce=nonce_of_age())
    ours = world.commit(submitted.commit, {"README.md": b"mine now"})
    world.bring(submitted)
    if how == "moved":
        world.point(submitted.ref, ours)
    else:
        world.house.git("update-ref", "-d", submitted.ref, cwd=world.house.remote)
    world.answer(submitted)
    if how == "refused":
        world.point(submitted.ref, submitted.commit)  # as a refusal without a branch leaves it
    before, done = live(world, submitted.nonce), pruned(world)
    if how == "moved":  # a person's commits are on the branch
        assert (done.archived, [left.ref for left in done.left]) == ([], [submitted.ref])
        return
    assert done.archived == [submitted.nonce]
    assert bridge_refs(world) == set()
    after = archived(world, submitted.nonce)
    assert (after.expected, after.parents, after.files) == (before.expected, (), before.files)
    assert after.alone == before.alone == (how == "deleted")
    expected = world.expected(submitted)
    assert believe(after, trusted=NOBODY, expected=expected).result.nonce == submitted.nonce
    assert pruned(world).archived == []


# What stays ------------------------------------------------------------------------------------------------


def without_inbox(world: World, nonce: str) -> None:
    world.submit(nonce=nonce)
    world.house.git("update-ref", "-d", refs.INBOX + nonce, cwd=world.house.remote)


def put_back(prefix: str) -> Callable[[World, str], object]:
    def put(world: World, nonce: str) -> None:
        submitted = world.submit(nonce=nonce)
        world.answer(submitted)
        world.point(prefix + nonce, submitted.commit)

    return put


UNFINISHED: dict[str, Callable[[World, str], object]] = {
    "waiting": lambda world, nonce: world.submit(nonce=nonce),
    "waiting without an inbox entry": without_inbox,
    "running": lambda world, nonce: world.claim(world.submit(nonce=nonce)),
    "answered and in the inbox": put_back(refs.INBOX),
    "answered and claimed": put_back(refs.CLAIMS),
}


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("case", UNFINISHED)
def test_unfinished_request_is_never_touched(world: World, case: str):
    finished, nonce = answered(world), nonce_of_age(timedelta(days=30))
    UNFINISHED[case](world, nonce)
    before = bridge_refs(world) - {finished.ref}
    for options in ({}, {"keep": 0, "older_than": timedelta(0)}):
        pruned(world, **options)
        assert bridge_refs(world) == before
    with pytest.raises(UnknownHandle):
        archived(world, nonce)


@pytest.mark.slow
def test_retention_is_by_age_and_number(world: World):
    young, older, oldest = (
        answered(world, timedelta(days=days), finished_at="2026-03-31T12:00:00Z") for days in (1, 2, 20)
    )
    answered(world, timedelta(days=-400))  # dated in the future
    before = world.house.git("show-ref", cwd=world.house.remote)
    assert pruned(world, dry_run=True).archived == [oldest.nonce]
    assert world.house.git("show-ref", cwd=world.house.remote) == before
    assert pruned(world, keep=3, older_than=timedelta(days=30)).archived == []
    assert pruned(world, keep=1, limit=1).archived == [oldest.nonce]
    assert pruned(world, keep=1).archived == [older.nonce]
    assert young.ref in bridge_refs(world)


@pytest.mark.slow
def test_fresh_result_stays_for_a_client_that_waits(world: World):
    answered(world, finished_at="2026-04-01T11:30:00Z")
    done = pruned(world, keep=0, older_than=timedelta(0))
    assert (done.archived, done.unfinished) == ([], 1)
    assert len(pruned(world, now=NOW + timedelta(hours=1)).archived) == 1


def folder(submitted: Submitted) -> str:
    return f"{RESULT_ROOT}/{submitted.nonce}"


def with_files(parent: str, **files: str) -> Callable[[World, Submitted], str]:
    """A commit on the request, on main or on its result, with a result and these files."""

    def make(world: World, submitted: Submitted) -> str:
        on = {"request": submitted.commit, "main": "main", "result": submitted.ref}[parent]
        sha = world.house.git("rev-parse", on, cwd=world.house.remote)
        placed = {} if parent == "result" else {f"{folder(submitted)}/result.json": b"{}"}
        placed |= {path: text.encode() for path, text in files.items()}
        return Objects(world.house.remote).commit_files(sha, dict(placed))

    return make


ODD: dict[str, tuple[Callable[[World, Submitted], str], str]] = {
    "commit on top": (with_files("result", **{"README.md": "my own work"}), "hold more than"),
    "no request below": (with_files("main"), "hold more than"),
}


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("case", ODD)
def test_branch_of_other_commits_stays_and_is_named(world: World, case: str):
    make, word = ODD[case]
    odd, fine = answered(world), answered(world)
    world.point(odd.ref, make(world, odd))
    done = pruned(world)
    assert done.archived == [fine.nonce]
    assert [(left.nonce, left.ref) for left in done.left] == [(odd.nonce, odd.ref)]
    assert word in done.left[0].reason
    assert bridge_refs(world) == {odd.ref}


def with_rows(*rows: tuple[str, str, str]) -> Callable[[World, Submitted], str]:
    """A result folder with more rows: mode, name, and what the blob holds."""

    def make(world: World, submitted: Submitted) -> str:
        objects = Objects(world.house.remote)
        inner = objects.tree((mode, name, objects.blob(text.encode())) for mode, name, text in rows)
        for name in (submitted.nonce, "results", ".mac-bridge"):
            inner = objects.tree([(FOLDER, name, inner)])
        return objects.commit(inner, [submitted.commit])

    return make


RESULT_ROW = (PLAIN, RESULT_NAME, "{}")
FORGED: dict[str, Callable[[World, Submitted], str]] = {
    "rubbish": with_files("request"),
    "a change outside": with_files("request", **{"README.md": "changed"}),
    "an odd name": with_rows(RESULT_ROW, (PLAIN, "\x1b[31mred", "x")),
    "a symlink": with_rows(RESULT_ROW, (LINK, "link", "/etc/passwd")),
    "a program": with_rows(RESULT_ROW, (PROGRAM, "a", "#!/bin/sh")),
    "a name twice": with_rows(RESULT_ROW, RESULT_ROW),
    "a way out": with_rows(RESULT_ROW, (PLAIN, "..", "x")),
}


@pytest.mark.sampled(9, 1)
@pytest.mark.parametrize("case", FORGED)
def test_forged_result_is_as_little_believed_in_the_archive(world: World, case: str):
    forged, fine = answered(world), answered(world)
    world.point(forged.ref, FORGED[case](world, forged))
    done = pruned(world)
    assert fine.nonce in done.archived
    if forged.nonce in done.archived:
        with pytest.raises((ResultError, BusError)):
            believe(archived(world, forged.nonce), trusted=NOBODY)
    else:
        assert [left.nonce for left in done.left] == [forged.nonce]
        assert done.left[0].reason.isprintable()
    assert archived(world, fine.nonce).files


@pytest.mark.slow
def test_old_cancel_requests_and_claims_go_with_their_requests(world: World):
    finished, fresh = answered(world), answered(world, timedelta(days=1), finished_at="2026-03-31T13:00:00Z")
    gone, waiting = nonce_of_age(), world.submit(nonce=nonce_of_age())
    for nonce in (finished.nonce, fresh.nonce, gone, waiting.nonce):
        world.point(refs.CANCELS + nonce, waiting.commit)
    before = bridge_refs(world)
    done = pruned(world)
    assert done.archived == [finished.nonce]
    deleted = {finished.ref, *(refs.CANCELS + nonce for nonce in (finished.nonce, fresh.nonce, gone))}
    assert before - bridge_refs(world) == set(done.deleted) == deleted
    held = world.claim(claimed := world.submit(nonce=nonce_of_age()))
    world.answer(claimed)
    made = datetime.fromisoformat(held.status.updated_at)
    early = pruned(world, now=made + timedelta(hours=1), older_than=timedelta(0))
    assert claimed.nonce not in early.archived
    assert claimed.nonce in pruned(world, now=made + timedelta(days=30)).archived
    assert held.ref not in bridge_refs(world)


# Hostile archives ------------------------------------------------------------------------------------------

HOSTILE_COPIES: dict[str, dict[str, bytes | None]] = {
    "no record": {"archived.json": None},
    "rubbish": {"archived.json": b"{"},
    "a ref that is a list": {"archived.json": b'{"ref": []}'},
    "more in it": {"archived.json": b'{"extra": 1}'},
    "no result": {"result/result.json": None},
    "another result": {"result/result.json": b"{}"},
    "too large": {"request.json": b" " * (MAX_BYTES + 1), "archived.json": b" " * (1 << 20)},
}


@pytest.mark.sampled(8, 1)
@pytest.mark.parametrize("case", HOSTILE_COPIES)
def test_forged_copy_is_one_clear_error_and_hides_no_other(world: World, case: str):
    forged, fine = answered(world), answered(world)
    copy_into_archive(world, fine.nonce)
    copy_into_archive(world, forged.nonce, HOSTILE_COPIES[case])
    with pytest.raises((ResultError, UnknownHandle)):
        believe(archived(world, forged.nonce), trusted=NOBODY)
    assert fine.nonce in [entry.nonce for entry in opened(world).newest()]
    assert archived(world, fine.nonce).files


LINES: dict[str, tuple[str, str]] = {
    "rubbish": ("{", "{{"),
    "another month": ('"nonce":"2', '"nonce":"1'),
    "another commit": ('"places":{', '"places":{"refs/heads/x":"' + "1" * 40 + '",'),
    "an option": ("refs/heads", "--upload-pack"),
    "more in it": ("{", '{"extra":1,'),
}


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("case", LINES)
def test_forged_line_of_the_index_hides_no_other(world: World, case: str):
    forged, fine = answered(world), answered(world)
    pruned(world)
    month = f"index/{fine.nonce[:4]}-{fine.nonce[4:6]}.jsonl"
    lines = world.house.git("show", f"{refs.ARCHIVE}:{month}", cwd=world.house.remote).splitlines()
    old, new = LINES[case]
    data = "".join((line.replace(old, new, 1) if forged.nonce in line else line) + "\n" for line in lines)
    tip = world.house.git("rev-parse", refs.ARCHIVE, cwd=world.house.remote)
    forgery = {month: b"\xff\n[]\n" + data.encode()}
    world.point(refs.ARCHIVE, Objects(world.house.remote).commit_files(tip, dict(forgery)))
    assert archived(world, fine.nonce).files
    with pytest.raises((ResultError, BusError)):
        believe(archived(world, forged.nonce), trusted=NOBODY)
    late = answered(world, timedelta(days=32))
    assert pruned(world).archived == [late.nonce]


@pytest.mark.slow
def test_prune_keeps_lines_of_the_index_that_it_does_not_need_as_they_are(world: World):
    answered(world)
    pruned(world)
    broken = f'{{"nonce":"{nonce_of_age()}",half a line'.encode()
    tip, month = world.house.git("rev-parse", refs.ARCHIVE, cwd=world.house.remote), "index/2026-03.jsonl"
    before = world.house.git("show", f"{tip}:{month}", cwd=world.house.remote).encode()
    files: dict[str, bytes | None] = {month: broken + b"\n" + before + b"\n"}
    world.point(refs.ARCHIVE, Objects(world.house.remote).commit_files(tip, files))
    late = answered(world)
    assert pruned(world).archived == [late.nonce]
    after = world.house.git("show", f"{refs.ARCHIVE}:{month}", cwd=world.house.remote).encode().splitlines()
    assert {broken, *before.splitlines()} < set(after)
    assert len([*opened(world).newest()]) == 2


# Faults ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("how", ["setting", "hook"])
def test_server_that_deletes_nothing_loses_nothing_and_says_so(world: World, how: str):
    submitted = answered(world)
    if how == "setting":
        world.house.git("config", "receive.denyDeletes", "true", cwd=world.house.remote)
    else:
        world.hook("update", 'case "$3" in *[1-9a-f]*) ;; *) echo "nothing is deleted here"; exit 1;; esac')
    for _ in range(2):
        done = pruned(world)
        assert done.archived == done.deleted == []
        assert "delet" in (done.refused or "")
        assert bridge_refs(world) == {submitted.ref}
        assert archived(world, submitted.nonce).files == live(world, submitted.nonce).files
    assert len(index_lines(world)) == 1


def test_server_that_takes_no_archive_is_one_clear_error(world: World):
    submitted = answered(world)
    world.hook("update", 'case "$1" in *archive) echo "no archives"; exit 1;; esac')
    with pytest.raises(PushRejected, match="no archives"):
        pruned(world)
    assert bridge_refs(world) == {submitted.ref}
    world.house.remote.rename(world.house.remote.with_name("away.git"))
    with pytest.raises(RemoteUnreachable):
        pruned(world)


@pytest.mark.slow
def test_prune_killed_before_deleting_is_finished_by_the_next(world: World):
    submitted = answered(world)
    tip = world.house.git("rev-parse", submitted.ref, cwd=world.house.remote)
    pruned(world)
    commit = world.house.git("rev-parse", refs.ARCHIVE, cwd=world.house.remote)
    for cache in (world.cache, new_cache(world)):
        world.point(submitted.ref, tip)  # as if only the archive had been pushed
        assert pruned(world, cache=cache).archived == [submitted.nonce]
        assert world.house.git("rev-parse", refs.ARCHIVE, cwd=world.house.remote) == commit
        assert bridge_refs(world) == set()


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("server", ["plain", "without transactions"])
def test_prunes_at_once_archive_everything_once(world: World, server: str):
    if server != "plain":
        world.house.git("config", "receive.advertiseAtomic", "false", cwd=world.house.remote)
    nonces = many_answered(world, 12)
    done: list[Pruned] = []
    shared = new_cache(world)

    def work(cache: GitCache) -> None:
        done.append(pruned(world, cache=cache))

    threads = [threading.Thread(target=work, args=(cache,)) for cache in (shared, new_cache(world), shared)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 3
    assert bridge_refs(world) == set()
    assert sorted(line["nonce"] for line in index_lines(world)) == nonces
    for nonce in nonces[::5]:
        assert believe(archived(world, nonce), trusted=NOBODY).result.nonce == nonce


@pytest.mark.slow
def test_server_that_takes_branches_only_has_an_archive_too(world: World):
    world.take_branches_only()
    own = world.submit(nonce=nonce_of_age())
    world.bring(own)
    world.house.git("update-ref", "-d", own.ref, cwd=world.house.remote)
    world.answer(own)
    on_branch = answered(world)
    assert refs.BRANCH_RESULTS + own.nonce in bridge_refs(world)
    assert set(pruned(world).archived) == {own.nonce, on_branch.nonce}
    assert bridge_refs(world) == set()
    assert archived(world, own.nonce).parents == ()
