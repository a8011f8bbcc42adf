"""A signal that ends the runner comes at any moment, and never in vain."""

from __future__ import annotations

import os
import signal
from threading import Event
from typing import cast

import pytest

from bridge.cli.runner import _draining
from bridge.runner.serve import Runner
from tests.houses import wait_for


class Daemon:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.timeout(20)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_moment_when_the_runner_looks_at_its_stop_sign_is_heeded(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """`Event.wait` holds the lock of the event for an instant, and `Event.set` waits for it."""
    daemon, stop = Daemon(), Event()
    before = signal.getsignal(number)
    with _draining(cast("Runner", daemon), stop):
        with stop._cond:  # type: ignore[attr-defined]
            os.kill(os.getpid(), number)
        assert stop.wait(5)
        assert not daemon.aborted
        os.kill(os.getpid(), number)
        wait_for(lambda: daemon.aborted, 5, "the second signal's effect")
    assert signal.getsignal(number) == before
    assert capsys.readouterr().out.count("once more") == 1


def test_two_signals_at_once_stop_the_job_too() -> None:
    for _ in range(3):
        daemon, stop = Daemon(), Event()
        with _draining(cast("Runner", daemon), stop):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            wait_for(lambda daemon=daemon: daemon.aborted, 5, "the second signal's effect")
        assert stop.is_set()
