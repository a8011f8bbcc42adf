"""The way of a result from this disk to the remote: kept before it is pushed, pushed until it stands.

A result that came too late goes; one that cannot be pushed now stays, also over restarts. What goes wrong
with one is counted against it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bridge.bus.claims import Claim, read_status
from bridge.bus.handles import Held
from bridge.bus.mirror import Mirror
from bridge.bus.publish import publish
from bridge.errors import BusError, LeaseLost, PushRejected, RemoteUnreachable, ResultError, described
from bridge.runner.later import Later
from bridge.runner.ledger import Ledger
from bridge.runner.spool import Entry, Spool


class Outbox:
    """Results of one runner on one remote.

    Args:
        mirror: Where requests' objects are, and which remote it is.
        spool: Where results are kept.
        ledger: Where answers are noted.
        later: When what failed may be tried again.
        say: Takes one line for the owner.
    """

    def __init__(
        self, mirror: Mirror, spool: Spool, ledger: Ledger, later: Later, say: Callable[[str], None]
    ) -> None:
        self._mirror = mirror
        self._spool = spool
        self._ledger = ledger
        self._later = later
        self._say = say
        # Results that the disk did not take: this process has them.
        self._unkept: dict[str, Entry] = {}

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
                place = self._spool.set_aside(nonce)
                self._say(f"{nonce}: not published, set aside in {place}: {type(error).__name__}: {error}")
            except Exception as error:  # a full disk passes; and one entry must not hold up the others
                pause = self._later.put_off(nonce)
                self._say(f"{nonce}: {described(error)}; trying again in {pause:g} s")
        return gone

    def _publish(self, entry: Entry, held: Claim | None, *, untouched: bool = False) -> bool:
        """Push a result; whether it is off our hands: published, or too late."""
        try:
            where = publish(
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
            )
        except LeaseLost as error:
            self._say(f"{entry.nonce}: not published: {error.message}")
        except (RemoteUnreachable, PushRejected) as error:
            self._later.put_off(entry.nonce)
            self._say(f"{entry.nonce}: kept for later: {error.message}")
            return False
        except BusError as error:
            # Not the remote's fault, so the copy here is broken; a new one publishes at the next try.
            self._later.put_off(entry.nonce)
            self._say(f"{entry.nonce}: kept for later: {error.message}")
            self._mirror.renew()
            return False
        else:
            self._say(f"{entry.nonce}: published as {where.commit[:12]} on {where.ref}")
            self._note(entry.nonce)
        self._unkept.pop(entry.nonce, None)
        self._spool.remove(entry.nonce)
        return True

    def _note(self, nonce: str) -> None:
        try:
            self._ledger.add(nonce)
        except OSError as error:
            self._say(f"{nonce}: that it was answered is known to this process only: {described(error)}")

    def _own_claim(self, held: Held | None, own: frozenset[str]) -> Claim | None:
        """The claim as ours to use, where an earlier process of this runner made it."""
        git = self._mirror.git
        status = None if held is None else read_status(git, held.commit)
        if held is None or status is None or status.session not in own:
            return None
        return Claim(git, self._mirror.remote, ref=held.ref, commit=held.commit, status=status)
