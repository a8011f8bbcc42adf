"""A wish to stop ends what waits and what runs, whole, and only where the machine listens to its author."""

from __future__ import annotations

import secrets
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.cancels import Wished, draft, wish
from bridge.bus.git import Git
from bridge.bus.handles import Held, resolve_handle
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.protocol.result import Phase, Reason, Status
from bridge.runner import wishes
from bridge.runner.child import Standby, Supervised
from bridge.runner.serve import Runner
from tests.bridge.runner.bench import Bench
from tests.houses import House, wait_for

GONE_S = 5.0

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
    print("progress 1/2 unwilling", flush=True)
    print("up and running", flush=True)
    time.sleep(90)
"""
PROGRAMS = {
    "echo": "print('hello from', arg)",
    "unwilling": UNWILLING,
    "patient": """
        import os, time
        open("up", "w").close()
        print("up and running", flush=True)
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
def running(bench: Bench) -> Iterator[subprocess.Popen[bytes]]:
    """A runner of its own process that ends with its first answer."""
    process = bench.daemon(once=True)
    try:
        yield process
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def ask_to_stop(bench: Bench, asked: Manifest, *, key: Path | None = None) -> None:
    git, remote = Git(bench.house.clone), str(bench.house.remote)
    inbox = refs.inbox_ref(asked.nonce)
    commit = git.ls_remote(remote)[inbox]
    cancel = draft(asked.nonce, commit, requested_by="me", reason="enough")
    signature = key and signing.sign(key, signing.CANCEL_NAMESPACE, cancel.to_bytes())
    assert wish(git, remote, cancel, Held(inbox, commit), signature=signature) is Wished.ASKED


def delete_branch(bench: Bench, asked: Manifest) -> None:
    bench.house.git("push", "--quiet", str(bench.house.remote), f":{asked.result_ref}")


def wait_until_it_runs(bench: Bench, asked: Manifest) -> None:
    def is_up() -> bool:
        ref = refs.claim_ref(asked.nonce)
        if ref not in bench.house.remote_refs():
            return False
        status = bench.house.git("show", f"{ref}:status.json", cwd=bench.house.remote)
        return "up and running" in status

    wait_for(is_up, 40, f"the job runs ({bench.daemon_log()})")


def alive(word: str) -> list[str]:
    """Command lines of the processes that were given this word."""
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if word in line]


def ended(bench: Bench, asked: Manifest) -> tuple[Status, Reason, str]:
    """Status, reason and message, believed because the runner's key is trusted."""
    station, trusted = bench.station(), bench.house.root / "trusted"
    assert station.key is not None
    trusted.write_text(signing.allowed_line(signing.public_key(station.key), "mac", signing.RESULT_NAMESPACE))
    verdict = bench.answer(asked.nonce, trusted).result.verdict
    return verdict.status, verdict.reason, verdict.message


def sign_requests(bench: Bench, name: str) -> Path:
    """A key that the machine lists, for requests and cancels."""
    key = signing.ensure_key(bench.house.root / "keys" / name, name)
    both = f"{signing.REQUEST_NAMESPACE},{signing.CANCEL_NAMESPACE}"
    with (bench.config / "allowed_signers").open("a") as listed:
        listed.write(signing.allowed_line(signing.public_key(key), name, both))
    return key


def ask_signed(bench: Bench, key: Path, preset: str) -> Manifest:
    manifest = bench.manifest(preset)
    signature = signing.sign(key, signing.REQUEST_NAMESPACE, manifest.to_bytes())
    return bench.ask(signature=signature, **dict(manifest))


@pytest.mark.slow
def test_a_waiting_request_ends_as_cancelled_without_being_started(bench: Bench) -> None:
    asked = bench.ask()
    ask_to_stop(bench, asked)
    assert bench.serve_once() == 1
    status, reason, message = ended(bench, asked)
    assert (status, reason) == (Status.CANCELLED, Reason.REQUESTED)
    assert "by me: enough" in message
    result = bench.answer(asked.nonce).result
    assert result.commands == ()
    assert Phase.RUNNING not in result.phase_seconds
    own = {ref for ref in bench.house.remote_refs() if asked.nonce in ref}
    assert own == {asked.result_ref}, "inbox, claim and wish go with the result"


@pytest.mark.slow
def test_a_running_job_that_does_not_want_to_end_is_gone_in_time(bench: Bench) -> None:
    word = f"marked-{secrets.token_hex(8)}"
    asked = bench.ask("unwilling", params={"word": word})
    with running(bench):
        wait_until_it_runs(bench, asked)
        assert len(alive(word)) >= 3, alive(word)
        ask_to_stop(bench, asked)
        began = time.monotonic()
        wait_for(lambda: not alive(word), GONE_S, f"the end of {alive(word)}")
        assert time.monotonic() - began <= GONE_S
    status, reason, message = ended(bench, asked)
    assert (status, reason) == (Status.CANCELLED, Reason.REQUESTED), bench.daemon_log()
    assert "by me: enough" in message
    assert "up and running" in bench.log(asked.nonce)
    own = {ref for ref in bench.house.remote_refs() if asked.nonce in ref}
    assert own == {asked.result_ref}


def test_deleting_the_branch_cancels_what_waits(bench: Bench) -> None:
    asked = bench.ask()
    delete_branch(bench, asked)
    assert bench.serve_once() == 1
    assert ended(bench, asked)[:2] == (Status.CANCELLED, Reason.REQUESTED)


@pytest.mark.slow
def test_deleting_the_branch_cancels_what_runs(bench: Bench) -> None:
    word = f"marked-{secrets.token_hex(8)}"
    asked = bench.ask("unwilling", params={"word": word})
    with running(bench):
        wait_until_it_runs(bench, asked)
        delete_branch(bench, asked)
        wait_for(lambda: not alive(word), GONE_S, f"the end of {alive(word)}")
    assert ended(bench, asked)[:2] == (Status.CANCELLED, Reason.REQUESTED), bench.daemon_log()
    git = Git(bench.house.clone)
    state = resolve_handle(git, str(bench.house.remote), asked.nonce)
    assert state.branch is None
    assert state.result is not None


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("author", ["nobody", "another signer", "whoever deletes the branch"])
def test_where_signatures_are_required_only_the_requester_stops_a_job(bench: Bench, author: str) -> None:
    ann, bob = sign_requests(bench, "ann"), sign_requests(bench, "bob")
    bench.policy("require_signature = true\n")
    asked = ask_signed(bench, ann, "patient")
    with running(bench):
        wait_until_it_runs(bench, asked)
        if author == "whoever deletes the branch":
            delete_branch(bench, asked)
        else:
            ask_to_stop(bench, asked, key=bob if author == "another signer" else None)
        time.sleep(3)  # many beats, at each of which a wish is heeded
        [up] = bench.in_rooms("up")
        up.with_name("enough").touch()
    assert ended(bench, asked)[:2] == (Status.PASSED, Reason.OK), bench.daemon_log()
    assert not [ref for ref in bench.house.remote_refs() if "cancel" in ref and asked.nonce in ref]


def result_of(bench: Bench, asked: Manifest) -> bool:
    """Whether the branch holds a result."""
    listed = ("ls-tree", "-r", "--name-only", asked.result_ref)
    return "/result.json" in bench.house.git(*listed, cwd=bench.house.remote)


def test_a_cancelled_request_is_answered_while_another_job_runs(bench: Bench) -> None:
    long = bench.ask("patient")
    with running(bench):
        wait_until_it_runs(bench, long)
        before = bench.ask("echo")
        waits = bench.ask("echo")
        ask_to_stop(bench, waits)
        wait_for(lambda: result_of(bench, waits), what=f"the answer ({bench.daemon_log()})")
        assert not result_of(bench, long)
        [up] = bench.in_rooms("up")
        wait_for(lambda: refs.claim_ref(waits.nonce) not in bench.house.remote_refs(), what="the claim")
        assert refs.claim_ref(long.nonce) in bench.house.remote_refs()
        up.with_name("enough").touch()
    status, reason, message = ended(bench, waits)
    assert (status, reason) == (Status.CANCELLED, Reason.REQUESTED)
    assert "by me: enough; it had not been started" in message
    assert [ref for ref in bench.house.remote_refs() if waits.nonce in ref] == [waits.result_ref]
    assert ended(bench, long)[:2] == (Status.PASSED, Reason.OK), bench.daemon_log()
    assert "finished" in bench.log(long.nonce)
    assert not result_of(bench, before), "what is not cancelled has its turn when the job has ended"


@pytest.mark.slow
def test_beside_a_job_a_request_is_not_cancelled_by_who_may_not(bench: Bench) -> None:
    ann, bob = sign_requests(bench, "ann"), sign_requests(bench, "bob")
    bench.policy("require_signature = true\n")
    long = ask_signed(bench, ann, "patient")
    with running(bench):
        wait_until_it_runs(bench, long)
        waits, stopped = (ask_signed(bench, ann, "echo") for _ in range(2))
        ask_to_stop(bench, waits, key=bob)
        ask_to_stop(bench, stopped, key=ann)
        wait_for(lambda: result_of(bench, stopped), what=f"the answer ({bench.daemon_log()})")
        [up] = bench.in_rooms("up")
        up.with_name("enough").touch()
    assert ended(bench, stopped)[0] is Status.CANCELLED
    assert ended(bench, long)[:2] == (Status.PASSED, Reason.OK), bench.daemon_log()
    assert not result_of(bench, waits)
    assert refs.claim_ref(waits.nonce) not in bench.house.remote_refs(), "it is not even claimed"
    assert f"{waits.nonce}: not stopped: the wish is signed by bob" in bench.daemon_log()
    assert bench.serve_once() == 1
    assert ended(bench, waits)[:2] == (Status.PASSED, Reason.OK)


@pytest.mark.slow
def test_a_cancelled_request_is_answered_while_another_runner_has_the_machine(bench: Bench) -> None:
    first = bench.ask("echo")
    machine = Supervised(Standby(bench.station().lock))
    with running(bench), machine:
        wait_for(lambda: "waiting: another job runs" in bench.daemon_log(), what="the runner waits")
        waits = bench.ask("echo")
        ask_to_stop(bench, waits)
        wait_for(lambda: result_of(bench, waits), what=f"the answer ({bench.daemon_log()})")
        assert not result_of(bench, first)
    assert ended(bench, waits)[0] is Status.CANCELLED
    assert ended(bench, first)[:2] == (Status.PASSED, Reason.OK), bench.daemon_log()


@pytest.mark.slow
def test_where_signatures_are_required_the_requester_stops_a_job(bench: Bench) -> None:
    ann = sign_requests(bench, "ann")
    bench.policy("require_signature = true\n")
    asked = ask_signed(bench, ann, "patient")
    with running(bench):
        wait_until_it_runs(bench, asked)
        ask_to_stop(bench, asked, key=ann)
    assert ended(bench, asked)[:2] == (Status.CANCELLED, Reason.REQUESTED), bench.daemon_log()
    assert "finished" not in bench.log(asked.nonce)


@pytest.mark.slow
def test_a_waiting_request_is_not_cancelled_by_who_may_not(bench: Bench) -> None:
    ann, bob = sign_requests(bench, "ann"), sign_requests(bench, "bob")
    bench.policy("require_signature = true\n")
    asked = ask_signed(bench, ann, "echo")
    ask_to_stop(bench, asked, key=bob)
    assert bench.serve_once() == 1
    assert ended(bench, asked)[:2] == (Status.PASSED, Reason.OK)


@pytest.mark.slow
def test_a_wish_about_another_request_stops_nothing(bench: Bench) -> None:
    first, second = bench.ask(), bench.ask()
    ask_to_stop(bench, first)
    remote = bench.house.remote
    bench.house.git("update-ref", refs.cancel_ref(second.nonce), refs.cancel_ref(first.nonce), cwd=remote)
    bench.serve_once()
    bench.serve_once()
    assert ended(bench, first)[0] is Status.CANCELLED
    assert ended(bench, second)[0] is Status.PASSED


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("comes_back", [True, False], ids=["comes back", "stays away"])
def test_over_actions_a_branch_counts_as_deleted_only_when_it_stays_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """A client without a token deletes and pushes a branch again, to start its run anew."""
    monkeypatch.setattr(wishes, "AWAY_S", 1.0)
    asked = bench.ask("patient", transport="actions")
    commit = Git(bench.house.clone).ls_remote(str(bench.house.remote))[asked.result_ref]
    station = replace(bench.station(), transports=frozenset({"actions"}))
    runner = Runner(station, say=bench.said.append, idle_s=0.2)
    serving = threading.Thread(target=lambda: runner.serve(once=True, idle_timeout_s=20))
    serving.start()
    wait_for(lambda: bench.in_rooms("up"), what="the job")
    delete_branch(bench, asked)
    if comes_back:
        time.sleep(0.5)  # a few beats
        bench.house.git("update-ref", asked.result_ref, commit, cwd=bench.house.remote)
        time.sleep(1.0)
        [up] = bench.in_rooms("up")
        up.with_name("enough").touch()
    serving.join(60)
    expected = (Status.PASSED, Reason.OK) if comes_back else (Status.CANCELLED, Reason.REQUESTED)
    assert ended(bench, asked)[:2] == expected, bench.said
