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
from tests.objects import PLAIN, Objects
from tests.worlds import World

LIMIT = 1 << 20


def noise(world: World, ref: str, size: int = 3 << 20) -> str:
    """A ref whose commit holds so many bytes that do not compress."""
    commit = Objects(world.house.remote).commit_files(None, {"x": os.urandom(size)})
    world.point(ref, commit)
    return commit


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def local_refs(cache: GitCache) -> list[str]:
    return cache.run("for-each-ref", "--format=%(refname)").decode().splitlines()


def test_fetched_commits_are_kept_under_names_of_our_own(world: World):
    submitted = world.submit()
    world.bring(submitted)
    assert world.cache.exists(submitted.commit)
    [ref] = local_refs(world.cache)
    assert re.fullmatch(rf"refs/kept/\d{{12}}-{submitted.commit}", ref)
    world.bring(submitted)  # fetches nothing
    assert local_refs(world.cache) == [ref]


def test_one_ref_that_is_too_large_hides_no_other(world: World):
    found = {f"refs/kk/{number}": noise(world, f"refs/kk/{number}", 1000) for number in range(5)}
    found["refs/kk/3"] = noise(world, "refs/kk/3")
    found["refs/kk/gone"] = found["refs/kk/0"][::-1]
    cache = GitCache(world.root / "small.git", world.remote, limit_bytes=LIMIT)
    failures = cache.bring(found, list(found))
    assert {name: type(error) for name, error in failures.items()} == {
        "refs/kk/3": FetchTooLarge,
        "refs/kk/gone": LeaseLost,
    }
    assert f"sends more than {LIMIT} bytes" in failures["refs/kk/3"].message
    assert all(cache.exists(sha) for name, sha in found.items() if name not in failures)
    assert not list(cache.directory.rglob("tmp_*"))
    assert size_of(cache.directory) < 2 * LIMIT
    world.house.git("update-ref", "-d", "refs/kk/3", cwd=world.house.remote)
    assert not cache.bring(found, ["refs/kk/4"])


def test_refs_of_one_commit_are_fetched_once(world: World, monkeypatch: pytest.MonkeyPatch):
    commit = noise(world, "refs/kk/0", 1000)
    lines = "".join(f"create refs/kk/{number} {commit}\n" for number in range(1, 2000))
    world.house.git("update-ref", "--stdin", cwd=world.house.remote, input=lines)
    found, fetches = world.cache.list_remote("refs/kk/"), []
    fetch = world.cache.fetch
    monkeypatch.setattr(world.cache, "fetch", lambda *a, **k: (fetches.append(a), fetch(*a, **k)))
    assert not world.cache.bring(found, list(found))
    assert len(fetches) == 1
    gone = dict.fromkeys(("refs/kk/a", "refs/kk/b"), "1" * 40)
    assert world.cache.bring(gone, list(gone)).keys() == gone.keys()


def test_ref_that_moved_after_the_listing_is_named(world: World):
    submitted, other = world.submit(), world.submit()
    world.point(submitted.ref, other.commit)
    [(name, error)] = world.cache.bring({submitted.ref: submitted.commit}, [submitted.ref]).items()
    assert (name, type(error)) == (submitted.ref, LeaseLost)


def test_objects_that_are_no_commits_are_fetched_or_named(world: World):
    objects = Objects(world.house.remote)
    blob = objects.blob(b"x")
    shas = {"blob": blob, "tree": objects.tree([(PLAIN, "x", blob)])}
    shas["tag"] = objects.write(
        "tag", f"object {blob}\ntype blob\ntag t\ntagger A <a@b> 1 +0000\n\nx\n".encode()
    )
    found = {f"refs/kk/{kind}": sha for kind, sha in shas.items()}
    for ref, sha in found.items():
        world.point(ref, sha)
    submitted = world.submit()
    found[submitted.ref] = submitted.commit
    failures = world.cache.bring(found, list(found))
    assert submitted.ref not in failures
    assert {name for name in found if world.cache.exists(found[name])} == found.keys() - failures.keys()


def test_commit_is_fetched_by_its_sha(world: World):
    submitted, gone = world.submit(), "1" * 40
    found = {submitted.commit: submitted.commit, gone: gone}
    assert world.cache.bring(found, list(found)).keys() == {gone}
    assert world.cache.commit(submitted.commit).parents


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("how", DAMAGE)
def test_broken_repository_is_rebuilt(world: World, how: str):
    submitted = world.submit()
    world.bring(submitted)

    def work() -> bytes | None:
        assert not world.cache.bring({submitted.ref: submitted.commit}, [submitted.ref])
        return world.cache.read_file(submitted.commit, ".mac-bridge/request.json", 1 << 16)

    expected = work()
    DAMAGE[how](world.cache.directory)
    world.cache.close()
    assert world.cache.recover(work) == expected
    world.cache.run("fsck", "--strict")


def test_remote_that_is_away_costs_no_repository(world: World):
    submitted = world.submit()
    world.bring(submitted)
    world.house.remote.rename(world.house.remote.with_name("away"))
    with pytest.raises(RemoteUnreachable):
        world.cache.recover(lambda: world.cache.bring({"1" * 40: "1" * 40}, ["1" * 40]))
    with pytest.raises(RemoteUnreachable):
        world.cache.rebuild()
    assert world.cache.exists(submitted.commit)


@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("broken", ["here", "there"])
def test_push_names_the_side_that_is_broken(world: World, how: str, broken: str):
    submitted = world.submit()
    world.bring(submitted)
    with world.cache.scratch() as scratch:
        commit = scratch.commit_files(submitted.commit, {"new": b"new"}, "new\n")
        DAMAGE[how](world.cache.directory if broken == "here" else world.house.remote)
        with pytest.raises(BusError) as caught:
            scratch.push(
                world.remote, [RefUpdate("refs/heads/new", commit, ""), RefUpdate("refs/n", commit, "")]
            )
    theirs = isinstance(caught.value, RemoteUnreachable | PushRejected | LeaseLost)
    assert theirs == (broken == "there"), caught.value
    if broken == "here":
        assert "refs/heads/new" not in world.house.remote_refs()


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("bound", ["MAX_PACKS", "MAX_BYTES"])
def test_what_comes_and_goes_takes_bounded_space(world: World, monkeypatch: pytest.MonkeyPatch, bound: str):
    monkeypatch.setattr(caching, "KEPT_S", -1)
    monkeypatch.setattr(caching, bound, 3 if bound == "MAX_PACKS" else LIMIT)
    for _ in range(5):
        found = {"refs/kk/x": noise(world, "refs/kk/x", LIMIT // 2)}
        assert not world.cache.bring(found, list(found))
        assert world.cache.exists(found["refs/kk/x"])
    assert size_of(world.cache.directory) < 3 * LIMIT
    assert len(local_refs(world.cache)) <= 4


def test_what_is_asked_for_again_stays(world: World, monkeypatch: pytest.MonkeyPatch):
    submitted = world.submit()
    monkeypatch.setattr("bridge.git.cache.MAX_BYTES", 1)
    found = world.cache.list_remote(submitted.ref)
    for _ in range(2):
        assert world.cache.bring(found, [submitted.ref]) == {}
        assert world.cache.exists(submitted.commit)


@pytest.mark.slow
def test_what_unpacks_to_a_thousand_times_its_size_stays_small(world: World):
    commit = Objects(world.house.remote).commit_files(None, {"x": bytes(64 << 20)})
    world.point("refs/kk/x", commit)
    assert not world.cache.bring({"refs/kk/x": commit}, ["refs/kk/x"])
    assert size_of(world.cache.directory) < 4 << 20


@pytest.mark.slow
def test_several_processes_and_threads_share_one_repository(world: World):
    requests = [world.submit() for _ in range(6)]
    errors: list[object] = []

    def bring(part: list[int]) -> None:
        cache = GitCache(world.cache.directory, world.remote)  # as another process has it
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
    assert all(world.cache.exists(one.commit) for one in requests)


def test_checkouts_own_way_to_a_remote_is_used(world: World):
    submitted = world.submit()
    world.house.git("config", f"url.{world.remote}.insteadOf", "bus:")
    cache = GitCache(world.root / "own.git", "bus:", origin=GitRepo(world.house.clone))
    found = cache.list_remote(submitted.ref)
    assert found == {submitted.ref: submitted.commit}
    assert not cache.bring(found, list(found))
