"""The job on a hosted runner, which may write: compare, read, judge again, commit the result.

It runs no code of a request and believes nothing the first job says: the digest is compared, the artifact is
read as hostile, the result is checked against the request commit, its evidence is judged by the gate
installed here. A result is published byte for byte, because its signature covers these bytes. A run without a
usable result is answered with one of the publisher's own, which no runner's key signs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from bridge import __version__
from bridge.bus.publish import AlreadyAnswered, ResultFiles, publish
from bridge.bus.results import Believed, ExpectedRequest, believe, check_files, fetch, pins_keys
from bridge.bus.state import state_of
from bridge.client.fetch import Judged, judge
from bridge.errors import BusError, EvidenceError
from bridge.git.cache import GitCache
from bridge.github.artifact import Artifact, TamperedArtifact, read_artifact, require_digest
from bridge.github.dispatch import RequestRef
from bridge.github.workflow import LEFT_ALONE, TRANSPORT, list_request, load_request, result_branch
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
from bridge.runner.request import Request
from bridge.signing.trust import TrustLevel

log = logging.getLogger(__name__)

PUBLISHER = RunnerFacts(name="publisher", id="0" * 16, version=__version__)
_FAILURES = ("failure", "skipped")
_MAX_MESSAGE = 4000


@dataclass(frozen=True)
class Delivery:
    """What the job on the Mac left for this one.

    Attributes:
        folder: Where its artifact was unpacked; may be missing.
        digest: The digest in its outputs; empty: none.
        run_result: How it ended, as `needs.<job>.result` says it; None: not known.
        run_url: The run's page; None: not known.
        attempt: Which attempt of the run it is.
    """

    folder: Path
    digest: str
    run_result: str | None = None
    run_url: str | None = None
    attempt: int = 1

    @property
    def page(self) -> str:
        """The run's page for the end of a message."""
        return f"; see {self.run_url}" if self.run_url else ""


@dataclass(frozen=True)
class PublishOutcome:
    """How a request ended.

    Attributes:
        nonce: The request.
        verdict: As judged here; it decides the exit code. None: the request is for a daemon.
        commit: The result commit, on `ref`; None: there is none.
        judged: The result with this gate's judgement; None: there is none to judge.
        is_news: Whether this call published it.
        notes: What a reader should know besides.
    """

    nonce: str
    verdict: Verdict | None
    commit: str | None = None
    ref: str | None = None
    judged: Judged | None = None
    is_news: bool = False
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The job's exit code."""
        return 0 if self.verdict is None else EXIT_CODES[self.verdict.status]


class WorkflowPublisher:
    """Publishes results of workflow runs to one remote.

    The cache's address has a token that may write. `trusted` is the allowed-signers file of runner keys and
    may be missing; if it lists any, a pass counts only when one of them signed it.
    """

    def __init__(
        self, cache: GitCache, *, trusted: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._cache = cache
        self._trusted = trusted
        self._now = now

    def publish(self, ref: RequestRef, delivery: Delivery) -> PublishOutcome:
        """Answer one request. Idempotent: a request that has its answer keeps it.

        Raises:
            PushRejected, LeaseLost, RemoteUnreachable: The remote did not take the result.
            BusError: The request cannot be fetched.
        """
        request = load_request(self._cache, ref)
        if request.manifest is not None and request.manifest.transport != TRANSPORT:
            log.info(LEFT_ALONE)
            return PublishOutcome(ref.nonce, None)
        if request.refusal is not None:
            log.info("cannot read the request: %s", request.refusal.message)
        if (answer := self._published(request, delivery)) is not None:
            return answer
        try:
            artifact = _delivered(delivery)
            if artifact is not None:
                return self._publish_artifact(request, delivery, artifact, self._judge(request, artifact))
        except TamperedArtifact as error:
            log.error("not published: %s", error.message)
            status = Status.REJECTED if request.manifest is not None else Status.LOST
            return self._publish_own(request, delivery, _tampered(status, error.message, delivery))
        return self._publish_own(request, delivery, _lost(delivery))

    def _judge(self, request: Request, artifact: Artifact) -> Judged:
        """Check an artifact against its request, and judge it."""
        nonce, expected = request.nonce, _expected(request)
        if artifact.nonce != nonce:
            raise TamperedArtifact(f"it is of the request {artifact.nonce}, not of {nonce}")
        try:
            result, files, signature = check_files(
                artifact.files, nonce=nonce, expected=expected, trusted=self._trusted
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

    def _publish_artifact(
        self, request: Request, delivery: Delivery, artifact: Artifact, judged: Judged
    ) -> PublishOutcome:
        verdict, notes = self._counted(judged), tuple[str, ...]()
        if verdict.status is not judged.believed.result.verdict.status:
            notes = ("The result is published as the run signed it, and it is not believed here.",)
            log.warning("the result is not believed here, and published as the run signed it")
        outcome = PublishOutcome(request.nonce, verdict, judged=judged, notes=notes)
        return self._push(request, delivery, artifact.files, outcome)

    def _publish_own(self, request: Request, delivery: Delivery, verdict: Verdict) -> PublishOutcome:
        """Answer with a result of the publisher's own, which says nothing of the job."""
        moment, manifest = format_time(self._now()), request.manifest
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
        own = (RESULT_NAME, RESULT_SIGNATURE_NAME)
        result = ResultFiles(
            nonce=request.nonce,
            request_commit=request.commit,
            result_ref=result_branch(request),
            result=files[RESULT_NAME],
            signature=files.get(RESULT_SIGNATURE_NAME),
            files={path: data for path, data in files.items() if path not in own},
        )
        try:
            place = publish(self._cache, self._cache.remote, result, claim=None)
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
        state = state_of(list_request(self._cache, request), request.nonce, result_branch(request))
        try:
            fetched = fetch(self._cache, self._cache.remote, state, expected=expected)
            if fetched is None:
                return None
            believed = believe(fetched, trusted=self._trusted, expected=expected, allow_unsigned=True)
        except EvidenceError as error:
            log.warning("the published result cannot be believed: %s", error.message)
            return None
        judged, place = judge(believed), f"{fetched.commit[:12]} on {fetched.ref}"
        log.info("answered already, as %s", place)
        verdict, notes = self._counted(judged), ("The request was answered before this job.",)
        if verdict.status is Status.PASSED:
            why = None
            if _is_other_result(delivery, fetched.files[RESULT_NAME]):
                why = f"another result was published first, {place}"
            elif delivery.run_result in _FAILURES and believed.signature is not TrustLevel.TRUSTED:
                why = f"the run ended as {delivery.run_result}, and the published result is a pass, {place}"
            verdict = verdict if why is None else _tampered(Status.REJECTED, why, delivery)
        return PublishOutcome(request.nonce, verdict, fetched.commit, fetched.ref, judged, notes=notes)

    def _counted(self, judged: Judged) -> Verdict:
        """The verdict here: with a list of trusted keys, a pass counts only when one of them signed it."""
        believed, verdict = judged.believed, judged.verdict
        is_signed = believed.signature is TrustLevel.TRUSTED
        if verdict.status is not Status.PASSED or is_signed or not pins_keys(self._trusted):
            return verdict
        message = f"a pass counts here only when a trusted runner key signed it; {believed.sentence}"
        return Verdict(status=Status.REJECTED, reason=Reason.TAMPERED, message=message[:_MAX_MESSAGE])


def _expected(request: Request) -> ExpectedRequest:
    """What a result must answer."""
    manifest, workload = request.manifest, None if request.data is None else request.data.parent
    preset, params = (manifest.preset, manifest.params) if manifest else (None, None)
    return ExpectedRequest(request.nonce, request.commit, workload, preset, params)


def _delivered(delivery: Delivery) -> Artifact | None:
    """The artifact whose digest the run gave; None: there is none.

    Raises:
        TamperedArtifact: There is another one.
    """
    found = read_artifact(delivery.folder)
    if found is not None:
        require_digest(found, delivery.digest)
    return found


def _is_other_result(delivery: Delivery, published: bytes) -> bool:
    try:
        found = _delivered(delivery)
        is_replay = found is None or found.verdict.reason is Reason.REPLAYED
    except EvidenceError:
        return True
    return found is not None and not is_replay and found.files[RESULT_NAME] != published


def _lost(delivery: Delivery) -> Verdict:
    ended = f" ({delivery.run_result})" if delivery.run_result else ""
    message = f"the workflow run ended{ended} without a result{delivery.page}"
    if delivery.run_result == "cancelled":
        message = f"the workflow run was cancelled before it gave a result{delivery.page}"
        return Verdict(status=Status.CANCELLED, reason=Reason.REQUESTED, message=message)
    if delivery.digest:
        message = f"the workflow run gave a result, and its artifact is missing{delivery.page}"
    return Verdict(status=Status.LOST, reason=Reason.RUN_LOST, message=message)


def _tampered(status: Status, why: str, delivery: Delivery) -> Verdict:
    message = f"the artifact is not the result that the run signed: {why}{delivery.page}"
    return Verdict(status=status, reason=Reason.TAMPERED, message=message[:_MAX_MESSAGE])
