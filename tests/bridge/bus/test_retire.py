"""Only what is exactly a runner's answer is retired; whatever is odd stays, is named, and stops nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bridge.bus import retire
from bridge.bus.archive_record import folder_of
from bridge.bus.cache import Cache, TooMuch
from bridge.bus.git import Git
from bridge.bus.objects import Entry
from bridge.bus.publish import TRAILER
from bridge.bus.requests import FOLDER, Submitted
from bridge.bus.results import believe
from bridge.bus.retire import Standing, due, standings
from bridge.errors import BusError, ResultError, UnknownHandle
from bridge.protocol import refs
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT
from tests.bridge.bus.archives import (
    NOBODY,
    NOW,
    answered,
    archived,
    bridge_refs,
    nonce_of_age,
    pruned,
)
from tests.worlds import World


def folder(submitted: Submitted) -> str:
    return f"{RESULT_ROOT}/{submitted.nonce}"


def on_top(world: World, submitted: Submitted) -> str:
    tip = world.house.git("rev-parse", submitted.ref, cwd=world.house.remote)
    return world.commit(tip, {"README.md": b"my own work"})


def outside(world: World, submitted: Submitted) -> str:
    files: dict[str, bytes | None] = {f"{folder(submitted)}/result.json": b"{}", "README.md": b"changed"}
    return world.commit(submitted.commit, files)


def odd_name(world: World, submitted: Submitted) -> str:
    files: dict[str, bytes | None] = {
        f"{folder(submitted)}/result.json": b"{}",
        f"{folder(submitted)}/\x1b[31mred": b"x",
    }
    return world.commit(submitted.commit, files)


def without_request(world: World, submitted: Submitted) -> str:
    files: dict[str, bytes | None] = {f"{folder(submitted)}/result.json": b"{}"}
    return world.commit(world.house.git("rev-parse", "main"), files)


def with_row(*rows: tuple[str, str, str]) -> Callable[[World, Submitted], str]:
    """A result folder with more rows: mode, name, and what the blob holds (for a folder: of itself)."""

    def make(world: World, submitted: Submitted) -> str:
        git = Git(world.house.remote)
        data = git.write_blob(b"{}")
        raw = b"".join(
            f"{mode} {name}".encode() + b"\0" + bytes.fromhex(git.write_blob(text.encode()))
            for mode, name, text in rows
        )
        raw += b"100644 result.json\0" + bytes.fromhex(data)
        results = git.write_tree([Entry("040000", "tree", git.write_raw_tree(raw), submitted.nonce)])
        kept = [row for row in git.entries(f"{submitted.commit}:{FOLDER}") if row.name != "results"]
        inner = git.write_tree([*kept, Entry("040000", "tree", results, "results")])
        root = [row for row in git.entries(submitted.commit) if row.name != FOLDER]
        tree = git.write_tree([*root, Entry("040000", "tree", inner, FOLDER)])
        commit = git.commit_tree(tree, [submitted.commit], "odd\n")
        git.close()
        return commit

    return make


ODD: dict[str, tuple[Callable[[World, Submitted], str], str]] = {
    "somebody's commit on top": (on_top, "on top"),
    "a change outside": (outside, "outside"),
    "an odd name": (odd_name, "plain name"),
    "a symlink": (with_row(("120000", "link", "/etc/passwd")), "plain"),
    "a program": (with_row(("100755", "a", "#!/bin/sh")), "plain"),
    "a dot git": (with_row(("100644", ".git", "x")), "plain"),
    "a name twice": (with_row(("100644", "result.json", "x")), ""),
    "a way out": (with_row(("100644", "..", "x")), "plain"),
    "no request below": (without_request, "does not lie below"),
}


@pytest.mark.sampled(5, 2)
@pytest.mark.parametrize("case", ODD)
def test_what_is_odd_stays_and_is_named_and_the_others_go(world: World, case: str):
    make, word = ODD[case]
    odd, fine = answered(world), answered(world)
    world.point(odd.ref, make(world, odd))
    done = pruned(world)
    assert fine.nonce in done.archived
    if case == "a name twice":  # git itself reads one of them
        return
    assert done.archived == (fine.nonce,)
    assert [(left.nonce, left.ref) for left in done.left] == [(odd.nonce, odd.ref)]
    assert word in done.left[0].reason
    assert done.left[0].reason.isprintable()
    assert bridge_refs(world) == {odd.ref}


def test_a_result_larger_than_is_read_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch):
    large, small = answered(world, files={"report.json": b"x" * 5000}), answered(world, files={})
    monkeypatch.setattr(retire, "MAX_RESULT_BYTES", 4000)
    done = pruned(world)
    assert (done.archived, [left.nonce for left in done.left]) == ((small.nonce,), [large.nonce])
    assert "at most 4000 are archived" in done.left[0].reason


@pytest.mark.slow
def test_a_branch_that_sends_too_much_does_not_stop_the_others(world: World, monkeypatch: pytest.MonkeyPatch):
    requests = [answered(world) for _ in range(4)]
    large, refresh = requests[2], Cache.refresh

    def limited(cache: Cache, wanted: Mapping[str, str], **options: Any) -> dict[str, str]:
        if large.ref in wanted:
            raise TooMuch("the remote sends more than is taken")
        return refresh(cache, wanted, **options)

    monkeypatch.setattr(Cache, "refresh", limited)
    done = pruned(world)
    assert sorted(done.archived) == sorted(one.nonce for one in requests if one is not large)
    assert [(left.ref, left.reason) for left in done.left] == [
        (large.ref, "the remote sends more than is taken")
    ]


@pytest.mark.slow
def test_two_branches_of_one_name_are_left_alone(world: World):
    submitted = answered(world)
    tip = world.house.git("rev-parse", submitted.ref, cwd=world.house.remote)
    world.point(f"refs/heads/mac-bridge/tests-{submitted.nonce}", tip)
    done = pruned(world)
    assert done.archived == ()
    assert "several" in done.left[0].reason


def test_a_result_on_its_branch_and_another_beside_it_are_left_alone(world: World):
    submitted = answered(world)
    data = world.result(world.asked(submitted), {}, attempt=2)
    git = Git(world.house.remote)
    file = git.write_tree([Entry("100644", "blob", git.write_blob(data), RESULT_NAME)])
    for name in (submitted.nonce, "results", FOLDER):
        file = git.write_tree([Entry("040000", "tree", file, name)])
    message = f"x\n\n{TRAILER}: {hashlib.sha256(data).hexdigest()}\n"
    world.point(refs.result_ref(submitted.nonce), git.commit_tree(file, [], message))
    git.close()
    done = pruned(world)
    assert done.archived == ()
    assert "beside it" in done.left[0].reason


def test_a_result_that_is_none_is_archived_and_still_not_believed(world: World):
    submitted = world.submit(nonce=nonce_of_age())
    world.point(
        submitted.ref, world.commit(submitted.commit, {f"{folder(submitted)}/result.json": b"rubbish"})
    )
    world.house.git("update-ref", "-d", refs.inbox_ref(submitted.nonce), cwd=world.house.remote)
    assert pruned(world).archived == (submitted.nonce,)
    with pytest.raises(ResultError, match="commit message"):
        believe(archived(world, submitted.nonce), trusted=NOBODY)


@pytest.mark.slow
def test_names_that_are_not_the_bridges_are_left_alone(world: World):
    main = world.house.git("rev-parse", "main")
    names = ["refs/heads/mac-bridge/\x80\xff", "refs/heads/mac-bridge/notes", "refs/mac-bridge/results/x"]
    for name in names[1:]:
        world.point(name, main)
    submitted = answered(world)
    assert pruned(world).archived == (submitted.nonce,)
    assert bridge_refs(world) == set(names[1:])


HOSTILE_ARCHIVES: dict[str, dict[str, bytes | None]] = {
    "a record of another request": {"archived.json": None},
    "no record": {"result/result.json": b"{}"},
    "a record that is rubbish": {"archived.json": b"{", "result/result.json": b"{}"},
    "a record with more in it": {"archived.json": b'{"extra": 1}', "result/result.json": b"{}"},
}


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("case", HOSTILE_ARCHIVES)
def test_a_forged_archive_is_one_clear_error_and_stops_nobody(world: World, case: str):
    submitted, other = answered(world), answered(world, timedelta(days=32))
    pruned(world)
    files = dict(HOSTILE_ARCHIVES[case])
    forged = nonce_of_age()
    month, day, name = folder_of(forged)
    if "archived.json" in files and files["archived.json"] is None:
        old = "/".join(folder_of(submitted.nonce))
        text = world.house.git("show", f"{refs.ARCHIVE}:{old}/archived.json", cwd=world.house.remote)
        files = {"archived.json": text.encode(), "result/result.json": b"{}"}
    tip = world.house.git("rev-parse", refs.ARCHIVE, cwd=world.house.remote)
    commit = world.commit(tip, {f"{month}/{day}/{name}/{path}": data for path, data in files.items()})
    world.point(refs.ARCHIVE, commit)
    with pytest.raises(ResultError):
        archived(world, forged)
    assert archived(world, submitted.nonce).nonce == submitted.nonce
    late = answered(world, timedelta(days=33))
    assert pruned(world).archived == (late.nonce,)
    assert archived(world, other.nonce).nonce == other.nonce


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("what", ["a file where a month belongs", "another branch's commit"])
def test_an_archive_ref_that_holds_something_else_loses_nothing(world: World, what: str):
    submitted = answered(world)
    main = world.house.git("rev-parse", "main")
    broken = what != "another branch's commit"
    commit = world.commit(main, {"2026-03": b"a file"}) if broken else main
    world.point(refs.ARCHIVE, commit)
    if broken:
        with pytest.raises(BusError, match="no folder"):
            pruned(world)
        assert bridge_refs(world) == {submitted.ref}
        with pytest.raises(UnknownHandle):
            archived(world, submitted.nonce)
    else:
        assert pruned(world).archived == (submitted.nonce,)
        assert archived(world, submitted.nonce).nonce == submitted.nonce


def test_retention_is_pure_and_knows_no_future():
    nonces = {days: nonce_of_age(timedelta(days=days)) for days in (-400, 0, 1, 13, 15, 40)}
    found = {f"refs/heads/mac-bridge/probe-{nonce}": "0" * 40 for nonce in nonces.values()}
    found[refs.inbox_ref(nonces[40])] = "0" * 40
    by_nonce = standings(found)
    assert due(by_nonce, now=NOW, older_than=timedelta(days=14), keep=None) == [nonces[15]]
    assert due(by_nonce, now=NOW, older_than=timedelta(days=14), keep=1) == [
        nonces[15], nonces[13], nonces[1],
    ]  # fmt: skip
    assert due({"x": Standing("x")}, now=NOW, older_than=timedelta(0), keep=0) == []


@pytest.mark.slow
def test_a_temporary_cache_serves_where_none_is_kept(world: World, tmp_path: Path):
    submitted = answered(world)
    assert pruned(world, folder=None).archived == (submitted.nonce,)
    assert archived(world, submitted.nonce, tmp_path / "elsewhere").nonce == submitted.nonce
