"""A list of keys in its owner's hands: keys added, shown, removed and revoked.

To change somebody's key, add the new one under the same name and revoke the old one: while both are listed,
what either signed counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from enum import StrEnum
from pathlib import Path

from bridge.errors import SignatureError
from bridge.protocol.sanitize import quoted
from bridge.signing import listed, revoked
from bridge.signing.keys import PublicKey, read_key
from bridge.signing.listed import Listed, read_keys


class State(StrEnum):
    """Whether a listed key counts now. A closed set."""

    COUNTS = "counts"
    REVOKED = "revoked"
    NOT_YET = "not-yet"
    EXPIRED = "expired"
    OTHER_USE = "other-use"


@dataclass(frozen=True)
class Entry:
    """One line of the list and whether it counts now."""

    listed: Listed
    state: State

    @property
    def words(self) -> str:
        """What is to be said of it; empty where it simply counts."""
        line = self.listed
        match self.state:
            case State.REVOKED:
                return "revoked"
            case State.OTHER_USE:
                return f"for {','.join(line.namespaces or ())} only"
            case State.NOT_YET:
                return f"from {line.valid_after:%Y-%m-%d %H:%M %Z} on"
            case State.EXPIRED:
                return f"expired {line.valid_before:%Y-%m-%d %H:%M %Z}"
            case State.COUNTS:
                return "" if line.valid_before is None else f"until {line.valid_before:%Y-%m-%d %H:%M %Z}"


@dataclass(frozen=True)
class Keyring:
    """Keys that count for some kinds of things, and the list of those that count no longer.

    Attributes:
        allowed: Whose key is whose, in the format of allowed signers.
        revoked: Keys that count no longer, whatever the other file says.
        namespaces: What a key that is added may sign; the first one says whether a listed key counts.
    """

    allowed: Path
    revoked: Path
    namespaces: tuple[str, ...]

    def all(self, now: datetime) -> list[Entry]:
        """Every line of the list, in its order.

        Raises:
            KeyListError: A list cannot be believed.
        """
        return [Entry(line, self._state(line, now)) for line in read_keys(self.allowed)]

    def add(self, name: str, key: PublicKey, *, valid_before: datetime | None, now: datetime) -> bool:
        """Let a key speak for a name; False when it could already.

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
        return listed.add(self.allowed, Listed(name, key, self.namespaces, None, valid_before))

    def remove(self, name: str, key: str | None = None) -> list[Listed]:
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

    def revoke(self, name: str, key: str | None = None, *, every: bool = False) -> list[PublicKey]:
        """Let a key count no more, here and in every list that is held against the same file.

        Its line stays in the list, so that what it signed is refused with the reason.

        Args:
            name: Whose.
            key: Which: its fingerprint, the key or a file; None: the only one of that name.
            every: All of that name.

        Raises:
            SignatureError: There is none like that, or several.
            KeyListError: A list as it stands cannot be believed.
            MachineError: The list cannot be written.
        """
        keys = {line.key.text: line.key for line in self._find(name, key)}.values()
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
        own = [line for line in lines if line.name == name]
        if not own:
            names = ", ".join(dict.fromkeys(line.name for line in lines)) or "none"
            raise SignatureError(f"{self.allowed} has no key of {quoted(name)}", f"names in it: {names}")
        if key is None:
            return own
        wanted = key if key.startswith("SHA256:") else read_key(key).fingerprint
        found = [line for line in own if line.key.fingerprint == wanted]
        if not found:
            keys = _prints(line.key for line in own)
            raise SignatureError(f"{quoted(wanted)} is no key of {name}", f"keys of {name}: {keys}")
        return found

    def _state(self, line: Listed, now: datetime) -> State:
        if revoked.is_revoked(self.revoked, line.key):
            return State.REVOKED
        if not line.speaks_in(self.namespaces[0]):
            return State.OTHER_USE
        if not line.has_begun(now):
            return State.NOT_YET
        return State.EXPIRED if line.is_over(now) else State.COUNTS


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
