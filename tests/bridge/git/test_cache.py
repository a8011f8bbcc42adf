"""The repository of one remote: fetched by exact name, bounded, rebuilt where it breaks."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from bridge.errors import BusError, FetchTooLarge, LeaseLost, PushRejected, RemoteUnreachable
from bridge.git import cache as caching
from bridge.git.cache import GitCache
from bridge.git.repo import GitRepo, RefUpdate
from tests.bridge.git.damage import DAMAGE
from tests.fixtures.bus import BusFixture
from tests.objects import PLAIN, Objects

LIMIT = 1 << 20


def noise(bus: BusFixture, ref: str, size: int = 3 << 20) -> str:
    """A ref whose commit holds so many bytes that do not compress."""
    commit = Objects(bus.repo.remote).commit_files(None, {"x": os.urandom(size)})
    bus.point(ref, commit)
    return commit


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def local_refs(cache: GitCache) -> list[str]:
    return cache.run("for-each-ref", "--format=%(refname)").decode().splitlines()


def test_fetched_commits_are_kept_under_names_of_our_own(bus: BusFixture):
    submitted = bus.submit()
    bus.bring(submitted)
    assert bus.cache.exists(submitted.commit)
    [ref] = local_refs(bus.cache)
    assert re.fullmatch(rf"refs/kept/\d{{12}}-{submitted.commit}", ref)
    bus.bring(submitted)  # fetches nothing
    assert local_refs(bus.cache) == [ref]


def test_one_ref_that_is_too_large_hides_no_other(bus: BusFixture):
    found = {f"refs/kk/{number}": noise(bus, f"refs/kk/{number}", 1000) for number in range(5)}
    found["refs/kk/3"] = noise(bus, "refs/kk/3")
    found["refs/kk/gone"] = found["refs/kk/0"][::-1]
    cache = GitCache(bus.root / "small.git", bus.remote, limit_bytes=LIMIT)
    failures = cache.bring(found, list(found))
    assert {name: type(error) for name, error in failures.items()} == {
        "refs/kk/3": FetchTooLarge,
        "refs/kk/gone": LeaseLost,
    }
    assert f"sends more than {LIMIT} bytes" in failures["refs/kk/3"].message
    assert all(cache.exists(sha) for name, sha in found.items() if name not in failures)
    assert not list(cache.directory.rglob("tmp_*"))
    assert size_of(cache.directory) < 2 * LIMIT
    bus.repo.git("update-ref", "-d", "refs/kk/3", cwd=bus.repo.remote)
    assert not cache.bring(found, ["refs/kk/4"])


@pytest.mark.slow
def test_refs_of_one_commit_are_fetched_once(bus: BusFixture, monkeypatch: pytest.MonkeyPatch):
    commit = noise(bus, "refs/kk/0", 1000)
    lines = "".join(f"create refs/kk/{number} {commit}\n" for number in range(1, 2000))
    bus.repo.git("update-ref", "--stdin", cwd=bus.repo.remote, input=lines)
    found, fetches = bus.cache.list_remote("refs/kk/"), []
    fetch = bus.cache.fetch
    monkeypatch.setattr(bus.cache, "fetch", lambda *a, **k: (fetches.append(a), fetch(*a, **k)))
    assert not bus.cache.bring(found, list(found))
    assert len(fetches) == 1
    gone = dict.fromkeys(("refs/kk/a", "refs/kk/b"), "1" * 40)
    assert bus.cache.bring(gone, list(gone)).keys() == gone.keys()


def test_ref_that_moved_after_the_listing_is_named(bus: BusFixture):
    submitted, other = bus.submit(), bus.submit()
    bus.point(submitted.ref, other.commit)
    [(name, error)] = bus.cache.bring({submitted.ref: submitted.commit}, [submitted.ref]).items()
    assert (name, type(error)) == (submitted.ref, LeaseLost)


def test_objects_that_are_no_commits_are_fetched_or_named(bus: BusFixture):
    objects = Objects(bus.repo.remote)
    blob = objects.blob(b"x")
    shas = {"blob": blob, "tree": objects.tree([(PLAIN, "x", blob)])}
    shas["tag"] = objects.write(
        "tag", f"object {blob}\ntype blob\ntag t\ntagger A <a@b> 1 +0000\n\nx\n".encode()
    )
    found = {f"refs/kk/{kind}": sha for kind, sha in shas.items()}
    for ref, sha in found.items():
        bus.point(ref, sha)
    submitted = bus.submit()
    found[submitted.ref] = submitted.commit
    failures = bus.cache.bring(found, list(found))
    assert submitted.ref not in failures
    assert {name for name in found if bus.cache.exists(found[name])} == found.keys() - failures.keys()


def test_commit_is_fetched_by_its_sha(bus: BusFixture):
    submitted, gone = bus.submit(), "1" * 40
    found = {submitted.commit: submitted.commit, gone: gone}
    assert bus.cache.bring(found, list(found)).keys() == {gone}
    assert bus.cache.commit(submitted.commit).parents


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("how", DAMAGE)
def test_broken_repository_is_rebuilt(bus: BusFixture, how: str):
    submitted = bus.submit()
    bus.bring(submitted)

    def work() -> bytes | None:
        assert not bus.cache.bring({submitted.ref: submitted.commit}, [submitted.ref])
        return bus.cache.read_file(submitted.commit, ".mac-bridge/request.json", 1 << 16)

    expected = work()
    DAMAGE[how](bus.cache.directory)
    bus.cache.close()
    assert bus.cache.recover(work) == expected
    bus.cache.run("fsck", "--strict")


def test_remote_that_is_away_costs_no_repository(bus: BusFixture):
    submitted = bus.submit()
    bus.bring(submitted)
    bus.repo.remote.rename(bus.repo.remote.with_name("away"))
    with pytest.raises(RemoteUnreachable):
        bus.cache.recover(lambda: bus.cache.bring({"1" * 40: "1" * 40}, ["1" * 40]))
    with pytest.raises(RemoteUnreachable):
        bus.cache.rebuild()
    assert bus.cache.exists(submitted.commit)


@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("broken", ["here", "there"])
def test_push_names_the_side_that_is_broken(bus: BusFixture, how: str, broken: str):
    submitted = bus.submit()
    bus.bring(submitted)
    with bus.cache.scratch() as scratch:
        commit = scratch.commit_files(submitted.commit, {"new": b"new"}, "new\n")
        DAMAGE[how](bus.cache.directory if broken == "here" else bus.repo.remote)
        with pytest.raises(BusError) as caught:
            scratch.push(
                bus.remote, [RefUpdate("refs/heads/new", commit, ""), RefUpdate("refs/n", commit, "")]
            )
    theirs = isinstance(caught.value, RemoteUnreachable | PushRejected | LeaseLost)
    assert theirs == (broken == "there"), caught.value
    if broken == "here":
        assert "refs/heads/new" not in bus.repo.remote_refs()


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("bound", ["MAX_PACKS", "MAX_BYTES"])
def test_what_comes_and_goes_takes_bounded_space(
    bus: BusFixture, monkeypatch: pytest.MonkeyPatch, bound: str
):
    monkeypatch.setattr(caching, "KEPT_S", -1)
    monkeypatch.setattr(caching, bound, 3 if bound == "MAX_PACKS" else LIMIT)
    for _ in range(5):
        found = {"refs/kk/x": noise(bus, "refs/kk/x", LIMIT // 2)}
        assert not bus.cache.bring(found, list(found))
        assert bus.cache.exists(found["refs/kk/x"])
    assert size_of(bus.cache.directory) < 3 * LIMIT
    assert len(local_refs(bus.cache)) <= 4


def test_what_is_asked_for_again_stays(bus: BusFixture, monkeypatch: pytest.MonkeyPatch):
    submitted = bus.submit()
    monkeypatch.setattr("bridge.git.cache.MAX_BYTES", 1)
    found = bus.cache.list_remote(submitted.ref)
    for _ in range(2):
        assert bus.cache.bring(found, [submitted.ref]) == {}
        assert bus.cache.exists(submitted.commit)


def test_fetch_with_a_deadline_is_bounded_and_cleans_nothing(
    bus: BusFixture, monkeypatch: pytest.MonkeyPatch
):
    kept, claim = noise(bus, "refs/kk/kept", 1000), noise(bus, "refs/kk/claim", 1000)
    large = noise(bus, "refs/kk/large", 1 << 20)
    monkeypatch.setattr(caching, "MAX_BYTES", 0)
    monkeypatch.setattr(caching, "HEARTBEAT_FETCH_BYTES", 100_000)
    assert not bus.cache.bring({"refs/kk/kept": kept}, ["refs/kk/kept"])
    with bus.cache.deadline():
        assert not bus.cache.bring({"refs/kk/claim": claim}, ["refs/kk/claim"])
        assert bus.cache.exists(kept), "a running job may need it"
        failed = bus.cache.bring({"refs/kk/large": large}, ["refs/kk/large"])
    assert isinstance(failed["refs/kk/large"], FetchTooLarge)
    monkeypatch.setattr(caching, "HEARTBEAT_FETCH_S", 0)
    with bus.cache.deadline():
        failed = bus.cache.bring({"refs/kk/large": large}, ["refs/kk/large"])
    assert isinstance(failed["refs/kk/large"], RemoteUnreachable)
    assert not bus.cache.bring({"refs/kk/large": large}, ["refs/kk/large"])
    assert not bus.cache.exists(kept)


def test_what_a_fetch_left_behind_is_removed_by_the_next(bus: BusFixture):
    submitted = bus.submit()
    part = bus.cache.objects / "pack" / "tmp_pack_Ab12cd"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(b"broken off")
    bus.bring(submitted)
    assert not part.exists()


@pytest.mark.slow
def test_what_unpacks_to_a_thousand_times_its_size_stays_small(bus: BusFixture):
    commit = Objects(bus.repo.remote).commit_files(None, {"x": bytes(64 << 20)})
    bus.point("refs/kk/x", commit)
    assert not bus.cache.bring({"refs/kk/x": commit}, ["refs/kk/x"])
    assert size_of(bus.cache.directory) < 4 << 20


@pytest.mark.slow
def test_several_processes_and_threads_share_one_repository(bus: BusFixture):
    requests = [bus.submit() for _ in range(6)]
    errors: list[object] = []

    def bring(part: list[int]) -> None:
        cache = GitCache(bus.cache.directory, bus.remote)  # as another process has it
        try:
            for number in part:
                one = requests[number]
                errors.extend(cache.bring({one.ref: one.commit}, [one.ref]).values())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=bring, args=(part,)) for part in ([0, 1, 2, 3], [2, 3, 4, 5], [5, 0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert all(bus.cache.exists(one.commit) for one in requests)


def test_checkouts_own_way_to_a_remote_is_used(bus: BusFixture):
    submitted = bus.submit()
    bus.repo.git("config", f"url.{bus.remote}.insteadOf", "bus:")
    cache = GitCache(bus.root / "own.git", "bus:", origin=GitRepo(bus.repo.clone))
    found = cache.list_remote(submitted.ref)
    assert found == {submitted.ref: submitted.commit}
    assert not cache.bring(found, list(found))
