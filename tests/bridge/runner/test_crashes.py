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
from tests.bridge.runner.bench import Bench
from tests.houses import wait_for


class Killed(BaseException):
    """What a test ends a runner with."""


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, after: bool = False) -> None:
    """Let a process end where it calls this method; with `after` once it has done so."""
    call = getattr(owner, name)

    def killed(*args: object, **options: object) -> None:
        if after:
            call(*args, **options)
        raise Killed

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
    bench: Bench, monkeypatch: pytest.MonkeyPatch, window: str
) -> None:
    owner, name, after, attempt = WINDOWS[window]
    asked = bench.ask()
    with monkeypatch.context() as context:
        kill_at(context, owner, name, after=after)
        with pytest.raises(Killed):
            bench.serve_once()
    runner = bench.runner()
    for _ in range(3):
        runner.serve(once=True, idle_timeout_s=0)
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    assert bench.answer(asked.nonce).result.attempt == attempt
    assert len(bench.claimed()) == attempt
    assert bench.left(asked.nonce) == {asked.result_ref}


@pytest.mark.slow
def test_lost_claim_stops_the_job_and_gives_no_result(bench: Bench) -> None:
    asked = bench.ask("sleep")
    claim, head = refs.CLAIMS + asked.nonce, bench.house.head()
    with bench.serving(bench.runner()):
        wait_for(lambda: bench.running("sleep.py"), what="the job")
        bench.point(claim, head)
        wait_for(lambda: bench.has_said("lease was lost"), what="the end of the job")
    assert bench.tip(claim) == head
    assert not bench.running("sleep.py")
    with Supervisor(bench.config_of().lock):
        pass


@pytest.mark.slow
def test_request_that_loses_its_claim_each_time_ends_as_lost(bench: Bench) -> None:
    """By claims that are deleted, which leave no trace on the remote: the store counts."""
    asked = bench.ask("sleep")
    with bench.serving(bench.runner()):
        for attempt in range(1, 4):
            words = f"claimed, attempt {attempt}"
            wait_for(lambda words=words: bench.has_said(words) and bench.running("sleep.py"), what=words)
            bench.delete(refs.CLAIMS + asked.nonce)
            wait_for(lambda: not bench.running("sleep.py"), what="the end of the job")
        wait_for(lambda: bench.has_said("published as"), what="the answer")
    assert bench.verdict(asked.nonce) == ("lost", "attempts")
    assert len(bench.claimed()) == 4


@pytest.mark.slow
def test_result_is_kept_while_the_remote_is_away(bench: Bench) -> None:
    away = bench.house.root / "away.git"
    wait = "import os, time\nopen('up', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.05)\n"
    bench.install({"unplug": wait})
    asked = bench.ask("unplug")
    with bench.serving(bench.runner()):
        wait_for(lambda: bench.in_rooms("up"), 60, "the job")
        bench.house.remote.rename(away)
        bench.in_rooms("up")[0].with_name("go").touch()
        wait_for(lambda: bench.has_said("its result is kept"), 60, "the result to be kept")
        away.rename(bench.house.remote)
        wait_for(lambda: bench.has_said("published as"), 60, "the result to be pushed")
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    assert bench.left(asked.nonce) == {asked.result_ref}


@pytest.mark.slow
def test_killed_process_leaves_no_job_and_the_next_one_finishes(bench: Bench) -> None:
    asked = bench.ask("sleep")
    daemon = bench.daemon()
    wait_for(lambda: bench.running("sleep.py"), what="the job's process")
    daemon.kill()
    daemon.wait(20)
    wait_for(lambda: not bench.running("sleep.py"), 10, "the end of the job's process")
    assert refs.CLAIMS + asked.nonce in bench.house.remote_refs()
    (bench.house.root / "sleep.py").write_text("print('second try')")
    assert bench.serve_once() == 1, "its own claim is replaced without waiting for the lease"
    answer = bench.answer(asked.nonce)
    assert answer.result.attempt == 2
    assert answer.files["log.txt"] == b"second try\n"


@pytest.mark.slow
def test_machine_stays_locked_while_a_dead_runners_job_lives(bench: Bench) -> None:
    bench.ask("sleep")
    lock = bench.config_of().lock
    daemon = bench.daemon()
    wait_for(lambda: bench.running("sleep.py"), what="the job's process")
    children = psutil.Process(daemon.pid).children()
    stopped = [child.pid for child in children if SUPERVISOR[1] in child.cmdline()]
    assert stopped
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)  # so that they cannot end the job at once
        daemon.kill()
        daemon.wait(20)
        time.sleep(0.5)
        assert bench.running("sleep.py")
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
        assert not bench.running("sleep.py"), "the lock was released before the job's processes were gone"
        return True

    wait_for(is_free, 20, "a free machine")


@pytest.mark.slow
def test_silent_claim_of_another_machine_is_replaced_after_its_lease(bench: Bench) -> None:
    asked, clock = bench.ask(), [0.0]
    bench.claim_as(bench.config_of("other", state_dir=bench.state / "other"), asked)
    runner = bench.runner(clock=lambda: clock[0])
    for seconds, answered in ((0.0, 0), (119.0, 0), (121.0, 1)):
        clock[0] = seconds
        assert runner.serve(once=True, idle_timeout_s=-1) == answered
    assert bench.answer(asked.nonce).result.attempt == 2


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("when", ["between looks", "between claim and publication"])
def test_damaged_cache_costs_a_moment_and_no_request(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, damage: str, when: str
) -> None:
    runner = bench.runner()
    if when == "between looks":
        bench.ask("echo", params={"word": "before"})
        assert runner.serve(once=True, idle_timeout_s=20) == 1
        asked = bench.ask()
        runner._queue.poll()  # the request is read, and its objects are lost before it is claimed
        [cache] = bench.config_of().folder.glob("remote-*.git")
        DAMAGE[damage](cache)
    else:
        asked = bench.ask()
        publish = Publisher.publish

        def break_first(self: Publisher, *args: object, **options: object) -> None:
            DAMAGE[damage](next(bench.config_of().folder.glob("remote-*.git")))
            publish(self, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(Publisher, "publish", break_first)
    serve_until(runner, lambda: bench.has_said(asked.nonce, "published as"))
    assert bench.verdict(asked.nonce) == ("passed", "ok"), bench.said
    assert bench.answer(asked.nonce).result.attempt == 1


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("damage", [b"\0" * 8192, b"SQLite format 3\0" + b"x" * 9000])
def test_damaged_store_is_set_aside_and_the_runner_serves_on(bench: Bench, damage: bytes) -> None:
    bench.ask()
    runner = bench.runner()
    assert runner.serve(once=True, idle_timeout_s=20) == 1
    runner._store.close()
    [store] = bench.config_of().folder.glob("store-*.sqlite")
    for path in store.parent.glob(f"{store.name}*"):
        path.write_bytes(damage) if path == store else path.unlink()
    asked = bench.ask()
    assert bench.serve_once() == 1
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    assert list(store.parent.glob("*.damaged-*"))


def fill(runner: Daemon) -> None:
    """Let the runner's database grow no further, as on a full disk."""
    database = runner._store._database
    [[pages]] = database.execute("PRAGMA page_count").fetchall()
    database.execute(f"PRAGMA max_page_count = {pages}")


@pytest.mark.slow
def test_result_that_the_disk_does_not_take_is_published_all_the_same(bench: Bench) -> None:
    bench.install({"long": "print('x' * 100_000)"})
    asked, runner = bench.ask("long"), bench.runner()
    fill(runner)
    assert runner.serve(once=True, idle_timeout_s=20) == 1
    assert bench.has_said("its result is not kept on this disk")
    assert bench.log(asked.nonce) == "x" * 100_000 + "\n"


@pytest.mark.slow
def test_claim_whose_request_cannot_be_looked_at_again_costs_no_attempt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, runner = bench.ask(), bench.runner()

    def away(*_: object) -> None:
        raise RemoteUnreachable("the remote is away")

    with monkeypatch.context() as network:
        network.setattr("bridge.runner.lease.Leases._look_again", away)
        assert runner.serve(once=True, idle_timeout_s=0) == 0
    assert bench.left(asked.nonce) == {asked.result_ref, refs.INBOX + asked.nonce}
    assert runner.serve(once=True, idle_timeout_s=20) == 1
    assert bench.answer(asked.nonce).result.attempt == 1


@pytest.mark.slow
def test_supervisor_that_does_not_start_costs_no_attempt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = bench.ask()
    with monkeypatch.context() as patched:
        patched.setattr(child, "SUPERVISOR", ("-c", "raise SystemExit(1)"))
        assert bench.runner().serve(once=True, idle_timeout_s=0) == 0
    assert "the job supervisor did not start" in "".join(bench.said)
    assert bench.left(asked.nonce) == {asked.result_ref, refs.INBOX + asked.nonce}
    assert bench.runner().serve(once=True, idle_timeout_s=20) == 1
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    assert bench.answer(asked.nonce).result.attempt == 1


@pytest.mark.slow
def test_full_disk_before_the_job_costs_no_attempt(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, runner = bench.ask(), bench.runner()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("bridge.runner.job.tempfile.TemporaryFile", full)
        for _ in range(4):
            assert runner.serve(once=True, idle_timeout_s=0) == 0
            runner._store._upsert(asked.nonce, not_before=None)
        assert bench.left(asked.nonce) == {asked.result_ref, refs.INBOX + asked.nonce}
    assert runner.serve(once=True, idle_timeout_s=20) == 1
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    assert bench.answer(asked.nonce).result.attempt == 1


@pytest.mark.slow
def test_failure_of_registration_does_not_end_the_daemon(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MachineError("cannot start python: Resource temporarily unavailable")

    monkeypatch.setattr("bridge.runner.registration.Registrar.info", fails)
    with bench.serving(bench.runner()):
        wait_for(lambda: bench.has_said("Resource temporarily unavailable"), what="the failure")
        asked = bench.ask()
        wait_for(lambda: bench.has_said(asked.nonce, "published as"), what="the result")


def serve_until(runner: Daemon, is_reached: Callable[[], bool], tries: int = 12) -> None:
    """Look again and again; pauses after failures are skipped."""
    for _ in range(tries):
        runner.serve(once=True, idle_timeout_s=0)
        if is_reached():
            return
        with runner._store._transaction() as database:
            database.execute("UPDATE request SET not_before = NULL")
    raise AssertionError("it did not happen")
