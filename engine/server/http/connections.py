"""uvicorn's connections, bounded in number and time: who sends no whole head of a request in time is let go.

uvicorn closes connections that are idle between requests, but waits for ever for the first request and for a
head that has begun. Without this, anybody could hold descriptors without a key, or all of them.
"""

import asyncio
from resource import RLIMIT_NOFILE, getrlimit
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedProtocol(H11Protocol):
    """One connection."""

    head_s: ClassVar[float] = 30.0  # until the head of a request is there
    most: ClassVar[int] = min(getrlimit(RLIMIT_NOFILE)[0] // 2, 4096)  # connections; more are let go at once

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Begin to wait."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take in data; whether a request has begun with it decides about the waiting."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._calm()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._calm()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.head_s, self._let_go)

    def _calm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _let_go(self) -> None:
        self._deadline = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
