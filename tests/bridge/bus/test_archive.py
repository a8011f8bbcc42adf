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
    NO_TRUSTED_KEYS,
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
from tests.fixtures.bus import BusFixture, snapshot
from tests.fixtures.repo import allowed_line
from tests.objects import FOLDER, LINK, PLAIN, PROGRAM, Objects


def opened(bus: BusFixture) -> Archive:
    cache = new_cache(bus)
    archive = open_archive(cache, cache.list_remote(refs.ARCHIVE))
    assert archive is not None
    return archive


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("version", ["first", "this"])
def test_archived_result_is_believed_as_before_and_survives_gc(bus: BusFixture, version: str):
    submitted = answered(bus)
    before, checkout = live(bus, submitted.nonce), snapshot(bus.repo.clone)
    if version == "first":
        copy_into_archive(bus, submitted.nonce)
    else:
        done = pruned(bus)
        assert (done.archived, done.deleted, done.left) == ([submitted.nonce], [submitted.ref], [])
        assert archive_files(bus) == ["index/2026-03.jsonl"]
    bus.repo.git("gc", "--quiet", "--prune=now", cwd=bus.repo.remote)
    assert bridge_refs(bus) == set()
    for handle in (submitted.nonce, submitted.ref, submitted.ref[11:], f"probe-{submitted.nonce[:15]}"):
        after = archived(bus, handle)
        assert (after.expected, after.files, after.commit) == (before.expected, before.files, before.commit)
    then, now = believe(before, trusted=NO_TRUSTED_KEYS), believe(after, trusted=NO_TRUSTED_KEYS)
    assert (then.result, then.files, then.signature) == (now.result, now.files, now.signature)
    assert now.ref == refs.ARCHIVE
    assert snapshot(bus.repo.clone) == checkout
    kept = after.asked
    assert kept is not None
    head = bus.repo.head()
    assert (kept.commit, kept.parents, kept.signature) == (submitted.commit, (head,), None)
    assert json.loads(kept.data)["nonce"] == submitted.nonce
    with pytest.raises(UnknownHandle, match="holds none"):
        archived(bus, nonce_of_age())


@pytest.mark.slow
def test_archive_of_the_first_version_is_continued(bus: BusFixture):
    old, older = answered(bus), answered(bus, timedelta(days=70))
    for one in (old, older):
        copy_into_archive(bus, one.nonce)
    new = answered(bus)
    assert pruned(bus).archived == [new.nonce]
    assert [entry.nonce for entry in opened(bus).newest()] == sorted(
        (old.nonce, older.nonce, new.nonce), reverse=True
    )
    for one in (old, older, new):
        entry = opened(bus).get(one.nonce)
        assert entry is not None
        assert (entry.preset, entry.summary and entry.summary.runner) == ("probe", "testmac")
        assert believe(archived(bus, one.nonce), trusted=NO_TRUSTED_KEYS).result.nonce == one.nonce


@pytest.mark.slow
def test_signature_counts_in_the_archive_as_it_did(bus: BusFixture, tmp_path: Path):
    key = signing.ensure_key(tmp_path / "key", "runner")
    trusted = tmp_path / "trusted"
    trusted.write_text(allowed_line(signing.public_key(key), "testmac", signing.RESULT_NAMESPACE))
    signed = bus.submit(nonce=nonce_of_age())
    data = bus.result(bus.expected(signed))
    bus.answer(signed, result=data, signature=signing.sign(key, signing.RESULT_NAMESPACE, data))
    unsigned = answered(bus)
    assert set(pruned(bus).archived) == {signed.nonce, unsigned.nonce}
    assert believe(archived(bus, signed.nonce), trusted=trusted).signature is TrustLevel.TRUSTED
    with pytest.raises(ResultError, match="no signature"):
        believe(archived(bus, unsigned.nonce), trusted=trusted)


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("how", ["deleted", "moved", "refused"])
def test_result_on_a_ref_of_its_own_is_archived(bus: BusFixture, how: str):
    submitted = bus.submit(nonce=nonce_of_age())
    ours = bus.commit(submitted.commit, {"README.md": b"mine now"})
    bus.bring(submitted)
    if how == "moved":
        bus.point(submitted.ref, ours)
    else:
        bus.repo.git("update-ref", "-d", submitted.ref, cwd=bus.repo.remote)
    bus.answer(submitted)
    if how == "refused":
        bus.point(submitted.ref, submitted.commit)  # as a refusal without a branch leaves it
    before, done = live(bus, submitted.nonce), pruned(bus)
    if how == "moved":  # a person's commits are on the branch
        assert (done.archived, [left.ref for left in done.left]) == ([], [submitted.ref])
        return
    assert done.archived == [submitted.nonce]
    assert bridge_refs(bus) == set()
    after = archived(bus, submitted.nonce)
    assert (after.expected, after.parents, after.files) == (before.expected, (), before.files)
    assert after.alone == before.alone == (how == "deleted")
    expected = bus.expected(submitted)
    assert believe(after, trusted=NO_TRUSTED_KEYS, expected=expected).result.nonce == submitted.nonce
    assert pruned(bus).archived == []


# What stays ------------------------------------------------------------------------------------------------


def without_inbox(bus: BusFixture, nonce: str) -> None:
    bus.submit(nonce=nonce)
    bus.repo.git("update-ref", "-d", refs.INBOX + nonce, cwd=bus.repo.remote)


def put_back(prefix: str) -> Callable[[BusFixture, str], object]:
    def put(bus: BusFixture, nonce: str) -> None:
        submitted = bus.submit(nonce=nonce)
        bus.answer(submitted)
        bus.point(prefix + nonce, submitted.commit)

    return put


UNFINISHED: dict[str, Callable[[BusFixture, str], object]] = {
    "waiting": lambda bus, nonce: bus.submit(nonce=nonce),
    "waiting without an inbox entry": without_inbox,
    "running": lambda bus, nonce: bus.claim(bus.submit(nonce=nonce)),
    "answered and in the inbox": put_back(refs.INBOX),
    "answered and claimed": put_back(refs.CLAIMS),
}


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("case", UNFINISHED)
def test_unfinished_request_is_never_touched(bus: BusFixture, case: str):
    finished, nonce = answered(bus), nonce_of_age(timedelta(days=30))
    UNFINISHED[case](bus, nonce)
    before = bridge_refs(bus) - {finished.ref}
    for options in ({}, {"keep": 0, "older_than": timedelta(0)}):
        pruned(bus, **options)
        assert bridge_refs(bus) == before
    with pytest.raises(UnknownHandle):
        archived(bus, nonce)


@pytest.mark.slow
def test_retention_is_by_age_and_number(bus: BusFixture):
    young, older, oldest = (
        answered(bus, timedelta(days=days), finished_at="2026-03-31T12:00:00Z") for days in (1, 2, 20)
    )
    answered(bus, timedelta(days=-400))  # dated in the future
    before = bus.repo.git("show-ref", cwd=bus.repo.remote)
    assert pruned(bus, dry_run=True).archived == [oldest.nonce]
    assert bus.repo.git("show-ref", cwd=bus.repo.remote) == before
    assert pruned(bus, keep=3, older_than=timedelta(days=30)).archived == []
    assert pruned(bus, keep=1, limit=1).archived == [oldest.nonce]
    assert pruned(bus, keep=1).archived == [older.nonce]
    assert young.ref in bridge_refs(bus)


@pytest.mark.slow
def test_fresh_result_stays_for_a_client_that_waits(bus: BusFixture):
    answered(bus, finished_at="2026-04-01T11:30:00Z")
    done = pruned(bus, keep=0, older_than=timedelta(0))
    assert (done.archived, done.unfinished) == ([], 1)
    assert len(pruned(bus, now=NOW + timedelta(hours=1)).archived) == 1


def folder(submitted: Submitted) -> str:
    return f"{RESULT_ROOT}/{submitted.nonce}"


def with_files(parent: str, **files: str) -> Callable[[BusFixture, Submitted], str]:
    """A commit on the request, on main or on its result, with a result and these files."""

    def make(bus: BusFixture, submitted: Submitted) -> str:
        on = {"request": submitted.commit, "main": "main", "result": submitted.ref}[parent]
        sha = bus.repo.git("rev-parse", on, cwd=bus.repo.remote)
        placed = {} if parent == "result" else {f"{folder(submitted)}/result.json": b"{}"}
        placed |= {path: text.encode() for path, text in files.items()}
        return Objects(bus.repo.remote).commit_files(sha, dict(placed))

    return make


ODD: dict[str, tuple[Callable[[BusFixture, Submitted], str], str]] = {
    "commit on top": (with_files("result", **{"README.md": "my own work"}), "hold more than"),
    "no request below": (with_files("main"), "hold more than"),
}


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("case", ODD)
def test_branch_of_other_commits_stays_and_is_named(bus: BusFixture, case: str):
    make, word = ODD[case]
    odd, fine = answered(bus), answered(bus)
    bus.point(odd.ref, make(bus, odd))
    done = pruned(bus)
    assert done.archived == [fine.nonce]
    assert [(left.nonce, left.ref) for left in done.left] == [(odd.nonce, odd.ref)]
    assert word in done.left[0].reason
    assert bridge_refs(bus) == {odd.ref}


def with_rows(*rows: tuple[str, str, str]) -> Callable[[BusFixture, Submitted], str]:
    """A result folder with more rows: mode, name, and what the blob holds."""

    def make(bus: BusFixture, submitted: Submitted) -> str:
        objects = Objects(bus.repo.remote)
        inner = objects.tree((mode, name, objects.blob(text.encode())) for mode, name, text in rows)
        for name in (submitted.nonce, "results", ".mac-bridge"):
            inner = objects.tree([(FOLDER, name, inner)])
        return objects.commit(inner, [submitted.commit])

    return make


RESULT_ROW = (PLAIN, RESULT_NAME, "{}")
FORGED: dict[str, Callable[[BusFixture, Submitted], str]] = {
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
def test_forged_result_is_as_little_believed_in_the_archive(bus: BusFixture, case: str):
    forged, fine = answered(bus), answered(bus)
    bus.point(forged.ref, FORGED[case](bus, forged))
    done = pruned(bus)
    assert fine.nonce in done.archived
    if forged.nonce in done.archived:
        with pytest.raises((ResultError, BusError)):
            believe(archived(bus, forged.nonce), trusted=NO_TRUSTED_KEYS)
    else:
        assert [left.nonce for left in done.left] == [forged.nonce]
        assert done.left[0].reason.isprintable()
    assert archived(bus, fine.nonce).files


@pytest.mark.slow
def test_old_cancel_requests_and_claims_go_with_their_requests(bus: BusFixture):
    finished, fresh = answered(bus), answered(bus, timedelta(days=1), finished_at="2026-03-31T13:00:00Z")
    gone, waiting = nonce_of_age(), bus.submit(nonce=nonce_of_age())
    for nonce in (finished.nonce, fresh.nonce, gone, waiting.nonce):
        bus.point(refs.CANCELS + nonce, waiting.commit)
    before = bridge_refs(bus)
    done = pruned(bus)
    assert done.archived == [finished.nonce]
    deleted = {finished.ref, *(refs.CANCELS + nonce for nonce in (finished.nonce, fresh.nonce, gone))}
    assert before - bridge_refs(bus) == set(done.deleted) == deleted
    held = bus.claim(claimed := bus.submit(nonce=nonce_of_age()))
    bus.answer(claimed)
    made = datetime.fromisoformat(held.status.updated_at)
    early = pruned(bus, now=made + timedelta(hours=1), older_than=timedelta(0))
    assert claimed.nonce not in early.archived
    assert claimed.nonce in pruned(bus, now=made + timedelta(days=30)).archived
    assert held.ref not in bridge_refs(bus)


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
def test_forged_copy_is_one_clear_error_and_hides_no_other(bus: BusFixture, case: str):
    forged, fine = answered(bus), answered(bus)
    copy_into_archive(bus, fine.nonce)
    copy_into_archive(bus, forged.nonce, HOSTILE_COPIES[case])
    with pytest.raises((ResultError, UnknownHandle)):
        believe(archived(bus, forged.nonce), trusted=NO_TRUSTED_KEYS)
    assert fine.nonce in [entry.nonce for entry in opened(bus).newest()]
    assert archived(bus, fine.nonce).files


LINES: dict[str, tuple[str, str]] = {
    "rubbish": ("{", "{{"),
    "another month": ('"nonce":"2', '"nonce":"1'),
    "another commit": ('"places":{', '"places":{"refs/heads/x":"' + "1" * 40 + '",'),
    "an option": ("refs/heads", "--upload-pack"),
    "more in it": ("{", '{"extra":1,'),
}


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("case", LINES)
def test_forged_line_of_the_index_hides_no_other(bus: BusFixture, case: str):
    forged, fine = answered(bus), answered(bus)
    pruned(bus)
    month = f"index/{fine.nonce[:4]}-{fine.nonce[4:6]}.jsonl"
    lines = bus.repo.git("show", f"{refs.ARCHIVE}:{month}", cwd=bus.repo.remote).splitlines()
    old, new = LINES[case]
    data = "".join((line.replace(old, new, 1) if forged.nonce in line else line) + "\n" for line in lines)
    tip = bus.repo.git("rev-parse", refs.ARCHIVE, cwd=bus.repo.remote)
    forgery = {month: b"\xff\n[]\n" + data.encode()}
    bus.point(refs.ARCHIVE, Objects(bus.repo.remote).commit_files(tip, dict(forgery)))
    assert archived(bus, fine.nonce).files
    with pytest.raises((ResultError, BusError)):
        believe(archived(bus, forged.nonce), trusted=NO_TRUSTED_KEYS)
    late = answered(bus, timedelta(days=32))
    assert pruned(bus).archived == [late.nonce]


@pytest.mark.slow
def test_prune_keeps_other_lines_of_the_index_unchanged(bus: BusFixture):
    answered(bus)
    pruned(bus)
    broken = f'{{"nonce":"{nonce_of_age()}",half a line'.encode()
    tip, month = bus.repo.git("rev-parse", refs.ARCHIVE, cwd=bus.repo.remote), "index/2026-03.jsonl"
    before = bus.repo.git("show", f"{tip}:{month}", cwd=bus.repo.remote).encode()
    files: dict[str, bytes | None] = {month: broken + b"\n" + before + b"\n"}
    bus.point(refs.ARCHIVE, Objects(bus.repo.remote).commit_files(tip, files))
    late = answered(bus)
    assert pruned(bus).archived == [late.nonce]
    after = bus.repo.git("show", f"{refs.ARCHIVE}:{month}", cwd=bus.repo.remote).encode().splitlines()
    assert {broken, *before.splitlines()} < set(after)
    assert len([*opened(bus).newest()]) == 2


# Faults ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("how", ["setting", "hook"])
def test_server_that_deletes_nothing_loses_nothing_and_says_so(bus: BusFixture, how: str):
    submitted = answered(bus)
    if how == "setting":
        bus.repo.git("config", "receive.denyDeletes", "true", cwd=bus.repo.remote)
    else:
        bus.hook("update", 'case "$3" in *[1-9a-f]*) ;; *) echo "nothing is deleted here"; exit 1;; esac')
    for _ in range(2):
        done = pruned(bus)
        assert done.archived == done.deleted == []
        assert "delet" in (done.refused or "")
        assert bridge_refs(bus) == {submitted.ref}
        assert archived(bus, submitted.nonce).files == live(bus, submitted.nonce).files
    assert len(index_lines(bus)) == 1


def test_server_that_takes_no_archive_is_one_clear_error(bus: BusFixture):
    submitted = answered(bus)
    bus.hook("update", 'case "$1" in *archive) echo "no archives"; exit 1;; esac')
    with pytest.raises(PushRejected, match="no archives"):
        pruned(bus)
    assert bridge_refs(bus) == {submitted.ref}
    bus.repo.remote.rename(bus.repo.remote.with_name("away.git"))
    with pytest.raises(RemoteUnreachable):
        pruned(bus)


@pytest.mark.slow
def test_prune_killed_before_deleting_is_finished_by_the_next(bus: BusFixture):
    submitted = answered(bus)
    tip = bus.repo.git("rev-parse", submitted.ref, cwd=bus.repo.remote)
    pruned(bus)
    commit = bus.repo.git("rev-parse", refs.ARCHIVE, cwd=bus.repo.remote)
    for cache in (bus.cache, new_cache(bus)):
        bus.point(submitted.ref, tip)  # as if only the archive had been pushed
        assert pruned(bus, cache=cache).archived == [submitted.nonce]
        assert bus.repo.git("rev-parse", refs.ARCHIVE, cwd=bus.repo.remote) == commit
        assert bridge_refs(bus) == set()


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("server", ["plain", "without transactions"])
def test_prunes_at_once_archive_everything_once(bus: BusFixture, server: str):
    if server != "plain":
        bus.repo.git("config", "receive.advertiseAtomic", "false", cwd=bus.repo.remote)
    nonces = many_answered(bus, 12)
    done: list[Pruned] = []
    shared = new_cache(bus)

    def work(cache: GitCache) -> None:
        done.append(pruned(bus, cache=cache))

    threads = [threading.Thread(target=work, args=(cache,)) for cache in (shared, new_cache(bus), shared)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 3
    assert bridge_refs(bus) == set()
    assert sorted(line["nonce"] for line in index_lines(bus)) == nonces
    for nonce in nonces[::5]:
        assert believe(archived(bus, nonce), trusted=NO_TRUSTED_KEYS).result.nonce == nonce


@pytest.mark.slow
def test_server_that_takes_branches_only_has_an_archive_too(bus: BusFixture):
    bus.allow_only_branches()
    own = bus.submit(nonce=nonce_of_age())
    bus.bring(own)
    bus.repo.git("update-ref", "-d", own.ref, cwd=bus.repo.remote)
    bus.answer(own)
    on_branch = answered(bus)
    assert refs.BRANCH_RESULTS + own.nonce in bridge_refs(bus)
    assert set(pruned(bus).archived) == {own.nonce, on_branch.nonce}
    assert bridge_refs(bus) == set()
    assert archived(bus, own.nonce).parents == ()
