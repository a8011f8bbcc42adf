"""A prune archives first, deletes then, touches nothing unfinished and loses nothing, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus import archive as archiving
from bridge.bus.archive import Pruned
from bridge.bus.archived import find_request, is_archived
from bridge.bus.git import Git
from bridge.bus.results import Standing, believe
from bridge.errors import ResultError, UnknownHandle
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_BYTES
from bridge.protocol.result import RESULT_ROOT
from tests import houses
from tests.bridge.bus.archives import (
    NOBODY,
    NOW,
    answered,
    archive_listing,
    archived,
    bridge_refs,
    live,
    many_answered,
    nonce_of_age,
    pruned,
)
from tests.worlds import FILES, World, make_world, snapshot


@pytest.fixture(params=["plain server", "server with filters"])
def any_world(world: World, request: pytest.FixtureRequest) -> World:
    if request.param != "plain server":
        world.house.git("config", "uploadpack.allowFilter", "true", cwd=world.house.remote)
    return world


def test_what_was_believed_is_believed_as_before(any_world: World):
    world = any_world
    submitted = answered(world)
    before, checkout = live(world, submitted.nonce), snapshot(world.house.clone)
    done = pruned(world)
    assert (done.archived, done.deleted, done.left) == ((submitted.nonce,), (submitted.ref,), ())
    assert bridge_refs(world) == set()
    for handle in (submitted.nonce, submitted.ref, submitted.ref[11:], f"probe-{submitted.nonce[:15]}"):
        after = archived(world, handle)
        assert (after.asked, after.files, after.commit) == (before.asked, before.files, before.commit)
    then, now = believe(before, trusted=NOBODY), believe(after, trusted=NOBODY)
    assert (then.result, then.files, then.signature) == (now.result, now.files, now.signature)
    assert now.ref == refs.ARCHIVE
    assert snapshot(world.house.clone) == checkout
    folder = f"2026-03/01/{submitted.nonce}"
    names = ["archived.json", "request.json", *(f"result/{name}" for name in sorted([*FILES, "result.json"]))]
    assert archive_listing(world) == [f"{folder}/{name}" for name in names]


def test_the_request_itself_is_kept_as_it_was_asked(any_world: World):
    world = any_world
    submitted, head = answered(world), world.house.git("rev-parse", "HEAD")
    path = f"{submitted.commit}:.mac-bridge/request.json"
    data = world.house.git("cat-file", "blob", path, cwd=world.house.remote).encode()
    pruned(world)
    kept = find_request(world.root / "state", world.remote, submitted.nonce, origin=world.git)
    assert kept is not None
    assert (kept.commit, kept.parent, kept.signature) == (submitted.commit, head, None)
    assert kept.data.strip() == data.strip()
    assert find_request(None, world.remote, nonce_of_age(), origin=world.git) is None


@pytest.mark.parametrize("case", ["gone", "too large"])
def test_a_request_that_somebody_changed_in_the_archive_is_not_handed_out(world: World, case: str):
    nonce = answered(world).nonce
    pruned(world)
    path = f"2026-03/01/{nonce}/request.json"
    tip = world.house.git("rev-parse", refs.ARCHIVE, cwd=world.house.remote)
    changed = None if case == "gone" else b" " * (MAX_BYTES + 1)
    world.point(refs.ARCHIVE, world.commit(tip, {path: changed}))
    assert find_request(None, world.remote, nonce, origin=world.git) is None


def test_a_signature_counts_in_the_archive_as_it_did(world: World, tmp_path: Path):
    key = signing.ensure_key(tmp_path / "key", "runner")
    trusted = tmp_path / "trusted"
    trusted.write_text(signing.allowed_line(signing.public_key(key), "testmac", signing.RESULT_NAMESPACE))
    signed = world.submit(nonce=nonce_of_age())
    data = world.result(world.asked(signed))
    world.answer(signed, result=data, signature=signing.sign(key, signing.RESULT_NAMESPACE, data))
    unsigned = answered(world)
    assert set(pruned(world).archived) == {signed.nonce, unsigned.nonce}
    assert believe(archived(world, signed.nonce), trusted=trusted).signature is Standing.TRUSTED
    with pytest.raises(ResultError, match="no signature"):
        believe(archived(world, unsigned.nonce), trusted=trusted)


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("how", ["deleted", "moved", "refused"])
def test_a_result_on_a_ref_of_its_own_is_archived(world: World, how: str):
    submitted = world.submit(nonce=nonce_of_age())
    ours = world.commit(submitted.commit, {"README.md": b"mine now"})
    if how == "moved":
        world.point(submitted.ref, ours)
    else:
        world.house.git("update-ref", "-d", submitted.ref, cwd=world.house.remote)
    world.answer(submitted)
    if how == "refused":
        world.point(submitted.ref, submitted.commit)  # as a refusal without a branch leaves it
    before = live(world, submitted.nonce)
    done = pruned(world)
    assert done.archived == (submitted.nonce,)
    assert refs.result_ref(submitted.nonce) in done.deleted
    assert bridge_refs(world) == ({submitted.ref} if how == "moved" else set())
    assert [left.ref for left in done.left] == ([submitted.ref] if how == "moved" else [])
    after = archived(world, submitted.nonce)
    assert (after.asked, after.parents, after.files) == (before.asked, (), before.files)
    assert after.alone == before.alone == (how == "deleted")
    assert believe(after, trusted=NOBODY, asked=world.asked(submitted)).result.nonce == submitted.nonce
    assert pruned(world).archived == ()


def unanswered(world: World, nonce: str) -> None:
    world.submit(nonce=nonce)


def without_inbox(world: World, nonce: str) -> None:
    world.submit(nonce=nonce)
    world.house.git("update-ref", "-d", refs.inbox_ref(nonce), cwd=world.house.remote)


def running(world: World, nonce: str) -> None:
    world.submit(nonce=nonce)
    [pending] = [one for one in world.mirror.refresh() if one.nonce == nonce]
    world.claim(pending)


UNFINISHED: dict[str, Callable[[World, str], None]] = {
    "waiting": unanswered,
    "waiting without an inbox entry": without_inbox,
    "running": running,
}


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("case", UNFINISHED)
def test_an_unfinished_request_is_never_touched(world: World, case: str):
    finished = answered(world)
    nonce = nonce_of_age(timedelta(days=30))
    UNFINISHED[case](world, nonce)
    before = bridge_refs(world) - {finished.ref}
    for options in ({}, {"keep": 0, "older_than": timedelta(0)}):
        pruned(world, **options)
        assert bridge_refs(world) == before
    with pytest.raises(UnknownHandle):
        archived(world, nonce)


def test_an_answered_request_that_is_claimed_or_put_back_stays(world: World):
    for ref_of in (refs.claim_ref, refs.inbox_ref):
        submitted = answered(world)
        world.point(ref_of(submitted.nonce), submitted.commit)
    before = bridge_refs(world)
    assert pruned(world).archived == ()
    assert bridge_refs(world) == before


@pytest.mark.slow
def test_what_is_young_or_among_the_newest_stays(world: World):
    young, older, oldest = (
        answered(world, timedelta(days=days), finished_at="2026-03-31T12:00:00Z") for days in (1, 2, 20)
    )
    assert pruned(world, dry_run=True).archived == (oldest.nonce,)
    assert pruned(world, keep=3, older_than=timedelta(days=30)).archived == ()
    assert pruned(world, keep=1, limit=1).archived == (oldest.nonce,)
    assert pruned(world, keep=1).archived == (older.nonce,)
    assert bridge_refs(world) == {young.ref}


def test_a_result_of_this_hour_stays_for_whoever_waits_for_it(world: World):
    answered(world, finished_at="2026-04-01T11:30:00Z")
    done = pruned(world, keep=0, older_than=timedelta(0))
    assert (done.archived, done.unfinished) == ((), 1)
    assert len(pruned(world, now=NOW + timedelta(hours=1)).archived) == 1


def test_a_replay_of_an_archived_request_can_be_told(world: World):
    submitted, found = answered(world), dict[str, str]()
    for expected in (False, True):
        found = world.git.ls_remote(world.remote)
        assert is_archived(None, world.remote, submitted.nonce, found=found) is expected
        pruned(world)
    assert not is_archived(None, world.remote, nonce_of_age(), found=found)


def test_a_dry_run_changes_nothing_on_the_remote(world: World):
    submitted = answered(world)
    before = world.house.git("show-ref", cwd=world.house.remote)
    assert pruned(world, dry_run=True).archived == (submitted.nonce,)
    assert world.house.git("show-ref", cwd=world.house.remote) == before


@pytest.mark.sampled(2, 1)
def test_a_prune_that_was_killed_before_deleting_is_finished_by_the_next(any_world: World):
    world = any_world
    submitted = answered(world)
    tip = world.house.git("rev-parse", submitted.ref, cwd=world.house.remote)
    pruned(world)
    commit = world.house.git("rev-parse", refs.ARCHIVE, cwd=world.house.remote)
    world.point(submitted.ref, tip)  # as if only the archive had been pushed
    for folder in (world.root / "state", world.root / "another"):
        assert pruned(world, folder=folder).archived == (submitted.nonce,)
        assert world.house.git("rev-parse", refs.ARCHIVE, cwd=world.house.remote) == commit
        assert bridge_refs(world) == set()
        world.point(submitted.ref, tip)


@pytest.mark.slow
def test_another_result_of_an_archived_name_is_left_alone(world: World):
    submitted = answered(world)
    pruned(world)
    world.point(submitted.ref, submitted.commit)
    world.answer(submitted, result=world.result(world.asked(submitted), attempt=2))
    done = pruned(world)
    assert done.archived == ()
    assert "another result" in done.left[0].reason
    assert bridge_refs(world) == {submitted.ref}
    assert believe(archived(world, submitted.nonce), trusted=NOBODY).result.attempt == 1


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("server", ["plain", "without transactions"])
def test_two_prunes_beside_each_other_archive_everything_once(world: World, server: str):
    if server != "plain":
        world.house.git("config", "receive.advertiseAtomic", "false", cwd=world.house.remote)
    nonces = many_answered(world, 12)
    done: list[Pruned] = []

    def work(name: str) -> None:
        done.append(pruned(world, folder=world.root / name, origin=Git(world.house.clone)))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two", "one")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 3
    assert bridge_refs(world) == set()
    records = [name for name in archive_listing(world) if name.endswith("archived.json")]
    assert len(records) == len(nonces)
    for nonce in nonces[::5]:
        assert believe(archived(world, nonce), trusted=NOBODY).result.nonce == nonce


def test_batches_go_on_where_the_last_ended(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archiving, "BATCH", 3)
    nonces = many_answered(world, 8)
    seen: list[tuple[int, int]] = []
    done = pruned(world, limit=4)
    assert (done.archived, done.remaining) == (tuple(nonces[:4]), 4)
    done = pruned(world, progress=lambda now, total: seen.append((now, total)))
    assert (done.archived, done.remaining) == (tuple(nonces[4:]), 0)
    assert seen == [(3, 4), (4, 4)]
    assert world.house.git("rev-list", "--count", refs.ARCHIVE, cwd=world.house.remote) == "4"


@pytest.mark.slow
def test_stale_wishes_to_stop_and_claims_go_with_their_requests(world: World):
    finished, fresh = answered(world), answered(world, timedelta(days=1), finished_at="2026-03-31T13:00:00Z")
    gone, waiting = nonce_of_age(), world.submit(nonce=nonce_of_age())
    for nonce in (finished.nonce, fresh.nonce, gone, waiting.nonce):
        world.point(refs.CANCELS + nonce, waiting.commit)
    before = bridge_refs(world)
    done = pruned(world)
    assert done.archived == (finished.nonce,)
    assert before - bridge_refs(world) == {
        finished.ref, *(refs.CANCELS + nonce for nonce in (finished.nonce, fresh.nonce, gone))
    }  # fmt: skip
    assert set(done.deleted) == before - bridge_refs(world)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("old", [True, False])
def test_only_a_claim_that_was_forgotten_goes_with_its_request(world: World, old: bool):
    submitted = world.submit(nonce=nonce_of_age())
    [pending] = world.mirror.refresh()
    held = world.claim(pending)
    world.answer(submitted)
    made = datetime.fromisoformat(held.status.updated_at)
    now = made + timedelta(days=30 if old else 0, hours=1)
    done = pruned(world, now=now, older_than=timedelta(0))
    assert bool(done.archived) is old
    assert bool(bridge_refs(world)) is not old


@pytest.mark.slow
def test_a_server_that_takes_branches_only_has_an_archive_too(world: World):
    world.take_branches_only()
    beside = world.submit(nonce=nonce_of_age())
    world.house.git("update-ref", "-d", beside.ref, cwd=world.house.remote)
    world.answer(beside)
    on_branch = answered(world)
    assert refs.BRANCH_RESULTS + beside.nonce in bridge_refs(world)
    assert set(pruned(world).archived) == {beside.nonce, on_branch.nonce}
    assert bridge_refs(world) == set()
    assert archived(world, beside.nonce).parents == ()


@pytest.mark.exhaustive
def test_three_hundred_requests_go_in_one_call(world: World):
    nonces = many_answered(world, 300)
    assert pruned(world, keep=0).archived == tuple(nonces)
    assert bridge_refs(world) == set()
    for nonce in nonces[::60]:
        assert believe(archived(world, nonce), trusted=NOBODY).result.nonce == nonce
    assert RESULT_ROOT not in "".join(archive_listing(world))


@pytest.mark.slow
def test_a_remote_of_the_longer_hash_is_pruned_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    isolated = houses.isolated_env
    monkeypatch.setattr(houses, "isolated_env", lambda root: {**isolated(root), "GIT_DEFAULT_HASH": "sha256"})
    world = make_world(tmp_path, monkeypatch)
    submitted = answered(world)
    assert len(submitted.commit) == 64
    assert pruned(world).archived == (submitted.nonce,)
    assert believe(archived(world, submitted.nonce), trusted=NOBODY).result.nonce == submitted.nonce
