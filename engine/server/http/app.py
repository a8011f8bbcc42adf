"""The routes. What is behind them is in `service`; what stands before them, in `guard`."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from engine.errors import EngineError
from engine.server.http.answer import Answer
from engine.server.http.guard import OPEN, App, Guard, Rules
from engine.server.http.listing import card, cards, health_of, version
from engine.server.http.metrics import CONTENT_TYPE, Metrics
from engine.server.record import Record, log
from engine.server.refusals import Refusal, refusal_of
from engine.server.service import Service
from engine.server.wire.replies import (
    ChatCompletion,
    ErrorReply,
    Health,
    ModelCard,
    ModelList,
    TextCompletion,
)
from engine.server.wire.requests import ChatRequest, TextRequest

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


def new_app(service: Service, metrics: Metrics, rules: Rules, *, log_content: bool = False) -> App:
    """The application, guarded.

    Args:
        service: answers requests; its worker is started and stopped with the application.
        metrics: what is counted.
        rules: whom to let in.
        log_content: write prompts and answers to the log.
    """
    api = bare_app(service, metrics, log_content=log_content)

    def ended(record: Record) -> None:
        log(record)
        metrics.count(record, _route(record.path))

    guarded: App = Guard(api, rules, ended)
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
        record: Record = request.state.record
        record.stream = bool(body.stream)
        return Answer(service, body, record, log_content=log_content)

    @api.get("/v1/models", responses=_only(401, 403), dependencies=KEYED)
    async def models() -> ModelList:
        """The registry's models, each once by its name and once for each KV channel."""
        return ModelList(data=cards(service))

    @api.get("/v1/models/{identifier}", responses=_only(400, 401, 403, 404), dependencies=KEYED)
    async def model(identifier: Annotated[str, Path(max_length=200)]) -> ModelCard:
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
