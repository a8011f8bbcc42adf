"""The answer to a completion request on the wire: one JSON object, or a stream of events.

The status waits for the engine's first event, so that a request the engine refuses gets a status and not a
broken stream. Where that takes long, a stream begins nevertheless, and comments keep it alive. When the
client goes, the work on its request ends.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any, ClassVar

from starlette.responses import Response

from engine.decode import Step
from engine.errors import EngineError
from engine.server.decoding.work import Ended, Event
from engine.server.record import Record
from engine.server.refusals import Refusal, refusal_of
from engine.server.service import Events, Service
from engine.server.text.response import ResponseBuilder
from engine.server.wire.replies import Reply
from engine.server.wire.requests import ChatRequest, TextRequest

KEEPALIVE_S = 5.0
PAUSE_S = 0.025  # between chunks: what came meanwhile is one chunk, so that a fast model is not slowed down
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Answer(Response):
    """Answers one request."""

    stalled_s: ClassVar[float] = 60.0  # a client that takes nothing for so long is given up

    def __init__(
        self, service: Service, request: ChatRequest | TextRequest, record: Record, *, log_content: bool
    ) -> None:
        super().__init__()
        self._service, self._request, self._record = service, request, record
        self._log_content = log_content
        self._begun = False  # the status was sent

    async def __call__(self, _: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer, unless the client goes before, or takes nothing any more."""

        async def hurried(message: MutableMapping[str, Any]) -> None:
            async with asyncio.timeout(self.stalled_s):
                await send(message)

        answering = asyncio.create_task(self._answer(hurried))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self._record.finish = "gone"
        finally:
            for task in (leaving, answering):
                task.cancel()
            try:
                await answering
            except asyncio.CancelledError:
                pass
            except TimeoutError:
                self._record.finish = "stalled"

    async def _answer(self, send: Send) -> None:
        try:
            async with self._service.job(self._request, self._record) as (builder, events):
                if self._request.stream:
                    await self._stream(send, builder, events)
                else:
                    await self._whole(send, builder, events)
        except Refusal as refusal:
            await self._refuse(send, refusal)
        except EngineError as error:
            await self._refuse(send, refusal_of(error))
        except TimeoutError:  # of a send: there is nobody to tell
            raise
        except Exception:
            await self._refuse(
                send, Refusal(500, "this is a bug in the server; its log says more", code="bug")
            )
            raise

    async def _whole(self, send: Send, builder: ResponseBuilder, events: Events) -> None:
        while True:
            batch = await events.next()
            builder.hear(self._steps(batch))
            if isinstance(ended := batch[-1], Ended):
                body = builder.complete(ended).model_dump_json().encode()
                self._note(builder, ended)
                await self._begin(send, 200, {"content-type": "application/json"}, len(body))
                await send({"type": "http.response.body", "body": body})
                return
            if self._record.first_s is not None:
                await events.pause(PAUSE_S)

    async def _stream(self, send: Send, builder: ResponseBuilder, events: Events) -> None:
        batch = await events.next(KEEPALIVE_S)
        await self._begin(send, 200, STREAM_HEADERS)
        await _push(send, _framed(builder.begin()))
        while not (batch and isinstance(batch[-1], Ended)):
            await _push(send, _framed(self._told(builder, batch)) if batch else b": waiting\n\n")
            if self._record.first_s is not None:
                await events.pause(PAUSE_S)
            batch = await events.next(KEEPALIVE_S)
        await send({"type": "http.response.body", "body": _framed(self._told(builder, batch)) + DONE})

    def _told(self, builder: ResponseBuilder, batch: Sequence[Event]) -> list[Reply]:
        """The chunks for events; the record takes note of them."""
        chunks = list(builder.take(self._steps(batch)))
        if isinstance(ended := batch[-1], Ended):
            chunks += builder.end(ended)
            self._note(builder, ended)
        return chunks

    def _steps(self, batch: Sequence[Event]) -> list[Step]:
        """The steps among events; the record takes note of them."""
        steps = [event for event in batch if isinstance(event, Step)]
        if steps:
            self._record.saw_tokens(sum(len(step.tokens) for step in steps))
        return steps

    def _note(self, builder: ResponseBuilder, ended: Ended) -> None:
        record, usage, how = self._record, builder.usage(ended.cached_tokens), builder.provenance(ended)
        record.completion_tokens, record.cached_tokens = usage.completion_tokens, ended.cached_tokens
        record.drafter, record.finish = how.drafter, builder.finish(ended)
        record.drafted, record.accepted, record.verify_rounds = how.drafted, how.accepted, how.verify_rounds
        if self._log_content:
            said = builder.whole.said.content
            record.content = {"request": self._request.model_dump_json(), "answer": said}

    async def _begin(
        self, send: Send, status: int, headers: dict[str, str], length: int | None = None
    ) -> None:
        self._begun = True
        self._record.status = status
        fields = headers if length is None else headers | {"content-length": str(length)}
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
            }
        )

    async def _refuse(self, send: Send, refusal: Refusal) -> None:
        """An error document with its status, or as the last event of a stream that has begun."""
        self._record.error = refusal.code
        body = json.dumps(refusal.document()).encode()
        if self._begun:
            self._record.finish = "failed"
            await send({"type": "http.response.body", "body": b"data: " + body + b"\n\n"})
            return
        headers = {"content-type": "application/json"} | refusal.headers
        await self._begin(send, refusal.status, headers, len(body))
        await send({"type": "http.response.body", "body": body})


async def _gone(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        continue


def _framed(chunks: Iterable[Reply]) -> bytes:
    return b"".join(b"data: " + chunk.model_dump_json().encode() + b"\n\n" for chunk in chunks)


async def _push(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})
