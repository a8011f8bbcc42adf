"""An answer on the wire whose reader does not do what readers do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from engine.registry import Places, Registry
from engine.server.metrics import RequestRecord
from engine.server.response import TextResponseBuilder
from engine.server.scheduler import Scheduler, SchedulerLimits
from engine.server.schema import TextRequest
from engine.server.serve import model_finder
from engine.server.service import CompletionResponse, RequestLimits, Service

pytestmark = pytest.mark.slow

ENDLESS = {"prompt": "class", "max_tokens": 900, "stream": True, "logit_bias": {"2": -100.0, "7": -100.0}}


@pytest.fixture
def service() -> Iterator[Service]:
    scheduler = Scheduler(model_finder(Places.of_machine(), download=False), SchedulerLimits())
    scheduler.start()
    service = Service(Registry.load(), scheduler, RequestLimits())
    yield service
    service.close()
    scheduler.stop()


async def never() -> Any:
    await asyncio.Event().wait()


def test_a_stalled_client_is_dropped_and_its_resources_freed(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(CompletionResponse, "stalled_s", 0.3)
    record, sent = RequestRecord("POST", "/v1/completions", "here"), []

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if len(sent) > 3:
            await never()

    async def answer() -> None:
        request = TextRequest.model_validate(ENDLESS)
        await asyncio.wait_for(
            CompletionResponse(service, request, record, TextResponseBuilder, log_content=False)(
                {}, never, send
            ),
            30,
        )
        while service.scheduler.stats.active:
            await asyncio.sleep(0.01)

    asyncio.run(answer())
    assert (record.status, record.finish, service.admitted) == (200, "stalled", 0)
    assert record.completion_tokens > 0


def test_a_disconnect_ends_the_decoding(service: Service):
    record = RequestRecord("POST", "/v1/completions", "here")

    async def answer() -> None:
        going = asyncio.Event()

        async def send(_: Any) -> None:
            going.set()

        async def receive() -> Any:
            await going.wait()
            return {"type": "http.disconnect"}

        request = TextRequest.model_validate(ENDLESS)
        await asyncio.wait_for(
            CompletionResponse(service, request, record, TextResponseBuilder, log_content=False)(
                {}, receive, send
            ),
            30,
        )
        while service.scheduler.stats.active:
            await asyncio.sleep(0.01)

    asyncio.run(answer())
    assert (record.finish, service.admitted) == ("gone", 0)
