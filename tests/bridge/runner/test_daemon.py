"""The loop as a whole: one job a machine, quotas, an honest registration, and pruning between two jobs."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from bridge.bus.registry import read_registry, register
from bridge.git.cache import GitCache
from bridge.protocol import refs
from bridge.protocol.result import Reason, Status
from bridge.protocol.runner_info import RunnerInfo, State
from bridge.runner import daemon as daemon_module
from bridge.runner.child import Supervisor
from bridge.runner.config import LOCAL, OWN_SERVER, PUBLIC_HOST, Timing, timing_of
from bridge.runner.daemon import PRUNE_EVERY_S, PRUNE_FIRST_S, Daemon
from bridge.runner.job import Job
from tests.fixtures.repo import wait_for
from tests.fixtures.runner import Clock, RunnerFixture
from tests.objects import Objects


def cache_of(runner: RunnerFixture) -> GitCache:
    cache = GitCache(runner.repo.root / "reader.git", str(runner.repo.remote))
    cache.prepare()
    return cache


def info_of(runner: RunnerFixture) -> RunnerInfo | None:
    return next((one.info for one in read_registry(cache_of(runner)).seen if one.name == "mac"), None)


def test_full_disk_keeps_no_finished_result_from_its_client(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, daemon = runner.ask(), runner.daemon()
    run = Job.run

    def run_and_fill(job: Job, *args: Any, **options: Any) -> Any:
        report = run(job, *args, **options)
        daemon._store._database.execute("PRAGMA query_only = ON")  # no write succeeds
        return report

    monkeypatch.setattr(Job, "run", run_and_fill)
    daemon.serve(once=True, idle_timeout_s=1)
    assert runner.verdict(asked.nonce) == ("passed", "ok")


def test_broken_policy_keeps_no_result_here(runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.bus.publish._FIRST_PAUSE_S", 0.001)
    clock, key = Clock(), runner.list_signer("ann")
    asked = runner.ask_signed(key)
    hook = runner.hook("update", 'case "$1" in *claims/*) ;; *) echo maintenance; exit 1;; esac')
    daemon = runner.daemon(clock=clock, now=clock.now)
    daemon.serve(once=True, idle_timeout_s=0)
    hook.unlink()
    waiting = runner.ask_signed(key)
    (runner.config / "allowed_signers").write_text("rubbish\n")
    clock.seconds += 60
    assert daemon.serve(once=True, idle_timeout_s=0) == 0
    assert runner.verdict(asked.nonce) == ("passed", "ok")
    assert runner.tip(refs.INBOX + waiting.nonce)
    assert runner.has_said("no request is handled until the policy is corrected")


@pytest.mark.slow
def test_archive_that_is_too_large_holds_up_no_request(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.bus.archive.MAX_INDEX_BYTES", 10)
    old = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=2)
    nonce = refs.new_nonce(old, b"123456")
    own = {"created_at": old, "nonce": nonce, "result_ref": refs.request_ref("echo", nonce, None)}
    asked = runner.ask(**own)
    index = Objects(runner.repo.remote).commit_files(None, {f"index/{old:%Y-%m}.jsonl": b"x" * 11})
    runner.point(refs.ARCHIVE, index)
    assert runner.serve_once() == 1
    assert runner.verdict(asked.nonce) == ("passed", "ok")


@pytest.mark.slow
def test_two_runners_on_one_machine_run_one_job_at_a_time(runner: RunnerFixture) -> None:
    runner.install({"busy": "import time; print(time.monotonic()); time.sleep(0.7); print(time.monotonic())"})
    nonces = [runner.ask("busy").nonce for _ in range(4)]
    with runner.serving(runner.daemon("first"), runner.daemon("second")):
        wait_for(lambda: sum("published as" in line for line in runner.said) == 4, 60, "all the results")
    times = sorted([float(word) for word in runner.log(nonce).split()] for nonce in nonces)
    for (_, ended), (began, _) in pairwise(times):
        assert ended <= began


@pytest.mark.slow
def test_registration_says_busy_during_a_job_and_stopped_afterwards(runner: RunnerFixture) -> None:
    asked = runner.ask("sleep")

    def is_busy() -> bool:
        seen = info_of(runner)
        return seen is not None and seen.state is State.BUSY

    with runner.serving(runner.daemon(), abort=True):
        wait_for(is_busy, what="a registration that says so")
        seen = info_of(runner)
        assert seen is not None
        assert seen.job is not None
        assert (seen.job.nonce, seen.job.preset) == (asked.nonce, "sleep")
    seen = info_of(runner)
    assert seen is not None
    assert (seen.state, seen.job, seen.load.done) == (State.STOPPED, None, 1)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("preset", ["echo", "fail"])
def test_what_another_live_runner_offers_is_left_to_it_for_a_while(
    runner: RunnerFixture, preset: str
) -> None:
    """A machine without the preset, and one whose policy forbids it, next to one that has it."""
    able = runner.daemon("able", state_dir=runner.state / "able")
    able.serve(once=True, idle_timeout_s=0.3)
    now = datetime.now(UTC)
    other = runner.repo.root / "other-config"
    other.mkdir()
    if preset == "fail":
        (other / "presets").symlink_to(runner.config / "presets")
        (other / "policy.toml").write_text('allow_presets = ["probe"]\n')
        (other / "policy.toml").chmod(0o600)
    times = [now]
    unable = runner.daemon(
        "unable", state_dir=runner.state / "unable", config_dir=other, now=lambda: times[0]
    )
    asked = runner.ask(preset)
    assert unable.serve(once=True, idle_timeout_s=0) == 1, "the other one says that it stopped"
    assert runner.answer(asked.nonce).result.verdict.reason in (Reason.POLICY, Reason.UNKNOWN_PRESET)
    cache = cache_of(runner)
    [seen] = [one for one in read_registry(cache).seen if one.name == "able"]
    live = seen.info.model_copy(update={"state": State.IDLE, "public_key": None})
    register(cache, live, None, now=now)
    asked = runner.ask(preset)
    assert unable.serve(once=True, idle_timeout_s=0) == 0
    times[0] = now + timedelta(minutes=10)
    assert unable.serve(once=True, idle_timeout_s=0) == 1, "it waits for others only so long"
    assert runner.answer(asked.nonce).result.verdict.status is Status.REFUSED


# Pruning ----------------------------------------------------------------------------------------------------


class PruneClock(Clock):
    """Starts when what is made now is old."""

    def __init__(self) -> None:
        super().__init__(0.0, datetime.now(UTC) + timedelta(days=40))

    def after(self, seconds: float, daemon: Daemon) -> None:
        self.seconds += seconds
        daemon._between_jobs(idle=False)


def finished(runner: RunnerFixture, count: int = 1) -> list[str]:
    """Branches of answered requests, as old as the clock says."""
    asked, daemon = [runner.ask().result_ref for _ in range(count)], runner.daemon()
    for _ in asked:
        assert daemon.serve(once=True, idle_timeout_s=20) == 1
    return asked


def pruner(runner: RunnerFixture, clock: PruneClock) -> Daemon:
    return runner.daemon("pruner", clock=clock, now=clock.now)


@pytest.mark.slow
def test_much_is_pruned_in_batches_and_registrations_after_it(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "PRUNE_BATCH", 2)
    asked, clock = finished(runner, 3), PruneClock()
    daemon = pruner(runner, clock)
    long_ago = {"name": "long-gone", "seen_at": "2026-01-01T00:00:00Z", "public_key": None}
    gone = daemon._registrar.info(State.IDLE).model_copy(update=long_ago)
    register(cache_of(runner), gone, None, now=clock.now())
    for pause, left, is_there in ((PRUNE_FIRST_S, 1, True), (daemon_module.PRUNE_AGAIN_S, 0, False)):
        clock.after(pause, daemon)
        assert len(runner.repo.remote_refs() & set(asked)) == left
        assert (f"{refs.RUNNERS}long-gone" in runner.repo.remote_refs()) is is_there


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("trouble", ["the remote is away", "no deletion"])
def test_pruning_that_fails_is_tried_again_hours_later(runner: RunnerFixture, trouble: str) -> None:
    [asked] = finished(runner)
    clock = PruneClock()
    daemon, away = pruner(runner, clock), runner.repo.remote.with_name("away.git")
    if trouble == "no deletion":
        runner.repo.git("config", "receive.denyDeletes", "true", cwd=runner.repo.remote)
        clock.after(PRUNE_FIRST_S, daemon)
        runner.repo.git("config", "receive.denyDeletes", "false", cwd=runner.repo.remote)
    else:
        runner.repo.remote.rename(away)
        clock.after(PRUNE_FIRST_S, daemon)
        away.rename(runner.repo.remote)
    clock.after(0.75 * PRUNE_EVERY_S - 1, daemon)
    assert runner.tip(asked)
    clock.after(0.5 * PRUNE_EVERY_S + 1, daemon)
    assert runner.tip(asked) is None


@pytest.mark.slow
def test_runner_prunes_while_requests_wait_but_not_next_to_a_job(runner: RunnerFixture) -> None:
    """That job may be measuring."""
    [old] = finished(runner)
    start = datetime.now(UTC) + timedelta(days=40)

    def serve() -> None:
        moments = itertools.count(0.0, 60.0)
        daemon = runner.daemon("pruner", clock=lambda: next(moments), now=lambda: start)
        daemon.serve(once=True, idle_timeout_s=2 * PRUNE_FIRST_S)

    nonce = refs.new_nonce(start, b"123456")
    created = start.replace(microsecond=0)
    waiting = runner.ask(
        nonce=nonce,
        result_ref=refs.request_ref("echo", nonce, None),
        created_at=created,
        expires_at=created + timedelta(hours=1),
    )
    with Supervisor(runner.config_of().lock):
        serve()
    assert runner.tip(old)
    runner.delete(*runner.left(waiting.nonce))
    runner.ask(transport="actions")
    serve()
    assert runner.tip(old) is None


@pytest.mark.parametrize(
    ("remote", "timing"),
    [
        ("/srv/bus.git", LOCAL),
        ("file:///srv/bus.git", LOCAL),
        ("git@git.example.org:team/bus.git", OWN_SERVER),
        ("ssh://git@studio.local/bus", OWN_SERVER),
        ("https://github.com/me/bus", PUBLIC_HOST),
        ("git@github.com:me/bus.git", PUBLIC_HOST),
        ("https://team.ghe.com/me/bus", PUBLIC_HOST),
        ("https://notgithub.com/me/bus", OWN_SERVER),
    ],
)
def test_timing_follows_the_kind_of_remote(remote: str, timing: Timing) -> None:
    assert timing_of(remote) == timing


@pytest.mark.parametrize("timing", [LOCAL, OWN_SERVER, PUBLIC_HOST])
def test_lease_outlives_several_lost_heartbeats(timing: Timing) -> None:
    assert timing.lease_s >= 4 * timing.heartbeat_s


def test_public_host_gets_few_pushes_and_reads() -> None:
    """GitHub's advice for a repository: at most 6 pushes a minute and 15 reads a second, of all runners."""
    pushes = 60 / PUBLIC_HOST.heartbeat_s + 60 / PUBLIC_HOST.registration_s
    assert pushes <= 2
    assert PUBLIC_HOST.fast_s is None
