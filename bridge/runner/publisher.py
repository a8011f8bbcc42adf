"""The way of a result from this machine to the remote: kept before it is pushed, until it is there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace

from bridge.bus.claims import Claim, read_status
from bridge.bus.publish import TRIES, AlreadyAnswered, ResultFiles, publish
from bridge.bus.requests import RefValue, state_of
from bridge.bus.results import file_objections
from bridge.errors import BusError, MachineError, ResultError, describe
from bridge.git.cache import GitCache
from bridge.proc import write_atomic
from bridge.protocol.refs import parse_request_ref
from bridge.protocol.result import RESULT_NAME, Reason, Status, Verdict, parse_result
from bridge.runner.config import RunnerConfig
from bridge.runner.store import Store

log = logging.getLogger(__name__)

# After so many tries, some 20 minutes, a result without files takes the place of one that is refused.
MAX_TRIES = 10


@dataclass
class Publisher:
    """Results of one runner on one remote; claims of `sessions`, processes of this runner, are ours."""

    config: RunnerConfig
    cache: GitCache
    store: Store
    _: KW_ONLY
    sessions: frozenset[str]

    def waiting(self) -> set[str]:
        """Nonces of the results that wait here."""
        return set(self.store.unpublished())

    def publish(self, result: ResultFiles, claim: Claim, *, untouched: bool) -> None:
        """Keep a result, then push it; it stays if that fails. For `untouched` see `bus.publish`."""
        try:
            self.store.keep(result)
        except MachineError as error:  # it may be published all the same; if not, the request runs again
            log.error("%s: its result is not kept on this disk: %s", result.nonce, error.message)
        self._deliver(result, claim, untouched=untouched)

    def flush(self, found: Mapping[str, str]) -> None:
        """Push what earlier failures or processes left; `found`: the remote's refs, as last seen."""
        for nonce in self.store.unpublished():
            if not self.store.is_due(nonce) or (result := self.store.result(nonce)) is None:
                continue
            try:
                _check_whole(result)
            except ResultError as error:
                log.error("%s: its result is damaged on this disk; it runs again: %s", nonce, error.message)
                self.store.drop_result(nonce)
            else:
                self._deliver(result, self._own_claim(nonce, found))

    def _deliver(self, result: ResultFiles, claim: Claim | None, *, untouched: bool = False) -> None:
        """Push one result; what goes wrong with it must not hold up the others."""
        nonce, known = result.nonce, self.store.get(result.nonce)
        try:
            where = self._push(result, claim, untouched=untouched, tries=1 if known.failures else TRIES)
        except AlreadyAnswered as error:
            log.warning("%s: not published: %s", nonce, error.message)
            if claim is not None:
                with contextlib.suppress(BusError):  # pruning deletes it later
                    claim.release()
        except Exception as error:
            accepts_claim = isinstance(error, BusError) and _accepts_claim(claim, error)
            refusals = known.refusals + 1 if accepts_claim else 0
            if refusals <= MAX_TRIES or not self._replace(result, claim, describe(error)):
                self.store.back_off(nonce, f"its result is kept: {describe(error)}", refusals=refusals)
                return
        else:
            log.info("%s: published as %s on %s", nonce, where.commit[:12], where.ref)
        self.store.answer(nonce)

    def _push(
        self, result: ResultFiles, claim: Claim | None, *, untouched: bool = False, tries: int = TRIES
    ) -> RefValue:
        return self.cache.recover(
            lambda: publish(
                self.cache, self.config.remote, result, claim=claim, untouched=untouched, tries=tries
            )
        )

    def _replace(self, result: ResultFiles, claim: Claim | None, why: str) -> bool:
        """Publish a result without files in place of one that the server refuses; whether that worked.

        Its request must not be pending for ever; the whole result is written to a folder.
        """
        folder = self.config.folder / "unpublished" / result.nonce
        try:
            for path, data in result.contents().items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_atomic(folder / path, data)
        except OSError:  # the disk is full: later, and the other requests go on
            return False
        whole = parse_result(result.result)
        ended = f"{whole.verdict.status}/{whole.verdict.reason}, but the server rejects its result"
        message = f"the job ended as {ended}; the runner's owner has it. {why}"
        verdict = Verdict(status=Status.FAILED, reason=Reason.RUNNER_ERROR, message=message[:4000])
        data = whole.model_copy(update={"commands": (), "files": (), "verdict": verdict}).to_bytes()
        bare = replace(result, result=data, signature=self.config.sign(data), files={})
        try:
            where = self._push(bare, claim)
        except (BusError, MachineError):
            return False
        published = f"published without its files as {where.commit[:12]} on {where.ref}"
        log.error("%s: %s; the whole result is in %s: %s", result.nonce, published, folder, why)
        return True

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


def _check_whole(result: ResultFiles) -> None:
    """Raise a `ResultError` where what lies here is not what was kept."""
    parsed = parse_result(result.result)
    named = None if result.result_ref is None else parse_request_ref(result.result_ref)
    is_own = result.result_ref is None or (named is not None and named.nonce == result.nonce)
    if not is_own or (parsed.nonce, parsed.request_commit) != (result.nonce, result.request_commit):
        raise ResultError(f"{RESULT_NAME} names another request")
    for objection in file_objections(parsed, result.contents()):
        raise ResultError(objection)


def _accepts_claim(claim: Claim | None, error: BusError) -> bool:
    """Whether the server accepts a push of ours: the claim, renewed, which also says what is wrong."""
    if claim is None:
        return False
    try:
        claim.hold_for_publishing(f"runner: the result is kept, retrying: {error.message}")
    except BusError:
        return False
    return True
