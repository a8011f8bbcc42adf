"""A look at the runners of a remote, by this client's own trusted keys; also beside other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

from bridge.bus.catalogue import TIMEOUT_S, Catalogue, read_cards
from bridge.bus.git import Git
from bridge.bus.handles import running, state_of
from bridge.bus.standing import Trust
from bridge.client.availability import Forecast, forecast
from bridge.errors import described
from bridge.signing import RESULT_NAMESPACE

LIMIT_S = 3.0
Found = TypeVar("Found")
# The fetch ends by itself, and tidies up, before anybody stops waiting for it.
_FETCH_SHARE = 0.9
# The list of refs is there before the cards are, as a rule; nobody waits long for it.
_GRACE_S = 0.1


def trusted_names(path: Path) -> dict[str, str]:
    """The runners whose keys count here and now, by fingerprint.

    Raises:
        KeyListError: The list cannot be believed.
    """
    return dict(Trust.by(path).names(RESULT_NAMESPACE))


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
    """Looks at the runners, and at what waits, in threads, while the caller does something else.

    Args:
        git: Any checkout.
        address: Of the bus.
        trusted_file: The runner keys that count here.
        count: Look at what waits and runs, too, for `ahead` and `running`.
        limit_s: Seconds from now after which nobody waits for it any more.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        git: Git,
        address: str,
        trusted_file: Path,
        *,
        count: bool = False,
        limit_s: float = LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._deadline = clock() + limit_s
        self._clock = clock
        fetch_s = _FETCH_SHARE * limit_s
        self._cards = _Beside(lambda: look(git, address, trusted_file, timeout_s=fetch_s))
        self._refs = _Beside(lambda: git.ls_remote(address, timeout_s=fetch_s)) if count else None

    def result(self) -> tuple[Catalogue | None, str | None]:
        """What was seen, and a sentence that says why nothing, or not what waits, is known."""
        if not self._cards.ended(max(0.0, self._deadline - self._clock())):
            return None, f"which runners are there could not be read within {self._limit_s:g} s"
        if self._cards.failure is not None:
            return None, f"which runners are there is not known: {self._cards.failure}"
        if self._refs is not None and self._refs.failure is not None:
            return self._cards.found, f"how many older requests wait is not known: {self._refs.failure}"
        return self._cards.found, None

    def ahead(self, nonce: str) -> int | None:
        """How many older requests wait, besides the one of this nonce; None: not known (yet)."""
        found = self._listed()
        return None if found is None else state_of(found, nonce).ahead

    def running(self, *, besides: str | None = None) -> int | None:
        """How many requests are claimed, without the one of a nonce; None: not known (yet)."""
        found = self._listed()
        return None if found is None else len(running(found) - {besides})

    def forecast(self, preset: str, *, running: int | None = None) -> Forecast | None:
        """How soon requests of a preset are likely to start; None: not known (yet).

        Args:
            preset: Name or alias.
            running: Requests that are claimed; None: as the list of refs tells, if that was asked for.
        """
        cards = self._cards.found
        if cards is None:
            return None
        claimed = self.running() if running is None else running
        return forecast(cards.seen, preset=preset, now=datetime.now(UTC), running=claimed)

    def expected_s(self, preset: str, ahead: int | None) -> float | None:
        """Seconds until a request is likely to start; None: not known (yet).

        Args:
            preset: Name or alias.
            ahead: Older requests that wait, too; None: not known.
        """
        found = None if ahead is None else self.forecast(preset)
        return None if found is None or ahead is None else found.wait_s(ahead)

    def _listed(self) -> Mapping[str, str] | None:
        """The remote's refs; None: not there (yet), or not asked for."""
        if self._refs is None or not self._refs.ended(_GRACE_S):
            return None
        return self._refs.found


class _Beside(Generic[Found]):
    """One question to a remote, asked in a thread of its own.

    Attributes:
        found: The answer; None: there is none (yet).
        failure: Why there is none.
    """

    def __init__(self, ask: Callable[[], Found]) -> None:
        self.found: Found | None = None
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, args=(ask,), name="lookout", daemon=True)
        self._thread.start()

    def ended(self, seconds: float) -> bool:
        """Wait for the answer at most so long; whether the question is answered, or failed."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, ask: Callable[[], Found]) -> None:
        try:
            self.found = ask()
        except Exception as error:  # a hint: whatever is wrong with it must not keep a request from going out
            self.failure = described(error)
