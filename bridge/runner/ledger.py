"""Which requests this runner has answered, also before a restart: one nonce a line.

A nonce is kept as long as its request could still be valid; older ones are refused as expired anyway, so
the list does not grow for ever. Of a signed request it is noted until when somebody could put it back
(``nonce=time``): that is what the runner's card tells other machines.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from bridge.protocol import refs
from bridge.protocol.manifest import MAX_LIFETIME, MAX_NONCE_SKEW, format_time


class Ledger:
    """The nonces of answered requests, read once and appended to.

    Args:
        path: The file; made with the first answer.
        now: The time of day (aware).
    """

    def __init__(self, path: Path, now: datetime) -> None:
        self._path = path
        oldest = refs.nonce_time(now - MAX_LIFETIME - MAX_NONCE_SKEW)
        entries = [word.partition("=") for word in read_words(path)]
        kept = [(nonce, until) for nonce, _, until in entries if refs.is_nonce(nonce) and nonce > oldest]
        self.nonces = {nonce for nonce, _ in kept}
        # Until when a signed request could be put back, by nonce; UTC times sort as text.
        self._until = {nonce: until for nonce, until in kept if until}
        if len(self.nonces) < len(entries):
            draft = path.with_suffix(".new")
            draft.write_text("".join(f"{self._line(nonce)}\n" for nonce in sorted(self.nonces)))
            draft.replace(path)

    def add(self, nonce: str, until: str | None = None) -> None:
        """Note an answer.

        Args:
            nonce: The request.
            until: When it expires, if it is signed.

        Raises:
            OSError: It cannot be written; this process knows it all the same.
        """
        self.nonces.add(nonce)
        if until is not None:
            self._until[nonce] = until
        with self._path.open("a", encoding="ascii") as file:
            file.write(f"\n{self._line(nonce)}\n")  # a full disk may have left half a line

    def replayable(self, now: datetime, limit: int) -> tuple[str, ...]:
        """Signed requests answered here that have not expired; of too many, those that expire last."""
        moment = format_time(now)
        valid = sorted((until, nonce) for nonce, until in list(self._until.items()) if until > moment)
        return tuple(sorted(nonce for _, nonce in valid[-limit:]))

    def _line(self, nonce: str) -> str:
        until = self._until.get(nonce)
        return nonce if until is None else f"{nonce}={until}"


def read_words(path: Path) -> list[str]:
    """What a ledger's file says, a word a request; nothing where there is no file."""
    return path.read_text("ascii", "replace").split() if path.exists() else []


def nonces_in(path: Path) -> set[str]:
    """The nonces in a ledger's file, be it another runner's."""
    return {nonce for word in read_words(path) if refs.is_nonce(nonce := word.partition("=")[0])}
