"""One request on its way: admit → lease a model → prepare → have it decoded.

Runs on the event loop; arrays are the worker's business. What a request holds (its place, its lease, its job)
is given back however it ends, also when its client has gone.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from starlette.responses import Response

from engine.decode import Step
from engine.errors import ConfigurationError, EngineError
from engine.grammar import Grammar
from engine.registry.channels import CHANNELS, Channel
from engine.registry.registry import Registry
from engine.sampling import Sampling
from engine.server.metrics import RequestRecord
from engine.server.prompting import RenderedPrompt, bound, chat_prompt, grammar_of, text_prompt
from engine.server.response import ChatResponseBuilder, ResponseBuilder, TextResponseBuilder
from engine.server.scheduler import Scheduler
from engine.server.schema import ChatRequest, CompletionRequest, Refusal, Reply, TextRequest, refusal_of
from engine.server.sequence import DecodeFailed, DecodeFinished, DecodeRequest, Event
from engine.server.sessions import LoadedModel

RETRY_S = 2  # after which a client that was turned away may try again


@dataclass(frozen=True)
class RequestLimits:
    """What one request, and all of them, may ask for.

    Attributes:
        max_tokens: of an answer; more is refused.
        default_tokens: of an answer whose request says nothing.
        admitted: requests that are worked on or wait; more are turned away.
    """

    max_tokens: int = 4096
    default_tokens: int = 512
    admitted: int = 68


class EventQueue:
    """What the engine says of one request, on the event loop's side.

    The loop is woken only while somebody waits: who reads now and then gets several events at once.
    """

    def __init__(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self._events: deque[Event] = deque()
        self._waiting = False

    def put(self, event: Event) -> None:
        """Called in the engine's thread; where the loop has ended already, nobody listens any more."""
        self._events.append(event)
        if self._waiting or isinstance(event, DecodeFinished | DecodeFailed):
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake.set)

    async def pause(self, seconds: float) -> None:
        """Let so much time pass, or less where the last event comes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not (self._events and isinstance(self._events[-1], DecodeFinished | DecodeFailed)):
                    await self._wake.wait()
                    self._wake.clear()

    async def next(self, seconds: float | None = None) -> list[Event]:
        """The events there are, at least one; none if there is none for so long.

        Raises:
            EngineError: the request failed, and what came before that was read.
        """
        self._waiting = True
        try:
            async with asyncio.timeout(seconds):
                while not self._events:  # it may be woken late, for an event that was read already
                    await self._wake.wait()
                    self._wake.clear()
        except TimeoutError:
            return []
        finally:
            self._waiting = False
        found: list[Event] = []
        while self._events and not (found and isinstance(self._events[0], DecodeFailed)):
            event = self._events.popleft()
            if isinstance(event, DecodeFailed):
                raise event.error
            found.append(event)
        return found


class Service:
    """Takes requests to the worker and back."""

    def __init__(self, registry: Registry, worker: Scheduler, bounds: RequestLimits) -> None:
        """Use a running worker.

        Args:
            registry: the models there are.
            worker: the engine's thread.
            bounds: what may be asked for.
        """
        self.registry, self.worker, self.bounds = registry, worker, bounds
        self.closing = False  # nothing new is admitted
        self.admitted = 0
        self._reading = ThreadPoolExecutor(1, "read")  # a tokenizer is not made for several threads
        self._compiling = ThreadPoolExecutor(1, "compile")

    def close(self) -> None:
        """End the threads that prepare."""
        for threads in (self._reading, self._compiling):
            threads.shutdown(cancel_futures=True)

    @asynccontextmanager
    async def job(
        self, request: ChatRequest | TextRequest, record: RequestRecord
    ) -> AsyncIterator[tuple[ResponseBuilder, EventQueue]]:
        """Have a request decoded; leaving the block before its last event cancels it.

        Args:
            request: checked.
            record: for the log, filled in on the way.

        Yields:
            What tells the answer, and the events of the engine; the last is Ended.

        Raises:
            Refusal: the request cannot be answered.
        """
        if request.kv_channel is not None and request.kv_channel not in CHANNELS:
            raise Refusal(
                400,
                f"kv_channel {ascii(request.kv_channel)[:100]} is none of {', '.join(CHANNELS)}",
                param="kv_channel",
                code="invalid_value",
            )
        with _told("model" if request.kv_channel is None else "kv_channel"):
            entry, channel = self.registry.resolve(request.model or self.registry.default, request.kv_channel)
        with self._admission():
            record.model, record.channel = entry.name, channel.name
            lease, job = self.worker.lease(entry), None
            try:
                with _told("model"):
                    model = await asyncio.wrap_future(lease.granted)
                builder, work = await self._prepared(request, model, channel, record.owner)
                record.prompt_tokens = len(work.prompt)
                events = EventQueue()
                job = self.worker.submit(lease, work, events.put)
                yield builder, events
            finally:
                if job is None:
                    self.worker.release(lease)
                else:
                    job.cancelled.set()

    @contextmanager
    def _admission(self) -> Iterator[None]:
        """A place among those that are worked on or wait.

        Raises:
            Refusal: there is none.
        """
        if self.closing:
            raise Refusal(503, "the server is shutting down", code="shutting_down")
        if self.admitted >= self.bounds.admitted:
            raise Refusal(
                429,
                f"{self.admitted} requests are worked on or wait, as many as may; try again later",
                code="queue_full",
                headers={"retry-after": str(RETRY_S)},
            )
        self.admitted += 1
        try:
            yield
        finally:
            self.admitted -= 1

    async def _prepared(
        self, request: ChatRequest | TextRequest, model: LoadedModel, channel: Channel, owner: str
    ) -> tuple[ResponseBuilder, DecodeRequest]:
        """Tokens, grammar and switches of a request.

        One thread makes tokens and another one grammars, which may take seconds: nobody without a schema
        waits for another's.
        """
        run = asyncio.get_running_loop().run_in_executor
        asked = await run(self._reading, _asked, request, model)
        grammar = None
        if bound(request):
            grammar = await run(self._compiling, _grammar, request, model, asked)
        work = self._work(request, model, channel, asked)
        work = replace(work, grammar=grammar, owner=owner)
        if isinstance(request, ChatRequest):
            return ChatResponseBuilder(request, model, asked, work), work
        return TextResponseBuilder(request, model, asked, work), work

    def _work(
        self, request: ChatRequest | TextRequest, model: LoadedModel, channel: Channel, asked: RenderedPrompt
    ) -> DecodeRequest:
        return DecodeRequest(
            prompt=asked.tokens,
            lasting=asked.lasting,
            max_tokens=self._max_tokens(request, model, asked),
            channel=channel,
            drafter=request.drafter or "default",
            block=_block(request, model),
            sampling=_sampling(request),
            stop_texts=request.stops,
            logprobs=_logprobs(request),
            penalties=_penalties(request),
            bias=_bias(request, model),
        )

    def _max_tokens(
        self, request: ChatRequest | TextRequest, model: LoadedModel, asked: RenderedPrompt
    ) -> int:
        """As many as were asked for and as the context leaves.

        Raises:
            Refusal: more were asked for than the server gives.
        """
        param, wanted = "max_tokens", request.max_tokens
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            param, wanted = "max_completion_tokens", request.max_completion_tokens
        if wanted is not None and wanted > self.bounds.max_tokens:
            raise Refusal(
                400,
                f"{param} must be at most {self.bounds.max_tokens} on this server, not {wanted}",
                param=param,
                code="invalid_value",
            )
        most = wanted or min(self.bounds.default_tokens, self.bounds.max_tokens)
        return most if model.context is None else min(most, model.context - len(asked.tokens))


def _asked(request: ChatRequest | TextRequest, model: LoadedModel) -> RenderedPrompt:
    if isinstance(request, ChatRequest):
        with _told("messages"):
            return chat_prompt(request, model)
    with _told("prompt"):
        return text_prompt(request, model)


def _grammar(request: ChatRequest | TextRequest, model: LoadedModel, asked: RenderedPrompt) -> Grammar | None:
    with _told("response_format"):
        return grammar_of(request, model, asked)


@contextmanager
def _told(param: str) -> Iterator[None]:
    """Errors of the engine become refusals that name this field."""
    try:
        yield
    except EngineError as error:
        raise refusal_of(error, param) from error


def _sampling(request: CompletionRequest) -> Sampling:
    """Raise ConfigurationError where the values make no sense together."""
    sampling = Sampling(
        temperature=request.temperature or 0.0,
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        top_k=request.top_k or 0,
        seed=None if request.seed is None else request.seed % 2**63,
    )
    with _told("temperature"):
        sampling.check()
    return sampling


def _block(request: CompletionRequest, model: LoadedModel) -> int | None:
    """The request's block, the model's, or None for the draft length's."""
    if isinstance(request.block, int):
        return request.block
    return None if request.block == "auto" or request.drafter == "none" else model.block


def _logprobs(request: ChatRequest | TextRequest) -> int | None:
    if isinstance(request, TextRequest):
        return request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None


def _penalties(request: CompletionRequest) -> dict[str, float]:
    given = {
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
    }
    return {name: value for name, value in given.items() if value}


def _bias(request: CompletionRequest, model: LoadedModel) -> dict[int, float]:
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    most = model.target.target.vocab_size
    with _told("logit_bias"):
        if odd := [token for token in bias if token >= most]:
            raise ConfigurationError(
                f"logit_bias: {odd[0]} is no token of this model, whose ids end at {most - 1}"
            )
    return bias


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


class CompletionResponse(Response):
    """Answers one request."""

    stalled_s: ClassVar[float] = 60.0  # a client that takes nothing for so long is given up

    def __init__(
        self,
        service: Service,
        request: ChatRequest | TextRequest,
        record: RequestRecord,
        *,
        log_content: bool,
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

    async def _whole(self, send: Send, builder: ResponseBuilder, events: EventQueue) -> None:
        while True:
            batch = await events.next()
            builder.hear(self._steps(batch))
            if isinstance(ended := batch[-1], DecodeFinished):
                body = builder.complete(ended).model_dump_json().encode()
                self._note(builder, ended)
                await self._begin(send, 200, {"content-type": "application/json"}, len(body))
                await send({"type": "http.response.body", "body": body})
                return
            if self._record.first_s is not None:
                await events.pause(PAUSE_S)

    async def _stream(self, send: Send, builder: ResponseBuilder, events: EventQueue) -> None:
        batch = await events.next(KEEPALIVE_S)
        await self._begin(send, 200, STREAM_HEADERS)
        await _push(send, _framed(builder.begin()))
        while not (batch and isinstance(batch[-1], DecodeFinished)):
            await _push(send, _framed(self._told(builder, batch)) if batch else b": waiting\n\n")
            if self._record.first_s is not None:
                await events.pause(PAUSE_S)
            batch = await events.next(KEEPALIVE_S)
        await send({"type": "http.response.body", "body": _framed(self._told(builder, batch)) + DONE})

    def _told(self, builder: ResponseBuilder, batch: Sequence[Event]) -> list[Reply]:
        """The chunks for events; the record takes note of them."""
        chunks = list(builder.take(self._steps(batch)))
        if isinstance(ended := batch[-1], DecodeFinished):
            chunks += builder.end(ended)
            self._note(builder, ended)
        return chunks

    def _steps(self, batch: Sequence[Event]) -> list[Step]:
        """The steps among events; the record takes note of them."""
        steps = [event for event in batch if isinstance(event, Step)]
        if steps:
            self._record.saw_tokens(sum(len(step.tokens) for step in steps))
        return steps

    def _note(self, builder: ResponseBuilder, ended: DecodeFinished) -> None:
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
