"""The door to git: hostile names, a hostile environment, deadlines, other kinds of repositories."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge.bus.claims import Beat
from bridge.bus.git import Git
from bridge.bus.handles import resolve_handle
from bridge.bus.mirror import Mirror
from bridge.bus.results import believe, fetch
from bridge.client.remotes import resolve_remote
from bridge.errors import BusError, LeaseLost, NoRemote, RemoteUnreachable, RevisionError
from bridge.protocol.result import Phase
from tests.worlds import World, snapshot


@pytest.mark.parametrize(
    "rev", ["", "-", "--exec=true", "--all", "nowhere", "a..b", "main\nHEAD", "HEAD:README.md"]
)
def test_what_is_no_commit_is_refused(world: World, rev: str):
    with pytest.raises(RevisionError):
        world.git.resolve(rev)


@pytest.mark.parametrize(
    "shape", ["--upload-pack=touch {}", "-u touch {}", "ext::touch {}", "-oProxyCommand=touch {}"]
)
def test_a_remote_cannot_smuggle_in_a_command(world: World, tmp_path: Path, shape: str):
    canary = tmp_path / "canary"
    remote = shape.format(canary)
    with pytest.raises((NoRemote, RemoteUnreachable)):
        world.git.ls_remote(resolve_remote(world.git, remote).address)
    with pytest.raises(RemoteUnreachable):
        world.git.fetch(remote, ["main"])
    assert not canary.exists()


def test_variables_that_name_another_repository_are_not_obeyed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = world.git.resolve("HEAD")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_OBJECT_DIRECTORY", "GIT_INDEX_FILE", "GIT_COMMON_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    assert world.git.resolve("HEAD") == expected
    assert world.submit().in_inbox


@pytest.mark.slow
def test_a_command_past_its_deadline_is_ended_with_all_its_children(world: World, tmp_path: Path):
    canary = tmp_path / "late"
    started = time.monotonic()
    with pytest.raises(BusError, match="did not"):
        world.git.run("-c", f"alias.slow=!sleep 2; touch '{canary}'", "slow", timeout_s=0.3)
    assert time.monotonic() - started < 1.5
    time.sleep(2.2)
    assert not canary.exists()


def test_what_is_written_in_a_scratch_store_is_gone_afterwards(world: World):
    before = snapshot(world.house.clone)
    with world.git.scratch() as scratch:
        blob = scratch.write_blob(b"only here")
        assert scratch.exists(blob)
    assert not world.git.exists(blob)
    assert snapshot(world.house.clone) == before


def test_a_colon_in_the_path_of_the_checkout_is_no_obstacle(world: World):
    moved = world.house.clone.with_name('a "clone": with spaces')
    world.house.clone.rename(moved)
    with Git(moved).scratch() as scratch:
        assert scratch.exists(scratch.resolve("HEAD"))


def test_a_repository_with_sha256_names_travels_too(world: World, tmp_path: Path):
    remote, clone = tmp_path / "r256.git", tmp_path / "c256"
    git = world.house.git
    git(
        "init",
        "--quiet",
        "--bare",
        "--object-format=sha256",
        "--initial-branch=main",
        str(remote),
        cwd=tmp_path,
    )
    git("init", "--quiet", "--object-format=sha256", str(clone), cwd=tmp_path)
    git("remote", "add", "origin", str(remote), cwd=clone)
    (clone / "a.txt").write_text("a\n")
    git("add", "-A", cwd=clone)
    git("-c", "user.name=T", "-c", "user.email=t@example.org", "commit", "-qm", "w", cwd=clone)
    git("push", "--quiet", "origin", "HEAD:main", cwd=clone)
    world.house.root = tmp_path / "sha256"
    world.house.root.mkdir()
    remote.rename(world.house.remote)
    clone.rename(world.house.clone)
    world.git = Git(world.house.clone)
    world.mirror = Mirror(tmp_path / "mirror256.git", world.remote)
    submitted = world.submit()
    held = world.claim(world.mirror.refresh()[0])
    world.answer(submitted, held=held)
    found = fetch(world.git, world.remote, resolve_handle(world.git, world.remote, submitted.nonce))
    assert found is not None
    assert len(believe(found, trusted=tmp_path / "none").commit) == 64


def test_where_only_branches_are_taken_the_whole_round_trip_works(world: World, tmp_path: Path):
    world.take_branches_only()
    submitted = world.submit()
    assert not submitted.in_inbox
    (pending,) = world.mirror.refresh()
    held = world.claim(pending)
    held.beat(Beat(Phase.RUNNING, 1.0))
    assert [seen.nonce for seen in world.mirror.refresh()] == [submitted.nonce]
    assert world.mirror.claims()[submitted.nonce].ref == held.ref
    world.answer(submitted, held=held)
    assert world.house.remote_refs() == {"refs/heads/main", submitted.ref}
    found = fetch(world.git, world.remote, resolve_handle(world.git, world.remote, submitted.nonce))
    assert found is not None
    believe(found, trusted=tmp_path / "none")
    assert world.mirror.refresh() == []


@pytest.mark.slow
def test_a_beat_whose_answer_was_lost_does_not_lose_the_lease(world: World, monkeypatch: pytest.MonkeyPatch):
    submitted = world.submit()
    held = world.claim(world.mirror.refresh()[0])
    # The server takes the push; the answer is cut off by the client's deadline.
    world.hook("post-receive", "sleep 3")
    with monkeypatch.context() as patience:
        patience.setattr("bridge.bus.holding.PUSH_TIMEOUT_S", 1.0)
        with pytest.raises(RemoteUnreachable):
            held.beat(Beat(Phase.RUNNING, 1.0))
    (world.house.remote / "hooks" / "post-receive").unlink()
    held.beat(Beat(Phase.RUNNING, 2.0))
    found = resolve_handle(world.git, world.remote, submitted.nonce)
    assert found.claim is not None
    assert found.claim.commit == held.commit
    world.point(held.ref, world.house.git("rev-parse", "HEAD"))
    with pytest.raises(LeaseLost):
        held.beat(Beat(Phase.RUNNING, 3.0))


def test_a_git_killed_while_it_is_first_asked_for_its_version_is_asked_again(world: World, tmp_path: Path):
    once, real = tmp_path / "once", shutil.which("git")
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    killed = f'if [ "$1" = version ] && mkdir {once} 2>/dev/null; then kill -9 $$; fi'
    fake.write_text(f'#!/bin/sh\n{killed}\nexec {real} "$@"\n')
    fake.chmod(0o755)
    program = (
        "import sys; from pathlib import Path; from bridge.bus.git import Git;"
        "print(*Git(Path(sys.argv[1])).ls_remote(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(world.house.clone), world.remote],
        env={**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["refs/heads/main"]), done.stderr
    assert once.exists()
