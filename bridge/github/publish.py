"""The job on a hosted runner, which may write: compare, read, judge again, commit the result.

It runs no code of a request, and believes nothing that the first job says.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from bridge import signing
from bridge.bus.publish import AlreadyAnswered, ResultFiles, publish, result_without_runner
from bridge.bus.requests import state_of
from bridge.bus.results import ExpectedRequest, believe, check_files, fetch, pins_keys
from bridge.client.fetch import Judged, judge
from bridge.errors import ApiError, BusError, EvidenceError
from bridge.git.cache import GitCache
from bridge.github.api import MAC_JOB, GitHub, JobRecord
from bridge.github.dispatch import RequestRef
from bridge.github.workflow import list_request, load_request, read_artifact, result_branch
from bridge.protocol import result as protocol
from bridge.protocol.result import RESULT_NAME, RESULT_SIGNATURE_NAME, Reason, Status, Verdict
from bridge.runner.admission import Request
from bridge.signing.trust import TrustLevel

log = logging.getLogger(__name__)


# GitHub cancels a job that waited 24 hours for a machine; its conclusion is that of a cancelled job, too.
_LONGEST_WAIT = timedelta(hours=23, minutes=55)


@dataclass(frozen=True)
class Delivery:
    """What the job on the Mac left for this one."""

    folder: Path  # where its artifact was unpacked; may be missing
    digest: str  # the digest in its outputs; empty: none
    run_result: str | None = None  # how it ended, as `needs.<job>.result` says it
    run_id: int | None = None
    run_url: str | None = None
    attempt: int = 1
    limit_s: float | None = None  # the time limit of that job; None: it is not told

    def verdict(self, status: Status, reason: Reason, message: str) -> Verdict:
        """A verdict of this job's own, with the run's page."""
        page = f"; see {self.run_url}" if self.run_url else ""
        return Verdict(status=status, reason=reason, message=f"{message}{page}"[:4000])

    def without_artifact(self, job: JobRecord | None) -> Verdict:
        """The verdict on a run that left no artifact; `job`: what the API says of the Mac's job."""
        if self.digest:
            message = "the workflow run gave a result, and its artifact is missing"
            return self.verdict(Status.LOST, Reason.RUN_LOST, message)
        waited = ran = None
        if job is not None and job.runner_name:
            ran = _between(job.started_at, job.completed_at)
        elif job is not None:
            waited = _between(job.created_at, job.completed_at)
        if waited is not None and waited >= _LONGEST_WAIT:
            message = (
                f"no machine took the workflow job within {waited / timedelta(hours=1):.0f} h; nothing ran"
            )
            return self.verdict(Status.LOST, Reason.NO_RUNNER, message)
        if ran is not None and self.limit_s is not None and ran.total_seconds() >= self.limit_s:
            limit = f"{self.limit_s / 60:g} min (KAKEYA_RUN_MINUTES)"
            message = f"the workflow job reached its time limit of {limit}, and left no result"
            return self.verdict(Status.FAILED, Reason.TIMEOUT, message)
        if self.run_result == "cancelled" or (job is not None and job.conclusion == "cancelled"):
            message = "the workflow run was cancelled before it gave a result"
            return self.verdict(Status.CANCELLED, Reason.REQUESTED, message)
        message = f"the workflow run ended ({self.run_result or 'unknown'}) without a result"
        return self.verdict(Status.LOST, Reason.RUN_LOST, message)


def _between(begin: str | None, end: str | None) -> timedelta | None:
    """The time between two moments as the API writes them; None: one is missing or cannot be read."""
    try:
        return datetime.fromisoformat(end or "") - datetime.fromisoformat(begin or "")
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True)
class PublishOutcome:
    """How a request ended."""

    nonce: str
    judged: Judged | None  # the published result as it counts here; None: a runner's daemon takes the request
    is_news: bool = False  # whether this call published it

    @property
    def exit_code(self) -> int:
        """The job's exit code."""
        return 0 if self.judged is None else protocol.EXIT_CODES[self.judged.verdict.status]


@dataclass(frozen=True)
class WorkflowPublisher:
    """Publishes results of workflow runs to one remote, whose address has a token that may write.

    `trusted` is the allowed-signers file of runner keys and may be missing; if it lists any, a pass counts
    only when one of them signed it. `github` is asked how a run without a result ended.
    """

    cache: GitCache
    trusted: Path
    github: GitHub | None = None

    def publish(self, ref: RequestRef, delivery: Delivery) -> PublishOutcome:
        """Answer one request. Idempotent: a request that has its answer keeps it."""
        request = load_request(self.cache, ref)
        if request is None:
            return PublishOutcome(ref.nonce, None)
        if (judged := self._published(request, delivery)) is not None:
            log.info("answered already, as %s on %s", judged.believed.commit[:12], judged.believed.ref)
            return PublishOutcome(request.nonce, judged)
        files = dict(self._result_files(request, delivery))
        result = ResultFiles(
            nonce=request.nonce,
            request_commit=request.commit,
            result_ref=result_branch(request),
            result=files.pop(RESULT_NAME),
            signature=files.pop(protocol.RESULT_SIGNATURE_NAME, None),
            files=files,
        )
        try:
            place = publish(self.cache, self.cache.remote, result, claim=None)
            is_news, said = True, f"published as {place.commit[:12]} on {place.ref}"
        except AlreadyAnswered as error:
            is_news, said = False, error.message
        log.info("%s", said)
        if (judged := self._published(request, delivery, ours=is_news)) is None:
            raise BusError(f"the published result of {request.nonce} cannot be believed")
        return PublishOutcome(request.nonce, judged, is_news)

    def _result_files(self, request: Request, delivery: Delivery) -> Mapping[str, bytes]:
        """What the run wrote if it answers the request, else a result of this job's own."""
        try:
            artifact = read_artifact(delivery.folder, request.nonce, delivery.digest)
            if artifact is not None:
                expected = _expected(request)
                check_files(artifact.files, nonce=request.nonce, expected=expected, trusted=self.trusted)
                return artifact.files
            verdict = delivery.without_artifact(self._mac_job(delivery))
        except EvidenceError as error:
            log.error("not published: %s", error.message)
            message = f"the artifact is not the result that the run signed: {error.message}"
            # No reader believes that a result without a preset is more than lost.
            status = Status.LOST if request.manifest is None else Status.REJECTED
            verdict = delivery.verdict(status, Reason.TAMPERED, message)
        result = result_without_runner(
            request.nonce,
            request.commit,
            request.manifest,
            verdict,
            author="publisher",
            attempt=delivery.attempt,
        )
        return {RESULT_NAME: result.to_bytes()}

    def _mac_job(self, delivery: Delivery) -> JobRecord | None:
        """What the API says of the Mac's job; None: it does not say."""
        if self.github is None or delivery.run_id is None:
            return None
        try:
            jobs = self.github.jobs(delivery.run_id)
        except ApiError as error:
            log.warning("going by how the job ended (%s): %s", delivery.run_result, error.message)
            return None
        return next((job for job in jobs if job.name == MAC_JOB), None)

    def _published(self, request: Request, delivery: Delivery, *, ours: bool = False) -> Judged | None:
        """The result that the remote holds, with the verdict that counts here; None: it holds none."""
        expected = _expected(request)
        state = state_of(list_request(self.cache, request), request.nonce, result_branch(request))
        try:
            fetched = fetch(self.cache, self.cache.remote, state, expected=expected)
            if fetched is None:
                return None
            believed = believe(fetched, trusted=self.trusted, expected=expected, allow_unsigned=True)
        except EvidenceError as error:
            log.warning("the published result cannot be believed: %s", error.message)
            return None
        judged = judge(believed)
        objection = self._objection(judged, delivery, fetched.files, ours=ours)
        if judged.verdict.status is Status.PASSED and objection is not None:
            judged = replace(judged, verdict=delivery.verdict(Status.REJECTED, *objection))
        if judged.verdict.status is not believed.result.verdict.status:
            log.warning("the result is on the remote as it was written, and it is not believed here")
        return judged

    def _objection(
        self, judged: Judged, delivery: Delivery, published: Mapping[str, bytes], *, ours: bool
    ) -> tuple[Reason, str] | None:
        """Why a published pass does not count here: anybody who may push can publish one before this job."""
        believed = judged.believed
        if pins_keys(self.trusted) and not judged.verified:
            message = f"a pass counts here only when a trusted runner key signed it; {believed.sentence}"
            if believed.signature is TrustLevel.UNTRUSTED_KEY:
                key, name = signing.signing_key(published[RESULT_SIGNATURE_NAME]), believed.result.runner.name
                remedy = "if that runner is yours, add this line to the variable KAKEYA_TRUSTED_RUNNERS"
                message = f"{message}; {remedy}: {name} {key.line}"
            return Reason.UNTRUSTED, message
        try:
            own = read_artifact(delivery.folder, believed.result.nonce, delivery.digest)
            is_same = own is None or own.files[RESULT_NAME] == published[RESULT_NAME]
            is_same = is_same or (own is not None and own.verdict.reason is Reason.REPLAYED)
        except EvidenceError:
            is_same = False
        if not is_same:
            return Reason.TAMPERED, "another result was published first"
        if not ours and delivery.run_result in ("failure", "skipped") and not judged.verified:
            message = f"the run ended as {delivery.run_result}, and the published result is a pass"
            return Reason.TAMPERED, message
        return None


def _expected(request: Request) -> ExpectedRequest:
    manifest, workload = request.manifest, None if request.data is None else request.data.parents[0]
    if manifest is None:
        return ExpectedRequest(request.nonce, request.commit, workload)
    asked = (manifest.preset, manifest.params, manifest.requested_by, manifest.against)
    return ExpectedRequest(request.nonce, request.commit, workload, *asked)
