"""The result that the publishing job writes itself, where there is none of the Mac's to publish.

It says what the publisher saw and nothing of the job. No runner's key signs it: a client that trusts keys
does not believe it, and asks GitHub for the run instead.
"""

from __future__ import annotations

from datetime import datetime

from bridge import __version__
from bridge.protocol.manifest import Manifest, format_time
from bridge.protocol.result import Reason, Result, RunnerFacts, Status, Verdict
from bridge.workflow.asked import Asked

NAME, _ID = "publisher", "0" * 16
# How a job of a workflow ends, as `needs.<job>.result` says it.
CANCELLED = "cancelled"
FAILURES = ("failure", "skipped")
RUN_RESULTS = ("success", *FAILURES, CANCELLED)


def lost(run_result: str | None, run_url: str | None, *, announced: bool) -> Verdict:
    """The verdict of a request whose run left nothing to publish.

    Args:
        run_result: How the job ended, of `RUN_RESULTS`; None: not known.
        run_url: The run's page.
        announced: It gave the digest of a result.
    """
    where = f"; see {run_url}" if run_url else ""
    if run_result == CANCELLED:
        message = f"the workflow run was cancelled before it gave a result{where}"
        return Verdict(status=Status.CANCELLED, reason=Reason.REQUESTED, message=message)
    if announced:
        message = f"the workflow run sealed a result, and its artifact is not there{where}"
    else:
        ended = f" ({run_result})" if run_result else ""
        message = f"the workflow run ended{ended} without a result{where}"
    return Verdict(status=Status.LOST, reason=Reason.RUN_LOST, message=message)


def tampered(why: str, run_url: str | None, *, ran: bool) -> Verdict:
    """The verdict of a request whose result was not to be believed between the two jobs.

    Args:
        why: What is wrong with it.
        ran: It may have run; else the request cannot even be read.
        run_url: The run's page.
    """
    where = f"; see {run_url}" if run_url else ""
    message = f"what the workflow's jobs passed on is not the result that the run sealed: {why}{where}"
    status = Status.REJECTED if ran else Status.LOST
    return Verdict(status=status, reason=Reason.TAMPERED, message=message[:4000])


def untrusted(standing: str) -> Verdict:
    """The verdict of a pass that no key signed which counts here, where there is a list of those that do.

    Args:
        standing: Who wrote it, as far as its signature tells.
    """
    message = f"a pass counts here only when a runner of the list of trusted keys signed it; {standing}"
    return Verdict(status=Status.REJECTED, reason=Reason.TAMPERED, message=message[:4000])


def result(
    asked: Asked, manifest: Manifest | None, verdict: Verdict, *, attempt: int, now: datetime
) -> Result:
    """A result with this verdict and nothing else.

    Args:
        asked: The request.
        manifest: What it asks; None: not readable.
        verdict: From `lost` or `tampered`.
        attempt: Of the run.
        now: The time of day (aware).
    """
    moment = format_time(now)
    return Result(
        nonce=asked.nonce,
        request_commit=asked.commit,
        workload_sha=manifest.workload_sha if manifest else None,
        preset=manifest.preset if manifest else None,
        preset_digest=None,
        engine_source=None,
        runner=RunnerFacts(name=NAME, id=_ID, version=__version__),
        attempt=attempt,
        started_at=moment,
        finished_at=moment,
        verdict=verdict,
    )
