"""What people with push rights, a dying git or a full disk did to a runner once, and can no more."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.git import Git
from bridge.bus.objects import Entry
from bridge.bus.requests import build
from bridge.errors import MachineError
from bridge.protocol import refs
from bridge.protocol.result import Reason, Status
from bridge.runner.outbox import Outbox
from bridge.runner.reserve import Reserve
from bridge.runner.serve import Runner
from bridge.runner.spool import Spool
from tests.bridge.runner.bench import Bench
from tests.houses import House, wait_for


def served(bench: Bench, nonce: str, runner: Runner | None = None) -> None:
    """Serve until that request has passed."""
    runner = runner or bench.runner()
    for _ in range(12):
        runner.serve(once=True, idle_timeout_s=0)
        if any(f"{nonce}: passed" in line for line in bench.said):
            return
    raise AssertionError(bench.said)


def with_a_late_parent(bench: Bench) -> str:
    """A commit that git takes for a root, with an abbreviated parent where no parent belongs."""
    git = Git(bench.house.clone)
    tree = git.commit(git.resolve("HEAD")).tree
    who = "Mallory <m@example.org> 1700000000 +0000"
    text = f"tree {tree}\nauthor {who}\ncommitter {who}\nparent 0123456789ab\n\nhello\n"
    return bench.house.git("hash-object", "-t", "commit", "--literally", "-w", "--stdin", input=text)


@pytest.mark.parametrize("where", ["inbox", "branch"])
def test_a_commit_with_an_odd_header_stops_nobody(bench: Bench, where: str) -> None:
    hostile = bench.manifest()
    commit = with_a_late_parent(bench)
    ref = refs.inbox_ref(hostile.nonce) if where == "inbox" else hostile.result_ref
    bench.house.git("push", "-q", str(bench.house.remote), f"{commit}:{ref}")
    served(bench, bench.ask().nonce)
    assert not any("a bug of kakeya-mac" in line for line in bench.said), bench.said


def test_wishes_to_stop_move_nobody_forward(bench: Bench, tmp_path: Path) -> None:
    """One signed request among unsigned ones that all carry a wish which does not count."""
    key = signing.ensure_key(tmp_path / "alice", "alice")
    line = signing.allowed_line(signing.public_key(key), "alice", signing.REQUEST_NAMESPACE)
    (bench.config / "allowed_signers").write_text(line)
    head = bench.house.git("rev-parse", "HEAD")
    for _ in range(3):
        flooding = bench.ask()
        bench.house.git("push", "-q", str(bench.house.remote), f"{head}:{refs.cancel_ref(flooding.nonce)}")
    manifest = bench.manifest()
    signature = signing.sign(key, signing.REQUEST_NAMESPACE, manifest.to_bytes())
    bench.push_commit(manifest, build(Git(bench.house.clone), manifest, signature))
    runner = bench.runner()
    for _ in range(2):
        assert runner.serve(once=True, idle_timeout_s=20) == 1
    assert any(f"{manifest.nonce}: passed" in line for line in bench.said), bench.said


def test_what_goes_wrong_between_two_looks_does_not_end_the_daemon(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise MachineError("cannot start python: Resource temporarily unavailable")

    monkeypatch.setattr(Reserve, "fill", fails)
    runner, stop = bench.runner(), threading.Event()
    thread = threading.Thread(target=runner.serve, kwargs={"stop": stop}, daemon=True)
    thread.start()
    wait_for(lambda: any("Resource temporarily unavailable" in line for line in bench.said), what="the fault")
    asked = bench.ask()
    wait_for(lambda: any(f"{asked.nonce}: passed" in line for line in bench.said), what="the result")
    stop.set()
    thread.join(20)


def test_a_result_that_the_disk_does_not_take_is_published_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    asked = bench.ask()
    monkeypatch.setattr(Spool, "put", full)
    assert bench.serve_once() == 1
    assert bench.answer(asked.nonce).result.attempt == 1
    assert sum("claimed" in line for line in bench.said) == 1


def test_a_result_in_memory_is_pushed_when_the_server_takes_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    runner = Runner(bench.station(), say=bench.said.append, clock=lambda: clock[0])
    asked = bench.ask()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    hook = bench.house.remote / "hooks" / "update"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text('#!/bin/sh\ncase "$1" in *claims*) exit 0;; *) echo maintenance; exit 1;; esac\n')
    hook.chmod(0o755)
    with monkeypatch.context() as disk:
        disk.setattr(Spool, "put", full)
        runner.serve(once=True, idle_timeout_s=0)
    hook.unlink()
    clock[0] += 1000.0
    runner.serve(once=True, idle_timeout_s=0)
    assert bench.answer(asked.nonce).result.verdict.status is Status.PASSED
    assert sum("claimed" in line for line in bench.said) == 1
    assert isinstance(runner._outbox, Outbox)
    assert asked.nonce not in runner._outbox


def squat(bench: Bench, nonce: str, commit: str, **changes: object) -> None:
    """Somebody else's claim, as they like it."""
    status = {
        "schema_version": 1,
        "nonce": nonce,
        "request_commit": commit,
        "runner": "squatter",
        "runner_id": "f" * 16,
        "pid": 1,
        "unique": "0" * 16,
        "attempt": 1,
        "beat": 0,
        "lease_s": 1.0,
        "session": "e" * 16,
        "updated_at": "2026-03-01T12:00:00Z",
        "phase": "running",
        "elapsed_s": 1.0,
        **changes,
    }
    git = Git(bench.house.remote)
    blob = git.write_blob(json.dumps(status).encode())
    tree = git.write_tree([Entry("100644", "blob", blob, "status.json")])
    bench.house.git(
        *("update-ref", refs.claim_ref(nonce), git.commit_tree(tree, [], "squat\n")), cwd=bench.house.remote
    )
    git.close()


@pytest.mark.parametrize("attempt", [10**6, 10**4000])
def test_a_squatted_claim_holds_a_request_no_longer_than_its_lease(bench: Bench, attempt: int) -> None:
    asked = bench.ask()
    commit = bench.house.git("rev-parse", asked.result_ref, cwd=bench.house.remote)
    squat(bench, asked.nonce, commit, attempt=attempt)
    clock = [0.0]
    runner = Runner(bench.station(), say=bench.said.append, clock=lambda: clock[0])
    for _ in range(2):
        runner.serve(once=True, idle_timeout_s=0)
        clock[0] += 1000.0
    assert runner.serve(once=True, idle_timeout_s=0) in (0, 1)
    assert bench.answer(asked.nonce).result.verdict.status in (Status.PASSED, Status.LOST)


@pytest.mark.slow
def test_a_look_leaves_no_refs_of_jobs_that_are_over(bench: Bench) -> None:
    bench.preset("nap", ["/bin/sleep", "1.2"])
    asked = bench.ask("nap")
    runner = bench.runner()
    runner.serve(once=True, idle_timeout_s=20)
    served(bench, bench.ask().nonce, runner)
    served(bench, bench.ask().nonce, runner)
    [mirror] = bench.station().folder.glob("mirror-*.git")
    assert bench.answer(asked.nonce).result.verdict.status is Status.PASSED
    assert not Git(mirror).refs("refs/watched/")


@pytest.mark.slow
def test_a_lock_that_a_killed_git_left_behind_does_not_make_cancel_deaf(bench: Bench) -> None:
    asked = bench.ask("sleep")
    runner, stop = bench.runner(), threading.Event()
    thread = threading.Thread(target=runner.serve, kwargs={"stop": stop}, daemon=True)
    thread.start()
    wait_for(lambda: any("claimed" in line for line in bench.said), what="the claim")
    [mirror] = bench.station().folder.glob("mirror-*.git")
    (mirror / "shallow.lock").touch()
    bench.house.git("update-ref", "-d", asked.result_ref, cwd=bench.house.remote)
    wait_for(lambda: any(f"{asked.nonce}: cancelled" in line for line in bench.said), 20, "the end")
    stop.set()
    thread.join(20)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("asked_for", ["echo", "fail"])
def test_what_another_machine_takes_is_left_to_it(
    bench: Bench, asked_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without the preset, and one whose policy forbids it, beside one that has it."""
    monkeypatch.setattr("bridge.runner.presence.SETTLE_S", 0.0)
    able, stop = bench.runner("able", state_dir=bench.state / "able"), threading.Event()
    able.serve(once=True, idle_timeout_s=0)
    other = Bench(House(bench.house.root, bench.house.env))
    config = bench.house.root / "other-config"
    config.mkdir()
    if asked_for == "fail":
        shutil.copytree(bench.config / "presets", config / "presets")
        (config / "policy.toml").write_text('allow_presets = ["probe"]\n')
        (config / "policy.toml").chmod(0o600)
    live = threading.Thread(target=able.serve, kwargs={"stop": stop}, daemon=True)
    live.start()
    wait_for(lambda: refs.RUNNERS + "able" in bench.house.remote_refs(), what="the card")
    stop.set()
    live.join(20)
    # It said that it stopped; a Mac that was cut off says nothing, and stays live for a while.
    clock = [0.0]
    unable = Runner(
        other.station("unable", state_dir=bench.state / "unable", config_dir=config),
        say=other.said.append,
        clock=lambda: clock[0],
    )
    asked = bench.ask(asked_for)
    assert unable.serve(once=True, idle_timeout_s=0) == 1
    assert bench.answer(asked.nonce).result.verdict.reason in (Reason.POLICY, Reason.UNKNOWN_PRESET)
    monkeypatch.setattr("bridge.runner.presence.Presence.stopped", lambda *_, **__: None)
    stop.clear()
    live = threading.Thread(target=able.serve, kwargs={"stop": stop}, daemon=True)
    live.start()
    wait_for(lambda: _is_idle(bench), what="a card that says it is there")
    stop.set()
    live.join(20)
    clock[0] += 100.0
    left = bench.ask(asked_for)
    assert unable.serve(once=True, idle_timeout_s=0) == 0
    clock[0] += 1000.0
    assert unable.serve(once=True, idle_timeout_s=0) == 1, "it waits for others only so long"
    assert bench.answer(left.nonce).result.verdict.status is Status.REFUSED


def _is_idle(bench: Bench) -> bool:
    show: Callable[..., str] = bench.house.git
    card = show("cat-file", "blob", f"{refs.RUNNERS}able:runner.json", cwd=bench.house.remote)
    return json.loads(card)["state"] == "idle"
