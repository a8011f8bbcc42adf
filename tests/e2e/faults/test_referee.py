"""The referee sees what it is there for: each broken promise, made by hand, is named."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.protocol import refs
from tests.e2e.faults import procs, referee
from tests.e2e.faults.scene import Scene

pytestmark = pytest.mark.e2e


def result_of(scene: Scene, nonce: str) -> str:
    return scene.repo.git("rev-parse", scene.requester.accepted[nonce].submitted.ref, cwd=scene.repo.remote)


def point(scene: Scene, ref: str, *commit: str) -> None:
    scene.repo.git("update-ref", *(("-d", ref) if not commit else (ref, *commit)), cwd=scene.repo.remote)


def lost(scene: Scene, one: str, _: str) -> None:
    point(scene, scene.requester.accepted[one].submitted.ref)


def unanswered(scene: Scene, one: str, _: str) -> None:
    submitted = scene.requester.accepted[one].submitted
    point(scene, submitted.ref, submitted.commit)


def twice(scene: Scene, one: str, _: str) -> None:
    git, remote = scene.repo.git, scene.repo.remote
    first = result_of(scene, one)
    message = git("log", "-1", "--format=%B", first, cwd=remote)
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    tree = git("rev-parse", f"{first}^{{tree}}", cwd=remote)
    again = git(*who, "commit-tree", tree, "-m", message, cwd=remote)
    point(scene, refs.RESULTS + one, again)


def swapped(scene: Scene, one: str, other: str) -> None:
    point(scene, scene.requester.accepted[one].submitted.ref, result_of(scene, other))


def still_claimed(scene: Scene, one: str, _: str) -> None:
    point(scene, refs.CLAIMS + one, result_of(scene, one))


def still_in_the_inbox(scene: Scene, one: str, _: str) -> None:
    point(scene, refs.INBOX + one, scene.requester.accepted[one].submitted.commit)


def ran_once_more(scene: Scene, one: str, _: str) -> None:
    with (scene.repo.root / "ledger.txt").open("a") as ledger:
        ledger.write(f"start {one}\n")


def ran_without_request(scene: Scene, _one: str, _other: str) -> None:
    with (scene.repo.root / "ledger.txt").open("a") as ledger:
        ledger.write("start 20260101t000000z000000000000\n")


def unknown_key(scene: Scene, _one: str, _other: str) -> None:
    log = scene.machines[0].log
    log.write_text("\n".join(line for line in log.read_text().splitlines() if "runners trust" not in line))


def kept(scene: Scene, one: str, _: str) -> None:
    database = sqlite3.connect(folder_of(scene) / "store-0123456789ab.sqlite")
    with contextlib.closing(database), database:
        database.execute("CREATE TABLE result(nonce TEXT)")
        database.execute("INSERT INTO result VALUES (?)", (one,))


def folder_of(scene: Scene) -> Path:
    [folder] = scene.machines[0].states[0].glob("runner/mac1")
    return folder


BROKEN: dict[Callable[[Scene, str, str], None], str] = {
    lost: "was accepted and is nowhere on the remote",
    unanswered: "0 result commits",
    twice: "2 result commits",
    swapped: "the result is not believed",
    still_claimed: "left on the remote: refs/mac-bridge/claims/",
    still_in_the_inbox: "left on the remote: refs/mac-bridge/inbox/",
    ran_once_more: "its job started 2 times, the result says attempt 1",
    ran_without_request: "a job ran, and there is no such request",
    unknown_key: "signed by a key that is not trusted here",
    kept: "a result was kept and not published",
}


def test_each_broken_promise_is_named(scene: Scene):
    """One run serves all: what is broken by hand is put back after each look."""
    scene.machine().start()
    one, other = scene.ask(), scene.ask()
    for nonce in (one, other):
        scene.answered(nonce)
    scene.close()
    repo = scene.repo
    ledger, log = repo.root / "ledger.txt", scene.machines[0].log
    before = repo.git("for-each-ref", "--format=%(refname) %(objectname)", cwd=repo.remote).splitlines()
    texts = {path: path.read_text() for path in (ledger, log)}
    for breaks, named in BROKEN.items():
        breaks(scene, one, other)
        report = referee.judge(repo, scene.machines, scene.requester, [], finished=True)
        assert any(named in problem for problem in report.problems), (breaks.__name__, report.problems)
        for path, text in texts.items():
            path.write_text(text)
        (folder_of(scene) / "store-0123456789ab.sqlite").unlink(missing_ok=True)
        for ref in scene.repo.remote_refs() - {line.split()[0] for line in before}:
            point(scene, ref)
        for line in before:
            point(scene, *line.split())
    assert not referee.judge(repo, scene.machines, scene.requester, [], finished=True).problems


def test_a_process_that_outlives_its_runner_is_seen(scene: Scene):
    runner = scene.machine()
    runner.start()
    nonce = scene.ask(20.0)
    scene.started(nonce)
    left = procs.belonging_to(scene.repo.root)
    assert {runner.pid, *procs.descendants(runner.pid)} <= set(left)
    assert any("job.py" in procs.command(pid) for pid in left)
    assert procs.end_all(scene.repo.root) == []
    assert procs.belonging_to(scene.repo.root) == []
