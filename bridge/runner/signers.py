"""The requesters that a Mac's owner listed: added, shown, removed and revoked.

A key in the list may sign requests and wishes to stop them, nothing else. To change somebody's key, add the
new one under the same name and revoke the old one: requests signed by either are that person's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from enum import StrEnum
from pathlib import Path

from bridge import signing
from bridge.bus.untrusted import quoted
from bridge.errors import SignatureError
from bridge.signing import listed, revoked
from bridge.signing.keys import PublicKey, read_key
from bridge.signing.listed import Listed, read_keys

NAMESPACES = (signing.REQUEST_NAMESPACE, signing.CANCEL_NAMESPACE)


class State(StrEnum):
    """Whether a listed key counts for requests now. A closed set."""

    COUNTS = "counts"
    REVOKED = "revoked"
    NOT_YET = "not-yet"
    EXPIRED = "expired"
    OTHER_USE = "other-use"


@dataclass(frozen=True)
class Signer:
    """One line of the list and whether it counts now."""

    entry: Listed
    state: State


@dataclass(frozen=True)
class Signers:
    """The two lists of one Mac.

    Attributes:
        allowed: ``allowed_signers``: whose key is whose.
        revoked: ``revoked_keys``: keys that count no longer, whatever the other one says.
    """

    allowed: Path
    revoked: Path

    def all(self, now: datetime) -> list[Signer]:
        """Every line of the list, in its order.

        Raises:
            KeyListError: A list cannot be believed.
        """
        return [Signer(entry, self._state(entry, now)) for entry in read_keys(self.allowed)]

    def add(self, name: str, key: PublicKey, *, valid_before: datetime | None, now: datetime) -> bool:
        """Let a key ask under a name; False when it could already.

        Args:
            name: Whose key it is.
            key: The key.
            valid_before: It does not count from then on (aware); None: no such bound.
            now: The time (aware).

        Raises:
            SignatureError: The name is none, the key is somebody else's or was revoked, or its time is over.
            KeyListError: A list as it stands cannot be believed.
            MachineError: The list cannot be written.
        """
        if valid_before is not None and valid_before <= now:
            raise SignatureError(f"{valid_before:%Y-%m-%d %H:%M %Z} is over", "give a later time")
        if revoked.is_revoked(self.revoked, key):
            raise SignatureError(
                f"the key {key.fingerprint} was revoked and would not count",
                f"make a new one; or take its line out of {self.revoked} if that was a mistake",
            )
        return listed.add(self.allowed, Listed(name, key, NAMESPACES, None, valid_before))

    def remove(self, name: str, key: str | None) -> list[Listed]:
        """Take somebody's keys out of the list; returns the lines that went.

        Args:
            name: Whose.
            key: Only this one: its fingerprint, the key or a file; None: all of that name.

        Raises:
            SignatureError: There is none like that.
            KeyListError: The list as it stands cannot be believed.
            MachineError: The list cannot be written.
        """
        found = self._find(name, key)
        listed.drop(self.allowed, tuple(found))
        return found

    def revoke(self, name: str, key: str | None, *, every: bool = False) -> list[PublicKey]:
        """Let a key count no more, here and in every list that is held against ``revoked_keys``.

        Its line stays in the list of signers, so that a request it signed is answered with the reason.

        Args:
            name: Whose.
            key: Which: its fingerprint, the key or a file; None: the only one of that name.
            every: All of that name.

        Raises:
            SignatureError: There is none like that, or several.
            KeyListError: A list as it stands cannot be believed.
            MachineError: The list cannot be written.
        """
        keys = {entry.key.text: entry.key for entry in self._find(name, key)}.values()
        left = [each for each in keys if not revoked.is_revoked(self.revoked, each)]
        if not left:
            raise SignatureError(f"every key of {name} that is meant was revoked before")
        if key is None and len(left) > 1 and not every:
            raise SignatureError(
                f"{name} has {len(left)} keys that count: {_prints(left)}",
                "say which with --key SHA256:…, or --all",
            )
        revoked.revoke(self.revoked, tuple(left))
        return left

    def _find(self, name: str, key: str | None) -> list[Listed]:
        lines = read_keys(self.allowed)
        own = [entry for entry in lines if entry.name == name]
        if not own:
            names = ", ".join(dict.fromkeys(entry.name for entry in lines)) or "none"
            raise SignatureError(f"{self.allowed} has no key of {quoted(name)}", f"names in it: {names}")
        if key is None:
            return own
        wanted = key if key.startswith("SHA256:") else read_key(key).fingerprint
        found = [entry for entry in own if entry.key.fingerprint == wanted]
        if not found:
            keys = _prints(entry.key for entry in own)
            raise SignatureError(f"{quoted(wanted)} is no key of {name}", f"keys of {name}: {keys}")
        return found

    def _state(self, entry: Listed, now: datetime) -> State:
        if revoked.is_revoked(self.revoked, entry.key):
            return State.REVOKED
        if not entry.speaks_in(signing.REQUEST_NAMESPACE):
            return State.OTHER_USE
        if not entry.has_begun(now):
            return State.NOT_YET
        return State.EXPIRED if entry.is_over(now) else State.COUNTS


def parse_until(text: str) -> datetime:
    """When a key stops to count: ``2027-01-31`` (its end, in local time) or ``2027-01-31T12:00[:00][Z]``.

    Raises:
        ValueError: It is neither.
    """
    if len(text) == len("2027-01-31"):
        day = datetime.fromisoformat(text).date() + timedelta(days=1)
        return datetime.combine(day, time()).astimezone()
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo is not None else moment.astimezone()).astimezone(UTC)


def _prints(keys: Iterable[PublicKey]) -> str:
    return ", ".join(dict.fromkeys(key.fingerprint for key in keys))
