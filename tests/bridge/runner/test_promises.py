"""What a runner promises as a whole: one job a machine, quotas, an honest card, no request answered twice."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from bridge import signing
from bridge.bus.archive import prune
from bridge.bus.catalogue import read_cards
from bridge.bus.git import Git
from bridge.bus.handles import resolve_handle
from bridge.proc import run_program
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.protocol.result import Reason, Status
from bridge.protocol.runner_info import RunnerCard, State
from bridge.runner.child import MachineBusy, Standby, Supervised
from bridge.runner.serve import Runner
from tests.bridge.bus.damage import DAMAGE
from tests.bridge.runner.bench import Bench
from tests.houses import wait_for


@contextmanager
def serving(*runners: Runner, abort: bool = False) -> Iterator[threading.Event]:
    """Runners at work beside the test; drained at the end, with `abort` their jobs, too."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=runner.serve, kwargs={"stop": stop}, daemon=True) for runner in runners
    ]
    for thread in threads:
        thread.start()
    try:
        yield stop
    finally:
        stop.set()
        for runner in runners if abort else ():
            runner.abort()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


def claimed(bench: Bench, nonce: str) -> Callable[[], bool]:
    return lambda: any(line.startswith(f"{nonce}: claimed") for line in bench.said)


def ask_as(bench: Bench, name: str, preset: str = "echo") -> Manifest:
    """A request signed by somebody whom this machine knows."""
    key = signing.ensure_key(bench.house.root / "keys" / name, name)
    allowed = signing.allowed_line(signing.public_key(key), name, signing.REQUEST_NAMESPACE)
    (bench.config / "allowed_signers").write_text(allowed)
    manifest = bench.manifest(preset)
    signature = signing.sign(key, signing.REQUEST_NAMESPACE, manifest.to_bytes())
    return bench.ask(signature=signature, **dict(manifest))


@pytest.mark.slow
def test_two_runners_on_one_machine_run_one_job_at_a_time(bench: Bench) -> None:
    bench.install({"busy": "import time; print(time.monotonic()); time.sleep(0.7); print(time.monotonic())"})
    nonces = [bench.ask("busy").nonce for _ in range(4)]
    with serving(bench.runner("first"), bench.runner("second")):
        wait_for(
            lambda: sum("published as" in line for line in bench.said) == len(nonces), 60, "all the results"
        )
    times = sorted([float(word) for word in bench.log(nonce).split()] for nonce in nonces)
    assert len(times) == len(nonces)
    for (_, ended), (began, _) in pairwise(times):
        assert ended <= began
    assert {bench.answer(nonce).result.runner.name for nonce in nonces} <= {"first", "second"}


@pytest.mark.slow
def test_a_requester_has_no_more_running_than_the_policy_says_and_others_are_served(bench: Bench) -> None:
    bench.policy("max_running_per_requester = 1\n")
    long = bench.ask("sleep")
    here = bench.runner("here", state_dir=bench.state / "here")
    there = bench.runner("there", state_dir=bench.state / "there")
    with serving(here, abort=True):
        wait_for(claimed(bench, long.nonce), what="the first job")
        waiting = bench.ask()
        assert there.serve(once=True, idle_timeout_s=1) == 0, bench.said
        hers = ask_as(bench, "ann")
        assert there.serve(once=True, idle_timeout_s=20) == 1
        assert bench.answer(hers.nonce).result.verdict.status is Status.PASSED
        assert there.serve(once=True, idle_timeout_s=1) == 0
    assert there.serve(once=True, idle_timeout_s=20) == 1
    assert bench.answer(waiting.nonce).result.runner.name == "there"


def card_of(bench: Bench, name: str) -> RunnerCard | None:
    seen = read_cards(Git(bench.house.clone), str(bench.house.remote)).seen
    return next((one.card for one in seen if one.name == name), None)


@pytest.mark.slow
def test_a_card_says_busy_while_a_job_runs_and_stopped_after_the_runner_was_drained(bench: Bench) -> None:
    asked = bench.ask("sleep")

    def is_busy() -> bool:
        card = card_of(bench, "mac")
        return card is not None and card.state is State.BUSY

    with serving(bench.runner(), abort=True):
        wait_for(is_busy, what="a card that says so")
        card = card_of(bench, "mac")
        assert card is not None
        assert card.job is not None
        assert (card.job.nonce, card.job.preset) == (asked.nonce, "sleep")
    card = card_of(bench, "mac")
    assert card is not None
    assert (card.state, card.job, card.load.done) == (State.STOPPED, None, 1)


@pytest.mark.slow
def test_a_replay_of_what_was_archived_is_run_by_no_machine(bench: Bench) -> None:
    began = datetime.now(UTC).replace(microsecond=0)
    asked = bench.ask(expires_at=began + timedelta(hours=20))
    commit = bench.house.git("rev-parse", asked.result_ref, cwd=bench.house.remote)
    assert bench.serve_once() == 1
    later = began + timedelta(hours=3)
    remote = str(bench.house.remote)
    done = prune(bench.house.root / "pruned", remote, now=later, keep=0, older_than=timedelta(hours=1))
    assert done.archived == (asked.nonce,)
    assert asked.result_ref not in bench.house.remote_refs()
    for name in ("mac", "another"):
        bench.push_commit(asked, commit)
        station = bench.station(name, state_dir=bench.state / name)  # which knows nothing of the first answer
        said: list[str] = []
        runner = Runner(station, say=said.append, idle_s=0.2, now=lambda: later)
        assert runner.serve(once=True, idle_timeout_s=20) == 1
        assert any("refused/replayed" in line for line in said), said
        assert bench.answer(asked.nonce).result.verdict.reason is Reason.REPLAYED
        bench.house.git("update-ref", "-d", asked.result_ref, cwd=bench.house.remote)
        bench.house.git("update-ref", "-d", refs.result_ref(asked.nonce), cwd=bench.house.remote)


def supervisors(bench: Bench) -> list[int]:
    """Processes of this bench that keep a job."""
    done = run_program(["ps", "-axo", "pid=,command="], timeout_s=10, limit_bytes=1 << 22)
    rows = [line.split(None, 1) for line in done.stdout.decode("utf-8", "replace").splitlines()]
    ours = ("bridge.runner.supervisor", str(bench.station().lock))
    return [int(pid) for pid, command in rows if all(word in command for word in ours)]


@pytest.mark.slow
def test_the_machine_stays_locked_while_anything_of_a_dead_runners_job_lives(bench: Bench) -> None:
    bench.ask("sleep")
    lock = bench.station().lock
    daemon = bench.daemon()
    wait_for(lambda: bool(bench.running("sleep.py")), what="the job's process")
    stopped = supervisors(bench)
    assert stopped
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)  # so that they cannot end the job at once
        daemon.kill()
        daemon.wait(20)
        time.sleep(0.5)
        assert bench.running("sleep.py")
        with pytest.raises(MachineBusy):
            Supervised(Standby(lock))
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    def is_free() -> bool:
        try:
            Supervised(Standby(lock)).close()
        except MachineBusy:
            return False
        assert not bench.running("sleep.py"), "the lock was let go before the job's tree was gone"
        return True

    wait_for(is_free, 20, "a free machine")


@pytest.mark.slow
def test_a_lone_runner_answers_also_where_the_server_never_takes_the_result(bench: Bench) -> None:
    hook = bench.house.remote / "hooks" / "update"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(
        '#!/bin/sh\ngit cat-file -e "$3" 2>/dev/null || exit 0\n'
        'git ls-tree -r --name-only "$3" | grep -q log.txt || exit 0\necho "no logs are taken"\nexit 1\n'
    )
    hook.chmod(0o755)
    asked = bench.ask()
    runner = Runner(bench.station(), say=bench.said.append, idle_s=0.2, clock=lambda: 100 * time.monotonic())
    with serving(runner):
        wait_for(lambda: any("a bare result" in line for line in bench.said), 60, "an answer")
        after = bench.ask()
        wait_for(claimed(bench, after.nonce), 30, "the next request's turn")
    found = bench.answer(asked.nonce).result.verdict
    assert (found.status, found.reason) == (Status.FAILED, Reason.RUNNER_ERROR)
    assert "no logs are taken" in found.message
    [aside] = bench.station().folder.glob(f"spool-*/unusable-{asked.nonce}")
    assert b"hello from test\n" in [path.read_bytes() for path in (aside / "files").iterdir()]


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("damage", ["no HEAD", "no objects folder", "no folder", "configuration"])
def test_a_mirror_that_breaks_beside_a_running_job_does_not_end_its_heartbeat(
    bench: Bench, damage: str
) -> None:
    nonce = bench.ask("sleep").nonce
    git, remote = Git(bench.house.clone), str(bench.house.remote)

    def held() -> str | None:
        claim = resolve_handle(git, remote, nonce).claim
        return None if claim is None else claim.commit

    with serving(bench.runner(), abort=True):
        wait_for(lambda: bool(bench.running("sleep.py")), what="the job")
        [mirror] = bench.station().folder.glob("mirror-*.git")
        DAMAGE[damage](mirror)
        wait_for(lambda: any("made again" in line for line in bench.said), what="a new copy")
        before = held()
        wait_for(lambda: held() not in (before, None), what="a beat")
        assert bench.running("sleep.py")
    assert bench.verdict(nonce) == ("cancelled", "shutdown")
