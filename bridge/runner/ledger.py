"""Which requests this runner has answered, also before a restart: one nonce a line.

A nonce is kept as long as its request could still be valid; older ones are refused as expired anyway, so
the list does not grow for ever.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from bridge.bus import refs
from bridge.manifest import MAX_LIFETIME, MAX_NONCE_SKEW


class Ledger:
    """The nonces of answered requests, read once and appended to.

    Args:
        path: The file; made with the first answer.
        now: The time of day (aware).
    """

    def __init__(self, path: Path, now: datetime) -> None:
        self._path = path
        oldest = refs.nonce_time(now - MAX_LIFETIME - MAX_NONCE_SKEW)
        lines = path.read_text("ascii", "replace").split() if path.exists() else []
        self.nonces = {line for line in lines if refs.is_nonce(line) and line > oldest}
        if len(self.nonces) < len(lines):
            draft = path.with_suffix(".new")
            draft.write_text("".join(f"{nonce}\n" for nonce in sorted(self.nonces)))
            draft.replace(path)

    def add(self, nonce: str) -> None:
        """Note an answer.

        Raises:
            OSError: It cannot be written; this process knows it all the same.
        """
        self.nonces.add(nonce)
        with self._path.open("a", encoding="ascii") as file:
            file.write(f"\n{nonce}\n")  # a full disk may have left half a line
