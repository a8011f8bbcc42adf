"""Events on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
from threading import Thread

import pytest

from engine.errors import GenerationError
from engine.server.sequence import DecodeFailed, Event, PrefillProgress
from engine.server.service import EventQueue


def test_events_come_from_another_thread_in_order_and_a_failure_is_raised():
    async def listen() -> None:
        events = EventQueue()
        assert await events.next(0.01) == []
        sent = [PrefillProgress(done, 3) for done in range(3)]
        thread = Thread(
            target=lambda: [events.put(each) for each in [*sent, DecodeFailed(GenerationError("no"))]]
        )
        thread.start()
        heard: list[tuple[int, Event]] = []
        while len(heard) < len(sent):
            heard += await events.next()
        assert heard == [(0, event) for event in sent]
        with pytest.raises(GenerationError, match="no"):
            await events.next()
        thread.join()

    asyncio.run(listen())


def test_events_for_a_loop_that_has_ended_are_dropped():
    async def make() -> EventQueue:
        return EventQueue()

    asyncio.run(make()).put(PrefillProgress(1, 2))
