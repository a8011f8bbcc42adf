"""What a runner began counts as an attempt, whatever somebody does to the claim on the remote."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime, timedelta

import pytest

from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.runner.begun import Begun
from bridge.runner.clerk import MAX_ATTEMPTS
from bridge.runner.serve import Runner
from tests.bridge.runner.bench import Bench
from tests.houses import wait_for


def cut_short(bench: Bench, asked: Manifest, runner: Runner) -> None:
    """Have the job begin, take its claim and inbox entry away, and put the request back."""
    served = threading.Thread(target=runner.serve, kwargs={"once": True, "idle_timeout_s": 20}, daemon=True)
    served.start()
    wait_for(lambda: bench.running("sleep.py"), what="the job's process")
    inbox, remote = refs.inbox_ref(asked.nonce), bench.house.remote
    commit = bench.house.git("rev-parse", inbox, cwd=remote)
    for ref in (inbox, refs.claim_ref(asked.nonce)):
        bench.house.git("update-ref", "-d", ref, cwd=remote)
    served.join(30)
    assert not served.is_alive()
    assert "the claim was lost" in bench.said[-1]
    bench.house.git("update-ref", inbox, commit, cwd=remote)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_request_that_is_taken_away_and_put_back_while_it_runs_counts_as_another_attempt(
    bench: Bench, restarted: bool
) -> None:
    asked, runner = bench.ask("sleep"), bench.runner()
    cut_short(bench, asked, runner)
    (bench.house.root / "sleep.py").write_text("print('well rested')\n")
    again = bench.runner() if restarted else runner
    assert again.serve(once=True, idle_timeout_s=20) >= 1
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    assert bench.answer(asked.nonce).result.attempt == 2


@pytest.mark.slow
def test_nobody_has_a_request_run_for_ever_by_taking_it_away_and_putting_it_back(bench: Bench) -> None:
    asked = bench.ask("sleep")
    for _ in range(MAX_ATTEMPTS):
        cut_short(bench, asked, bench.runner())
    assert bench.serve_once() == 1
    assert bench.verdict(asked.nonce) == ("lost", "attempts")
    assert sum("claimed, attempt" in line for line in bench.said) == MAX_ATTEMPTS + 1


def test_what_was_begun_is_kept_while_its_request_may_be_valid(bench: Bench) -> None:
    now = datetime.now(UTC)
    path = bench.house.root / "begun"
    old, young = (refs.new_nonce(now - timedelta(days=days), os.urandom(6)) for days in (400, 0))
    begun = Begun(path, now)
    for nonce, attempt in ((old, 1), (young, 2), (young, 1)):
        begun.note(nonce, attempt)
    assert (begun.attempts(young), begun.attempts(refs.new_nonce(now, os.urandom(6)))) == (2, 0)
    path.write_text(f"{path.read_text()}\n{young}=\n{young[:9]}\n{young}=x\n")
    again = Begun(path, now)
    assert (again.attempts(old), again.attempts(young)) == (0, 2)
    assert path.read_text() == f"{young}=2\n"
