"""The job that may write: what the run left is compared, read, judged once more, and committed.

It runs no code of a request and believes nothing that the run says: the digest is compared, the folder read
as if somebody hostile had packed it, the result held against the request commit, its evidence judged by the
gate installed here. What the Mac sealed is published as it is, byte for byte, for its signature is over these
bytes. Where there is nothing to publish the request is answered all the same, by the publisher itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from bridge.bus.handles import state_of
from bridge.bus.publish import Answered, publish
from bridge.bus.results import Believed, believe, check_files, fetch, pins_keys
from bridge.bus.standing import Standing
from bridge.client.judged import Judged, judge
from bridge.errors import BusError, EvidenceError
from bridge.protocol.result import (
    EXIT_CODES,
    RESULT_NAME,
    RESULT_SIGNATURE_NAME,
    Reason,
    Status,
    Verdict,
    parse_result,
)
from bridge.workflow import parcel, stand_in
from bridge.workflow.asked import Asked
from bridge.workflow.calling_off import call_off
from bridge.workflow.local import LEFT, Copy, Reading
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
        notes: What a reader must know besides.
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
        """What the job ends with."""
        return 0 if self.verdict is None else EXIT_CODES[self.verdict.status]


@dataclass(frozen=True)
class _Case:
    """A request with all that decides about its answer."""

    reading: Reading
    delivery: Delivery

    @property
    def asked(self) -> Asked:
        return self.reading.asked


class Publisher:
    """Publishes results of a workflow's runs to one remote.

    Args:
        folder: For a bare copy of the bus.
        remote: Address of the bus, with a token that may write.
        trusted: Allowed-signers file of the runner keys that count here; need not exist. Where it lists any,
            no pass counts that none of them signed.
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
        case = _Case(self._copy.read(asked), delivery)
        if not case.reading.is_ours:
            self._say(f"left alone: {LEFT}")
            return Outcome(asked.nonce, None)
        if case.reading.fault is not None:
            self._say(f"the request cannot be read: {case.reading.fault}")
        if (standing := self._answered(case)) is not None:
            return standing
        try:
            found = _sealed(delivery)
            judged = None if found is None else self._weighed(case, found)
        except TamperedParcel as error:
            self._say(f"not published: {error.message}")
            ran = case.reading.manifest is not None
            return self._own(case, stand_in.tampered(error.message, delivery.run_url, ran=ran))
        if found is None or judged is None:
            if delivery.run_result == stand_in.CANCELLED:
                call_off(self._copy.git, self._remote, asked, say=self._say)
                if (standing := self._answered(case)) is not None:
                    return standing
            announced = bool(delivery.digest)
            return self._own(case, stand_in.lost(delivery.run_result, delivery.run_url, announced=announced))
        return self._send(case, found, judged)

    def _weighed(self, case: _Case, found: Parcel) -> Judged:
        """A parcel held against its request, and judged.

        Raises:
            TamperedParcel: It is not a result of this request.
        """
        nonce = case.asked.nonce
        if found.nonce != nonce:
            raise TamperedParcel(f"it is of the request {found.nonce}, not of {nonce}")
        try:
            result, files, signature = check_files(
                found.files, nonce=nonce, asked=case.reading.expected, trusted=self._trusted
            )
        except EvidenceError as error:
            raise TamperedParcel(error.message) from None
        return judge(
            Believed(
                result=result,
                files=files,
                commit="",
                ref=case.reading.branch,
                signature=signature.standing,
                signer=signature.signer,
                objection=signature.objection,
                asked=case.reading.expected,
            )
        )

    def _send(self, case: _Case, found: Parcel, judged: Judged) -> Outcome:
        """Publish what the run sealed, byte for byte."""
        own = (RESULT_NAME, RESULT_SIGNATURE_NAME)
        files = {path: data for path, data in found.files.items() if path not in own}
        place = self._push(case, found.files[RESULT_NAME], found.files.get(RESULT_SIGNATURE_NAME), files)
        if place is None:
            return self._must_be_answered(case)
        notes: tuple[str, ...] = ()
        verdict = self._counted(judged)
        if verdict.status is not judged.believed.result.verdict.status:
            notes = ("The result is published as the run sealed it, and it is not believed here.",)
            self._say(f"published as the run sealed it, and not believed: {verdict.message}")
        return Outcome(case.asked.nonce, verdict, *place, judged, is_news=True, notes=notes)

    def _counted(self, judged: Judged) -> Verdict:
        """What a result is worth here: a pass counts by a key of the list, where there is one."""
        believed, verdict = judged.believed, judged.verdict
        is_signed = believed.signature is Standing.TRUSTED
        if verdict.status is not Status.PASSED or is_signed or not pins_keys(self._trusted):
            return verdict
        return stand_in.untrusted(believed.sentence)

    def _own(self, case: _Case, verdict: Verdict) -> Outcome:
        """Answer with a result of the publisher's own."""
        made = stand_in.result(
            case.asked, case.reading.manifest, verdict, attempt=case.delivery.attempt, now=self._now()
        )
        place = self._push(case, made.to_bytes())
        if place is None:
            return self._must_be_answered(case)
        return Outcome(case.asked.nonce, verdict, *place, is_news=True)

    def _push(
        self,
        case: _Case,
        result: bytes,
        signature: bytes | None = None,
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> tuple[str, str] | None:
        """Publish; where it stands now, or None: the request was answered meanwhile."""
        try:
            place = publish(
                self._copy.git,
                self._remote,
                request_commit=case.asked.commit,
                nonce=case.asked.nonce,
                result_ref=case.reading.branch,
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

    def _must_be_answered(self, case: _Case) -> Outcome:
        standing = self._answered(case)
        if standing is None:
            raise BusError(f"the request {case.asked.nonce} has an answer that is not to be believed")
        return standing

    def _answered(self, case: _Case) -> Outcome | None:
        """How the answer that stands ends this job; None: there is none yet.

        Anybody who may push can be faster with an answer than the run was. One that says "passed" while the
        run sealed another one, or failed, makes no run green, unless a trusted key signed it.
        """
        asked, delivery = case.asked, case.delivery
        state = state_of(self._copy.git.ls_remote(self._remote), asked.nonce, asked.branch)
        try:
            fetched = fetch(self._copy.git, self._remote, state, asked=case.reading.expected)
            if fetched is None:
                return None
            believed = believe(
                fetched, trusted=self._trusted, asked=case.reading.expected, allow_unsigned=True
            )
        except EvidenceError as error:
            self._say(f"what stands as its answer is not to be believed: {error.message}")
            return None
        judged, place = judge(believed), f"{fetched.commit[:12]} on {fetched.ref}"
        self._say(f"answered already, as {place}")
        verdict, notes = self._counted(judged), ("The request was answered before this job.",)
        if verdict.status is Status.PASSED:
            why = None
            if _is_another(delivery, fetched.files[RESULT_NAME]):
                why = f"another answer stands in its place, {place}"
            elif delivery.run_result in stand_in.FAILURES and believed.signature is not Standing.TRUSTED:
                why = f"the run ended as {delivery.run_result}, and a pass stands in its place, {place}"
            if why is not None:
                verdict = stand_in.tampered(why, delivery.run_url, ran=True)
        return Outcome(asked.nonce, verdict, fetched.commit, fetched.ref, judged, notes=notes)


def _sealed(delivery: Delivery) -> Parcel | None:
    """The parcel that the run sealed; None: it left none.

    Raises:
        TamperedParcel: It left another one.
    """
    found = parcel.read(delivery.folder)
    if found is not None:
        parcel.require_digest(found, delivery.digest)
    return found


def _is_another(delivery: Delivery, standing: bytes) -> bool:
    """Whether the run sealed another result than the one that stands."""
    try:
        found = _sealed(delivery)
        if found is None:
            return False
        verdict = parse_result(found.files[RESULT_NAME]).verdict
    except EvidenceError:
        return True
    return verdict.reason is not Reason.REPLAYED and found.files[RESULT_NAME] != standing
