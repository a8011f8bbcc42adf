"""What stands in front of the routes: who may ask, from where, how much at once, and how long it may take.

    Host      of a server that listens on this machine alone: only this machine's names, so that a web page
              whose name was bound to this address reaches nothing
    Origin    of a web page: refused unless it was allowed (CORS is off by default)
    key       ``Authorization: Bearer KEY``, compared in constant time; /health needs none
    type      bodies are JSON, and say so
    size      of the body; counted as it comes, whatever its header says
    time      in which the body has to be there

The request's record is made here, and ended here: logged and counted.
"""

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from engine.server.record import Record
from engine.server.refusals import Refusal, unsupported
from engine.server.wire.unsupported import PATHS

OPEN = ("/health",)
BODIES = ("/v1/chat/completions", "/v1/completions")
PORT = re.compile(r"(?<=[^:]):[0-9]{0,5}\Z")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Rules:
    """Whom to let in.

    Attributes:
        keys: SHA-256 digests of the keys that are good; empty for no key at all.
        hosts: names a request may give as its Host; empty for any.
        origins: of web pages that may ask; ``*`` stands for any.
        largest_body: bytes.
        body_s: seconds in which the body has to be there.
    """

    keys: tuple[bytes, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    largest_body: int = 2**20
    body_s: float = 30.0


def digest(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


class Guard:
    """An ASGI application in front of another."""

    def __init__(self, app: App, rules: Rules, ended: Callable[[Record], None]) -> None:
        """Guard.

        Args:
            app: what is guarded.
            rules: whom to let in.
            ended: told of each request when it has ended.
        """
        self._app, self._rules, self._ended = app, rules, ended

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client") or ("unknown", 0)
        record = Record(scope["method"], scope["path"], str(client[0]))
        scope.setdefault("state", {})["record"] = record

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = int(message["status"])
            await send(message)

        try:
            try:
                headers = Headers(scope=scope)
                self._refuse(scope, headers)
                if self._rules.keys:
                    record.owner = digest(headers.get("authorization", "")).hex()[:16]
                body = await self._body(scope, receive)
            except Refusal as refusal:
                record.error = refusal.code
                await refuse(noted, refusal)
                return
            await self._app(scope, _replayed(body, receive), noted)
        finally:
            record.end()
            self._ended(record)

    def _refuse(self, scope: MutableMapping[str, Any], headers: Headers) -> None:
        """Raise Refusal for a request that may not come in."""
        rules, path, method = self._rules, str(scope["path"]), str(scope["method"])
        host = _name(headers.get("host", ""))
        if rules.hosts and host not in rules.hosts:
            raise Refusal(
                421, f"this server is not called {host!r}; --allow-host lets a name in", code="wrong_host"
            )
        origin = headers.get("origin")
        if origin is not None and not {origin, "*"} & set(rules.origins):
            raise Refusal(
                403,
                f"web pages of {origin!r} may not ask; --allow-origin lets them",
                code="origin_not_allowed",
            )
        if rules.keys and path not in OPEN and not _known(headers.get("authorization", ""), rules.keys):
            raise Refusal(
                401,
                "give an API key this server knows, as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if any(path == known or path.startswith(known + "/") for known in PATHS):
            raise unsupported(f"{method} {path}")
        if method == "POST" and path in BODIES and _media_type(headers) != "application/json":
            raise Refusal(415, "send the body as Content-Type: application/json", code="wrong_content_type")

    async def _body(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes:
        """The whole body.

        Raises:
            Refusal: it is too large, or took too long to come.
        """
        most, parts, size = self._rules.largest_body, [], 0
        given = Headers(scope=scope).get("content-length", "0")
        try:
            async with asyncio.timeout(self._rules.body_s):
                while True:
                    if size > most or (given.isdigit() and int(given[:20]) > most):
                        raise Refusal(
                            413,
                            f"the body has more than {most} bytes, the most this server takes",
                            code="too_large",
                        )
                    message = await receive()
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        break
        except TimeoutError:
            raise Refusal(
                408, f"the body did not come within {self._rules.body_s:g} s", code="too_slow"
            ) from None
        if size > most:
            raise Refusal(
                413, f"the body has more than {most} bytes, the most this server takes", code="too_large"
            )
        return b"".join(parts)


async def refuse(send: Send, refusal: Refusal) -> None:
    """Send the error document of a refusal."""
    body = json.dumps(refusal.document()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))} | refusal.headers
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body once more, and then what else there is to receive."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


def _known(header: str, keys: tuple[bytes, ...]) -> bool:
    scheme, _, key = header.partition(" ")
    given = digest(key.strip())
    return scheme.lower() == "bearer" and any(hmac.compare_digest(given, known) for known in keys)


def _media_type(headers: Headers) -> str:
    """Of the body, without its parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _name(host: str) -> str:
    """A Host header without its port; what has none of the two forms of one is left as it is."""
    return PORT.sub("", host).lower()
