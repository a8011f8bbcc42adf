"""The way of a result from this disk to the remote: kept before it is pushed, pushed until it stands.

A result that came too late goes; one that cannot be pushed now stays, also over restarts. What goes wrong
with one is counted against it alone. One that the server never takes, while it takes our claim, must not
leave its request pending for ever: a bare result says so in its place, and the whole one is put aside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from bridge.bus.claims import Claim, read_status
from bridge.bus.handles import Held
from bridge.bus.mirror import Mirror
from bridge.bus.publish import TRIES, Answered, Published, Superseded, publish
from bridge.errors import (
    BrokenObject,
    BusError,
    LeaseLost,
    PushRejected,
    RemoteUnreachable,
    ResultError,
    described,
)
from bridge.protocol.result import Reason, Status, Verdict, parse_result
from bridge.runner.later import Later
from bridge.runner.ledger import Ledger
from bridge.runner.spool import Entry, Spool

# So often, and for so long, a result is brought before a bare one takes its place: bad moments pass.
REJECTIONS = 5
PATIENCE_S = 900.0
# Between two tries of a result that the server takes not even bare; each renews the claim for longer.
LONGEST_PAUSE_S = 600.0


class Outbox:
    """Results of one runner on one remote.

    Args:
        mirror: Where requests' objects are, and which remote it is.
        spool: Where results are kept.
        ledger: Where answers are noted.
        later: When what failed may be tried again.
        sign: Signs the bytes of a result; None where this machine cannot.
        sign_claim: The same of a claim.
        say: Takes one line for the owner.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        mirror: Mirror,
        spool: Spool,
        ledger: Ledger,
        later: Later,
        *,
        sign: Callable[[bytes], bytes | None],
        sign_claim: Callable[[bytes], bytes | None] = lambda _: None,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._mirror = mirror
        self._spool = spool
        self._ledger = ledger
        self._later = later
        self._sign = sign
        self._sign_claim = sign_claim
        self._say = say
        # Results that the disk did not take: this process has them.
        self._unkept: dict[str, Entry] = {}
        # When, in a row, the server did not take a result and took our claim right after.
        self._rejections: dict[str, list[float]] = {}
        # Results for which the mirror was made again: who can provoke that once must not do it for ever.
        self._renewed: set[str] = set()
        # Results of which the owner knows that not even a bare one is taken in their place.
        self._given_up: set[str] = set()

    def __contains__(self, nonce: object) -> bool:
        """Whether a result of this nonce waits here."""
        return nonce in self._unkept or nonce in self._spool

    def nonces(self) -> set[str]:
        """What waits here."""
        return {*self._unkept, *self._spool.nonces()}

    def send(self, entry: Entry, claim: Claim, *, untouched: bool) -> None:
        """Keep a result, then push it; it stays if that fails. For `untouched` see `publish`."""
        try:
            self._spool.put(entry)
        except OSError as error:
            self._unkept[entry.nonce] = entry
            self._say(f"{entry.nonce}: kept in memory only: {described(error)}")
        try:
            self._publish(entry, claim, untouched=untouched)
        except Exception as error:  # the result is here; `flush` tries again
            pause = self._later.put_off(entry.nonce)
            self._say(f"{entry.nonce}: {described(error)}; trying again in {pause:g} s")

    def flush(self, claims: Callable[[], Mapping[str, Held]], own: frozenset[str]) -> int:
        """Push what an earlier failure or an earlier process left; how many are no longer here.

        Args:
            claims: Gives the claims on the remote by nonce.
            own: Sessions of this runner: claims of theirs are ours.
        """
        waiting = [nonce for nonce in sorted(self.nonces()) if self._later.is_due(nonce)]
        held = claims() if waiting else {}
        gone = 0
        for nonce in waiting:
            try:
                entry = self._unkept.get(nonce) or self._spool.read(nonce)
                gone += self._publish(entry, self._own_claim(held.get(nonce), own))
            except RemoteUnreachable:
                raise
            except (ValueError, KeyError, TypeError, FileNotFoundError, ResultError) as error:
                self._forget(nonce)
                place = self._spool.set_aside(nonce)
                self._say(f"{nonce}: not published, set aside in {place}: {type(error).__name__}: {error}")
            except Exception as error:  # a full disk passes; and one entry must not hold up the others
                pause = self._later.put_off(nonce)
                self._say(f"{nonce}: {described(error)}; trying again in {pause:g} s")
        return gone

    def _publish(self, entry: Entry, held: Claim | None, *, untouched: bool = False) -> bool:
        """Push a result; whether it is off our hands: published, or too late."""
        try:
            where = self._push_repaired(entry, held, untouched=untouched)
        except Superseded as error:
            self._say(f"{entry.nonce}: not published: {error.message}")
            if isinstance(error, Answered):
                self._note(entry)
            self._let_go(entry.nonce)
            return True
        except (LeaseLost, RemoteUnreachable, PushRejected) as error:
            return self._rejected(entry, held, error)
        self._say(f"{entry.nonce}: published as {where.commit[:12]} on {where.ref}")
        self._note(entry)
        self._forget(entry.nonce)
        self._spool.remove(entry.nonce)
        return True

    def _push_repaired(self, entry: Entry, held: Claim | None, *, untouched: bool) -> Published:
        """`_push`; where git fails on this side, the copy here is broken: a new one is made and used, once.

        Raises:
            BusError: As `publish` does.
        """
        try:
            return self._push(entry, held, untouched=untouched)
        except (LeaseLost, RemoteUnreachable, PushRejected):
            raise
        except BusError as error:
            if isinstance(error, BrokenObject) or entry.nonce in self._renewed:
                raise
            self._renewed.add(entry.nonce)
            self._say(f"{entry.nonce}: tried again with a new copy of the queue: {error.message}")
            self._mirror.remake()
            return self._push(entry, held, untouched=False)

    def _push(self, entry: Entry, held: Claim | None, *, untouched: bool = False) -> Published:
        return publish(
            self._mirror.git,
            self._mirror.remote,
            request_commit=entry.request_commit,
            nonce=entry.nonce,
            result_ref=entry.result_ref,
            files=entry.files,
            result=entry.result,
            signature=entry.signature,
            claim=held,
            untouched=untouched,
            tries=1 if entry.nonce in self._rejections else TRIES,
        )

    def _rejected(self, entry: Entry, held: Claim | None, error: BusError) -> bool:
        """A result was not taken; whether a bare one in its place was, after several tries."""
        nonce, now = entry.nonce, self._clock()
        if _is_heard(held, error):
            self._rejections.setdefault(nonce, []).append(now)
        else:
            self._rejections.pop(nonce, None)  # nothing of ours is taken now, so it is not this result
        rejections = self._rejections.get(nonce, [])
        if len(rejections) < REJECTIONS or now - rejections[0] < PATIENCE_S:
            self._later.put_off(nonce)
            self._say(f"{nonce}: kept for later: {error.message}")
            return False
        try:
            self._publish_bare(entry, held, error)
        except (LeaseLost, PushRejected, RemoteUnreachable) as again:
            self._later.put_off(nonce, longest_s=LONGEST_PAUSE_S)
            if nonce not in self._given_up:
                self._given_up.add(nonce)
                self._say(
                    f"{nonce}: kept, and tried ever more seldom: not even a bare result is taken in its"
                    f" place: {again.message}"
                )
            return False
        return True

    def _publish_bare(self, entry: Entry, held: Claim | None, error: BusError) -> None:
        """Answer with a result without files that says why the whole one is not there; that one is put aside.

        Raises:
            OSError: The whole one cannot be kept on the disk, so nothing takes its place.
            BusError: As `publish` does.
        """
        nonce = entry.nonce
        if nonce in self._unkept:
            self._spool.put(entry)
            del self._unkept[nonce]
        self._spool.mark_refused(nonce)
        where = self._push(_bare(entry, self._sign, error), held)
        self._note(entry)
        place = self._let_go(nonce)
        self._say(
            f"{nonce}: a bare result is published as {where.commit[:12]} on {where.ref}, for the whole one is"
            f" not taken; that one is put aside in {place}: {error.message}"
        )

    def _let_go(self, nonce: str) -> Path | None:
        """Forget a result; one in whose place another may stand is put aside. Where it lies now."""
        self._forget(nonce)
        if self._spool.is_refused(nonce):
            return self._spool.set_aside(nonce)
        self._spool.remove(nonce)
        return None

    def _forget(self, nonce: str) -> None:
        self._unkept.pop(nonce, None)
        self._rejections.pop(nonce, None)
        self._given_up.discard(nonce)
        self._renewed.discard(nonce)

    def _note(self, entry: Entry) -> None:
        try:
            self._ledger.add(entry.nonce, entry.until)
        except OSError as error:
            self._say(
                f"{entry.nonce}: that it was answered is known to this process only: {described(error)}"
            )

    def _own_claim(self, held: Held | None, own: frozenset[str]) -> Claim | None:
        """The claim as ours to use, where an earlier process of this runner made it."""
        git = self._mirror.git
        status = None if held is None else read_status(git, held.commit)
        if held is None or status is None or status.session not in own:
            return None
        return Claim(
            git,
            self._mirror.remote,
            ref=held.ref,
            commit=held.commit,
            status=status,
            sign=self._sign_claim,
        )


def _is_heard(held: Claim | None, error: BusError) -> bool:
    """Whether the server takes a push of ours: the claim, renewed, which also says what is wrong."""
    if held is None:
        return False
    try:
        held.hold(f"runner: the result is kept for later: {error.message}")
    except BusError:
        return False
    return True


def _bare(entry: Entry, sign: Callable[[bytes], bytes | None], error: BusError) -> Entry:
    """The answer in place of a result that the server does not take: nothing of the job is in it."""
    whole = parse_result(entry.result)
    ended = f"{whole.verdict.status}/{whole.verdict.reason}"
    message = (
        f"the job ended as {ended}, but its result does not get to the server; the runner's owner has it."
        f" {error.message}"
    )
    verdict = Verdict(status=Status.FAILED, reason=Reason.RUNNER_ERROR, message=message[:4000])
    changes = {"commands": (), "files": (), "verdict": verdict}
    result = whole.model_copy(update=changes).to_bytes()
    return replace(entry, result=result, signature=sign(result), files={})
