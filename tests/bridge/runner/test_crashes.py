"""A runner that dies, or loses its claim or its remote: the request is still answered, and once."""

import threading
import time

import pytest

from bridge.protocol import refs
from bridge.protocol.result import Status
from bridge.runner.child import Standby, Supervised
from bridge.runner.serve import Runner
from tests.bridge.runner.bench import Bench
from tests.houses import wait_for


def test_a_lost_claim_stops_the_job_and_gives_no_result(bench: Bench) -> None:
    stop = threading.Event()
    runner = bench.runner()
    thread = threading.Thread(target=runner.serve, kwargs={"stop": stop}, daemon=True)
    asked = bench.ask("sleep")
    thread.start()
    claim = refs.claim_ref(asked.nonce)
    wait_for(lambda: any("claimed" in line for line in bench.said), what="the claim")
    stop.set()
    head = bench.house.git("rev-parse", "HEAD")
    bench.house.git("push", "-q", "--force", str(bench.house.remote), f"{head}:{claim}")
    thread.join(30)
    assert not thread.is_alive()
    assert "the claim was lost" in bench.said[-1]
    assert bench.house.git("rev-parse", claim, cwd=bench.house.remote) == head
    with Supervised(Standby(bench.station().lock)):
        pass


@pytest.mark.slow
def test_an_unreachable_remote_is_waited_for_and_a_result_is_kept_for_it(bench: Bench) -> None:
    away = bench.house.root / "away.git"
    script = bench.house.root / "unplug.py"
    script.write_text(
        "import os, time\nopen('up', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.05)\n"
    )
    bench.preset("unplug", ["${python}", "-I", str(script)], timeout=90)
    asked = bench.ask("unplug")
    runner = bench.runner()
    stop = threading.Event()
    thread = threading.Thread(target=runner.serve, kwargs={"stop": stop}, daemon=True)
    thread.start()
    wait_for(lambda: bench.in_rooms("up"), 60, "the job runs")
    bench.house.remote.rename(away)
    [up] = bench.in_rooms("up")
    up.with_name("go").touch()
    wait_for(lambda: any("kept for later" in line for line in bench.said), 60, "the result to be kept")
    away.rename(bench.house.remote)
    wait_for(lambda: any("published as" in line for line in bench.said), 60, "the result to be pushed")
    stop.set()
    thread.join(20)
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    assert refs.claim_ref(asked.nonce) not in bench.house.remote_refs()


def test_a_killed_runner_leaves_nothing_running_and_the_next_one_finishes(bench: Bench) -> None:
    asked = bench.ask("sleep")
    daemon = bench.daemon()
    claim = refs.claim_ref(asked.nonce)
    wait_for(lambda: "claimed" in bench.daemon_log(), what="the claim")
    wait_for(lambda: bool(bench.running("sleep.py")), what="the job's process")
    daemon.kill()
    daemon.wait(20)
    wait_for(lambda: not bench.running("sleep.py"), 10, "the end of the job's process")
    assert claim in bench.house.remote_refs()
    (bench.house.root / "sleep.py").write_text("print('second try')")
    started = time.monotonic()
    assert bench.serve_once() == 1
    assert time.monotonic() - started < 30, "its own old claim is taken over without waiting for the lease"
    answer = bench.answer(asked.nonce)
    assert answer.result.verdict.status is Status.PASSED
    assert answer.result.attempt == 2
    assert answer.files["log.txt"] == b"second try\n"


@pytest.mark.slow
def test_a_request_whose_runners_always_die_ends_as_lost(bench: Bench) -> None:
    asked = bench.ask("sleep")
    for _ in range(3):
        daemon = bench.daemon()
        wait_for(lambda: bool(bench.running("sleep.py")), what="the job's process")
        daemon.kill()
        daemon.wait(20)
        wait_for(lambda: not bench.running("sleep.py"), 10, "the end of the job's process")
    assert bench.serve_once() == 1
    assert bench.verdict(asked.nonce) == ("lost", "attempts")


@pytest.mark.slow
def test_a_silent_claim_of_another_machine_is_taken_over(bench: Bench) -> None:
    asked = bench.ask("sleep")
    daemon = bench.daemon("other")
    wait_for(lambda: "claimed" in bench.daemon_log("other"), what="the claim")
    daemon.kill()
    daemon.wait(20)
    (bench.house.root / "sleep.py").write_text("print('taken over')")
    clock = [0.0]
    runner = Runner(
        bench.station("mine", state_dir=bench.state / "mine"), say=bench.said.append, clock=lambda: clock[0]
    )
    assert runner.serve(once=True, idle_timeout_s=-1) == 0
    clock[0] = 119.0
    assert runner.serve(once=True, idle_timeout_s=-1) == 0
    clock[0] = 121.0
    assert runner.serve(once=True, idle_timeout_s=-1) == 1
    assert bench.answer(asked.nonce).result.attempt == 2
    assert bench.log(asked.nonce) == "taken over\n"
