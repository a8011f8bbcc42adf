"""The job on a hosted runner, which may write: compare, read, judge again, commit the result.

It runs no code of a request and believes nothing the first job says: the artifact is read as hostile, its
digest compared, the result checked against the request commit, its evidence judged by the gate installed
here. A result is published byte for byte, because its signature covers these bytes. A run without a usable
result is answered with one of the publisher's own, which no runner's key signs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from bridge import __version__
from bridge.bus.publish import AlreadyAnswered, ResultFiles, publish
from bridge.bus.requests import state_of
from bridge.bus.results import Believed, ExpectedRequest, believe, check_files, fetch, pins_keys
from bridge.client.fetch import Judged, judge
from bridge.errors import BusError, EvidenceError
from bridge.git.cache import GitCache
from bridge.github.dispatch import RequestRef
from bridge.github.workflow import (
    Artifact,
    TamperedArtifact,
    list_request,
    load_request,
    read_artifact,
    result_branch,
)
from bridge.protocol.manifest import format_time
from bridge.protocol.result import (
    EXIT_CODES,
    RESULT_NAME,
    RESULT_SIGNATURE_NAME,
    Reason,
    Result,
    RunnerFacts,
    Status,
    Verdict,
)
from bridge.runner.admission import Request
from bridge.signing.trust import TrustLevel

log = logging.getLogger(__name__)

PUBLISHER = RunnerFacts(name="publisher", id="0" * 16, version=__version__)
_MAX_MESSAGE = 4000


@dataclass(frozen=True)
class Delivery:
    """What the job on the Mac left for this one."""

    folder: Path  # where its artifact was unpacked; may be missing
    digest: str  # the digest in its outputs; empty: none
    run_result: str | None = None  # how it ended, as `needs.<job>.result` says it
    run_url: str | None = None
    attempt: int = 1

    def read(self) -> Artifact | None:
        """The artifact whose digest the run gave; None: there is none. Any other is a `TamperedArtifact`."""
        return read_artifact(self.folder, self.digest)

    def verdict(self, status: Status, reason: Reason, message: str) -> Verdict:
        """A verdict of this job's own, with the run's page."""
        page = f"; see {self.run_url}" if self.run_url else ""
        return Verdict(status=status, reason=reason, message=f"{message}{page}"[:_MAX_MESSAGE])

    def tampered(self, status: Status, why: str) -> Verdict:
        """The verdict on an artifact that is not the run's."""
        message = f"the artifact is not the result that the run signed: {why}"
        return self.verdict(status, Reason.TAMPERED, message)

    def lost(self) -> Verdict:
        """The verdict on a run that left no artifact."""
        if self.run_result == "cancelled":
            message = "the workflow run was cancelled before it gave a result"
            return self.verdict(Status.CANCELLED, Reason.REQUESTED, message)
        ended = f" ({self.run_result})" if self.run_result else ""
        message = f"the workflow run ended{ended} without a result"
        if self.digest:
            message = "the workflow run gave a result, and its artifact is missing"
        return self.verdict(Status.LOST, Reason.RUN_LOST, message)


@dataclass(frozen=True)
class PublishOutcome:
    """How a request ended."""

    nonce: str
    verdict: Verdict | None  # as judged here; None: a runner's daemon takes the request
    commit: str | None = None  # the result commit
    ref: str | None = None  # where it is
    judged: Judged | None = None  # the result with this gate's judgement; None: there is none to judge
    is_news: bool = False  # whether this call published it
    notes: tuple[str, ...] = ()  # for readers

    @property
    def exit_code(self) -> int:
        """The job's exit code."""
        return 0 if self.verdict is None else EXIT_CODES[self.verdict.status]


@dataclass(frozen=True)
class WorkflowPublisher:
    """Publishes results of workflow runs to one remote, whose address has a token that may write.

    `trusted` is the allowed-signers file of runner keys and may be missing; if it lists any, a pass counts
    only when one of them signed it.
    """

    cache: GitCache
    trusted: Path

    def publish(self, ref: RequestRef, delivery: Delivery) -> PublishOutcome:
        """Answer one request. Idempotent: a request that has its answer keeps it.

        Raises:
            PushRejected, LeaseLost, RemoteUnreachable: The remote did not take the result.
            BusError: The request cannot be fetched.
        """
        request = load_request(self.cache, ref)
        if request is None:
            return PublishOutcome(ref.nonce, None)
        if request.refusal is not None:
            log.info("cannot read the request: %s", request.refusal.message)
        if (answer := self._published(request, delivery)) is not None:
            return answer
        try:
            artifact = delivery.read()
            judged = None if artifact is None else self._judge(request, artifact)
        except TamperedArtifact as error:
            log.error("not published: %s", error.message)
            status = Status.LOST if request.manifest is None else Status.REJECTED
            return self._publish_own(request, delivery, delivery.tampered(status, error.message))
        if artifact is None or judged is None:
            return self._publish_own(request, delivery, delivery.lost())
        verdict, notes = self._counted(judged), tuple[str, ...]()
        if verdict.status is not judged.believed.result.verdict.status:
            notes = ("The result is published as the run signed it, and it is not believed here.",)
            log.warning(notes[0])
        outcome = PublishOutcome(request.nonce, verdict, judged=judged, notes=notes)
        return self._push(request, delivery, artifact.files, outcome)

    def _judge(self, request: Request, artifact: Artifact) -> Judged:
        """Check an artifact against its request, and judge it."""
        nonce, expected = request.nonce, _expected(request)
        if artifact.nonce != nonce:
            raise TamperedArtifact(f"it is of the request {artifact.nonce}, not of {nonce}")
        try:
            result, files, signature = check_files(
                artifact.files, nonce=nonce, expected=expected, trusted=self.trusted
            )
        except EvidenceError as error:
            raise TamperedArtifact(error.message) from None
        return judge(
            Believed(
                result=result,
                files=files,
                commit="",
                ref=result_branch(request),
                signature=signature.trust,
                signer=signature.signer,
                objection=signature.objection,
                expected=expected,
            )
        )

    def _publish_own(self, request: Request, delivery: Delivery, verdict: Verdict) -> PublishOutcome:
        """Answer with a result of the publisher's own, which says nothing of the job."""
        moment, manifest = format_time(datetime.now(UTC)), request.manifest
        result = Result(
            nonce=request.nonce,
            request_commit=request.commit,
            workload_sha=manifest.workload_sha if manifest else None,
            preset=manifest.preset if manifest else None,
            preset_digest=None,
            engine_source=None,
            runner=PUBLISHER,
            attempt=delivery.attempt,
            started_at=moment,
            finished_at=moment,
            verdict=verdict,
        )
        files = {RESULT_NAME: result.to_bytes()}
        return self._push(request, delivery, files, PublishOutcome(request.nonce, verdict))

    def _push(
        self, request: Request, delivery: Delivery, files: Mapping[str, bytes], outcome: PublishOutcome
    ) -> PublishOutcome:
        """Commit a result; its outcome, or that of another one that was published meanwhile."""
        others = dict(files)
        result = ResultFiles(
            nonce=request.nonce,
            request_commit=request.commit,
            result_ref=result_branch(request),
            result=others.pop(RESULT_NAME),
            signature=others.pop(RESULT_SIGNATURE_NAME, None),
            files=others,
        )
        try:
            place = publish(self.cache, self.cache.remote, result, claim=None)
        except AlreadyAnswered as error:
            log.info(error.message)
            if (answer := self._published(request, delivery)) is None:
                raise BusError(f"the published result of {request.nonce} cannot be believed") from None
            return answer
        log.info("published as %s on %s", place.commit[:12], place.ref)
        return replace(outcome, commit=place.commit, ref=place.ref, is_news=True)

    def _published(self, request: Request, delivery: Delivery) -> PublishOutcome | None:
        """The outcome of the result that the remote holds already; None: it holds none.

        Anybody who may push can publish before this job does. A pass that is not the run's own result, or
        whose run failed, does not make this job succeed unless a trusted key signed it.
        """
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
        judged, place = judge(believed), f"{fetched.commit[:12]} on {fetched.ref}"
        log.info("answered already, as %s", place)
        verdict, ended = self._counted(judged), delivery.run_result
        has_failed = ended in ("failure", "skipped") and believed.signature is not TrustLevel.TRUSTED
        if verdict.status is Status.PASSED and _is_other_result(delivery, fetched.files[RESULT_NAME]):
            verdict = delivery.tampered(Status.REJECTED, f"another result was published first, {place}")
        elif verdict.status is Status.PASSED and has_failed:
            why = f"the run ended as {ended}, and the published result is a pass, {place}"
            verdict = delivery.tampered(Status.REJECTED, why)
        notes = ("The request was answered before this job.",)
        return PublishOutcome(request.nonce, verdict, fetched.commit, fetched.ref, judged, notes=notes)

    def _counted(self, judged: Judged) -> Verdict:
        """The verdict here: with a list of trusted keys, a pass counts only when one of them signed it."""
        verdict = judged.verdict
        if verdict.status is not Status.PASSED or judged.verified or not pins_keys(self.trusted):
            return verdict
        sentence = judged.believed.sentence
        message = f"a pass counts here only when a trusted runner key signed it; {sentence}"
        return Verdict(status=Status.REJECTED, reason=Reason.TAMPERED, message=message[:_MAX_MESSAGE])


def _expected(request: Request) -> ExpectedRequest:
    """What a result must answer."""
    manifest, workload = request.manifest, None if request.data is None else request.data.parent
    preset, params = (manifest.preset, manifest.params) if manifest else (None, None)
    return ExpectedRequest(request.nonce, request.commit, workload, preset, params)


def _is_other_result(delivery: Delivery, published: bytes) -> bool:
    """Whether the run wrote another result than the published one, or an altered one."""
    try:
        found = delivery.read()
        is_replay = found is None or found.verdict.reason is Reason.REPLAYED
    except EvidenceError:
        return True
    return found is not None and not is_replay and found.files[RESULT_NAME] != published
