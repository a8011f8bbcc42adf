"""What keeps a request ours while its job runs: a claim on the bus, or a workflow run that GitHub gave us."""

from __future__ import annotations

from typing import Protocol

from bridge.bus.holding import Beat


class Hold(Protocol):
    """How a job says that it goes on, and learns that it must not."""

    @property
    def attempt(self) -> int:
        """Which attempt of the request this is, from 1."""
        ...

    def beat(self, beat: Beat) -> None:
        """Say how far the job is.

        Raises:
            LeaseLost: The request is somebody else's now: the job must stop.
            BusError: It could not be said; the next beat may do.
        """
        ...
