"""A look at the runners of a remote, by this client's own trusted keys; also beside other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from bridge.bus.catalogue import TIMEOUT_S, Catalogue, read_cards
from bridge.bus.git import Git
from bridge.client.availability import expected_wait_s
from bridge.client.trust import trusted
from bridge.errors import BridgeError, SignatureError, described
from bridge.signing import fingerprint

LIMIT_S = 3.0
# The fetch ends by itself, and tidies up, before anybody stops waiting for it.
_FETCH_SHARE = 0.9


def trusted_names(path: Path) -> dict[str, str]:
    """The runners whose keys count here, by fingerprint; a line that holds no key is nobody's."""
    names = {}
    for entry in trusted(path):
        try:
            names[fingerprint(entry.key)] = entry.name
        except SignatureError:
            continue
    return names


def look(git: Git, address: str, trusted_file: Path, *, timeout_s: float = TIMEOUT_S) -> Catalogue:
    """The runners seen on a remote.

    Args:
        git: Any checkout; nothing is left in it.
        address: Of the bus.
        trusted_file: The runner keys that count here; it need not exist.
        timeout_s: Deadline.

    Raises:
        RemoteUnreachable: The remote did not answer.
        BusError: It sends more than is read.
    """
    return read_cards(git, address, trusted=trusted_names(trusted_file), timeout_s=timeout_s)


class Lookout:
    """Looks at the runners in a thread, while the caller does something else.

    Args:
        git: Any checkout.
        address: Of the bus.
        trusted_file: The runner keys that count here.
        limit_s: Seconds from now after which nobody waits for it any more.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        git: Git,
        address: str,
        trusted_file: Path,
        *,
        limit_s: float = LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._deadline = clock() + limit_s
        self._clock = clock
        self._found: Catalogue | None = None
        self._failure: str | None = None
        self._thread = threading.Thread(
            target=self._look, args=(git, address, trusted_file), name="lookout", daemon=True
        )
        self._thread.start()

    def result(self) -> tuple[Catalogue | None, str | None]:
        """What was seen, or a sentence that says why nothing is known."""
        self._thread.join(max(0.0, self._deadline - self._clock()))
        if self._thread.is_alive():
            return None, f"which runners are there could not be read within {self._limit_s:g} s"
        return self._found, self._failure

    def expected_s(self, preset: str, ahead: int) -> float | None:
        """Seconds until a request with so many in front of it is likely to start; None: not known (yet)."""
        found = self._found
        if found is None:
            return None
        return expected_wait_s(found.seen, preset=preset, ahead=ahead, now=datetime.now(UTC))

    def _look(self, git: Git, address: str, trusted_file: Path) -> None:
        try:
            self._found = look(git, address, trusted_file, timeout_s=_FETCH_SHARE * self._limit_s)
        except (BridgeError, OSError) as error:
            self._failure = f"which runners are there is not known: {described(error)}"
