"""The way of a result from this machine to the remote: kept before it is pushed, pushed until it is there.

A result that came too late goes; one that cannot be pushed now stays, over restarts, too. What goes wrong
with one counts against it alone. One that the server never takes, although it takes our claim, must not
leave its request pending for ever: a result without files says so in its place, and the whole one is written
to a folder.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path

from bridge.bus.claims import Claim, read_status
from bridge.bus.publish import TRIES, AlreadyAnswered, Published, ResultFiles, Superseded, publish
from bridge.bus.requests import CANCELS, state_of
from bridge.errors import (
    BusError,
    LeaseLost,
    MachineError,
    PushRejected,
    RemoteUnreachable,
    ResultError,
    describe,
)
from bridge.git.cache import GitCache
from bridge.git.repo import RefUpdate
from bridge.proc import write_atomic
from bridge.protocol import refs
from bridge.protocol.result import RESULT_NAME, RESULT_SIGNATURE_NAME, Reason, Status, Verdict, parse_result
from bridge.runner.config import RunnerConfig
from bridge.runner.store import Store

log = logging.getLogger(__name__)

# So often, and for so long, a result is refused before one without files takes its place: bad moments pass.
MAX_REJECTIONS = 5
PATIENCE_S = 900.0
# Between two tries of a result that the server refuses even without files; each renews the claim for longer.
LONGEST_PAUSE_S = 600.0


@dataclass
class Publisher:
    """Results of one runner on one remote; claims of `sessions`, processes of this runner, are ours."""

    config: RunnerConfig
    cache: GitCache
    store: Store
    _: KW_ONLY
    sessions: frozenset[str]
    # Results that the disk did not take: this process has them.
    _unsaved: dict[str, ResultFiles] = field(default_factory=dict, init=False)
    _late: set[str] = field(default_factory=set, init=False)  # cancel requests whose deletion was tried

    def waiting(self) -> set[str]:
        """Nonces of the results that wait here."""
        return {*self._unsaved, *self.store.unpublished()}

    def publish(self, result: ResultFiles, claim: Claim, *, untouched: bool) -> None:
        """Keep a result, then push it; it stays if that fails. For `untouched` see `bus.publish`."""
        try:
            self.store.keep(result)
        except MachineError as error:
            self._unsaved[result.nonce] = result
            log.error("%s: its result is kept in memory only: %s", result.nonce, describe(error))
        try:
            self._deliver(result, claim, untouched=untouched)
        except Exception as error:  # the result is kept; `flush` tries again
            self._back_off(result.nonce, error)

    def flush(self, found: Mapping[str, str]) -> None:
        """Push what an earlier failure or an earlier process left; `found`: the remote's refs, as last seen.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        for nonce in sorted(self.waiting()):
            result = self._unsaved.get(nonce) or self.store.result(nonce)
            if result is None or not self.store.is_due(nonce):
                continue
            try:
                self._deliver(result, self._own_claim(nonce, found))
            except RemoteUnreachable:
                raise
            except ResultError as error:
                log.error(
                    "%s: not published, written to %s: %s", nonce, self._write_out(result), error.message
                )
                self._forget(nonce, answered=False)
            except Exception as error:  # a full disk passes; and one result must not hold up the others
                self._back_off(nonce, error)

        self._remove_late_cancels(found)

    def _remove_late_cancels(self, found: Mapping[str, str]) -> None:
        """Delete cancel requests that came between the last look and the push of the result, each once."""
        late = [
            RefUpdate(ref, None, commit)
            for prefix in CANCELS
            for ref, commit in found.items()
            if commit not in self._late
            and (nonce := refs.nonce_of(ref, prefix))
            and self.store.get(nonce).answered_at is not None
        ]
        if late:
            self._late |= {update.expected for update in late}
            with contextlib.suppress(PushRejected, LeaseLost):  # a server may keep its refs
                self.cache.push(self.config.remote, late)

    def _deliver(self, result: ResultFiles, claim: Claim | None, *, untouched: bool = False) -> None:
        nonce = result.nonce
        tries = 1 if self.store.get(nonce).failures else TRIES
        try:
            where = self._push(result, claim, untouched=untouched, tries=tries)
        except Superseded as error:
            log.warning("%s: not published: %s", nonce, error.message)
            self._forget(nonce, answered=isinstance(error, AlreadyAnswered))
        except (LeaseLost, RemoteUnreachable, PushRejected) as error:
            self._rejected(result, claim, error)
        else:
            log.info("%s: published as %s on %s", nonce, where.commit[:12], where.ref)
            self._forget(nonce, answered=True)

    def _push(
        self, result: ResultFiles, claim: Claim | None, *, untouched: bool = False, tries: int = TRIES
    ) -> Published:
        return self.cache.recover(
            lambda: publish(
                self.cache, self.config.remote, result, claim=claim, untouched=untouched, tries=tries
            )
        )

    def _rejected(self, result: ResultFiles, claim: Claim | None, error: BusError) -> None:
        """The remote did not accept a result: after several tries one without files goes in its place."""
        nonce = result.nonce
        count, since = self.store.note_rejection(nonce, rejected=_takes_claim(claim, error))
        if count < MAX_REJECTIONS or self.store.clock() - since < PATIENCE_S:
            self.store.back_off(nonce, f"its result is kept: {error.message}")
            return
        folder = self._write_out(result)
        try:
            where = self._push(_without_files(result, self.config.sign, error), claim)
        except (LeaseLost, PushRejected, RemoteUnreachable) as again:
            reason = f"the server also rejected the result without files: {again.message}"
            self.store.back_off(nonce, reason, longest_s=LONGEST_PAUSE_S)
            return
        published = f"published without its files as {where.commit[:12]} on {where.ref}"
        log.error("%s: %s; the whole result is in %s: %s", nonce, published, folder, error.message)
        self._forget(nonce, answered=True)

    def _write_out(self, result: ResultFiles) -> Path:
        """Write a result that cannot be published to a folder for the owner."""
        folder = self.config.folder / "unpublished" / result.nonce
        files = {**result.files, RESULT_NAME: result.result}
        if result.signature is not None:
            files[RESULT_SIGNATURE_NAME] = result.signature
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(folder / path, data)
        return folder

    def _own_claim(self, nonce: str, found: Mapping[str, str]) -> Claim | None:
        """The claim on a request as ours to use, where an earlier process of this runner made it."""
        held = state_of(found, nonce).claim
        if held is None or self.cache.bring({held.ref: held.commit}, [held.ref], depth=1):
            return None
        status = read_status(self.cache, held.commit)
        if status is None or status.session not in self.sessions:
            return None
        sign = self.config.sign_claim
        return Claim(
            self.cache, self.config.remote, ref=held.ref, commit=held.commit, status=status, sign=sign
        )

    def _forget(self, nonce: str, *, answered: bool) -> None:
        self._unsaved.pop(nonce, None)
        if answered:
            self.store.answer(nonce)
        else:
            self.store.drop_result(nonce)

    def _back_off(self, nonce: str, error: Exception) -> None:
        reason = f"its result is kept: {describe(error)}"
        try:
            self.store.back_off(nonce, reason)
        except MachineError:  # the disk is full: the next look tries again
            log.error("%s: %s", nonce, reason)


def _takes_claim(claim: Claim | None, error: BusError) -> bool:
    """Whether the server takes a push of ours: the claim, renewed, which also says what is wrong."""
    if claim is None:
        return False
    try:
        claim.hold_for_publishing(f"runner: the result is kept, retrying: {error.message}")
    except BusError:
        return False
    return True


def _without_files(
    result: ResultFiles, sign: Callable[[bytes], bytes | None], error: BusError
) -> ResultFiles:
    """What is published in place of a result that the server refuses: nothing of the job is in it."""
    whole = parse_result(result.result)
    ended = f"{whole.verdict.status}/{whole.verdict.reason}"
    message = (
        f"the job ended as {ended}, but the server rejects its result; the runner's owner has it."
        f" {error.message}"
    )
    verdict = Verdict(status=Status.FAILED, reason=Reason.RUNNER_ERROR, message=message[:4000])
    data = whole.model_copy(update={"commands": (), "files": (), "verdict": verdict}).to_bytes()
    return replace(result, result=data, signature=sign(data), files={})
