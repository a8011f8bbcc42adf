"""A runner that dies, or loses its claim or its remote: the request is still answered, and once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from bridge.errors import MachineError, RemoteUnreachable
from bridge.protocol import refs
from bridge.runner import child
from bridge.runner.child import SUPERVISOR, MachineBusy, Supervisor
from bridge.runner.daemon import Daemon
from bridge.runner.publisher import Publisher
from bridge.runner.store import Store
from tests.bridge.git.damage import DAMAGE
from tests.fixtures.repo import wait_for
from tests.fixtures.runner import RunnerFixture


class RunnerKilled(BaseException):
    """What a test ends a runner with."""


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, after: bool = False) -> None:
    """Let a process end where it calls this method; with `after` once it has done so."""
    call = getattr(owner, name)

    def killed(*args: object, **options: object) -> None:
        if after:
            call(*args, **options)
        raise RunnerKilled

    monkeypatch.setattr(owner, name, killed)


# Where a process ends, and the attempt that the request's one result then comes from.
WINDOWS: dict[str, tuple[type, str, bool, int]] = {
    "after the claim": (Store, "begin", False, 2),
    "after begin": (Store, "begin", True, 2),
    "before the result is kept": (Publisher, "publish", False, 2),
    "after the result is kept": (Store, "keep", True, 1),
    "after the push": (Store, "answer", False, 1),
    "after the push was noted": (Store, "answer", True, 1),
}


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("window", WINDOWS)
def test_killed_runner_answers_once_after_its_restart(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch, window: str
) -> None:
    owner, name, after, attempt = WINDOWS[window]
    asked = runner.ask()
    with monkeypatch.context() as context:
        kill_at(context, owner, name, after=after)
        with pytest.raises(RunnerKilled):
            runner.serve_once()
    daemon = runner.daemon()
    for _ in range(3):
        daemon.serve(once=True, idle_timeout_s=0)
    assert runner.verdict(asked.nonce) == ("passed", "ok")
    assert runner.answer(asked.nonce).result.attempt == attempt
    assert len(runner.claimed()) == attempt
    assert runner.left(asked.nonce) == {asked.result_ref}


@pytest.mark.slow
def test_lost_claim_stops_the_job_and_gives_no_result(runner: RunnerFixture) -> None:
    asked = runner.ask("sleep")
    claim, head = refs.CLAIMS + asked.nonce, runner.repo.head()
    with runner.serving(runner.daemon()):
        wait_for(lambda: runner.running("sleep.py"), what="the job")
        runner.point(claim, head)
        wait_for(lambda: runner.has_said("lease was lost"), what="the end of the job")
    assert runner.tip(claim) == head
    assert not runner.running("sleep.py")
    with Supervisor(runner.config_of().lock):
        pass


@pytest.mark.slow
def test_request_that_loses_its_claim_each_time_ends_as_lost(runner: RunnerFixture) -> None:
    """By claims that are deleted, which leave no trace on the remote: the store counts."""
    asked = runner.ask("sleep")
    with runner.serving(runner.daemon()):
        for attempt in range(1, 4):
            words = f"claimed, attempt {attempt}"
            wait_for(lambda words=words: runner.has_said(words) and runner.running("sleep.py"), what=words)
            runner.delete(refs.CLAIMS + asked.nonce)
            wait_for(lambda: not runner.running("sleep.py"), what="the end of the job")
        wait_for(lambda: runner.has_said("published as"), what="the answer")
    assert runner.verdict(asked.nonce) == ("lost", "attempts")
    assert len(runner.claimed()) == 4


@pytest.mark.slow
def test_result_is_kept_while_the_remote_is_away(runner: RunnerFixture) -> None:
    away = runner.repo.root / "away.git"
    wait = "import os, time\nopen('up', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.05)\n"
    runner.install({"unplug": wait})
    asked = runner.ask("unplug")
    with runner.serving(runner.daemon()):
        wait_for(lambda: runner.in_workspaces("up"), 60, "the job")
        runner.repo.remote.rename(away)
        runner.in_workspaces("up")[0].with_name("go").touch()
        wait_for(lambda: runner.has_said("its result is kept"), 60, "the result to be kept")
        away.rename(runner.repo.remote)
        wait_for(lambda: runner.has_said("published as"), 60, "the result to be pushed")
    assert runner.verdict(asked.nonce) == ("passed", "ok")
    assert runner.left(asked.nonce) == {asked.result_ref}


@pytest.mark.slow
def test_killed_process_leaves_no_job_and_the_next_one_finishes(runner: RunnerFixture) -> None:
    asked = runner.ask("sleep")
    process = runner.spawn()
    wait_for(lambda: runner.running("sleep.py"), what="the job's process")
    process.kill()
    process.wait(20)
    wait_for(lambda: not runner.running("sleep.py"), 10, "the end of the job's process")
    assert refs.CLAIMS + asked.nonce in runner.repo.remote_refs()
    (runner.repo.root / "sleep.py").write_text("print('second try')")
    assert runner.serve_once() == 1, "its own claim is replaced without waiting for the lease"
    answer = runner.answer(asked.nonce)
    assert answer.result.attempt == 2
    assert answer.files["log.txt"] == b"second try\n"


@pytest.mark.slow
def test_machine_stays_locked_while_a_dead_runners_job_lives(runner: RunnerFixture) -> None:
    runner.install({"sleep": "import time; open('up', 'w').close(); time.sleep(60)"})
    runner.ask("sleep")
    lock = runner.config_of().lock
    process = runner.spawn()
    wait_for(lambda: runner.in_workspaces("up"), what="the job's process")
    children = psutil.Process(process.pid).children()
    stopped = [child.pid for child in children if SUPERVISOR[1] in child.cmdline()]
    assert stopped
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)  # so that they cannot end the job at once
        process.kill()
        process.wait(20)
        time.sleep(0.5)
        assert runner.running("sleep.py")
        with pytest.raises(MachineBusy):
            Supervisor(lock)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    def is_free() -> bool:
        try:
            Supervisor(lock).close()
        except MachineBusy:
            return False
        assert not runner.running("sleep.py"), "the lock was released before the job's processes were gone"
        return True

    wait_for(is_free, 20, "a free machine")


@pytest.mark.slow
def test_silent_claim_of_another_machine_is_replaced_after_its_lease(runner: RunnerFixture) -> None:
    asked, clock = runner.ask(), [0.0]
    runner.claim_as(runner.config_of("other", state_dir=runner.state / "other"), asked)
    daemon = runner.daemon(clock=lambda: clock[0])
    for seconds, answered in ((0.0, 0), (119.0, 0), (121.0, 1)):
        clock[0] = seconds
        assert daemon.serve(once=True, idle_timeout_s=-1) == answered
    assert runner.answer(asked.nonce).result.attempt == 2


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("when", ["between looks", "between claim and publication"])
def test_damaged_cache_costs_a_moment_and_no_request(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch, damage: str, when: str
) -> None:
    daemon = runner.daemon()
    if when == "between looks":
        runner.ask("echo", params={"word": "before"})
        assert daemon.serve(once=True, idle_timeout_s=20) == 1
        asked = runner.ask()
        daemon._queue.poll()  # the request is read, and its objects are lost before it is claimed
        [cache] = runner.config_of().folder.glob("remote-*.git")
        DAMAGE[damage](cache)
    else:
        asked = runner.ask()
        publish = Publisher.publish

        def break_first(self: Publisher, *args: object, **options: object) -> None:
            DAMAGE[damage](next(runner.config_of().folder.glob("remote-*.git")))
            publish(self, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(Publisher, "publish", break_first)
    serve_until(daemon, lambda: runner.has_said(asked.nonce, "published as"))
    assert runner.verdict(asked.nonce) == ("passed", "ok"), runner.said
    assert runner.answer(asked.nonce).result.attempt == 1


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("damage", [b"\0" * 8192, b"SQLite format 3\0" + b"x" * 9000])
def test_damaged_store_is_set_aside_and_the_runner_serves_on(runner: RunnerFixture, damage: bytes) -> None:
    runner.ask()
    daemon = runner.daemon()
    assert daemon.serve(once=True, idle_timeout_s=20) == 1
    daemon._store.close()
    [store] = runner.config_of().folder.glob("store-*.sqlite")
    for path in store.parent.glob(f"{store.name}*"):
        path.write_bytes(damage) if path == store else path.unlink()
    asked = runner.ask()
    assert runner.serve_once() == 1
    assert runner.verdict(asked.nonce) == ("passed", "ok")
    assert list(store.parent.glob("*.damaged-*"))


def fill(daemon: Daemon) -> None:
    """Let the runner's database grow no further, as on a full disk."""
    database = daemon._store._database
    [[pages]] = database.execute("PRAGMA page_count").fetchall()
    database.execute(f"PRAGMA max_page_count = {pages}")


@pytest.mark.slow
def test_result_that_the_disk_does_not_take_is_published_all_the_same(runner: RunnerFixture) -> None:
    runner.install({"long": "print('x' * 100_000)"})
    asked, daemon = runner.ask("long"), runner.daemon()
    fill(daemon)
    assert daemon.serve(once=True, idle_timeout_s=20) == 1
    assert runner.has_said("its result is not kept on this disk")
    assert runner.log(asked.nonce) == "x" * 100_000 + "\n"


@pytest.mark.slow
def test_claim_of_an_unreadable_request_costs_no_attempt(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, daemon = runner.ask(), runner.daemon()

    def away(*_: object) -> None:
        raise RemoteUnreachable("the remote is away")

    with monkeypatch.context() as network:
        network.setattr("bridge.runner.lease.Leases._look_again", away)
        assert daemon.serve(once=True, idle_timeout_s=0) == 0
    assert runner.left(asked.nonce) == {asked.result_ref, refs.INBOX + asked.nonce}
    assert daemon.serve(once=True, idle_timeout_s=20) == 1
    assert runner.answer(asked.nonce).result.attempt == 1


@pytest.mark.slow
def test_supervisor_that_does_not_start_costs_no_attempt(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = runner.ask()
    with monkeypatch.context() as patched:
        patched.setattr(child, "SUPERVISOR", ("-c", "raise SystemExit(1)"))
        assert runner.daemon().serve(once=True, idle_timeout_s=0) == 0
    assert "the job supervisor did not start" in "".join(runner.said)
    assert runner.left(asked.nonce) == {asked.result_ref, refs.INBOX + asked.nonce}
    assert runner.daemon().serve(once=True, idle_timeout_s=20) == 1
    assert runner.verdict(asked.nonce) == ("passed", "ok")
    assert runner.answer(asked.nonce).result.attempt == 1


@pytest.mark.slow
def test_full_disk_before_the_job_costs_no_attempt(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, daemon = runner.ask(), runner.daemon()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("bridge.runner.job.tempfile.TemporaryFile", full)
        for _ in range(4):
            assert daemon.serve(once=True, idle_timeout_s=0) == 0
            daemon._store._upsert(asked.nonce, not_before=None)
        assert runner.left(asked.nonce) == {asked.result_ref, refs.INBOX + asked.nonce}
    assert daemon.serve(once=True, idle_timeout_s=20) == 1
    assert runner.verdict(asked.nonce) == ("passed", "ok")
    assert runner.answer(asked.nonce).result.attempt == 1


@pytest.mark.slow
def test_failure_of_registration_does_not_end_the_daemon(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MachineError("cannot start python: Resource temporarily unavailable")

    monkeypatch.setattr("bridge.runner.registration.Registrar.info", fails)
    with runner.serving(runner.daemon()):
        wait_for(lambda: runner.has_said("Resource temporarily unavailable"), what="the failure")
        asked = runner.ask()
        wait_for(lambda: runner.has_said(asked.nonce, "published as"), what="the result")


def serve_until(daemon: Daemon, is_reached: Callable[[], bool], tries: int = 12) -> None:
    """Look again and again; pauses after failures are skipped."""
    for _ in range(tries):
        daemon.serve(once=True, idle_timeout_s=0)
        if is_reached():
            return
        with daemon._store._transaction() as database:
            database.execute("UPDATE request SET not_before = NULL")
    raise AssertionError("it did not happen")
