"""One request on its way: admit → lease a model → prepare → have it decoded.

Runs on the event loop; arrays are the worker's business. What a request holds (its place, its lease, its job)
is given back however it ends, also when its client has gone.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace

from engine.errors import ConfigurationError, EngineError
from engine.grammar import Grammar
from engine.registry import CHANNELS, Channel, Registry
from engine.sampling import Sampling
from engine.server.decoding.models import Model
from engine.server.decoding.work import Ended, Event, Failed, Work
from engine.server.decoding.worker import Worker
from engine.server.record import Record
from engine.server.refusals import Refusal, refusal_of
from engine.server.text.constraints import bound, grammar_of
from engine.server.text.prompting import Asked, chat_prompt, text_prompt
from engine.server.text.response import Chat, ResponseBuilder, Text
from engine.server.wire.requests import ChatRequest, Completion, TextRequest

RETRY_S = 2  # after which a client that was turned away may try again


@dataclass(frozen=True)
class Bounds:
    """What one request, and all of them, may ask for.

    Attributes:
        max_tokens: of an answer; more is refused.
        default_tokens: of an answer whose request says nothing.
        admitted: requests that are worked on or wait; more are turned away.
    """

    max_tokens: int = 4096
    default_tokens: int = 512
    admitted: int = 68


class Events:
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
        if self._waiting or isinstance(event, Ended | Failed):
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake.set)

    async def pause(self, seconds: float) -> None:
        """Let so much time pass, or less where the last event comes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not (self._events and isinstance(self._events[-1], Ended | Failed)):
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
        while self._events and not (found and isinstance(self._events[0], Failed)):
            event = self._events.popleft()
            if isinstance(event, Failed):
                raise event.error
            found.append(event)
        return found


class Service:
    """Takes requests to the worker and back."""

    def __init__(self, registry: Registry, worker: Worker, bounds: Bounds) -> None:
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
        self, request: ChatRequest | TextRequest, record: Record
    ) -> AsyncIterator[tuple[ResponseBuilder, Events]]:
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
                events = Events()
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
        self, request: ChatRequest | TextRequest, model: Model, channel: Channel, owner: str
    ) -> tuple[ResponseBuilder, Work]:
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
            return Chat(request, model, asked, work), work
        return Text(request, model, asked, work), work

    def _work(self, request: ChatRequest | TextRequest, model: Model, channel: Channel, asked: Asked) -> Work:
        return Work(
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

    def _max_tokens(self, request: ChatRequest | TextRequest, model: Model, asked: Asked) -> int:
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


def _asked(request: ChatRequest | TextRequest, model: Model) -> Asked:
    if isinstance(request, ChatRequest):
        with _told("messages"):
            return chat_prompt(request, model)
    with _told("prompt"):
        return text_prompt(request, model)


def _grammar(request: ChatRequest | TextRequest, model: Model, asked: Asked) -> Grammar | None:
    with _told("response_format"):
        return grammar_of(request, model, asked)


@contextmanager
def _told(param: str) -> Iterator[None]:
    """Errors of the engine become refusals that name this field."""
    try:
        yield
    except EngineError as error:
        raise refusal_of(error, param) from error


def _sampling(request: Completion) -> Sampling:
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


def _block(request: Completion, model: Model) -> int | None:
    """The request's block, the model's, or None for the draft length's."""
    if isinstance(request.block, int):
        return request.block
    return None if request.block == "auto" or request.drafter == "none" else model.block


def _logprobs(request: ChatRequest | TextRequest) -> int | None:
    if isinstance(request, TextRequest):
        return request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None


def _penalties(request: Completion) -> dict[str, float]:
    given = {
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
    }
    return {name: value for name, value in given.items() if value}


def _bias(request: Completion, model: Model) -> dict[int, float]:
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    most = model.target.target.vocab_size
    with _told("logit_bias"):
        if odd := [token for token in bias if token >= most]:
            raise ConfigurationError(
                f"logit_bias: {odd[0]} is no token of this model, whose ids end at {most - 1}"
            )
    return bias
