"""A signal ends the runner, at whatever moment it comes."""

from __future__ import annotations

import os
import signal
from threading import Event
from typing import cast

import pytest

from bridge.cli.runner import _draining
from bridge.runner.daemon import Daemon
from tests.fixtures.repo import wait_for


class Abortable:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.timeout(20)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_the_event_is_locked_drains(
    number: signal.Signals,
) -> None:
    """`Event.wait` holds the lock of the event for an instant, and `Event.set` waits for it."""
    daemon, stop = Abortable(), Event()
    before = signal.getsignal(number)
    with _draining(cast("Daemon", daemon), stop):
        with stop._cond:  # type: ignore[attr-defined]
            os.kill(os.getpid(), number)
        assert stop.wait(5)
        assert not daemon.aborted
        os.kill(os.getpid(), number)
        wait_for(lambda: daemon.aborted, 5, "the second signal's effect")
    assert signal.getsignal(number) == before


def test_two_signals_at_once_stop_the_job_too() -> None:
    for _ in range(3):
        daemon, stop = Abortable(), Event()
        with _draining(cast("Daemon", daemon), stop):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            wait_for(lambda daemon=daemon: daemon.aborted, 5, "the second signal's effect")
        assert stop.is_set()
