"""One request being decoded, an event a turn: what is asked of the engine's thread, and what it answers.

A generator yields an event for each chunk of the prompt and for each round; closing it midway leaves the
session usable. Arrays are made by the engine's thread alone, so requests and events hold none.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from mlx_lm.sample_utils import make_logits_processors

from engine.cache.stats import KVUse, kept_positions, kv_use
from engine.cache.transaction import resident
from engine.decode import Processor, Round, Step, decode
from engine.draft_length import DraftLength
from engine.errors import GenerationError
from engine.external_engines.engine import ExternalEngine
from engine.grammar import Grammar
from engine.registry import Channel
from engine.sampling import Sampler, Sampling
from engine.server.schema import Drafting, UnsupportedError
from engine.session import Session
from engine.stops import Stops
from engine.target.loading import LoadedTarget


@dataclass(frozen=True)
class DecodeRequest:
    """What is to be decoded."""

    prompt: list[int]
    stable_prefix: int  # how many tokens probably begin the conversation's next prompt too
    max_tokens: int
    channel: Channel
    drafter: Drafting = "default"
    block: int | None = None  # tokens of a verify forward; None lets the draft length choose
    sampling: Sampling = field(default_factory=Sampling)
    stop_texts: tuple[str, ...] = ()
    logprobs: int | None = None  # alternatives to report for each token; None for no log-probabilities
    penalties: Mapping[str, float] = field(default_factory=dict)  # by mlx-lm's names, zeros left out
    bias: Mapping[int, float] = field(default_factory=dict)  # token ids to what is added to their logits
    grammar: Grammar | None = None
    owner: str = ""  # see `engine.server.sessions.SessionKey`


@dataclass(frozen=True)
class PrefillProgress:
    """How many of the prompt's tokens are computed, or were cached."""

    done: int
    total: int


@dataclass(frozen=True)
class DecodeFinished:
    """The last event of a request that is complete; see `engine.server.schema.Provenance`."""

    finish: str
    drafter: str | None
    block: int | str | None
    why_off: str | None
    rounds: tuple[Round, ...]
    drafter_forwards: int
    cached_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    resident_bytes: int
    cache_classes: Mapping[str, int]
    cache_strategy: str | None = None
    kept_positions: int | None = None
    coded: KVUse | None = None


@dataclass(frozen=True)
class DecodeFailed:
    """The last event of a request that failed."""

    error: Exception


Event = PrefillProgress | Step | DecodeFinished | DecodeFailed
EventCallback = Callable[[Event], None]


def decode_in_session(
    request: DecodeRequest,
    target: LoadedTarget,
    session: Session,
    *,
    draft_length: DraftLength,
    chunk: int,
    submitted: float,
    why_off: str | None,
) -> Generator[Event]:
    """Decode a request in a session of its target.

    Args:
        request: what to decode.
        target: the session's.
        session: may hold a part of the prompt already.
        draft_length: chooses the blocks.
        chunk: prompt positions a turn.
        submitted: when the request came, by `perf_counter`.
        why_off: why nothing will be drafted; None where something may be.
    """
    started = perf_counter()
    drafter, total = session.drafter, len(request.prompt)
    forwards = drafter.forwards if drafter else 0
    cached = done = session.resume(request.prompt)
    yield PrefillProgress(done, total)
    for end in (min(request.stable_prefix, total - 1), total - 1):
        while done < end:
            upto = min(done + chunk, end)
            session.take_in(request.prompt[done:upto])
            done = upto
            yield PrefillProgress(done, total)
        if done == request.stable_prefix:
            session.mark()
    steps = decode(
        target.target,
        drafter,
        request.prompt,
        max_tokens=request.max_tokens,
        stops=Stops(target.stops, request.stop_texts, target.tokenizer),
        sampler=None if request.sampling.greedy else Sampler(request.sampling),
        processors=_processors(request),
        draft_length=draft_length,
        prefill_chunk=chunk,
        session=session,
        logprobs=request.logprobs,
    )
    first = last = 0.0
    finish: str | None = None
    rounds: list[Round] = []
    with closing(steps):
        for step in steps:
            last = perf_counter()
            first, finish = first or last, step.finish
            if step.round is not None:
                rounds.append(step.round)
            yield step
    if finish is None:
        raise GenerationError("the text did not come to an end")
    if why_off is None and not rounds:
        why_off = "the answer ended with its first token"
    elif why_off is None:
        why_off = "the drafter had nothing to propose, or plain steps were the faster ones here"
    classes, nbytes = resident(session.caches)
    yield DecodeFinished(
        finish=finish,
        drafter=drafter.name if drafter else None,
        block=request.block or ("auto" if drafter else None),
        why_off=None if any(each.block > 1 for each in rounds) else why_off,
        rounds=tuple(rounds),
        drafter_forwards=drafter.forwards - forwards if drafter else 0,
        cached_tokens=cached,
        queue_s=started - submitted,
        prefill_s=first - started,
        decode_s=last - first,
        resident_bytes=nbytes,
        cache_classes=classes,
        kept_positions=kept_positions(session.caches),
        coded=kv_use(session.caches),
    )


def _processors(request: DecodeRequest) -> list[Processor]:
    """The grammar comes last: nothing may bring back what it forbids."""
    mlx_lm: Any = make_logits_processors
    processors: list[Processor] = mlx_lm(dict(request.bias) or None, **request.penalties)
    if request.grammar is not None:
        processors.append(request.grammar.processor(len(request.prompt)))
    return processors


# --- external engines: greedy, and tokens are all they give ---------------------------------------------


def check_external_request(engine: ExternalEngine, request: DecodeRequest) -> None:
    """Refuse what an external engine does not do.

    Raises:
        UnsupportedError: a field asks for more than greedy decoding.
        ConfigurationError: the engine cannot serve the channel.
    """
    asked = {
        "temperature": not request.sampling.greedy,
        "logprobs": request.logprobs is not None,
        "logit_bias": bool(request.bias),
        "response_format": request.grammar is not None,
        "block": request.block is not None,
        "drafter": request.drafter != "default",
    } | dict.fromkeys(request.penalties, True)
    for name, given in asked.items():
        if given:
            raise UnsupportedError(name, f"{name} is not supported with the engine {engine.engine.name}")
    engine.refuse(request.channel.policy)


def decode_externally(
    request: DecodeRequest,
    target: LoadedTarget,
    engine: ExternalEngine,
    caches: list[Any],
    *,
    submitted: float,
) -> Generator[Event]:
    """Decode a request that `check_external_request` let pass, with the channel's caches in the engine.

    Args:
        request: what to decode.
        target: the engine's.
        engine: decodes.
        caches: gets the caches that the engine is given.
        submitted: when the request came, by `perf_counter`.
    """
    started, first, policy = perf_counter(), 0.0, request.channel.policy
    stops = Stops(target.stops, request.stop_texts, target.tokenizer)
    stops.start(request.prompt)
    yield PrefillProgress(0, len(request.prompt))
    left, finish = request.max_tokens, None
    tokens: Any = engine.generate(request.prompt, request.max_tokens, policy, caches=caches)
    with closing(tokens):
        for token in tokens:
            first, left = first or perf_counter(), left - 1
            finish = "stop" if stops.find((token,)) is not None else None if left else "length"
            yield Step((token,), None, finish)
            if finish:
                break
    if finish is None:
        raise GenerationError(f"the engine {engine.engine.name} stopped before the text came to an end")
    classes, nbytes = resident(caches)
    yield DecodeFinished(
        finish=finish,
        drafter=None,
        block=None,
        why_off=f"the engine {engine.engine.name} decodes this model",
        rounds=(),
        drafter_forwards=0,
        cached_tokens=0,
        queue_s=started - submitted,
        prefill_s=first - started,
        decode_s=perf_counter() - first,
        resident_bytes=nbytes,
        cache_classes=classes,
        cache_strategy=engine.strategy_for(policy),
    )
