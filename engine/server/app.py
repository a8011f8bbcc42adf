"""The HTTP application: who may ask and how much, the routes, and errors as documents."""

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from ipaddress import ip_address
from resource import RLIMIT_NOFILE, getrlimit
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.errors import ConfigurationError, EngineError, ModelNotHere
from engine.registry import SEPARATOR, ModelEntry, Places, locate
from engine.server import messages, responses, schema
from engine.server.metrics import CONTENT_TYPE, Metrics, RequestRecord
from engine.server.response import ChatResponseBuilder, TextResponseBuilder
from engine.server.schema import (
    ERRORS,
    LONGEST_SHOWN,
    UNSUPPORTED_PATHS,
    Refusal,
    refusal_of,
    shown,
    unsupported,
)
from engine.server.service import BUG, NO_RECEIVE, CompletionResponse, NewBuilder, Service, refused

Route = Callable[..., Any]
ResponseId = Annotated[str, Path(max_length=100)]
STARTED = int(time.time())
KEYLESS_PATHS = ("/health",)
BODY_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    *("/v1/messages", "/v1/messages/count_tokens"),
)
ROUTES = ("/metrics", "/v1/models", "/openapi.json", *KEYLESS_PATHS, *BODY_PATHS)
WITH_ID = ("/v1/models", "/v1/responses")  # which an id may follow
UNVERSIONED = re.compile(r"/(chat/completions|completions|models|responses|messages)(/|\Z)")
PORT = re.compile(r"(?<=[^:]):[0-9]{0,5}\Z")  # of a Host header
HOST_NAME = re.compile(r"[a-z0-9_.-]{1,253}")
DOCKER_HOST = "host.docker.internal"
NEEDED = {  # field -> what it has to have at least
    "input": "a text, or a list with a message or another item",
    "prompt": "a text, token ids, or a list with one of them",
    "messages": "a message or more",
}


# --- who may ask ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AccessRules:
    """Which requests to let in."""

    keys: tuple[bytes, ...] = ()  # SHA-256 digests; empty where none is needed
    metrics_keys: tuple[bytes, ...] = ()  # of keys for the metrics of all keys, and for nothing else
    hosts: tuple[str, ...] = ()  # names that a Host header may have besides loopback's; empty for any
    origins: tuple[str, ...] = ()  # of web pages that may ask; * for any
    largest_body: int = 2**20  # bytes
    body_s: float = 30.0  # in which the whole body has to arrive


def digest(key: str) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


class AccessGuard:
    """Middleware that applies the rules, reads the body, and logs and counts the request's record."""

    def __init__(self, app: ASGIApp, rules: AccessRules, metrics: Metrics) -> None:
        self._app, self._rules, self._metrics = app, rules, metrics

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if UNVERSIONED.match(scope["path"]):  # clients whose base URL lacks the version
            scope = {**scope, "path": f"/v1{scope['path']}"}
        path = scope["path"]
        record = RequestRecord(scope["method"], path, str((scope.get("client") or ["unknown"])[0]))
        scope.setdefault("state", {})["record"] = record
        body: list[bytes] = []

        async def receive_again() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            return await receive()

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = int(message["status"])
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check(record, headers)
            body.append(await self._body(headers, receive))
            await self._app(scope, receive_again, send_noted)
        except Refusal as refusal:  # of this guard's; the application answers its own
            record.error = refusal.code
            await asyncio.sleep(0)  # uvicorn answers a malformed body that came with the head, and hangs up
            await refused(refusal, path)(scope, NO_RECEIVE, send_noted)
        finally:
            record.end()
            listed = next((each for each in WITH_ID if path.startswith(f"{each}/")), "other")
            self._metrics.count(record, path if path in ROUTES else listed)

    def _check(self, record: RequestRecord, headers: Headers) -> None:
        rules, path = self._rules, record.path
        if (ambiguous := _ambiguous_length(headers)) is not None:
            raise ambiguous
        # so that a web page whose name was bound to this address reaches nothing; Starlette's own says 400
        host = PORT.sub("", headers.get("host", "")).lower()
        if rules.hosts and host not in rules.hosts and not _is_loopback(host):
            raise Refusal(421, _wrong_host(host), code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and not {origin, "*"} & set(rules.origins):
            message = (
                f"web pages of {origin!r} may not ask; to let them, start the server with --allow-origin"
            )
            raise Refusal(403, message, code="origin_not_allowed")
        given = _given_key(headers)
        overseer = path == "/metrics" and _is_among(given, rules.metrics_keys)
        if rules.keys and path not in KEYLESS_PATHS and not overseer and not _is_among(given, rules.keys):
            message = "give an API key this server knows, as Authorization: Bearer KEY or x-api-key: KEY"
            raise Refusal(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        record.owner = given.hex()[:16] if rules.keys and path not in KEYLESS_PATHS else ""
        record.sees_all = overseer or len(rules.keys) < 2
        if UNSUPPORTED_PATHS.match(path):
            raise unsupported(f"{record.method} {path}")
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if record.method == "POST" and path in BODY_PATHS and media_type != "application/json":
            raise Refusal(415, "send the body as Content-Type: application/json", code="wrong_content_type")

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        most, seconds, body = self._rules.largest_body, self._rules.body_s, bytearray()
        given, more = headers.get("content-length", "0"), True
        too_large = given.isdigit() and int(given[:20]) > most
        try:
            async with asyncio.timeout(seconds):
                while more and not too_large:
                    message = await receive()
                    body += message.get("body", b"")
                    too_large = len(body) > most
                    more = bool(message.get("more_body"))  # not of http.disconnect
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {seconds:g} s", code="too_slow") from None
        if too_large:
            text = f"the body has more than {most} bytes, the most this server takes"
            raise Refusal(413, text, code="too_large")
        return bytes(body)


def _ambiguous_length(headers: Headers) -> Refusal | None:
    """The refusal of a body whose end a proxy in front may have seen elsewhere than this server does."""
    if "content-length" not in headers or "transfer-encoding" not in headers:
        return None
    text = "send Content-Length or Transfer-Encoding, not both"
    return Refusal(400, text, code="ambiguous_length", headers={"connection": "close"})


class GuardedCORS(CORSMiddleware):
    """CORS, whose answers to preflight requests do not pass the guard: browsers send no key with them."""

    def preflight_response(self, request_headers: Headers) -> Response:
        ambiguous = _ambiguous_length(request_headers)
        if ambiguous is not None:
            return refused(ambiguous, "/")
        return super().preflight_response(request_headers)


def _given_key(headers: Headers) -> bytes:
    """The digest of the key that a request gives; that of an empty one where it gives none.

    Anthropic's clients send it in a header of its own.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return digest((key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip())


def _is_among(given: bytes, keys: Sequence[bytes]) -> bool:
    return any(hmac.compare_digest(given, known) for known in keys)


def _is_loopback(host: str) -> bool:
    """Whether a Host header names the reader's own machine: 127.0.0.0/8, ::1, localhost, *.localhost."""
    name = host.removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _wrong_host(host: str) -> str:
    if not HOST_NAME.fullmatch(host):
        return f"this server is not called {host[:LONGEST_SHOWN]!r}"
    why = ", the name by which a container asks for its host" if host == DOCKER_HOST else ""
    return f"this server is not called {host!r}{why}; to let it in, start it with --allow-host {host}"


class BoundedProtocol(H11Protocol):
    """A connection, closed where a request's head is late, for which uvicorn would wait without end."""

    head_s: ClassVar[float] = 30.0  # until the head of a request is there
    most: ClassVar[int] = min(getrlimit(RLIMIT_NOFILE)[0] // 2, 4096)  # connections; more are closed at once

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        self._wait_for_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def _wait_for_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.head_s, self._expire)

    def _expire(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


# --- the routes -----------------------------------------------------------------------------------------


def new_app(service: Service, metrics: Metrics, rules: AccessRules, *, log_content: bool = False) -> ASGIApp:
    """Make the application with its guard; `log_content` writes prompts and answers to the log."""
    app: ASGIApp = AccessGuard(bare_app(service, metrics, log_content=log_content), rules, metrics)
    if rules.origins:  # outermost, because a browser asks before it sends a key
        app = GuardedCORS(app, rules.origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"])
    return app


def bare_app(service: Service, metrics: Metrics, *, log_content: bool) -> FastAPI:
    """Make the routes without the guard; the service is closed with the application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.close()

    api = FastAPI(
        title="kakeya_engine serve",
        version=version("kakeya-mac"),
        description="OpenAI's and Anthropic's protocols, by speculative decoding on MLX.",
        lifespan=lifespan,
        docs_url=None,  # pages that load scripts from elsewhere
        redoc_url=None,
    )
    _add_completions(api, service, log_content=log_content)
    _add_messages(api, service, log_content=log_content)
    _add_listing(api, service, metrics)
    for kind in (EngineError, RequestValidationError, HTTPException, Exception):
        api.add_exception_handler(kind, _refuse)
    _amend_openapi(api.openapi())  # FastAPI keeps it
    return api


def _add_completions(api: FastAPI, service: Service, *, log_content: bool) -> None:
    refusals = _refusals(400, 401, 403, 404, 408, 413, 415, 429, 501)

    def post(path: str, operation: str, reply: type, **more: Any) -> Callable[[Route], Route]:
        responses = refusals | {200: {"model": reply, "content": {"text/event-stream": {}}, **more}}
        return api.post(path, operation_id=operation, responses=responses, response_class=JSONResponse)

    def answer(body: schema.AnyRequest, request: Request, new_builder: NewBuilder) -> Response:
        record: RequestRecord = request.state.record
        record.stream = bool(body.stream)
        return CompletionResponse(service, body, record, new_builder, log_content=log_content)

    @post("/v1/chat/completions", "chat", schema.ChatCompletion)
    async def chat(body: schema.ChatRequest, request: Request) -> Response:
        """Answer a conversation; with `stream`, as events that end with `[DONE]`."""
        return answer(body, request, ChatResponseBuilder)

    @post("/v1/completions", "complete", schema.TextCompletion)
    async def complete(body: schema.TextRequest, request: Request) -> Response:
        """Continue a text; with `stream`, as events that end with `[DONE]`."""
        return answer(body, request, TextResponseBuilder)

    turns = responses.TurnStore()

    given = {"parameters": {"response_id": "$response.body#/id"}}
    links = {"read": {"operationId": "response", **given}, "delete": {"operationId": "forget", **given}}

    @post("/v1/responses", "respond", responses.ResponseObject, links=links)
    async def respond(body: responses.ResponsesRequest, request: Request) -> Response:
        """Answer a conversation as OpenAI's Responses do; with `stream`, as typed events."""
        owner = request.state.record.owner
        items = turns.resolved(owner, body.items(turns.items_before(owner, body)))
        builder = partial(responses.ResponsesBuilder, asked=body, items=items, store=turns)
        return answer(body.chat(items), request, builder)

    @api.get("/v1/responses/{response_id}", operation_id="response", responses=_refusals(400, 401, 403, 404))
    async def response(response_id: ResponseId, request: Request) -> responses.ResponseObject:
        """An answer that was stored."""
        return turns.get(request.state.record.owner, response_id).reply

    @api.delete("/v1/responses/{response_id}", operation_id="forget", responses=_refusals(400, 401, 403, 404))
    async def forget(response_id: ResponseId, request: Request) -> responses.DeletedResponse:
        """Forget one of them."""
        turns.delete(request.state.record.owner, response_id)
        return responses.DeletedResponse(id=response_id)


def _add_messages(api: FastAPI, service: Service, *, log_content: bool) -> None:
    documented: dict[int | str, dict[str, Any]] = {
        status: each | {"model": messages.AnthropicError}
        for status, each in _refusals(400, 401, 403, 404, 408, 413, 415, 429, 501).items()
    }
    events = {"model": messages.MessageReply, "content": {"text/event-stream": {}}}

    @api.post(
        "/v1/messages",
        operation_id="message",
        responses=documented | {200: events},
        response_class=JSONResponse,
    )
    async def message(body: messages.MessagesRequest, request: Request) -> Response:
        """Answer a conversation as Anthropic's Messages do; with `stream`, as typed events."""
        record: RequestRecord = request.state.record
        record.stream = bool(body.stream)
        builder = messages.MessagesBuilder
        return CompletionResponse(service, body.chat(), record, builder, log_content=log_content)

    @api.post("/v1/messages/count_tokens", operation_id="count_tokens", responses=documented)
    async def count_tokens(body: messages.CountTokensRequest, request: Request) -> messages.TokenCount:
        """How many tokens the prompt of a message would have."""
        tokens = await service.count_tokens(body.chat(), request.state.record)
        return messages.TokenCount(input_tokens=tokens)


def _add_listing(api: FastAPI, service: Service, metrics: Metrics) -> None:
    @api.get("/v1/models", responses=_refusals(400, 401, 403))
    async def models(*, everything: Annotated[bool, Query(alias="all")] = False) -> schema.ModelList:
        """The models that are here, each by its name and once for each KV channel; or `all` of them."""
        found = cards(service)
        return schema.ModelList(data=[card for card in found if everything or card.x_kakeya["here"]])

    @api.get("/v1/models/{identifier}", responses=_refusals(400, 401, 403, 404))
    async def model(identifier: Annotated[str, Path(max_length=200)]) -> schema.ModelReply:
        """One of them."""
        entry, channel = service.registry.resolve(identifier)
        return _cards_of(service, entry, {identifier: channel.name})[0]

    @api.get("/health", responses={503: {"model": schema.Health}})
    async def health(response: Response) -> schema.Health:
        """Whether requests are served; needs no key."""
        reason = None
        if service.closing:
            reason = "the server is shutting down"
        elif not service.scheduler.healthy:
            reason = "the engine's thread died; the server's log says why"
        response.status_code = 503 if reason else 200
        return schema.Health(
            status="unavailable" if reason else "ok",
            reason=reason,
            version=version("kakeya-mac"),
        )

    @api.get("/metrics", response_class=Response, responses=_refusals(401, 403))
    async def prometheus(request: Request) -> Response:
        """Counters and gauges in Prometheus' text format; where there are several keys, those of the key."""
        record: RequestRecord = request.state.record
        return Response(metrics.text(None if record.sees_all else record.owner), media_type=CONTENT_TYPE)


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": schema.ErrorReply, "description": ERRORS[status][1]} for status in statuses}


def cards(service: Service) -> list[schema.ModelReply]:
    """Describe every id that a request may name."""
    found = []
    for entry in service.registry.entries:
        ids = {entry.name: entry.default_channel}
        ids |= {f"{entry.name}{SEPARATOR}{channel}": channel for channel in entry.channels}
        found += _cards_of(service, entry, ids)
    return found


def _cards_of(service: Service, entry: ModelEntry, channels: Mapping[str, str]) -> list[schema.ModelReply]:
    why_not = None
    try:
        locate(entry, Places.of_machine())
    except (ModelNotHere, ConfigurationError) as error:
        why_not = str(error)
    about = {
        "summary": entry.summary,
        "target": str(entry.target),
        "drafter": str(entry.drafter) if entry.drafter else None,
        "kv_channels": list(entry.channels),
        "kv_policies": [each.text for each in service.registry.requests],
        "here": why_not is None,
        "why_not": why_not,
        "loaded": entry.name in service.scheduler.stats.models,
    }
    found = []
    for name, channel in channels.items():
        own = {"kv_channel": channel, "default": name == service.registry.default}
        found.append(schema.ModelReply(id=name, created=STARTED, x_kakeya=about | own))
    return found


def _amend_openapi(found: dict[str, Any]) -> None:
    """Add the key, and leave out the answers that FastAPI would give to wrong bodies."""
    parts = found["components"]
    for name in ("HTTPValidationError", "ValidationError"):
        parts["schemas"].pop(name, None)
    parts["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path, methods in found["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            operation["security"] = [] if path in KEYLESS_PATHS else [{"key": []}, {"x-api-key": []}]


async def _refuse(request: Request, error: Exception) -> Response:
    refusal = BUG
    match error:
        case EngineError():
            refusal = refusal_of(error)
        case RequestValidationError():
            refusal = _invalid(error)
        case HTTPException(status_code=404):
            refusal = Refusal(404, f"there is no {request.url.path}", code="not_found")
        case HTTPException(status_code=400):  # FastAPI's error for a body that is not even broken JSON
            refusal = Refusal(400, "the body is not JSON", code="invalid_json")
        case HTTPException():
            text = f"{request.method} {request.url.path}: {error.detail}"
            status = 405 if error.status_code == 405 else 500
            headers = {"allow": _methods(request)} if status == 405 else error.headers
            refusal = Refusal(status, text, code="invalid_request", headers=headers)
    request.state.record.error = refusal.code
    return refused(refusal, request.state.record.path)


def _methods(request: Request) -> str:
    """The methods of a path, of which each is a route of its own."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods}))


def _invalid(error: RequestValidationError) -> Refusal:
    """Of several errors in a body, refuse the one nested deepest, and rather a length than a type.

    A list that is too long or too short has an error for every type that it might have been, too.
    """
    errors = error.errors()
    lengths = {"too_long", "too_short"}
    worst = max(errors, key=lambda each: (len(_steps(each["loc"], error.body)), each["type"] in lengths))
    param = ".".join(_steps(worst["loc"], error.body)) or None
    if worst["loc"][0] == "query":
        param = str(worst["loc"][1])
    if any(each["type"] == "json_invalid" for each in errors):
        return Refusal(400, "the body is not JSON", code="invalid_json")
    if worst["loc"] == ("body",) and worst["type"] == "missing":
        return Refusal(400, "the body is missing", code="invalid_json")
    if worst["type"] == "missing":
        param = ".".join(filter(None, (param, str(worst["loc"][-1]))))
        return Refusal(400, f"{param} is missing", param=param, code="missing_parameter")
    if worst["type"] == "too_short":
        what = NEEDED.get(str(param), "one item or more")
        return Refusal(400, f"{param} is empty; send {what}", param=param, code="invalid_value")
    if worst["type"] == "too_long":
        count, most = len(worst["input"]), worst["ctx"]["max_length"]
        return Refusal(
            400,
            f"{param} has {count} items, and at most {most} are accepted",
            param=param,
            code="invalid_value",
        )
    message = str(worst["msg"]).removeprefix("Value error, ")
    text = f"{param or 'the body'}: {message}, not {shown(worst.get('input'))}"
    return Refusal(400, text, param=param, code="invalid_value")


def _steps(location: Sequence[Any], body: Any) -> list[str]:
    """The place of an error in the body as clients know it, without pydantic's names of union members."""
    steps, node = [], body
    for part in location[1:]:
        inside = isinstance(node, dict) and part in node
        if inside or (isinstance(node, list) and isinstance(part, int) and part < len(node)):
            steps.append(str(part)[:LONGEST_SHOWN])
            node = node[part]
    return steps
