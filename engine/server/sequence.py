"""One request being decoded: an event for each chunk of the prompt and for each round.

Closing the generator midway leaves the session usable. Requests and events hold no arrays, which belong to
the engine's thread.
"""

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from mlx_lm.sample_utils import make_logits_processors

from engine.acceptance import Processor
from engine.cache.transaction import resident
from engine.decode import Step
from engine.draft_length import DraftLength
from engine.errors import GenerationError
from engine.external_engines.engine import OWN_CACHES, DraftCounts, ExternalEngine
from engine.generate import Outcome, SamplingOptions, generate_in_session
from engine.grammar import Grammar
from engine.registry import Channel
from engine.sampling import Sampling
from engine.server.prompt_cache import CacheKey, PromptCache
from engine.server.schema import CacheTier, Drafting, unsupported
from engine.session import Session
from engine.stops import Stops
from engine.target.loading import LoadedTarget

FIRST_ENDED = "the answer ended with its first token"
NOT_FASTER = "the drafter had nothing to propose, or plain steps were the faster ones here"


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
    owner: str = ""  # of the API key: nothing is shared with another's


@dataclass(frozen=True)
class PrefillProgress:
    """How many of the prompt's tokens are computed, or were cached."""

    done: int  # of the prompt's tokens, the cached ones included
    total: int


@dataclass(frozen=True)
class DecodeFinished:
    """The last event of a complete request; see `engine.server.schema.Provenance`."""

    outcome: Outcome
    drafter: str | None
    block: int | str | None
    why_off: str | None
    queue_s: float
    resident_bytes: int | None  # of the target's caches and the drafter; None: an external engine has its own
    drafter_resident_bytes: int | None  # the drafter's part
    cached_tokens: int = 0
    cached_from: CacheTier | None = None  # where they were; None: there were none
    engine: str = "kakeya"
    fallback_from: str | None = None  # the model's external engine, where it cannot decode this request
    cache_strategy: str | None = None  # of an external engine
    external_counts: DraftCounts | None = None  # of an external engine that drafts


@dataclass(frozen=True)
class DecodeFailed:
    """The last event of a request that failed."""

    error: Exception


Event = PrefillProgress | Step | DecodeFinished | DecodeFailed


def decode_in_session(
    request: DecodeRequest,
    target: LoadedTarget,
    session: Session,
    cache: PromptCache,
    key: CacheKey,
    *,
    draft_length: DraftLength,
    chunk: int,
    submitted: float,
    why_off: str | None,
    fallback_from: str | None = None,
) -> Generator[Event]:
    """Decode a request in a new session of its target, `chunk` prompt positions a turn."""
    prompt, total = request.prompt, len(request.prompt)
    while cache.coming(key, prompt):
        yield PrefillProgress(0, total)
    started = perf_counter()
    if found := cache.find(key, prompt, session.snapshot):
        session.restore(found.snapshot)
    drafter, cached = session.drafter, session.resume(prompt)
    with cache.prefill(key, prompt, request.stable_prefix, cached) as prefill:
        yield PrefillProgress(cached, total)
        while (done := prefill.done) < total - 1:
            prefill.done = min(done + chunk, prefill.next_stop(total - 1))
            session.prefill(prompt[done : prefill.done])
            if prefill.done in prefill.stops:
                cache.add(key, session.snapshot())
            yield PrefillProgress(prefill.done, total)
    mlx_lm: Any = make_logits_processors
    processors: list[Processor] = mlx_lm(dict(request.bias) or None, **request.penalties)
    if request.grammar is not None:  # last: nothing may bring back what it forbids
        processors.append(request.grammar.processor(total))
    steps = generate_in_session(
        target,
        session,
        prompt,
        request.max_tokens,
        SamplingOptions(request.sampling, tuple(processors), request.stop_texts, logprobs=request.logprobs),
        draft_length=draft_length,
        prefill_chunk=chunk,
        started=started,
        text=False,
    )
    outcome = None
    with closing(steps):
        for step in steps:
            outcome = step.outcome
            yield step
    assert outcome is not None  # noqa: S101 - the last step has one
    if outcome.verify_rounds:
        why_off = None
    elif why_off is None:
        why_off = NOT_FASTER if outcome.rounds else FIRST_ENDED
    yield DecodeFinished(
        outcome,
        drafter=drafter.name if drafter else None,
        block=request.block or ("auto" if drafter else None),
        why_off=why_off,
        queue_s=started - submitted,
        resident_bytes=outcome.resident_bytes + outcome.drafter_resident_bytes,
        drafter_resident_bytes=outcome.drafter_resident_bytes,
        cached_tokens=cached,
        cached_from=found.tier if found and cached else None,
        fallback_from=fallback_from,
    )


# --- external engines: greedy, and tokens are all they give ---------------------------------------------


def check_external_request(engine: ExternalEngine, request: DecodeRequest) -> None:
    """Raise Refusal for a field that asks for more than greedy decoding."""
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
            raise unsupported(f"{name} with the engine {engine.name}", name)


def decode_externally(
    request: DecodeRequest,
    target: LoadedTarget,
    engine: ExternalEngine,
    caches: list[Any],
    counts: DraftCounts,
    *,
    drafter: str | None,
    submitted: float,
) -> Generator[Event]:
    """Decode a request that `check_external_request` let pass; fill `caches` and `counts` on the way."""
    started, policy = perf_counter(), request.channel.policy
    first, finish, tokens = 0.0, None, list[int]()
    stops = Stops(target.stops, request.stop_texts, target.tokenizer)
    stops.start(request.prompt)
    yield PrefillProgress(0, len(request.prompt))
    steps: Any = engine.generate(request.prompt, request.max_tokens, policy, caches=caches, counts=counts)
    with closing(steps):
        for token in steps:
            first = first or perf_counter()
            tokens.append(token)
            full = len(tokens) == request.max_tokens
            finish = "stop" if stops.find((token,)) is not None else "length" if full else None
            yield Step((token,), None, finish)
            if finish:
                break
    if finish is None:
        raise GenerationError(f"the engine {engine.name} stopped before the text came to an end")
    why_off = None
    if drafter is None:
        why_off = f"the engine {engine.name} decodes this model without a drafter"
    elif not counts.rounds:
        why_off = FIRST_ENDED if len(tokens) == 1 else f"the engine {engine.name} reports no verify rounds"
    prefill_s, decode_s = first - started, perf_counter() - first
    path, (classes, held) = f"external:{engine.name}", resident(caches)
    drafters = resident(counts.caches)[1] if counts.caches else None if drafter else 0
    yield DecodeFinished(
        Outcome(tokens, "", finish, prefill_s, decode_s, [], path, classes, held),
        drafter=drafter,
        block=engine.block if drafter else None,
        why_off=why_off,
        queue_s=started - submitted,
        resident_bytes=None if drafters is None or engine.strategy == OWN_CACHES else held + drafters,
        drafter_resident_bytes=drafters,
        engine=engine.name,
        external_counts=replace(counts, caches=[]) if drafter else None,
        cache_strategy=engine.strategy,
    )
