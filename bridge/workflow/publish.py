"""The job that may write: what the run left is compared, read, judged once more, and committed.

It runs no code of a request and believes nothing that the run says: the digest is compared, the folder read
as if somebody hostile had packed it, the result held against the request commit, its evidence judged by the
gate installed here. What the Mac sealed is published as it is, byte for byte, for its signature is over these
bytes. Where there is nothing to publish the request is answered all the same, by the publisher itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bridge.bus.handles import state_of
from bridge.bus.publish import Answered, publish
from bridge.bus.requests import bound_manifest, read_request
from bridge.bus.results import Asked as AskedFor
from bridge.bus.results import Believed, believe, check_files, fetch
from bridge.client.judged import Judged, judge
from bridge.errors import BusError, EvidenceError, ManifestError
from bridge.manifest import Manifest
from bridge.result import EXIT_CODES, RESULT_NAME, RESULT_SIGNATURE_NAME, Verdict
from bridge.workflow import parcel, stand_in
from bridge.workflow.asked import Asked
from bridge.workflow.execute import TRANSPORT
from bridge.workflow.local import Copy, unreachable
from bridge.workflow.parcel import Parcel, TamperedParcel


@dataclass(frozen=True)
class Delivery:
    """What the run's job left for this one.

    Attributes:
        folder: Where its artifact was unpacked; need not exist.
        digest: What it gave as the folder's digest; empty: it gave none.
        run_result: How it ended; None: not known.
        run_url: The run's page; None: not known.
        attempt: Which attempt of the run it is.
    """

    folder: Path
    digest: str
    run_result: str | None = None
    run_url: str | None = None
    attempt: int = 1


@dataclass(frozen=True)
class Outcome:
    """How a request stands after the job.

    Attributes:
        nonce: The request.
        verdict: As judged here: what is shown, and what the exit code says. None: it is left to an embedded
            runner.
        commit: The result commit; None: there is none.
        ref: Where it stands.
        judged: The result with what this gate says of its evidence; None: there is none to judge.
        is_news: It was published by this call; else it stood already.
    """

    nonce: str
    verdict: Verdict | None
    commit: str | None = None
    ref: str | None = None
    judged: Judged | None = None
    is_news: bool = False

    @property
    def exit_code(self) -> int:
        """What the job ends with."""
        return 0 if self.verdict is None else EXIT_CODES[self.verdict.status]


class Publisher:
    """Publishes results of a workflow's runs to one remote.

    Args:
        folder: For a bare copy of the bus.
        remote: Address of the bus, with a token that may write.
        trusted: Allowed-signers file of the runner keys that count here; need not exist.
        say: Takes one line for the log.
        now: The time of day (aware).
    """

    def __init__(
        self,
        folder: Path,
        remote: str,
        *,
        trusted: Path,
        say: Callable[[str], None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._remote = remote
        self._trusted = trusted
        self._say = say
        self._now = now
        self._copy = Copy(folder, remote, say=say)

    def publish(self, asked: Asked, delivery: Delivery) -> Outcome:
        """Answer one request.

        Args:
            asked: The request.
            delivery: What the run left.

        Raises:
            PushRejected, LeaseLost, RemoteUnreachable: The remote did not take the result.
            BusError: The request is not to be had.
        """
        self._copy.bring(asked)
        if not self._copy.holds(asked.commit):
            raise unreachable(asked)
        manifest, workload = self._read(asked)
        if manifest is not None and manifest.transport != TRANSPORT:
            self._say(f"left alone: it asks for the transport {manifest.transport}")
            return Outcome(asked.nonce, None)
        expected = AskedFor(asked.nonce, asked.commit, workload, manifest.preset if manifest else None)
        if (standing := self._standing(asked, expected)) is not None:
            return standing
        branch = manifest.result_ref if manifest else asked.branch
        try:
            found = self._sealed(delivery)
            judged = None if found is None else self._weighed(found, expected, branch)
        except TamperedParcel as error:
            self._say(f"not published: {error.message}")
            return self._own(
                asked,
                manifest,
                branch,
                stand_in.tampered(error.message, delivery.run_url, ran=manifest is not None),
                delivery,
            )
        if found is None or judged is None:
            verdict = stand_in.lost(delivery.run_result, delivery.run_url, announced=bool(delivery.digest))
            return self._own(asked, manifest, branch, verdict, delivery)
        return self._send(asked, expected, branch, found, judged)

    def _read(self, asked: Asked) -> tuple[Manifest | None, str | None]:
        """What the request asks, and for which commit; None: that cannot be read."""
        try:
            request = read_request(self._copy.git, asked.commit)
        except (ManifestError, BusError) as error:
            self._say(f"the request cannot be read: {error.message}")
            return None, None
        try:
            return bound_manifest(request, asked.nonce), request.parent
        except ManifestError as error:
            self._say(f"the request cannot be read: {error.message}")
            return None, request.parent

    def _sealed(self, delivery: Delivery) -> Parcel | None:
        """The parcel that the run sealed; None: it left none.

        Raises:
            TamperedParcel: It left another one.
        """
        found = parcel.read(delivery.folder)
        if found is not None:
            parcel.require_digest(found, delivery.digest)
        return found

    def _weighed(self, found: Parcel, expected: AskedFor, branch: str) -> Judged:
        """A parcel held against its request, and judged.

        Raises:
            TamperedParcel: It is not a result of this request.
        """
        if found.nonce != expected.nonce:
            raise TamperedParcel(f"it is of the request {found.nonce}, not of {expected.nonce}")
        try:
            result, files, signature = check_files(
                found.files, nonce=expected.nonce, asked=expected, trusted=self._trusted
            )
        except EvidenceError as error:
            raise TamperedParcel(error.message) from None
        return judge(
            Believed(
                result=result,
                files=files,
                commit="",
                ref=branch,
                signature=signature.standing,
                signer=signature.signer,
                objection=signature.objection,
            )
        )

    def _send(self, asked: Asked, expected: AskedFor, branch: str, found: Parcel, judged: Judged) -> Outcome:
        result, own = judged.believed.result, (RESULT_NAME, RESULT_SIGNATURE_NAME)
        files = {path: data for path, data in found.files.items() if path not in own}
        place = self._push(
            asked, branch, files, found.files[RESULT_NAME], found.files.get(RESULT_SIGNATURE_NAME)
        )
        if place is None:
            return self._answered(asked, expected)
        if judged.verdict.status is not result.verdict.status:
            self._say(f"published as the run sealed it, and not believed: {judged.verdict.message}")
        return Outcome(asked.nonce, judged.verdict, *place, judged, is_news=True)

    def _own(
        self, asked: Asked, manifest: Manifest | None, branch: str, verdict: Verdict, delivery: Delivery
    ) -> Outcome:
        """Answer with a result of the publisher's own."""
        made = stand_in.result(asked, manifest, verdict, attempt=delivery.attempt, now=self._now())
        place = self._push(asked, branch, {}, made.to_bytes(), None)
        if place is None:
            return self._answered(asked, AskedFor(asked.nonce, asked.commit, made.workload_sha, made.preset))
        return Outcome(asked.nonce, verdict, *place, is_news=True)

    def _push(
        self, asked: Asked, branch: str, files: dict[str, bytes], result: bytes, signature: bytes | None
    ) -> tuple[str, str] | None:
        """Publish; where it stands now, or None: the request was answered meanwhile."""
        try:
            place = publish(
                self._copy.git,
                self._remote,
                request_commit=asked.commit,
                nonce=asked.nonce,
                result_ref=branch,
                files=files,
                result=result,
                signature=signature,
                claim=None,
            )
        except Answered as error:
            self._say(error.message)
            return None
        self._say(f"published as {place.commit[:12]} on {place.ref}")
        return place.commit, place.ref

    # Answered before --------------------------------------------------------------------------------------

    def _answered(self, asked: Asked, expected: AskedFor) -> Outcome:
        standing = self._standing(asked, expected)
        if standing is None:
            raise BusError(f"the request {asked.nonce} has an answer that is not to be read")
        return standing

    def _standing(self, asked: Asked, expected: AskedFor) -> Outcome | None:
        """The answer that stands; None: there is none yet."""
        state = state_of(self._copy.git.ls_remote(self._remote), asked.nonce, asked.branch)
        try:
            fetched = fetch(self._copy.git, self._remote, state, asked=expected)
            if fetched is None:
                return None
            believed = believe(fetched, trusted=self._trusted, asked=expected, allow_unsigned=True)
        except EvidenceError as error:
            self._say(f"what stands as its answer is not to be believed: {error.message}")
            return None
        judged = judge(believed)
        self._say(f"answered already, as {fetched.commit[:12]} on {fetched.ref}")
        return Outcome(asked.nonce, judged.verdict, fetched.commit, fetched.ref, judged)
