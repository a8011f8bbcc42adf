"""The walled level: a daemon under another account does the request, and the workflow waits for its answer.

The account that GitHub's runner has then needs no engine, no models and no key that counts; whoever rules
over its workflow file rules over nothing but this wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Event

from bridge.client.watch import watch
from bridge.errors import ResultError, WaitTimeout
from bridge.protocol.result import RESULT_NAME, Verdict, parse_result
from bridge.render.outcome import status_line
from bridge.workflow.asked import Asked
from bridge.workflow.local import LEFT, Copy

# How long after the last moment at which a job could end its answer may still be on its way.
LATE_S = 300.0


class Cancelled(WaitTimeout):
    """The run was cancelled while it waited."""


def wait(
    copy: Copy,
    remote: str,
    asked: Asked,
    stop: Event,
    *,
    longest_job_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Verdict | None:
    """Wait until the daemon has answered a request; how it ended, or None: it is not for a workflow.

    What it says is not judged here: that is for the job that publishes, which finds it there.

    Args:
        copy: Of the bus.
        remote: Address of the bus.
        asked: The request.
        stop: Set when the run is cancelled.
        longest_job_s: How long a job may take that begins just before the request expires.
        say: Takes one line for the log.
        clock: Monotonic seconds.
        now: The time of day (aware).

    Raises:
        WaitTimeout: No answer came in all the time it had.
        Cancelled: The run was cancelled.
        BusError: The remote never answered, or nothing of the request is left there.
        ResultError: What stands in the answer's place is none.
    """

    def pause(seconds: float) -> None:
        if stop.wait(seconds):
            raise Cancelled("the workflow run was cancelled; the daemon may go on with the request")

    copy.bring(asked)
    reading = copy.read(asked)
    if not reading.is_ours:
        say(f"left alone: {LEFT}")
        return None
    manifest = reading.manifest
    left_s = 0.0 if manifest is None else (manifest.expires_at - now()).total_seconds()
    say("this machine leaves requests to the daemon of another account; waiting for its answer")
    for update in watch(
        copy.git,
        remote,
        asked.nonce,
        deadline=clock() + max(0.0, left_s) + longest_job_s + LATE_S,
        asked=reading.expected,
        clock=clock,
        sleep=pause,
    ):
        if update.result is not None:
            data = update.result.files.get(RESULT_NAME)
            if data is None:
                raise ResultError(f"the answer to {asked.nonce} holds no {RESULT_NAME}")
            return parse_result(data).verdict
        say(update.notice or status_line(update.status, update.phase, update.ahead))
    raise WaitTimeout(f"{asked.nonce} has no answer")  # `watch` ends in a result or in an error
