"""How often the jobs of requests were begun here, also before a restart: one ``nonce=attempt`` a word.

What a claim says of attempts goes with the claim, and whoever can push may delete it together with the inbox
entry and put the request back. A nonce is kept as long as its request could still be valid.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from bridge.protocol import refs
from bridge.protocol.manifest import MAX_LIFETIME, MAX_NONCE_SKEW
from bridge.runner.ledger import read_words


class Begun:
    """Attempts of this runner by request, read once and appended to.

    Args:
        path: The file; made with the first job.
        now: The time of day (aware).
    """

    def __init__(self, path: Path, now: datetime) -> None:
        self._path = path
        self._attempts: dict[str, int] = {}
        oldest = refs.nonce_time(now - MAX_LIFETIME - MAX_NONCE_SKEW)
        words = read_words(path)
        for word in words:
            nonce, _, attempt = word.partition("=")
            if refs.is_nonce(nonce) and nonce > oldest and attempt.isdecimal():
                self._attempts[nonce] = max(self.attempts(nonce), int(attempt[:4]))
        if len(self._attempts) < len(words):
            draft = path.with_suffix(".new")
            draft.write_text("".join(f"{nonce}={n}\n" for nonce, n in sorted(self._attempts.items())))
            draft.replace(path)

    def attempts(self, nonce: str) -> int:
        """The highest attempt of a request that was begun here; 0: none."""
        return self._attempts.get(nonce, 0)

    def note(self, nonce: str, attempt: int) -> None:
        """Note an attempt before its job begins.

        Raises:
            OSError: It cannot be written; this process knows it all the same.
        """
        self._attempts[nonce] = max(self.attempts(nonce), attempt)
        with self._path.open("a", encoding="ascii") as file:
            file.write(f"\n{nonce}={attempt}\n")  # a full disk may have left half a line
