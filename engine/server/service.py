"""One request: admit → lease a model → prepare → decode → answer, as one JSON object or a stream of events.

Runs on the event loop. What a request holds is given back however it ends, also when its client disconnects.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Send

from engine.decode import Step
from engine.errors import EngineError
from engine.generate import PENALTIES
from engine.grammar import Grammar
from engine.registry import Channel, ModelEntry, Registry
from engine.sampling import COLDEST, Sampling
from engine.server import schema
from engine.server.messages import MESSAGES_PATH, anthropic_error
from engine.server.metrics import RequestRecord
from engine.server.prompting import RenderedPrompt, chat_prompt, grammar_of, needs_grammar, text_prompts
from engine.server.response import CompletionBuilder, ResponseBuilder
from engine.server.responses import PARAMS, RESPONSES_PATH
from engine.server.scheduler import DecodeJob, Scheduler
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
    queue: int = 64  # requests that may wait while as many are decoded as can be at once
    strict: bool = False  # refuse unknown fields, instead of ignoring those that change nothing


class EventQueue:
    """The events of a request for the event loop, each with the number of its choice.

    The loop is woken only while it waits, to get several at once.
    """

    def __init__(self, choices: int = 1) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self._events: deque[tuple[int, Event]] = deque()
        self._waiting = False
        self._open = choices  # that have not ended; 0 once one has failed

    def put(self, event: Event, choice: int = 0) -> None:
        """Add an event, from any thread; where the loop has ended already it is dropped."""
        self._events.append((choice, event))
        if isinstance(event, ENDS):
            self._open = 0 if isinstance(event, DecodeFailed) else self._open - 1
        if self._waiting or self._open <= 0:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake.set)

    async def pause(self, seconds: float) -> None:
        """Wait so long, or until the last event comes."""
        await self._wait(lambda: self._open <= 0, seconds)

    async def next(self, seconds: float | None = None) -> list[tuple[int, Event]]:
        """Return the events there are, none after a timeout; raise a failed request's error after them."""
        self._waiting = True
        try:
            await self._wait(lambda: bool(self._events), seconds)
        finally:
            self._waiting = False
        found: list[tuple[int, Event]] = []
        while self._events and not (found and isinstance(self._events[0][1], DecodeFailed)):
            choice, event = self._events.popleft()
            if isinstance(event, DecodeFailed):
                raise event.error
            found.append((choice, event))
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
        unknown = [name for name in request.ignored if name not in schema.WITHOUT_EFFECT]
        if self.limits.strict and unknown:
            text = f"{unknown[0]} is unknown here; leave it out"
            raise invalid(unknown[0], text, code="unknown_parameter")
        channel, known = request.kv_channel, self.registry.channels
        if channel is not None and channel not in known and not self.registry.spells_policy(channel):
            # 400, where an id has 404
            raise invalid("kv_channel", f"kv_channel {ascii(channel)[:100]} is none of {', '.join(known)}")
        with refusing("model" if channel is None else "kv_channel"):
            entry, resolved = self.registry.resolve(request.model or self.registry.default, channel)
        if self.closing:
            raise Refusal(503, "the server is shutting down", code="shutting_down")
        if self.admitted >= (most := self.scheduler.parallel + self.limits.queue):
            text = f"as many requests are served or wait as may, {most}; try again later"
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
    ) -> AsyncIterator[tuple[CompletionBuilder, EventQueue]]:
        """Have the choices of a request decoded; leaving the block before all have ended cancels them."""
        with self._admitted(request, record) as (entry, channel):
            # all at once: one asked for later could wait for a request that waits for this one's model
            count = request.prompt_count * request.decoded_choices
            leases = [self.scheduler.lease(entry) for _ in range(count)]
            jobs: list[DecodeJob] = []
            try:
                with refusing("model"):
                    model, *_ = [await asyncio.wrap_future(lease.granted) for lease in leases]
                builders = await self._prepare(request, model, channel, record.owner, new_builder)
                answer, events = CompletionBuilder(builders), EventQueue(len(builders))
                record.prompt_tokens = answer.usage().prompt_tokens
                for choice, (lease, builder) in enumerate(zip(leases, builders, strict=True)):
                    deliver = partial(events.put, choice=choice)
                    jobs.append(self.scheduler.submit(lease, builder.decoded, deliver, choice_of=leases[0]))
                yield answer, events
            finally:
                for lease in leases[len(jobs) :]:
                    self.scheduler.release(lease)
                for job in jobs:
                    job.cancelled.set()

    async def count_tokens(self, request: schema.ChatRequest, record: RequestRecord) -> int:
        """Return how many tokens the prompt has; raise Refusal as `job` does."""
        with self._admitted(request, record) as (entry, _):
            lease = self.scheduler.lease(entry)
            try:
                with refusing("model"):
                    model = await asyncio.wrap_future(lease.granted)
                (prompt,) = await self._prompts(request, model)
                return len(prompt.tokens)
            finally:
                self.scheduler.release(lease)

    async def _prompts(self, request: schema.AnyRequest, model: LoadedModel) -> list[RenderedPrompt]:
        run = asyncio.get_running_loop().run_in_executor
        if isinstance(request, schema.ChatRequest):
            return [await run(self._tokenizing, chat_prompt, request, model)]
        return await run(self._tokenizing, text_prompts, request, model)

    async def _prepare(
        self,
        request: schema.AnyRequest,
        model: LoadedModel,
        channel: Channel,
        owner: str,
        new_builder: NewBuilder,
    ) -> list[ResponseBuilder]:
        """Make what builds the answers of all choices, a prompt's behind one another; raise Refusal."""
        run = asyncio.get_running_loop().run_in_executor
        if isinstance(request, schema.ChatRequest):
            logprobs = (request.top_logprobs or 0) if request.logprobs else None
        else:
            logprobs = request.logprobs if request.tells_logprobs else None
        prompts = await self._prompts(request, model)
        grammars: list[Grammar | None] = [None] * len(prompts)
        if needs_grammar(request):
            grammars = [await run(self._compiling, grammar_of, request, model, prompt) for prompt in prompts]
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
        model.refuse_tokens("logit_bias", bias)
        model.refuse_tokens("stop_token_ids", request.stop_token_ids or ())
        block = model.block if request.block is None and request.drafter != "none" else request.block
        ranked = request.decoded_choices > request.kept_choices
        shared = DecodeRequest(
            prompt=[],
            stable_prefix=0,
            max_tokens=1,
            channel=channel,
            drafter=request.drafter or "default",
            block=None if block == "auto" else block,
            sampling=_sampling(request),
            stop_texts=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
            stop_tokens=tuple(request.stop_token_ids or ()),
            ignore_stops=bool(request.ignore_eos),
            min_tokens=request.min_tokens or 0,
            logprobs=0 if logprobs is None and ranked else logprobs,
            prompt_logprobs=logprobs if isinstance(request, schema.TextRequest) and request.echo else None,
            penalties={name: value for name in PENALTIES if (value := getattr(request, name))},
            bias=bias,
            owner=owner,
        )
        return [
            new_builder(
                request,
                model,
                prompt,
                replace(
                    shared,
                    prompt=prompt.tokens,
                    stable_prefix=prompt.stable_prefix,
                    max_tokens=self._max_tokens(request, model, prompt),
                    grammar=grammar,
                    sampling=sampling,
                ),
            )
            for prompt, grammar in zip(prompts, grammars, strict=True)
            for sampling in _samplings(shared.sampling, request.decoded_choices)
        ]

    def _max_tokens(self, request: schema.AnyRequest, model: LoadedModel, prompt: RenderedPrompt) -> int:
        """What the request wants, or as much as the server and the model's context leave of it.

        1 for a request of none, which the answer leaves out: the engine decodes at least one.
        """
        most, wanted = self.limits.max_tokens, request.wanted_tokens
        default = most if request.open_ended else self.limits.default_tokens
        count = min(default if wanted is None else max(wanted, 1), most)
        return count if model.context is None else min(count, model.context - len(prompt.tokens))


def _sampling(request: schema.CompletionRequest) -> Sampling:
    given = {name: getattr(request, name) for name in ("temperature", "top_p", "min_p", "top_k")}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("temperature", 0) < COLDEST or given.get("top_p") == 0:  # both leave the likeliest token
        given = {}
    seed = None if request.seed is None else request.seed % 2**63  # clients send negative ones too
    return Sampling(**given, seed=seed)


def _samplings(first: Sampling, count: int) -> Iterator[Sampling]:
    """The sampling of each choice of a prompt: where there is a seed, the others' are derived from it."""
    for choice in range(count):
        seed = first.seed
        if choice and seed is not None:
            seed = int.from_bytes(hashlib.sha256(f"{seed}:{choice}".encode()).digest()[:8]) % 2**63
        yield replace(first, seed=seed)


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
            async with job as (answer, events):
                respond = self._stream if self._request.stream else self._whole
                await respond(send, answer, events)
        except EngineError as error:
            await self._refuse(send, refusal_of(error))
        except TimeoutError:  # the client accepts nothing
            raise
        except Exception:
            await self._refuse(send, BUG)
            raise

    async def _whole(self, send: Send, answer: CompletionBuilder, events: EventQueue) -> None:
        while not answer.ended:
            if self._record.first_s is not None:
                await events.pause(PAUSE_S)
            answer.hear(self._counted(await events.next()))
        body = answer.complete().model_dump_json().encode()
        self._note(answer)
        self._record.status = 200
        await Response(body, media_type="application/json")({"type": "http"}, NO_RECEIVE, send)

    async def _stream(self, send: Send, answer: CompletionBuilder, events: EventQueue) -> None:
        batch = await events.next(KEEPALIVE_S)
        self._record.status = 200
        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        self._builder = first = answer.first
        body = _framed(first, answer.begin())
        while True:
            body += _framed(first, answer.take(self._counted(batch))) if batch else first.waiting
            if answer.ended:
                break
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if self._record.first_s is not None:
                await events.pause(PAUSE_S)
            batch, body = await events.next(KEEPALIVE_S), b""
        self._note(answer)
        await send({"type": "http.response.body", "body": body + first.done})

    def _counted(self, batch: list[tuple[int, Event]]) -> list[tuple[int, Event]]:
        if steps := [event for _, event in batch if isinstance(event, Step)]:
            self._record.add_tokens(sum(len(step.tokens) for step in steps))
        return batch

    def _note(self, answer: CompletionBuilder) -> None:
        record, how, usage = self._record, answer.provenance(), answer.usage()
        record.completion_tokens = usage.completion_tokens
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        record.drafter, record.finish = how.drafter, answer.finish
        record.verify_rounds = how.verify_rounds
        if how.drafted is not None:  # accepted drafts are counted as a part of those
            record.drafted, record.accepted = how.drafted, how.accepted
        if self._log_content:
            said = "\n".join(builder.parsed.content for builder in answer.builders)
            record.content = {"request": self._request.model_dump_json(), "answer": said}

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
    if path == RESPONSES_PATH and refusal.param is not None:
        document = replace(refusal, param=PARAMS.get(refusal.param, refusal.param)).document()
    if path.startswith(MESSAGES_PATH):
        error, status = anthropic_error(refusal)
        document = error.model_dump()
    return JSONResponse(document, status, refusal.headers)
