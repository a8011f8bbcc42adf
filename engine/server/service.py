"""One request: admit → lease a model → prepare → decode → answer, as one JSON object or a stream of events.

Runs on the event loop. What a request holds is given back however it ends, also when its client disconnects.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Send

from engine.decode import Step
from engine.errors import EngineError
from engine.generate import PENALTIES
from engine.registry import Channel, ModelEntry, Registry
from engine.sampling import Sampling
from engine.server import schema
from engine.server.messages import MESSAGES_PATH, anthropic_error
from engine.server.metrics import RequestRecord
from engine.server.prompting import RenderedPrompt, chat_prompt, grammar_of, needs_grammar, text_prompt
from engine.server.response import ResponseBuilder
from engine.server.scheduler import Scheduler
from engine.server.schema import Refusal, invalid, refusal_of, refusing
from engine.server.sequence import DecodeFailed, DecodeFinished, DecodeRequest, Event
from engine.server.sessions import LoadedModel

RETRY_S = 2  # when a client that was refused for a full queue may try again
KEEPALIVE_S = 5.0
PAUSE_S = 0.025  # between chunks, so that a fast model is not slowed down by sending single tokens
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
BUG = Refusal(500, "this is a bug in the server; its log says more", code="bug")

ENDS = (DecodeFinished, DecodeFailed)
NO_RECEIVE: Any = None  # a reply that is sent whole does not listen
NewBuilder = Callable[[Any, LoadedModel, RenderedPrompt, DecodeRequest], ResponseBuilder]


@dataclass(frozen=True)
class RequestLimits:
    """What one request may ask for, and how many there may be; more is refused."""

    max_tokens: int = 4096  # of an answer
    default_tokens: int = 512  # … whose request says nothing
    admitted: int = 68  # requests that are served or wait


class EventQueue:
    """The events of one request for the event loop, woken only while it waits, to get several at once."""

    def __init__(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self._events: deque[Event] = deque()
        self._waiting = False

    def put(self, event: Event) -> None:
        """Add an event, from any thread; where the loop has ended already it is dropped."""
        self._events.append(event)
        if self._waiting or isinstance(event, ENDS):
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake.set)

    async def pause(self, seconds: float) -> None:
        """Wait so long, or until the last event comes."""
        await self._wait(lambda: bool(self._events) and isinstance(self._events[-1], ENDS), seconds)

    async def next(self, seconds: float | None = None) -> list[Event]:
        """Return the events there are, none after a timeout; raise a failed request's error after them."""
        self._waiting = True
        try:
            await self._wait(lambda: bool(self._events), seconds)
        finally:
            self._waiting = False
        found: list[Event] = []
        while self._events and not (found and isinstance(self._events[0], DecodeFailed)):
            event = self._events.popleft()
            if isinstance(event, DecodeFailed):
                raise event.error
            found.append(event)
        return found

    async def _wait(self, ready: Callable[[], bool], seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not ready():  # it may be woken late, for an event that was returned already
                    await self._wake.wait()
                    self._wake.clear()


class Service:
    """Takes requests to the scheduler and back."""

    def __init__(self, registry: Registry, scheduler: Scheduler, limits: RequestLimits) -> None:
        self.registry, self.scheduler, self.limits = registry, scheduler, limits
        self.closing = False  # nothing new is admitted
        self.admitted = 0
        # Tokenizers are not thread-safe. Grammars take seconds to compile and delay no request without one.
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")
        self._compiling = ThreadPoolExecutor(1, "compile")

    def close(self) -> None:
        for threads in (self._tokenizing, self._compiling):
            threads.shutdown(cancel_futures=True)

    @contextmanager
    def _admitted(
        self, request: schema.AnyRequest, record: RequestRecord
    ) -> Iterator[tuple[ModelEntry, Channel]]:
        """Return what the request names, and count it; raise Refusal where there is no room for it."""
        channel, known = request.kv_channel, self.registry.channels
        if channel is not None and channel not in known and not self.registry.spells_policy(channel):
            # 400, where an id has 404
            raise invalid("kv_channel", f"kv_channel {ascii(channel)[:100]} is none of {', '.join(known)}")
        with refusing("model" if channel is None else "kv_channel"):
            entry, resolved = self.registry.resolve(request.model or self.registry.default, channel)
        if self.closing:
            raise Refusal(503, "the server is shutting down", code="shutting_down")
        if self.admitted >= self.limits.admitted:
            text = f"{self.admitted} requests are served or wait, as many as may; try again later"
            raise Refusal(429, text, code="queue_full", headers={"retry-after": str(RETRY_S)})
        record.model, record.channel = entry.name, resolved.name
        self.admitted += 1
        try:
            yield entry, resolved
        finally:
            self.admitted -= 1

    @asynccontextmanager
    async def job(
        self, request: schema.AnyRequest, record: RequestRecord, new_builder: NewBuilder
    ) -> AsyncIterator[tuple[ResponseBuilder, EventQueue]]:
        """Have a request decoded; leaving the block before its last event, DecodeFinished, cancels it."""
        with self._admitted(request, record) as (entry, channel):
            lease, job = self.scheduler.lease(entry), None
            try:
                with refusing("model"):
                    model = await asyncio.wrap_future(lease.granted)
                builder = await self._prepare(request, model, channel, record.owner, new_builder)
                record.prompt_tokens = len(builder.decoded.prompt)
                events = EventQueue()
                job = self.scheduler.submit(lease, builder.decoded, events.put)
                yield builder, events
            finally:
                if job is None:
                    self.scheduler.release(lease)
                else:
                    job.cancelled.set()

    async def count_tokens(self, request: schema.ChatRequest, record: RequestRecord) -> int:
        """Return how many tokens the prompt has; raise Refusal as `job` does."""
        with self._admitted(request, record) as (entry, _):
            lease = self.scheduler.lease(entry)
            try:
                with refusing("model"):
                    model = await asyncio.wrap_future(lease.granted)
                return len((await self._prompt(request, model)).tokens)
            finally:
                self.scheduler.release(lease)

    async def _prompt(self, request: schema.AnyRequest, model: LoadedModel) -> RenderedPrompt:
        run = asyncio.get_running_loop().run_in_executor
        if isinstance(request, schema.ChatRequest):
            return await run(self._tokenizing, chat_prompt, request, model)
        return await run(self._tokenizing, text_prompt, request, model)

    async def _prepare(
        self,
        request: schema.AnyRequest,
        model: LoadedModel,
        channel: Channel,
        owner: str,
        new_builder: NewBuilder,
    ) -> ResponseBuilder:
        run = asyncio.get_running_loop().run_in_executor
        if isinstance(request, schema.ChatRequest):
            logprobs = (request.top_logprobs or 0) if request.logprobs else None
        else:
            logprobs = request.logprobs
        prompt = await self._prompt(request, model)
        grammar = None
        if needs_grammar(request):
            grammar = await run(self._compiling, grammar_of, request, model, prompt)
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
        model.refuse_tokens("logit_bias", bias)
        block = model.block if request.block is None and request.drafter != "none" else request.block
        decode_request = DecodeRequest(
            prompt=prompt.tokens,
            stable_prefix=prompt.stable_prefix,
            max_tokens=self._max_tokens(request, model, prompt),
            channel=channel,
            drafter=request.drafter or "default",
            block=None if block == "auto" else block,
            sampling=_sampling(request),
            stop_texts=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
            logprobs=logprobs,
            penalties={name: value for name in PENALTIES if (value := getattr(request, name))},
            bias=bias,
            grammar=grammar,
            owner=owner,
        )
        return new_builder(request, model, prompt, decode_request)

    def _max_tokens(self, request: schema.AnyRequest, model: LoadedModel, prompt: RenderedPrompt) -> int:
        param, wanted, most = "max_tokens", request.max_tokens, self.limits.max_tokens
        if isinstance(request, schema.ChatRequest) and request.max_completion_tokens is not None:
            param, wanted = "max_completion_tokens", request.max_completion_tokens
        if wanted is not None and wanted > most:
            raise invalid(param, f"{param} must be at most {most} on this server, not {wanted}")
        count = wanted or min(self.limits.default_tokens, most)
        return count if model.context is None else min(count, model.context - len(prompt.tokens))


def _sampling(request: schema.CompletionRequest) -> Sampling:
    given = {name: getattr(request, name) for name in ("temperature", "top_p", "min_p", "top_k")}
    seed = None if request.seed is None else request.seed % 2**63  # clients send negative ones too
    sampling = Sampling(**{name: value for name, value in given.items() if value is not None}, seed=seed)
    with refusing("temperature"):
        sampling.check()
    return sampling


class CompletionResponse(Response):
    """Answers one request; the status waits for the engine's first event, since the engine may refuse."""

    stalled_s: ClassVar[float] = 60.0  # how long a client may accept nothing before its request is cancelled

    def __init__(
        self,
        service: Service,
        request: schema.AnyRequest,
        record: RequestRecord,
        new_builder: NewBuilder,
        *,
        log_content: bool,
    ) -> None:
        super().__init__()
        self._service, self._request, self._record = service, request, record
        self._new_builder = new_builder
        self._builder: ResponseBuilder | None = None  # of a stream that has started
        self._log_content = log_content

    async def __call__(self, _: Message, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self.stalled_s):
                await send(message)

        async def disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                continue

        answering = asyncio.create_task(self._answer(send_in_time))
        leaving = asyncio.create_task(disconnected())
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
            job = self._service.job(self._request, self._record, self._new_builder)
            async with job as (builder, events):
                answer = self._stream if self._request.stream else self._whole
                await answer(send, builder, events)
        except EngineError as error:
            await self._refuse(send, refusal_of(error))
        except TimeoutError:  # the client accepts nothing
            raise
        except Exception:
            await self._refuse(send, BUG)
            raise

    async def _whole(self, send: Send, builder: ResponseBuilder, events: EventQueue) -> None:
        while True:
            batch = await events.next()
            builder.hear(self._steps(batch))
            if isinstance(ended := batch[-1], DecodeFinished):
                body = builder.complete(ended).model_dump_json().encode()
                self._note(builder, ended)
                self._record.status = 200
                await Response(body, media_type="application/json")({"type": "http"}, NO_RECEIVE, send)
                return
            if self._record.first_s is not None:
                await events.pause(PAUSE_S)

    async def _stream(self, send: Send, builder: ResponseBuilder, events: EventQueue) -> None:
        batch = await events.next(KEEPALIVE_S)
        self._record.status = 200
        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        self._builder = builder
        body = _framed(builder, builder.begin())
        while not (batch and isinstance(batch[-1], DecodeFinished)):
            body += _framed(builder, builder.take(self._steps(batch))) if batch else builder.waiting
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if self._record.first_s is not None:
                await events.pause(PAUSE_S)
            batch, body = await events.next(KEEPALIVE_S), b""
        ended = batch[-1]
        body += _framed(builder, builder.take(self._steps(batch))) + _framed(builder, builder.end(ended))
        self._note(builder, ended)
        await send({"type": "http.response.body", "body": body + builder.done})

    def _steps(self, batch: Sequence[Event]) -> list[Step]:
        steps = [event for event in batch if isinstance(event, Step)]
        if steps:
            self._record.add_tokens(sum(len(step.tokens) for step in steps))
        return steps

    def _note(self, builder: ResponseBuilder, ended: DecodeFinished) -> None:
        record, how = self._record, builder.provenance(ended)
        record.completion_tokens, record.cached_tokens = len(builder.tokens), ended.cached_tokens
        record.drafter, record.finish = how.drafter, builder.finish(ended)
        record.verify_rounds = how.verify_rounds
        if how.drafted is not None:  # accepted drafts are counted as a part of those
            record.drafted, record.accepted = how.drafted, how.accepted
        if self._log_content:
            answer = builder.parsed.content
            record.content = {"request": self._request.model_dump_json(), "answer": answer}

    async def _refuse(self, send: Send, refusal: Refusal) -> None:
        """Send an error document with its status, or as the last event of a stream that has started."""
        self._record.error = refusal.code
        if self._builder is not None:
            self._record.finish = "failed"
            body = _framed(self._builder, self._builder.fail(refusal))
            await send({"type": "http.response.body", "body": body})
        else:
            response = refused(refusal, self._record.path)
            self._record.status = response.status_code
            await response({"type": "http"}, NO_RECEIVE, send)


def _framed(builder: ResponseBuilder, replies: Iterable[schema.Reply]) -> bytes:
    return b"".join(builder.frame(reply) for reply in replies)


def refused(refusal: Refusal, path: str) -> Response:
    """Return the error document of a refusal, in the form of the path's protocol."""
    document, status = refusal.document(), refusal.status
    if path.startswith(MESSAGES_PATH):
        error, status = anthropic_error(refusal)
        document = error.model_dump()
    return JSONResponse(document, status, refusal.headers)
