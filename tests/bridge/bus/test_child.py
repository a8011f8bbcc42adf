"""What is read of a command is all it printed, and a helper that outlives it holds up nobody."""

from __future__ import annotations

import subprocess
import time

import pytest

from bridge.bus.child import Outcome, collect


def run(script: str, *, timeout_s: float = 20.0) -> Outcome:
    process = subprocess.Popen(
        ["sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    return collect(process, deadline=time.monotonic() + timeout_s, limit_bytes=1 << 24)


@pytest.mark.parametrize(
    "closed", ["", ">&-", "2>&-", ">&- 2>&-"], ids=["both", "standard error", "standard output", "neither"]
)
def test_a_helper_that_keeps_a_stream_open_is_not_waited_for(closed: str) -> None:
    began = time.monotonic()
    done = run(f"sleep 60 {closed} & echo said; echo asked >&2; exit 3")
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"said\n", b"asked\n")
    assert not done.timed_out
    assert time.monotonic() - began < 10


def test_all_that_was_printed_is_read_before_the_wait_ends() -> None:
    """What is still in the pipe when a command ends is no less its output."""
    done = run("sleep 60 & head -c 5000000 /dev/zero; head -c 60000 /dev/zero >&2")
    assert (len(done.stdout), len(done.stderr)) == (5_000_000, 60_000)


def test_a_command_past_its_deadline_is_ended() -> None:
    began = time.monotonic()
    assert run("sleep 60", timeout_s=0.5).timed_out
    assert time.monotonic() - began < 10
