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
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from resource import RLIMIT_NOFILE, getrlimit
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Path, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.errors import ConfigurationError, EngineError, ModelNotHere
from engine.registry.channels import SEPARATOR
from engine.registry.entries import ModelEntry
from engine.registry.locate import Places, locate
from engine.server.metrics import CONTENT_TYPE, Metrics, RequestRecord, log
from engine.server.schema import (
    PATHS,
    ChatCompletion,
    ChatRequest,
    ErrorReply,
    Health,
    ModelList,
    ModelReply,
    Refusal,
    TextCompletion,
    TextRequest,
    refusal_of,
    unsupported,
)
from engine.server.service import CompletionResponse, Service

OPEN = ("/health",)
BODIES = ("/v1/chat/completions", "/v1/completions")
PORT = re.compile(r"(?<=[^:]):[0-9]{0,5}\Z")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class AccessRules:
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


class AccessGuard:
    """An ASGI application in front of another."""

    def __init__(self, app: App, rules: AccessRules, ended: Callable[[RequestRecord], None]) -> None:
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
        record = RequestRecord(scope["method"], scope["path"], str(client[0]))
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


STARTED = int(time.time())


def version() -> str:
    """Of the product."""
    return installed_version("kakeya-mac")


def cards(service: Service) -> list[ModelReply]:
    """Every id a request may name."""
    return [each for entry in service.registry.entries for each in _cards(service, entry)]


def card(service: Service, identifier: str) -> ModelReply:
    """The card of one id.

    Raises:
        UnknownModel: no such model or channel.
        ConfigurationError: the model does not offer the channel.
    """
    entry, _ = service.registry.resolve(identifier)
    return next(each for each in _cards(service, entry) if each.id == identifier)


def health_of(service: Service) -> Health:
    """Whether requests are served, and how many."""
    figures = service.worker.figures
    reason = None
    if service.closing:
        reason = "the server is shutting down"
    elif not service.worker.healthy:
        reason = "the engine's thread died; the server's log says why"
    return Health(
        status="unavailable" if reason else "ok",
        reason=reason,
        version=version(),
        active=figures.active,
        waiting=max(service.admitted - figures.active, 0),
    )


def _cards(service: Service, entry: ModelEntry) -> list[ModelReply]:
    here, said = True, None
    try:
        locate(entry, Places.of_machine())
    except (ModelNotHere, ConfigurationError) as error:
        here, said = False, str(error)
    about = {
        "summary": entry.summary,
        "target": str(entry.target),
        "drafter": str(entry.drafter) if entry.drafter else None,
        "kv_channels": list(entry.channels),
        "here": here,
        "why_not": said,
        "loaded": entry.name in service.worker.figures.models,
    }
    return [
        ModelReply(
            id=identifier,
            created=STARTED,
            x_kakeya=about | {"kv_channel": channel, "default": identifier == service.registry.default},
        )
        for identifier, channel in [
            (entry.name, entry.default_channel),
            *((f"{entry.name}{SEPARATOR}{name}", name) for name in entry.channels),
        ]
    ]


LONGEST_SHOWN = 100  # characters of a value in a message
ROUTES = ("/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions", "/openapi.json")
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorReply, "description": "A value is wrong; `param` names the field"},
    401: {"model": ErrorReply, "description": "No API key, or another one"},
    403: {"model": ErrorReply, "description": "A web page that is not allowed"},
    404: {"model": ErrorReply, "description": "No such model"},
    408: {"model": ErrorReply, "description": "The body took too long"},
    413: {"model": ErrorReply, "description": "The body is too large"},
    415: {"model": ErrorReply, "description": "The body is not JSON"},
    429: {"model": ErrorReply, "description": "As many requests are waiting as may"},
    501: {"model": ErrorReply, "description": "A feature of OpenAI's that is not here"},
}
# for the document; it is the guard that looks at keys
KEYED = [Security(HTTPBearer(description="Where the server has keys.", auto_error=False))]
STREAM: dict[str, Any] = {"text/event-stream": {}}


def new_app(service: Service, metrics: Metrics, rules: AccessRules, *, log_content: bool = False) -> App:
    """The application, guarded.

    Args:
        service: answers requests; its worker is started and stopped with the application.
        metrics: what is counted.
        rules: whom to let in.
        log_content: write prompts and answers to the log.
    """
    api = bare_app(service, metrics, log_content=log_content)

    def ended(record: RequestRecord) -> None:
        log(record)
        metrics.count(record, _route(record.path))

    guarded: App = AccessGuard(api, rules, ended)
    if rules.origins:  # outermost, for the browser asks before it sends a key
        return CORSMiddleware(
            guarded, allow_origins=rules.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return guarded


def bare_app(service: Service, metrics: Metrics, *, log_content: bool) -> FastAPI:
    """The routes alone."""

    @asynccontextmanager
    async def living(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.close()

    api = FastAPI(
        title="kakeya_engine serve",
        version=version(),
        description="OpenAI's chat and text completions by speculative decoding on MLX.",
        lifespan=living,
        docs_url=None,  # pages that load scripts from elsewhere
        redoc_url=None,
        responses={},
    )
    _routes(api, service, metrics, log_content=log_content)
    _errors(api)
    api.openapi = lambda: _document(api)  # type: ignore[method-assign]
    return api


def _document(api: FastAPI) -> dict[str, Any]:
    """The OpenAPI document: with the key, and without the answers FastAPI would give to wrong bodies."""
    if not api.openapi_schema:
        found = get_openapi(
            title=api.title, version=api.version, description=api.description, routes=api.routes
        )
        parts = found["components"]
        for name in ("HTTPValidationError", "ValidationError"):
            parts["schemas"].pop(name, None)
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in found["paths"].items():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                operation["security"] = [] if path in OPEN else [{"key": []}]
        api.openapi_schema = found
    return api.openapi_schema


def _routes(api: FastAPI, service: Service, metrics: Metrics, *, log_content: bool) -> None:
    @api.post(
        "/v1/chat/completions",
        responses={200: {"model": ChatCompletion, "content": STREAM}, **REFUSALS},
        response_class=JSONResponse,
        operation_id="chat",
        dependencies=KEYED,
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation; with `stream`, as events that end with `[DONE]`."""
        return _answer(body, request)

    @api.post(
        "/v1/completions",
        responses={200: {"model": TextCompletion, "content": STREAM}, **REFUSALS},
        response_class=JSONResponse,
        operation_id="complete",
        dependencies=KEYED,
    )
    async def complete(body: TextRequest, request: Request) -> Response:
        """Continue a text; with `stream`, as events that end with `[DONE]`."""
        return _answer(body, request)

    def _answer(body: ChatRequest | TextRequest, request: Request) -> Response:
        record: RequestRecord = request.state.record
        record.stream = bool(body.stream)
        return CompletionResponse(service, body, record, log_content=log_content)

    @api.get("/v1/models", responses=_only(401, 403), dependencies=KEYED)
    async def models() -> ModelList:
        """The registry's models, each once by its name and once for each KV channel."""
        return ModelList(data=cards(service))

    @api.get("/v1/models/{identifier}", responses=_only(400, 401, 403, 404), dependencies=KEYED)
    async def model(identifier: Annotated[str, Path(max_length=200)]) -> ModelReply:
        """One of them."""
        return card(service, identifier)

    @api.get("/health", responses={503: {"model": Health}})
    async def health(response: Response) -> Health:
        """Whether requests are served; needs no key."""
        found = health_of(service)
        response.status_code = 200 if found.status == "ok" else 503
        return found

    @api.get("/metrics", response_class=Response, responses=_only(401, 403), dependencies=KEYED)
    async def prometheus() -> Response:
        """Counters and gauges in Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)


def _only(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: REFUSALS[status] for status in statuses}


def _errors(api: FastAPI) -> None:
    """Whatever is raised becomes an error document."""

    @api.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        request.state.record.error = refusal.code
        return JSONResponse(refusal.document(), refusal.status, refusal.headers)

    @api.exception_handler(EngineError)
    async def failed(request: Request, error: EngineError) -> Response:
        return await refused(request, refusal_of(error))

    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await refused(request, _invalid(error))

    @api.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        status = error.status_code
        if status == 404:
            return await refused(request, Refusal(404, f"there is no {request.url.path}", code="not_found"))
        if status == 400:  # what the reading of a body ends with where it is not even broken JSON
            return await refused(request, Refusal(400, "the body is not JSON", code="invalid_json"))
        said = f"{request.method} {request.url.path}: {error.detail}"
        refusal = Refusal(status if status == 405 else 500, said, code="invalid_request")
        refusal.headers = dict(error.headers or {})
        return await refused(request, refusal)

    @api.exception_handler(Exception)
    async def bug(_: Request, __: Exception) -> Response:
        refusal = Refusal(500, "this is a bug in the server; its log says more", code="bug")
        return JSONResponse(refusal.document(), 500)


def _invalid(error: RequestValidationError) -> Refusal:
    """The refusal of a body that is not as it should be; of several mistakes, the one deepest inside."""
    errors = error.errors()
    if any(each["type"] == "json_invalid" for each in errors):
        return Refusal(400, "the body is not JSON", code="invalid_json")
    worst = max(errors, key=lambda each: len(_steps(each["loc"], error.body)))
    param = ".".join(_steps(worst["loc"], error.body)) or None
    if worst["type"] == "extra_forbidden":
        return Refusal(400, f"{param} is unknown here; leave it out", param=param, code="unknown_parameter")
    if worst["loc"] == ("body",) and worst["type"] == "missing":
        return Refusal(400, "the body is missing", code="invalid_json")
    if worst["type"] == "missing":
        param = ".".join(filter(None, (param, str(worst["loc"][-1]))))
        return Refusal(400, f"{param} is missing", param=param, code="missing_parameter")
    message = str(worst["msg"]).removeprefix("Value error, ")
    shown = _shown(worst.get("input"))
    return Refusal(400, f"{param or 'the body'}: {message}, not {shown}", param=param, code="invalid_value")


def _steps(location: Sequence[Any], body: Any) -> list[str]:
    """A place in the body as clients know it: without what the checking of unions puts in between."""
    steps, node = [], body
    for part in location[1:]:
        inside = isinstance(node, dict) and part in node
        if inside or (isinstance(node, list) and isinstance(part, int) and part < len(node)):
            steps.append(str(part)[:LONGEST_SHOWN])
            node = node[part]
    return steps


def _shown(value: Any) -> str:
    """A value for a message."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} …"


def _route(path: str) -> str:
    """The route a path belongs to, for metrics."""
    return path if path in ROUTES else "/v1/models" if path.startswith("/v1/models/") else "other"
