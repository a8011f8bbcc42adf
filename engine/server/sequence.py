"""One request being decoded: an event for each chunk of the prompt and for each round.

Requests and events hold no arrays, which belong to the engine's thread.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from engine.acceptance import Processor, TokenSelector
from engine.cache.transaction import resident
from engine.decode import SequenceDecoder, Step
from engine.device import launch, read_tokens, wait
from engine.draft_length import DraftLength
from engine.errors import GenerationError
from engine.external_engines.engine import OWN_CACHES, DraftCounts, ExternalEngine
from engine.generate import Outcome, OutcomeRecord, SamplingOptions, hold_off
from engine.grammar import Grammar
from engine.logprobs import Logprobs, TokenLogprob
from engine.registry import Channel
from engine.sampling import Sampling
from engine.server.prompt_cache import CacheKey, Found, PromptCache
from engine.server.schema import CacheTier, Drafting, unsupported
from engine.session import Session
from engine.stops import Stops
from engine.target.loading import LoadedTarget

ECHOED_ROWS = 128  # positions of a prompt whose log-probabilities are computed at once, in float32
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
    stop_tokens: tuple[int, ...] = ()  # besides the model's
    ignore_stops: bool = False  # go on past the model's stop tokens
    min_tokens: int = 0  # before which nothing but max_tokens ends the text
    # alternatives to report for each token of the prompt; None for no log-probabilities of it. Nothing cached
    # is used then.
    prompt_logprobs: int | None = None

    @property
    def _ends(self) -> SamplingOptions:
        return SamplingOptions(
            self.sampling,
            stop_texts=self.stop_texts,
            ignore_stops=self.ignore_stops,
            stop_tokens=self.stop_tokens,
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
        )

    def stops(self, target: LoadedTarget) -> Stops:
        """What ends the text."""
        return self._ends.stops(target)

    def options(self, target: LoadedTarget) -> SamplingOptions:
        """How tokens are chosen, and what ends the text."""
        mlx_lm: Any = make_logits_processors
        processors: list[Processor] = mlx_lm(dict(self.bias) or None, **self.penalties)
        if self.min_tokens:
            size = target.target.vocab_size
            processors.append(hold_off(self.stops(target), len(self.prompt), size))
        if self.grammar is not None:  # last: nothing may bring back what it forbids
            processors.append(self.grammar.processor(len(self.prompt)))
        return replace(self._ends, processors=tuple(processors))


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
    batch: int = 1  # sequences of the largest batch it was a part of
    engine: str = "kakeya"
    fallback_from: str | None = None  # the model's external engine, where it cannot decode this request
    cache_strategy: str | None = None  # of an external engine
    external_counts: DraftCounts | None = None  # of an external engine that drafts


@dataclass(frozen=True)
class DecodeFailed:
    """The last event of a request that failed."""

    error: Exception


@dataclass(frozen=True)
class PromptLogprobs:
    """How likely the next tokens of the prompt were, its first token excepted."""

    records: tuple[TokenLogprob, ...]


Event = PrefillProgress | PromptLogprobs | Step | DecodeFinished | DecodeFailed


class RequestDecoder:
    """A request in our engine: its prompt chunk by chunk, then rounds, alone or in a batch."""

    def __init__(
        self,
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
    ) -> None:
        """Decode in a new session of the target; ``chunk`` prompt positions are computed at once."""
        self.request, self.session, self.draft_length = request, session, draft_length
        self._target, self._cache, self._key = target, cache, key
        self.chunk, self._submitted = chunk, submitted  # positions of the prompt that are computed at once
        self._why_off, self._fallback_from = why_off, fallback_from
        self.prefilling = False  # its prompt, which may wait for another one that begins like it
        self.left = len(request.prompt)  # positions of it that are still to be computed
        self.sequence: SequenceDecoder | None = None  # as soon as the first token is known
        self._started, self._cached = 0.0, 0
        self._found: Found | None = None
        self._record: OutcomeRecord | None = None
        self._outcome: Outcome | None = None
        self._batch = 1  # sequences of its largest batch

    @property
    def nbytes(self) -> int:
        """Bytes of the session's caches, which are not here while it is in a batch, and of the drafter."""
        drafter = self.session.drafter
        return resident(self.session.caches)[1] + (drafter.nbytes if drafter is not None else 0)

    def keep(self) -> None:
        """Leave what the session holds to later requests."""
        self._cache.add(self._key, self.session.snapshot())

    def save(self) -> None:
        """Write what was left of the prompt to the disk, where there is a folder for it."""
        self._cache.save(self._key, self.request.prompt)

    def prefill(self, stream: mx.Stream) -> Generator[Event]:
        """Compute the prompt on a stream of its own, `chunk` positions a turn, up to the first token.

        What a turn computes is launched, and waited for in the next one: batches have their round meanwhile.
        """
        request, session, cache, key = self.request, self.session, self._cache, self._key
        prompt, total, echoed = request.prompt, len(request.prompt), None
        while request.prompt_logprobs is None and cache.coming(key, prompt):
            yield PrefillProgress(0, total)
        self._started = perf_counter()
        if request.prompt_logprobs is not None:  # nothing that was kept tells them
            echoed = Logprobs(request.prompt_logprobs, self._target.target.vocab_size)
        elif found := cache.find(key, prompt, session.snapshot):
            session.restore(found.snapshot)
            self._found = found
        self._cached = session.resume(prompt)
        with cache.prefill(key, prompt, request.stable_prefix, self._cached) as prefill:
            self.prefilling, self.left = True, total - prefill.done
            yield PrefillProgress(prefill.done, total)
            while (done := prefill.done) < total - 1:
                size = self.chunk if echoed is None else min(self.chunk, ECHOED_ROWS)
                prefill.done = min(done + size, prefill.next_stop(total - 1))
                if echoed is None:
                    with mx.stream(stream):
                        session.prefill(prompt[done : prefill.done], settle=launch)
                else:
                    records = prefill_with_logprobs(session, prompt, done, prefill.done, echoed)
                    yield PromptLogprobs(records)
                if prefill.done in prefill.stops:
                    cache.add(key, session.snapshot())
                self.left = total - prefill.done
                # else the first token is launched, too, before others have a turn
                if prefill.done < total - 1:
                    yield PrefillProgress(prefill.done, total)
                    wait([each.state for each in session.caches])
        options = request.options(self._target)
        reported = options.logprobs
        selector = TokenSelector(
            options.sampler(),
            options.processors,
            None if reported is None else Logprobs(reported, self._target.target.vocab_size),
        )
        stops = options.stops(self._target)
        sequence = SequenceDecoder(session, self.draft_length, stops, selector, request.max_tokens)
        self._record = OutcomeRecord(self._target, session, prompt, None, self._started)
        with mx.stream(stream):
            launched = sequence.launch_first(prompt)
        self.left = 0
        yield PrefillProgress(total, total)
        step = sequence.first(launched)
        self.sequence = sequence
        yield self.record(step, 1)

    def record(self, step: Step, batch: int) -> Step:
        """Note a step of a round of so many sequences; of the last one, when the session has its caches."""
        assert self._record is not None  # noqa: S101 - the first token is known
        self._batch = max(self._batch, batch)
        noted = self._record.add(step)
        self._outcome = noted.outcome
        return noted

    def finished(self) -> DecodeFinished:
        """Return the event that follows the last step."""
        outcome, request, drafter = self._outcome, self.request, self.session.drafter
        assert outcome is not None  # noqa: S101 - the last step has one
        why_off = self._why_off
        if outcome.verify_rounds:
            why_off = None
        elif why_off is None:
            why_off = NOT_FASTER if outcome.rounds else FIRST_ENDED
        return DecodeFinished(
            outcome,
            drafter=drafter.name if drafter else None,
            block=request.block or ("auto" if drafter else None),
            why_off=why_off,
            queue_s=self._started - self._submitted,
            resident_bytes=outcome.resident_bytes + outcome.drafter_resident_bytes,
            drafter_resident_bytes=outcome.drafter_resident_bytes,
            cached_tokens=self._cached,
            cached_from=self._found.tier if self._found and self._cached else None,
            batch=self._batch,
            fallback_from=self._fallback_from,
        )


def prefill_with_logprobs(
    session: Session, prompt: Sequence[int], begin: int, end: int, records: Logprobs
) -> tuple[TokenLogprob, ...]:
    """Prefill a part of a prompt, not its last token, and report the tokens behind each of the part.

    They are the target's own: processors, which change what is generated, do not apply.
    """
    following = list(prompt[begin + 1 : end + 1])
    packed = session.prefill(
        prompt[begin:end], lambda logits: records.pack(mx.array(following, mx.int32), logits)
    )
    assert packed is not None  # noqa: S101 - there is something to read
    return records.unpack(following, read_tokens(packed))


# --- external engines: greedy, and tokens are all they give ---------------------------------------------


def check_external_request(engine: ExternalEngine, request: DecodeRequest) -> None:
    """Raise Refusal for a field that asks for more than greedy decoding."""
    asked = {
        "echo": request.prompt_logprobs is not None,
        "temperature": not request.sampling.greedy,
        "logprobs": request.logprobs is not None,
        "logit_bias": bool(request.bias),
        "response_format": request.grammar is not None,
        "block": request.block is not None,
        "drafter": request.drafter != "default",
        "ignore_eos": request.ignore_stops,
        "min_tokens": request.min_tokens > 0,
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
    stops = request.stops(target)
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
