"""A cancel request ends what waits and what runs, whole, and only where its author is authorised."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.cancels import CancelOutcome, request_cancel
from bridge.bus.requests import RefValue
from bridge.git.cache import GitCache
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest, new_cancel
from bridge.protocol.result import Phase
from bridge.runner.child import Supervisor
from tests.bridge.runner.bench import Bench
from tests.houses import House, wait_for

GONE_S = 5.0
CANCELLED, PASSED = ("cancelled", "requested"), ("passed", "ok")

# A job that does not want to end: it ignores SIGTERM, and so do its children in sessions of their own.
UNWILLING = """
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    program = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); time.sleep(90)"
    nested = (
        "import subprocess, sys, time, signal; signal.signal(15, signal.SIG_IGN);"
        f"subprocess.Popen([sys.executable, '-c', {program!r}, sys.argv[1]], start_new_session=True);"
        "time.sleep(90)"
    )
    subprocess.Popen([sys.executable, "-c", nested, arg], start_new_session=True)
    time.sleep(0.5)
    open("up", "w").close()
    print("up and running", flush=True)
    time.sleep(90)
"""
PROGRAMS = {
    "echo": "print('hello from', arg)",
    "unwilling": UNWILLING,
    "patient": """
        import os, time
        open("up", "w").close()
        while not os.path.exists("enough"):
            time.sleep(0.05)
        print("finished")
    """,
}


@pytest.fixture
def bench(house: House) -> Bench:
    made = Bench(house)
    made.install(PROGRAMS)
    return made


@contextmanager
def running(bench: Bench) -> Iterator[None]:
    """A runner at work; at the end its job may finish."""
    with bench.serving(bench.runner()):
        yield
        for up in bench.in_rooms("up"):
            up.with_name("enough").touch()


def wait_until_it_runs(bench: Bench) -> None:
    wait_for(lambda: bench.in_rooms("up"), 40, "the job")


def cancel(bench: Bench, asked: Manifest, *, key: Path | None = None) -> None:
    cache = GitCache(bench.house.root / "client.git", str(bench.house.remote))
    inbox = refs.INBOX + asked.nonce
    commit = bench.tip(inbox) or ""
    request = new_cancel(asked.nonce, commit, requested_by="me", reason="enough")
    signature = None if key is None else signing.sign(key, signing.CANCEL_NAMESPACE, request.to_bytes())
    outcome = request_cancel(cache, request, RefValue(inbox, commit), signature=signature)
    assert outcome is CancelOutcome.ASKED


def alive(word: str) -> list[str]:
    """Command lines of the processes that were given this word."""
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if word in line]


def is_answered(bench: Bench, asked: Manifest) -> bool:
    listed = ("ls-tree", "-r", "--name-only", asked.result_ref)
    return "/result.json" in bench.house.git(*listed, cwd=bench.house.remote)


def test_waiting_request_is_cancelled_without_being_started(bench: Bench) -> None:
    asked = bench.ask()
    cancel(bench, asked)
    assert bench.serve_once() == 1
    assert bench.verdict(asked.nonce) == CANCELLED
    result = bench.answer(asked.nonce).result
    assert "by me: enough" in result.verdict.message
    assert (result.commands, Phase.RUNNING in result.phase_seconds) == ((), False)
    assert bench.left(asked.nonce) == {asked.result_ref}, "inbox, claim and cancel request go with the result"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a cancel request", "a deleted branch"])
def test_running_job_that_ignores_signals_is_gone_in_time(bench: Bench, how: str) -> None:
    word = f"marked-{secrets.token_hex(8)}"
    asked = bench.ask("unwilling", params={"word": word})
    with running(bench):
        wait_until_it_runs(bench)
        assert len(alive(word)) >= 3, alive(word)
        cancel(bench, asked) if how == "a cancel request" else bench.delete(asked.result_ref)
        wait_for(lambda: not alive(word), 2 * GONE_S, f"the end of {alive(word)}")
    assert bench.verdict(asked.nonce) == CANCELLED
    assert "up and running" in bench.log(asked.nonce)
    place = asked.result_ref if how == "a cancel request" else refs.RESULTS + asked.nonce
    assert bench.left(asked.nonce) == {place}


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("author", ["unsigned", "another signer", "a deleted branch", "the requester"])
def test_only_the_requester_stops_a_job_where_signatures_are_required(bench: Bench, author: str) -> None:
    ann, bob = bench.list_signer("ann"), bench.list_signer("bob")
    bench.policy("require_signature = true\n")
    asked = bench.ask_signed(ann, "patient")
    with running(bench):
        wait_until_it_runs(bench)
        if author == "a deleted branch":
            bench.delete(asked.result_ref)
        else:
            cancel(bench, asked, key={"another signer": bob, "the requester": ann}.get(author))
        if author == "the requester":
            wait_for(lambda: is_answered(bench, asked), what="the answer")
        elif author == "a deleted branch":
            time.sleep(3)  # more than one question whether the job shall stop
        else:
            wait_for(lambda: bench.has_said(asked.nonce, "not cancelled"), what="the objection")
    assert bench.verdict(asked.nonce) == (CANCELLED if author == "the requester" else PASSED)
    assert not [ref for ref in bench.left(asked.nonce) if "cancel" in ref]


@pytest.mark.slow
def test_waiting_requests_are_cancelled_while_another_job_runs(bench: Bench) -> None:
    ann, bob = bench.list_signer("ann"), bench.list_signer("bob")
    bench.policy("require_signature = true\n")
    long = bench.ask_signed(ann, "patient")
    with running(bench):
        wait_until_it_runs(bench)
        untouched, kept, broken, stopped = (bench.ask_signed(ann, "echo") for _ in range(4))
        bench.point(f"{refs.CLAIMS + broken.nonce}/x", bench.tip("refs/heads/main") or "")
        cancel(bench, kept, key=bob)
        cancel(bench, broken, key=ann)
        cancel(bench, stopped, key=ann)
        stray = bench.manifest().nonce  # its request is gone
        bench.point(refs.CANCELS + stray, bench.tip(refs.CANCELS + stopped.nonce) or "")
        wait_for(lambda: is_answered(bench, stopped), what="the answer")
        assert not is_answered(bench, long)
        assert not is_answered(bench, untouched)
        wait_for(lambda: bench.has_said(kept.nonce, "not cancelled"), what="the objection")
        assert kept.nonce not in bench.claimed()
    assert bench.verdict(stopped.nonce) == CANCELLED
    assert bench.left(stopped.nonce) == {stopped.result_ref}
    assert bench.verdict(long.nonce) == PASSED


@pytest.mark.slow
def test_request_is_cancelled_while_another_runner_has_the_machine(bench: Bench) -> None:
    first = bench.ask()
    with Supervisor(bench.config_of().lock), running(bench):
        wait_for(lambda: bench.has_said("waiting: "), what="the runner waits")
        waits = bench.ask()
        cancel(bench, waits)
        wait_for(lambda: is_answered(bench, waits), what="the answer")
    assert bench.verdict(waits.nonce) == CANCELLED
    assert not is_answered(bench, first)
