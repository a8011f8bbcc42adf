"""One request on its way through the engine: what is to be decoded, and what is told about it.

Made where requests come in, worked off by the engine's thread (`engine.server.scheduler`). Arrays are
made there alone, so nothing here holds any.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from mlx_lm.sample_utils import make_logits_processors

from engine.cache.stats import KVUse, kept_positions, kv_use
from engine.cache.transaction import resident
from engine.decode import Processor, Round, Step, decode
from engine.draft_length import DraftLength, FixedDraftLength
from engine.drafters.base import Drafter
from engine.errors import GenerationError
from engine.external_engines.engine import ExternalEngine
from engine.grammar import Grammar
from engine.registry.channels import Channel
from engine.sampling import Sampler, Sampling
from engine.server.schema import Drafting, UnsupportedError
from engine.session import Session
from engine.stops import Stops
from engine.target.loading import LoadedTarget


@dataclass(frozen=True)
class DecodeRequest:
    """What is to be decoded.

    Attributes:
        prompt: token ids.
        lasting: so many of the prompt's tokens are likely to begin the conversation's next prompt, too.
        max_tokens: emit at most so many.
        channel: how keys and values are kept.
        drafter: what drafts.
        block: tokens a verification, the bonus included; None lets the draft length choose.
        sampling: how tokens are drawn.
        stop_texts: strings that end the text.
        logprobs: alternatives of each token to tell; None for no log-probabilities.
        penalties: mlx-lm's names of penalties to their values; zeros are left out.
        bias: token ids to what is added to their logits.
        grammar: what the text has to follow.
        owner: whose sessions may be used, see `engine.server.sessions.SessionKey`.
    """

    prompt: list[int]
    lasting: int
    max_tokens: int
    channel: Channel
    drafter: Drafting = "default"
    block: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop_texts: tuple[str, ...] = ()
    logprobs: int | None = None
    penalties: Mapping[str, float] = field(default_factory=dict)
    bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None
    owner: str = ""


@dataclass(frozen=True)
class PrefillProgress:
    """So many of the prompt's tokens are computed, or were held already."""

    done: int
    total: int


@dataclass(frozen=True)
class DecodeFinished:
    """The last event of a request that came to its end; see `engine.server.schema.Provenance`."""

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
    """The last event of a request that did not."""

    error: Exception


Event = PrefillProgress | Step | DecodeFinished | DecodeFailed
EventCallback = Callable[[Event], None]


@dataclass(frozen=True)
class SessionKey:
    """What sessions of one kind have in common.

    Attributes:
        model: the registry's name.
        channel: the KV channel's name.
        drafter: of `engine.server.sequence.Drafting`.
        owner: whose key the requests came with: how much is held of a prompt would tell others what was said.
    """

    model: str
    channel: str
    drafter: str
    owner: str = ""


@dataclass
class CachedSession:
    """A session, its drafter, and what its draft length has learned.

    Attributes:
        key: which kind it is of.
        session: open.
        drafter: bound to the session's target; serves this session alone.
        draft length: that learns from all its requests.
        used: when its last request ended, seconds of the caller's clock.
    """

    key: SessionKey
    session: Session
    drafter: Drafter | None
    draft_length: DraftLength
    used: float = field(default=0.0)

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values, and of its drafter's."""
        caches = sum(int(cache.nbytes) for cache in self.session.caches) + self.session.mark_nbytes
        return caches + (self.drafter.nbytes if self.drafter is not None else 0)

    def common(self, prompt: Sequence[int]) -> int:
        """How many tokens at the beginning of a prompt it holds."""
        held = self.session.tokens
        shorter = min(len(held), len(prompt))
        return next((i for i in range(shorter) if held[i] != prompt[i]), shorter)


DIVIDE = 2**63  # seeds below zero count from the end, as clients may send any number of 64 bits


class DecodingSequence:
    """The steps of one request in a session of its own."""

    def __init__(
        self,
        work: DecodeRequest,
        target: LoadedTarget,
        kept: CachedSession,
        *,
        draft_length: DraftLength,
        chunk: int,
        submitted: float,
        why_off: str | None,
    ) -> None:
        """Begin.

        Args:
            work: what is to be decoded.
            target: the session's.
            kept: the session.
            draft_length: chooses the blocks.
            chunk: prompt positions a turn.
            submitted: when the request came, by `perf_counter`.
            why_off: why nothing will be drafted; None where something may be.
        """
        self.kept = kept
        self._work, self._target, self._pace, self._chunk = work, target, draft_length, chunk
        self._why_off = why_off
        self._submitted, self._began = submitted, perf_counter()
        self._first = self._last = 0.0
        self._forwards = kept.drafter.forwards if kept.drafter else 0
        self._cached, self._finish = 0, ""
        self._rounds: list[Round] = []
        self._turns = self._steps()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of the drafter's memory."""
        return self.kept.nbytes

    def turn(self) -> Event:
        """Do a piece of the work, and say what came of it; not to be called after the last event."""
        return next(self._turns)

    def close(self) -> None:
        """Leave it where it is."""
        self._turns.close()

    def _steps(self) -> Generator[Event]:
        session, work = self.kept.session, self._work
        total = len(work.prompt)
        self._cached = done = session.resume(work.prompt)
        yield PrefillProgress(done, total)
        for end in (min(work.lasting, total - 1), total - 1):
            while done < end:
                upto = min(done + self._chunk, end)
                session.take_in(work.prompt[done:upto])
                done = upto
                yield PrefillProgress(done, total)
            if done == work.lasting:
                session.mark()
        steps = decode(
            self._target.target,
            self.kept.drafter,
            work.prompt,
            max_tokens=work.max_tokens,
            stops=Stops(self._target.stops, work.stop_texts, self._target.tokenizer),
            sampler=_sampler(work),
            processors=_processors(work),
            draft_length=self._pace,
            prefill_chunk=self._chunk,
            session=session,
            logprobs=work.logprobs,
        )
        with closing(steps):
            for step in steps:
                self._note(step)
                yield step
        if not self._finish:
            raise GenerationError("the text did not come to an end")
        yield self._ended()

    def _note(self, step: Step) -> None:
        self._last = perf_counter()
        if step.round is None:
            self._first = self._last
        else:
            self._rounds.append(step.round)
        self._finish = step.finish or ""

    def _ended(self) -> DecodeFinished:
        drafter = self.kept.drafter
        classes, nbytes = resident(self.kept.session.caches)
        spoke = any(record.block > 1 for record in self._rounds)
        return DecodeFinished(
            finish=self._finish,
            drafter=drafter.name if drafter else None,
            block=self._work.block or ("auto" if drafter else None),
            why_off=None if spoke else self._why_off or _silence(self._rounds),
            rounds=tuple(self._rounds),
            drafter_forwards=drafter.forwards - self._forwards if drafter else 0,
            cached_tokens=self._cached,
            queue_s=self._began - self._submitted,
            prefill_s=self._first - self._began,
            decode_s=self._last - self._first,
            resident_bytes=nbytes,
            cache_classes=classes,
            kept_positions=kept_positions(self.kept.session.caches),
            coded=kv_use(self.kept.session.caches),
        )


def _silence(rounds: list[Round]) -> str:
    """Why nothing was verified though something might have been drafted."""
    if not rounds:
        return "the answer ended with its first token"
    return "the drafter had nothing to propose, or plain steps were the faster ones here"


def draft_length_for(
    work: DecodeRequest, kept: CachedSession, fresh: Callable[[], DraftLength]
) -> DraftLength:
    """The session's own draft length, or one that the request asks for.

    Args:
        work: the request; a fixed block and a seed have their own draft length.
        kept: the session.
        fresh: makes a draft length that looks at no clock, so that a seed can be repeated.
    """
    if kept.drafter is None:
        return FixedDraftLength(1)
    if work.block is not None:
        return FixedDraftLength(work.block)
    return fresh() if work.sampling.seed is not None else kept.draft_length


def _sampler(work: DecodeRequest) -> Sampler | None:
    sampling = work.sampling
    if sampling.greedy:
        return None
    if sampling.seed is not None and sampling.seed < 0:
        sampling = replace(sampling, seed=sampling.seed + DIVIDE)
    return Sampler(sampling)


def _processors(work: DecodeRequest) -> list[Processor]:
    """The grammar comes last: nothing may bring back what it forbids."""
    mlx_lm: Any = make_logits_processors
    processors: list[Processor] = mlx_lm(dict(work.bias) or None, **work.penalties)
    if work.grammar is not None:
        processors.append(work.grammar.processor(len(work.prompt)))
    return processors


def check_external_request(guest: ExternalEngine, work: DecodeRequest) -> None:
    """Raise UnsupportedError for what a foreign engine does not do, ConfigurationError for its channel."""
    asked = {
        "temperature": not work.sampling.greedy,
        "logprobs": work.logprobs is not None,
        "logit_bias": bool(work.bias),
        "response_format": work.grammar is not None,
        "block": work.block is not None,
        "drafter": work.drafter != "default",
    } | dict.fromkeys(work.penalties, True)
    for name, given in asked.items():
        if given:
            raise UnsupportedError(name, f"{name} is not supported with the engine {guest.engine.name}")
    guest.refuse(work.channel.policy)


class ExternalSequence:
    """The steps of one request."""

    kept: CachedSession | None = None

    def __init__(
        self, work: DecodeRequest, target: LoadedTarget, guest: ExternalEngine, submitted: float
    ) -> None:
        """Begin.

        Args:
            work: what is to be decoded; `check_external_request` has nothing against it.
            target: the guest's.
            guest: the engine.
            submitted: when the request came, by `perf_counter`.
        """
        self._work, self._target, self._guest = work, target, guest
        self._submitted, self._began = submitted, perf_counter()
        self._caches: list[Any] = []
        self._turns = self._steps()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(int(cache.nbytes) for cache in self._caches)

    def turn(self) -> Event:
        """Do a piece of the work, and say what came of it; not to be called after the last event."""
        return next(self._turns)

    def close(self) -> None:
        """Leave it where it is."""
        self._turns.close()

    def _steps(self) -> Generator[Event]:
        work, stops = self._work, Stops(self._target.stops, self._work.stop_texts, self._target.tokenizer)
        stops.start(work.prompt)
        yield PrefillProgress(0, len(work.prompt))
        left, first = work.max_tokens, 0.0
        tokens: Any = self._guest.generate(
            work.prompt, work.max_tokens, work.channel.policy, caches=self._caches
        )
        with closing(tokens):
            for token in tokens:
                first, left = first or perf_counter(), left - 1
                stopped = stops.find((token,)) is not None
                finish = "stop" if stopped else None if left else "length"
                yield Step((token,), None, finish)
                if finish:
                    yield self._ended(finish, first)
                    return

    def _ended(self, finish: str, first: float) -> DecodeFinished:
        classes, nbytes = resident(self._caches)
        return DecodeFinished(
            finish=finish,
            drafter=None,
            block=None,
            why_off=f"the engine {self._guest.engine.name} decodes this model",
            rounds=(),
            drafter_forwards=0,
            cached_tokens=0,
            queue_s=self._began - self._submitted,
            prefill_s=first - self._began,
            decode_s=perf_counter() - first,
            resident_bytes=nbytes,
            cache_classes=classes,
            cache_strategy=self._guest.strategy_for(self._work.channel.policy),
        )
