"""One client: asks, reads or leaves in one of many ways, and hands everything that arrived to the referee."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import anthropic
import openai

from tests.e2e.engines import KEY, Serving
from tests.e2e.soak.pool import Ask, Expected, create_of
from tests.e2e.soak.protocols import PATHS, Answer, Reader, answers_of
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


@dataclass
class Life:
    """A server from its start to its end.

    Attributes:
        server: its process.
        until: the time of `time.monotonic` after which nobody asks; requests that have started are finished.
        killed: set just before it is: what fails afterwards is its doing.
    """

    server: Serving
    until: float
    killed: bool = False

    @property
    def over(self) -> bool:
        """Whether nobody asks any more."""
        return self.killed or time.monotonic() >= self.until

    async def kill(self) -> None:
        """Wait for the end, and end it in the middle of everything."""
        await asyncio.sleep(self.until - time.monotonic())
        self.killed = True
        self.server.process.kill()


class Client:
    """Asks until it is time to stop."""

    def __init__(self, life: Life, courses: list[list[Expected]], referee: Referee, seed: int) -> None:
        self._life, self._courses, self._referee = life, courses, referee
        self._server = server = life.server
        self._random = Random(seed)  # noqa: S311 - to be repeated
        self._openai = openai.AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=300)
        self._anthropic = anthropic.AsyncAnthropic(
            base_url=server.root, api_key=KEY, max_retries=0, timeout=300
        )
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

    async def run(self) -> None:
        """Ask until the server's life is over."""
        async with self._openai, self._anthropic:
            while not self._life.over:
                for expected in self._random.choice(self._courses):
                    way = self._random.choices(list(WAYS), list(WAYS.values()))[0]
                    await self._ask(expected, way)
                    if self._life.killed:
                        return

    async def once(self) -> None:
        """Ask everything once, one after the other."""
        async with self._openai, self._anthropic:
            for course in self._courses:
                for expected in course:
                    await self._ask(expected, "whole")

    async def _ask(self, expected: Expected, way: str) -> None:
        self._referee.asked(expected.ask, way)
        try:
            await self._ways[way](expected)
        except Exception as error:
            if self._life.killed:
                self._referee.was_cut()
            else:
                self._referee.failed(expected.ask, way, error)

    async def _whole(self, expected: Expected) -> None:
        reply = await self._create(expected.ask)
        document = reply.model_dump(warnings=False)
        self._referee.arrived(expected, answers_of(expected.ask.protocol, document))

    async def _stream(self, expected: Expected) -> None:
        reader = Reader(expected.ask.protocol)
        async with await self._create(expected.ask, stream=True) as stream:
            async for event in stream:
                reader.take(event.model_dump(warnings=False))
        self._referee.arrived(expected, reader.answers(expected.ask.count))

    async def _stream_left(self, expected: Expected) -> None:
        reader, events = Reader(expected.ask.protocol), self._random.randrange(1, 30)
        async with await self._create(expected.ask, stream=True) as stream:
            async for event in stream:
                reader.take(event.model_dump(warnings=False))
                events -= 1
                if not events:
                    break
        self._referee.left(expected, reader.texts)

    async def _given_up(self, expected: Expected) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._random.expovariate(4)):
                await self._whole(expected)
                return
        self._referee.left(expected, {})

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
        self._referee.arrived(expected, _answers(expected.ask, received))

    async def _gone_in_headers(self, expected: Expected) -> None:
        request = self._request(expected.ask)
        async with self._raw() as (_, writer):
            writer.write(request[: self._random.randrange(1, request.index(b"\r\n\r\n"))])
            await writer.drain()
        self._referee.left(expected, {})

    async def _gone_in_body(self, expected: Expected) -> None:
        request = self._request(expected.ask)
        async with self._raw() as (_, writer):
            writer.write(request[: self._random.randrange(request.index(b"\r\n\r\n") + 4, len(request))])
            await writer.drain()
            await asyncio.sleep(self._random.choice((0, 0.05)))
        self._referee.left(expected, {})

    async def _gone_before_answer(self, expected: Expected) -> None:
        async with self._raw() as (_, writer):
            writer.write(self._request(expected.ask))
            await writer.drain()
            await asyncio.sleep(self._random.choice((0, 0.001, 0.01, 0.1)))
        self._referee.left(expected, {})

    async def _gone_after_headers(self, expected: Expected) -> None:
        async with self._raw() as (reader, writer):
            writer.write(self._request(expected.ask))
            await reader.readuntil(b"\r\n\r\n")
        self._referee.left(expected, {})

    async def _reset(self, expected: Expected) -> None:
        async with self._raw() as (reader, writer):
            writer.write(self._request(expected.ask))
            await reader.read(self._random.randrange(1, 4000))
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
            writer.transport.abort()
        self._referee.left(expected, {})

    async def _create(self, ask: Ask, **more: Any) -> Any:
        return await create_of(self._openai, self._anthropic, ask.protocol)(**ask.arguments, **more)

    def _request(self, ask: Ask, version: str = "1.1") -> bytes:
        body = json.dumps(ask.body | {"stream": True}).encode()
        head = (
            f"POST {PATHS[ask.protocol]} HTTP/{version}\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
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


def _answers(ask: Ask, received: bytes) -> tuple[Answer, ...]:
    """The answers of a raw stream, from its status line to its last event."""
    head, _, body = received.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise ValueError(f"no stream: {head[:100]!r} … {body[-100:]!r}")
    reader = Reader(ask.protocol)
    for line in body.decode().split("\n"):
        if line.startswith("data: {"):
            reader.take(json.loads(line.removeprefix("data: ")))
    return reader.answers(ask.count)
