"""What went wrong and when it may be tried again: each failure of one thing doubles its own pause."""

from __future__ import annotations

from collections.abc import Callable, Collection

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0


class Later:
    """Pauses by name.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[str, tuple[float, float]] = {}

    def is_due(self, name: str) -> bool:
        """Whether its pause, if it has one, is over."""
        return name not in self._until or self._clock() >= self._until[name][0]

    def put_off(self, name: str, *, longest_s: float = MAX_PAUSE_S) -> float:
        """Note a failure; the seconds until the next try, at most `longest_s`."""
        pause = min(2 * self._until.get(name, (0.0, FIRST_PAUSE_S / 2))[1], longest_s)
        self._until[name] = (self._clock() + pause, pause)
        return pause

    def keep(self, names: Collection[str]) -> None:
        """Forget every other name."""
        self._until = {name: pause for name, pause in self._until.items() if name in names}
