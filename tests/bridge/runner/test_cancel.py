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
from tests.fixtures.repo import RepoFixture, wait_for
from tests.fixtures.runner import RunnerFixture

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
def runner(repo: RepoFixture) -> RunnerFixture:
    made = RunnerFixture(repo)
    made.install(PROGRAMS)
    return made


@contextmanager
def running(runner: RunnerFixture) -> Iterator[None]:
    """A runner at work; at the end its job may finish."""
    with runner.serving(runner.daemon()):
        yield
        for up in runner.in_workspaces("up"):
            up.with_name("enough").touch()


def wait_until_it_runs(runner: RunnerFixture) -> None:
    wait_for(lambda: runner.in_workspaces("up"), 40, "the job")


def cancel(runner: RunnerFixture, asked: Manifest, *, key: Path | None = None) -> None:
    cache = GitCache(runner.repo.root / "client.git", str(runner.repo.remote))
    inbox = refs.INBOX + asked.nonce
    commit = runner.tip(inbox) or ""
    request = new_cancel(asked.nonce, commit, requested_by="me", reason="enough")
    signature = None if key is None else signing.sign(key, signing.CANCEL_NAMESPACE, request.to_bytes())
    outcome = request_cancel(cache, request, RefValue(inbox, commit), signature=signature)
    assert outcome is CancelOutcome.ASKED


def alive(word: str) -> list[str]:
    """Command lines of the processes that were given this word."""
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if word in line]


def is_answered(runner: RunnerFixture, asked: Manifest) -> bool:
    listed = ("ls-tree", "-r", "--name-only", asked.result_ref)
    return "/result.json" in runner.repo.git(*listed, cwd=runner.repo.remote)


def test_waiting_request_is_cancelled_without_being_started(runner: RunnerFixture) -> None:
    asked = runner.ask()
    cancel(runner, asked)
    assert runner.serve_once() == 1
    assert runner.verdict(asked.nonce) == CANCELLED
    result = runner.answer(asked.nonce).result
    assert "by me: enough" in result.verdict.message
    assert (result.commands, Phase.RUNNING in result.phase_seconds) == ((), False)
    assert runner.left(asked.nonce) == {asked.result_ref}, (
        "inbox, claim and cancel request go with the result"
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a cancel request", "a deleted branch"])
def test_running_job_that_ignores_signals_is_gone_in_time(runner: RunnerFixture, how: str) -> None:
    word = f"marked-{secrets.token_hex(8)}"
    asked = runner.ask("unwilling", params={"word": word})
    with running(runner):
        wait_until_it_runs(runner)
        assert len(alive(word)) >= 3, alive(word)
        cancel(runner, asked) if how == "a cancel request" else runner.delete(asked.result_ref)
        wait_for(lambda: not alive(word), 2 * GONE_S, f"the end of {alive(word)}")
    assert runner.verdict(asked.nonce) == CANCELLED
    assert "up and running" in runner.log(asked.nonce)
    place = asked.result_ref if how == "a cancel request" else refs.RESULTS + asked.nonce
    assert runner.left(asked.nonce) == {place}


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("author", ["unsigned", "another signer", "a deleted branch", "the requester"])
def test_only_the_requester_stops_a_job_where_signatures_are_required(
    runner: RunnerFixture, author: str
) -> None:
    ann, bob = runner.list_signer("ann"), runner.list_signer("bob")
    runner.policy("require_signature = true\n")
    asked = runner.ask_signed(ann, "patient")
    with running(runner):
        wait_until_it_runs(runner)
        if author == "a deleted branch":
            runner.delete(asked.result_ref)
        else:
            cancel(runner, asked, key={"another signer": bob, "the requester": ann}.get(author))
        if author == "the requester":
            wait_for(lambda: is_answered(runner, asked), what="the answer")
        elif author == "a deleted branch":
            time.sleep(3)  # more than one question whether the job shall stop
        else:
            wait_for(lambda: runner.has_said(asked.nonce, "not cancelled"), what="the objection")
    assert runner.verdict(asked.nonce) == (CANCELLED if author == "the requester" else PASSED)
    assert not [ref for ref in runner.left(asked.nonce) if "cancel" in ref]


@pytest.mark.slow
def test_waiting_requests_are_cancelled_while_another_job_runs(runner: RunnerFixture) -> None:
    ann, bob = runner.list_signer("ann"), runner.list_signer("bob")
    runner.policy("require_signature = true\n")
    long = runner.ask_signed(ann, "patient")
    with running(runner):
        wait_until_it_runs(runner)
        untouched, kept, broken, stopped = (runner.ask_signed(ann, "echo") for _ in range(4))
        runner.point(f"{refs.CLAIMS + broken.nonce}/x", runner.tip("refs/heads/main") or "")
        cancel(runner, kept, key=bob)
        cancel(runner, broken, key=ann)
        cancel(runner, stopped, key=ann)
        orphan = runner.manifest().nonce  # its request is gone
        runner.point(refs.CANCELS + orphan, runner.tip(refs.CANCELS + stopped.nonce) or "")
        wait_for(lambda: is_answered(runner, stopped), what="the answer")
        assert not is_answered(runner, long)
        assert not is_answered(runner, untouched)
        wait_for(lambda: runner.has_said(kept.nonce, "not cancelled"), what="the objection")
        assert kept.nonce not in runner.claimed()
    assert runner.verdict(stopped.nonce) == CANCELLED
    assert runner.left(stopped.nonce) == {stopped.result_ref}
    assert runner.verdict(long.nonce) == PASSED


@pytest.mark.slow
def test_request_is_cancelled_while_another_runner_has_the_machine(runner: RunnerFixture) -> None:
    first = runner.ask()
    with Supervisor(runner.config_of().lock), running(runner):
        wait_for(lambda: runner.has_said("waiting: "), what="the runner waits")
        waits = runner.ask()
        cancel(runner, waits)
        wait_for(lambda: is_answered(runner, waits), what="the answer")
    assert runner.verdict(waits.nonce) == CANCELLED
    assert not is_answered(runner, first)
