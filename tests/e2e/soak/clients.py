"""One client: asks, reads or leaves in one of many ways, and hands everything that arrived to the referee."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import openai

from tests.e2e.engines import KEY, Serving
from tests.e2e.soak.pool import Answer, Ask, Expected, answer_of
from tests.e2e.soak.referee import Referee

# way -> how often it is chosen
WAYS = {
    "whole": 32,
    "stream": 36,
    "stream left": 12,
    "whole given up": 5,
    "slow reader": 4,
    "gone in headers": 2,
    "gone in body": 2,
    "gone before answer": 3,
    "gone after headers": 2,
    "reset": 4,
}
SMALL = 2048  # bytes of a slow reader's buffers
LINGER_NOT = struct.pack("ii", 1, 0)  # close at once, with a reset


class Client:
    """Asks until it is time to stop."""

    def __init__(self, server: Serving, courses: list[list[Expected]], referee: Referee, seed: int) -> None:
        self._server, self._courses, self._referee = server, courses, referee
        self._random = Random(seed)  # noqa: S311 - to be repeated
        self._openai = openai.AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=300)
        self._ways: dict[str, Callable[[Expected], Awaitable[None]]] = {
            "whole": self._whole,
            "stream": self._stream,
            "stream left": self._stream_left,
            "whole given up": self._given_up,
            "slow reader": self._slow,
            "gone in headers": self._gone_in_headers,
            "gone in body": self._gone_in_body,
            "gone before answer": self._gone_before_answer,
            "gone after headers": self._gone_after_headers,
            "reset": self._reset,
        }

    async def run(self, until: float) -> None:
        """Ask until this time of `time.monotonic`; started requests are finished."""
        async with self._openai:
            while time.monotonic() < until:
                for expected in self._random.choice(self._courses):
                    way = self._random.choices(list(WAYS), list(WAYS.values()))[0]
                    self._referee.asked(expected.ask, way)
                    try:
                        await self._ways[way](expected)
                    except Exception as error:
                        self._referee.failed(expected.ask, way, error)

    async def once(self) -> None:
        """Ask everything once, one after the other."""
        async with self._openai:
            for course in self._courses:
                for expected in course:
                    self._referee.asked(expected.ask, "whole")
                    try:
                        await self._whole(expected)
                    except Exception as error:
                        self._referee.failed(expected.ask, "whole", error)

    async def _whole(self, expected: Expected) -> None:
        reply = await self._create(expected.ask)
        self._referee.arrived(expected, answer_of(reply.choices[0], reply.x_kakeya))

    async def _stream(self, expected: Expected) -> None:
        text, finish, how = "", None, None
        async with await self._create(expected.ask, stream=True) as stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    text += _piece(choice)
                    finish = choice.finish_reason or finish
                how = getattr(chunk, "x_kakeya", None) or how
        self._referee.arrived(expected, _streamed(text, finish, how))

    async def _stream_left(self, expected: Expected) -> None:
        text, chunks = "", self._random.randrange(1, 30)
        async with await self._create(expected.ask, stream=True) as stream:
            async for chunk in stream:
                text += "".join(_piece(choice) for choice in chunk.choices)
                chunks -= 1
                if not chunks:
                    break
        self._referee.left(expected, text)

    async def _given_up(self, expected: Expected) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._random.expovariate(4)):
                await self._whole(expected)
                return
        self._referee.left(expected, "")

    async def _slow(self, expected: Expected) -> None:
        """HTTP/1.0, whose answers end with the connection, through buffers that are soon full."""
        near = socket.socket()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        near.setblocking(False)
        await asyncio.get_running_loop().sock_connect(near, ("127.0.0.1", self._server.port))
        reader, writer = await asyncio.open_connection(sock=near, limit=SMALL)
        pause = self._random.choice((0.001, 0.01, 0.05))
        received = b""
        try:
            writer.write(self._request(expected.ask, version="1.0"))
            while piece := await reader.read(512):
                received += piece
                await asyncio.sleep(pause)
        finally:
            writer.close()
        self._referee.arrived(expected, _events(received))

    async def _gone_in_headers(self, expected: Expected) -> None:
        request = self._request(expected.ask)
        async with self._raw() as (_, writer):
            writer.write(request[: self._random.randrange(1, request.index(b"\r\n\r\n"))])
            await writer.drain()
        self._referee.left(expected, "")

    async def _gone_in_body(self, expected: Expected) -> None:
        request = self._request(expected.ask)
        async with self._raw() as (_, writer):
            writer.write(request[: self._random.randrange(request.index(b"\r\n\r\n") + 4, len(request))])
            await writer.drain()
            await asyncio.sleep(self._random.choice((0, 0.05)))
        self._referee.left(expected, "")

    async def _gone_before_answer(self, expected: Expected) -> None:
        async with self._raw() as (_, writer):
            writer.write(self._request(expected.ask))
            await writer.drain()
            await asyncio.sleep(self._random.choice((0, 0.001, 0.01, 0.1)))
        self._referee.left(expected, "")

    async def _gone_after_headers(self, expected: Expected) -> None:
        async with self._raw() as (reader, writer):
            writer.write(self._request(expected.ask))
            await reader.readuntil(b"\r\n\r\n")
        self._referee.left(expected, "")

    async def _reset(self, expected: Expected) -> None:
        async with self._raw() as (reader, writer):
            writer.write(self._request(expected.ask))
            await reader.read(self._random.randrange(1, 4000))
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
            writer.transport.abort()
        self._referee.left(expected, "")

    async def _create(self, ask: Ask, **more: Any) -> Any:
        create: Any = (self._openai.chat if ask.chat else self._openai).completions.create
        return await create(**ask.arguments, **more)

    def _request(self, ask: Ask, version: str = "1.1") -> bytes:
        body = json.dumps(ask.body | {"stream": True}).encode()
        path = "/v1/chat/completions" if ask.chat else "/v1/completions"
        head = (
            f"POST {path} HTTP/{version}\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    @contextlib.asynccontextmanager
    async def _raw(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            yield reader, writer
        finally:
            writer.close()


def _piece(choice: Any) -> str:
    return (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""


def _streamed(text: str, finish: Any, how: Any) -> Answer:
    """A stream's answer.

    Raises:
        ValueError: it did not come to its end, and no client had asked for that.
    """
    if finish is None or how is None:
        raise ValueError(f"the stream broke off after {text!r}")
    return Answer(text, finish, tuple(how["token_ids"]), tuple(how["prompt_token_ids"]))


def _events(received: bytes) -> Answer:
    """The answer of a raw stream, from its status line to its `[DONE]`."""
    head, _, body = received.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0] or not body.endswith(b"data: [DONE]\n\n"):
        raise ValueError(f"no whole stream: {head[:100]!r} … {body[-100:]!r}")
    text, finish, how = "", None, None
    for event in body.decode().split("\n\n")[:-2]:
        if event.startswith(":"):
            continue
        chunk = json.loads(event.removeprefix("data: "))
        for choice in chunk["choices"]:
            text += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
            finish = choice["finish_reason"] or finish
        how = chunk.get("x_kakeya") or how
    return _streamed(text, finish, how)
