"""Requests that are on branches alone are found, at a cost that follows what is new and not what ever was."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from bridge.bus import scan
from bridge.bus.git import Git
from bridge.bus.mirror import Mirror
from bridge.bus.requests import build
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_LIFETIME, MAX_NONCE_SKEW
from tests.bridge.bus.archives import NOW, many_answered, nonce_of_age
from tests.worlds import World


class Scans:
    """A runner's mirror, process by process, and which branches each look fetched."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seconds = 0.0
        self.fetched: list[str] = []
        self.listed = 0
        self.start()

    def start(self, interval_s: float = 0.0) -> None:
        """Begin anew, as after a restart: the folder stays."""
        directory = self.world.root / "state" / "scans.git"
        self.mirror = Mirror(
            directory,
            self.world.remote,
            scan_interval_s=interval_s,
            clock=lambda: self.seconds,
            now=lambda: NOW,
        )
        git = self.mirror.git
        fetch, ls_remote = git.fetch, git.ls_remote

        def counted_fetch(remote: str, specs: Sequence[str], **options: Any) -> None:
            self.fetched += [spec[1:].partition("*:")[0] for spec in specs if "refs/scanned/" in spec]
            fetch(remote, specs, **options)

        def counted_ls_remote(remote: str, *patterns: str) -> dict[str, str]:
            self.listed += bool(patterns)
            return ls_remote(remote, *patterns)

        git.fetch, git.ls_remote = counted_fetch, counted_ls_remote  # type: ignore[method-assign]

    def look(self) -> list[str]:
        """Nonces of what is pending."""
        self.fetched.clear()
        return [pending.nonce for pending in self.mirror.refresh()]

    def kept(self) -> int:
        return len(self.mirror.git.refs("refs/scanned/"))


@pytest.fixture
def scans(world: World) -> Scans:
    return Scans(world)


def on_branches(world: World, count: int, age: timedelta = timedelta(hours=1)) -> list[str]:
    """Requests on their branches alone, oldest first."""
    git, workload = Git(world.house.remote), world.house.git("rev-parse", "HEAD")
    nonces = []
    for number in range(count):
        nonce = nonce_of_age(age - timedelta(seconds=number))
        manifest = world.manifest(nonce=nonce, workload_sha=workload)
        world.point(manifest.result_ref, build(git, manifest, None))
        nonces.append(nonce)
    git.close()
    return nonces


def junk(world: World, count: int, age: timedelta = timedelta(minutes=1)) -> list[str]:
    """Branches that are named like requests and are none."""
    head = world.house.git("rev-parse", "HEAD")
    nonces = [nonce_of_age(age - timedelta(milliseconds=number)) for number in range(count)]
    lines = [f"create refs/heads/mac-bridge/probe-{nonce} {head}\n" for nonce in nonces]
    world.house.git("update-ref", "--stdin", cwd=world.house.remote, input="".join(lines))
    return nonces


def test_one_scan_fetches_sixty_four_branches_and_each_of_them_once(scans: Scans) -> None:
    names = {f"refs/heads/mac-bridge/probe-{nonce}" for nonce in junk(scans.world, 150)}
    fetched = []
    for expected in (64, 64, 22, 0, 0):
        assert scans.look() == []
        assert len(scans.fetched) == expected
        fetched += scans.fetched
    assert set(fetched) == names
    assert scans.kept() == 0, "what is no open request leaves no ref here"


def test_the_newest_are_looked_at_first_and_a_flood_hides_nobody_for_ever(
    scans: Scans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "_COUNT", 5)
    [old] = on_branches(scans.world, 1, timedelta(days=2))
    [new] = on_branches(scans.world, 1, timedelta(seconds=1))
    junk(scans.world, 12)
    assert scans.look() == [new]
    found: list[str] = []
    looks = 1
    while old not in found:
        found = scans.look()
        looks += 1
    assert looks == 3  # fourteen branches, five a scan
    assert found == [old, new]


def test_what_is_answered_is_fetched_once_and_once_more_after_a_restart(
    scans: Scans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "_COUNT", 4)
    finished = many_answered(scans.world, 6, timedelta(days=3))
    [waiting] = on_branches(scans.world, 1)
    for expected in (4, 3, 0):
        assert scans.look() == [waiting]
        assert len(scans.fetched) == expected
    scans.start()
    seen: list[str] = []
    for expected in (4, 2, 0):
        assert scans.look() == [waiting], "an answered request came back after a restart"
        assert len(scans.fetched) == expected
        seen += scans.fetched
    assert {refs.parse_request_ref(ref).nonce for ref in seen} == set(finished)  # type: ignore[union-attr]
    assert scans.kept() == 1


def test_what_waits_is_known_after_a_restart_at_once(scans: Scans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_COUNT", 2)
    waiting = on_branches(scans.world, 4)
    scans.look()
    assert scans.look() == waiting
    scans.start()
    assert scans.look() == waiting
    assert scans.fetched == []


def test_what_a_scan_that_was_cut_short_left_is_judged_by_the_next(scans: Scans) -> None:
    """Killed after it had fetched the branches and before it dropped the answered ones."""
    finished = many_answered(scans.world, 2, timedelta(days=3))
    [waiting] = on_branches(scans.world, 1)
    scans.look()
    specs = [f"+refs/heads/mac-bridge/probe-{n}:refs/scanned/mac-bridge/probe-{n}" for n in finished]
    directory = scans.mirror.git.directory
    scans.world.house.git("fetch", "--quiet", "--depth=2", scans.world.remote, *specs, cwd=directory)
    scans.start()
    assert scans.kept() == 3
    assert scans.look() == [waiting]
    assert scans.fetched == []
    assert scans.kept() == 1


def test_what_is_answered_meanwhile_leaves_with_the_next_scan(scans: Scans) -> None:
    world = scans.world
    first, second = on_branches(world, 2)
    assert scans.look() == [first, second]
    ref = f"refs/heads/mac-bridge/probe-{first}"
    tip = world.house.git("rev-parse", ref, cwd=world.house.remote)
    path = f".mac-bridge/results/{first}/result.json"
    for restart in (False, True):
        world.point(ref, world.commit(tip, {path: b"{}"}))
        if restart:
            scans.start()
        scans.look()
        assert scans.look() == [second]
        scans.look()
        assert scans.fetched == []
        assert scans.kept() == 1
        world.point(ref, tip)  # put back by force
        scans.look()
        assert scans.look() == [first, second]


def test_what_is_deleted_leaves_with_the_next_scan(scans: Scans) -> None:
    [nonce] = on_branches(scans.world, 1)
    assert scans.look() == [nonce]
    ref = f"refs/heads/mac-bridge/probe-{nonce}"
    scans.world.house.git("update-ref", "-d", ref, cwd=scans.world.house.remote)
    assert scans.look() == []
    assert scans.kept() == 0


def test_branches_older_than_any_request_may_live_are_not_fetched(scans: Scans) -> None:
    longest = MAX_LIFETIME + MAX_NONCE_SKEW
    many_answered(scans.world, 3, longest + timedelta(days=1))
    on_branches(scans.world, 1, longest + timedelta(seconds=1))
    [oldest] = on_branches(scans.world, 1, longest - timedelta(seconds=1))
    assert scans.look() == [oldest]
    assert len(scans.fetched) == 1


def test_what_is_in_the_inbox_is_not_fetched_from_its_branch(scans: Scans) -> None:
    submitted = scans.world.submit(nonce=nonce_of_age(timedelta(hours=1)))
    assert scans.look() == [submitted.nonce]
    assert scans.fetched == []
    inbox = refs.inbox_ref(submitted.nonce)
    scans.world.house.git("update-ref", "-d", inbox, cwd=scans.world.house.remote)
    assert scans.look() == [submitted.nonce]
    assert scans.fetched == [submitted.ref]


def test_branches_are_listed_once_an_interval_or_when_asked_for(scans: Scans) -> None:
    scans.start(interval_s=60.0)
    assert scans.look() == []
    [nonce] = on_branches(scans.world, 1)
    scans.listed = 0
    for _ in range(3):
        scans.seconds += 19.9
        assert scans.look() == []
    assert scans.listed == 0
    scans.seconds += 0.5
    assert scans.look() == [nonce]
    [other] = on_branches(scans.world, 1, timedelta(minutes=1))
    assert scans.look() == [nonce]
    scans.mirror.scan_next()
    assert scans.look() == [nonce, other]
    assert scans.listed == 2


def test_finished_branches_cost_an_idle_look_nothing(scans: Scans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their number: no fetch of their own, no ref here, and no question of git's about them."""
    junk(scans.world, 60)
    scans.look()
    asked: list[str] = []
    ask = scans.mirror.git.kind_and_size

    def counted(name: str) -> tuple[str | None, int]:
        asked.append(name)
        return ask(name)  # type: ignore[return-value]

    monkeypatch.setattr(scans.mirror.git, "kind_and_size", counted)
    for _ in range(3):
        scans.look()
        assert scans.fetched == []
    assert asked == []


def test_names_that_only_look_like_requests_are_not_fetched(scans: Scans) -> None:
    head = scans.world.house.git("rev-parse", "HEAD")
    for name in ("notes", "probe-20260301", f"probe-{nonce_of_age(timedelta())}-more", "deep/probe"):
        scans.world.point(f"refs/heads/mac-bridge/{name}", head)
    assert scans.look() == []
    assert scans.fetched == []
