"""Several sequences decoded together: one verify forward for all, each with its own drafts and acceptance.

    blocks = [[bonus, d1 … d(B-1)] of every sequence]     [S, B]
    logits = target(blocks)                               one forward, [S, B, V]
    every sequence accepts, emits and keeps its own a + 1 positions

Prompts are computed one by one, then their caches are merged. A sequence that has ended leaves the batch. The
tokens are those the sequences would have had alone. Drafters draft for one sequence at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import mlx.core as mx

from engine.accept import pack_greedy, pack_sampled, unpack
from engine.cache.batch import BatchTransaction, merge
from engine.decode import Round, Step
from engine.drafters.base import NOTHING, Draft, Drafter
from engine.errors import ConfigurationError, PromptError
from engine.host import launch, read_token, read_tokens
from engine.pace import Fixed, Pace
from engine.sampling import Sampler
from engine.session import Session
from engine.stops import Stops
from engine.target import Target


@dataclass(frozen=True)
class Request:
    """One sequence to be continued; see `engine.decode.decode` for the fields."""

    prompt: Sequence[int]
    max_tokens: int
    stops: Stops = field(default_factory=Stops)
    sampler: Sampler | None = None

    def check(self) -> None:
        """Raise PromptError or ConfigurationError where it makes no sense."""
        if not self.prompt:
            raise PromptError("the prompt is empty")
        if self.max_tokens < 1:
            raise ConfigurationError(f"max_tokens must be at least 1, not {self.max_tokens}")


@dataclass(frozen=True)
class Emitted:
    """A step of one sequence.

    Attributes:
        request: its place among the requests.
        step: what was emitted, and the round it came from.
        resident_bytes: its share of the caches; of use at its last step.
    """

    request: int
    step: Step
    resident_bytes: int


def decode_together(
    target: Target,
    drafter: Drafter | None,
    requests: Sequence[Request],
    *,
    pace: Pace | None = None,
    prefill_chunk: int = 2048,
) -> Iterator[Emitted]:
    """Continue several prompts at once.

    Args:
        target: the model.
        drafter: bound to ``target``; each sequence gets a twin of it. None decodes plainly.
        requests: what to continue; each has stops and a sampler of its own.
        pace: chooses the block length, the same for all (default: the drafter's own, 1 without one).
        prefill_chunk: prompt positions per forward.

    Yields:
        The first token of each sequence when it is known, then the tokens of each round, one after another.

    Raises:
        PromptError, ConfigurationError: a request makes no sense, or there is none.
        ModelError: sequences of this model cannot be decoded together.
    """
    if not requests:
        raise ConfigurationError("there is nothing to decode")
    for request in requests:
        request.check()
    pace = pace or Fixed(drafter.block_size if drafter else 1)
    if drafter is None and pace.largest > 1:
        raise ConfigurationError(f"a block of {pace.largest} needs a drafter")
    lanes: list[_Lane] = []
    caches: list[list[Any]] = []
    pace.start()
    for index, request in enumerate(requests):
        lane = _Lane(index, request, drafter.twin() if drafter else None)
        with Session(target, lane.drafter, headroom=max(pace.largest, 1)) as session:
            emitted = lane.prefill(session, prefill_chunk)
        yield emitted
        if emitted.step.finish is None:
            lanes.append(lane)
            caches.append(session.caches)
    if not lanes:
        return
    batch = _Batch(target, lanes, merge(target.model, caches), pace)
    del caches
    try:
        with batch.transaction.guarded():
            while batch.lanes:
                yield from batch.round()
    finally:
        batch.close()


class _Lane:
    """One sequence of the batch."""

    def __init__(self, index: int, request: Request, drafter: Drafter | None) -> None:
        self.index, self.request, self.drafter = index, request, drafter
        self.bonus = -1
        self.remaining = request.max_tokens
        self.finish: str | None = None

    def prefill(self, session: Session, chunk: int) -> Emitted:
        """Compute the prompt; the forward of its last token gives the first token."""
        prompt = self.request.prompt
        self.request.stops.start()
        for done in range(0, len(prompt) - 1, chunk):
            session.take_in(prompt[done : min(done + chunk, len(prompt) - 1)])
        session.transaction.begin(1 + len(session.carried))
        logits, rows = session.forward(mx.array([[*session.carried, prompt[-1]]], mx.int32))
        token = read_token(self.chosen(logits[0, -1:]))
        session.commit(prompt[-1:], rows if rows is None else rows[:, -1:])
        ended = self.request.stops.find((token,)) is not None
        return self.emit((token,), None, ended, sum(cache.nbytes for cache in session.caches))

    def propose(self, count: int) -> Draft:
        """At most ``count`` drafts for this sequence."""
        if self.drafter is None or count < 1:
            return NOTHING
        return self.drafter.propose(self.bonus, count, self.request.sampler)

    def pack(self, draft: Draft, logits: mx.array) -> mx.array:
        """See `engine.accept`; logits [B, V]."""
        if self.request.sampler is None:
            return pack_greedy(draft.tokens, logits)
        return pack_sampled(draft, logits, self.request.sampler)

    def chosen(self, logits: mx.array) -> mx.array:
        """The token after a row of logits [1, V], [1]."""
        sampler = self.request.sampler
        if sampler is None:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        return sampler.draw(sampler.distribution(logits))

    def emit(self, tokens: tuple[int, ...], record: Round | None, ended: bool, nbytes: int) -> Emitted:
        """Book what was emitted."""
        self.bonus = tokens[-1]
        self.remaining -= len(tokens)
        if ended or self.remaining < 1:
            self.finish = "stop" if ended else "length"
        return Emitted(self.index, Step(tokens, record, self.finish), nbytes)


class _Batch:
    """The sequences that have not ended, and their merged caches."""

    def __init__(self, target: Target, lanes: list[_Lane], caches: list[Any], pace: Pace) -> None:
        self.target, self.lanes, self.pace = target, lanes, pace
        self.transaction = BatchTransaction(target.model, caches)
        drafter = lanes[0].drafter
        self._taps = target.tap(drafter.tap_layers) if drafter and drafter.tap_layers else None

    def close(self) -> None:
        """Restore the target's layers."""
        self.transaction.close()
        if self._taps is not None:
            self._taps.close()

    def round(self) -> Iterator[Emitted]:
        """Draft for all, verify all, and let each keep its own."""
        started = perf_counter()
        lanes, wish = self.lanes, self.pace.choose(max(lane.remaining for lane in self.lanes))
        proposed = [lane.propose(wish - 1) for lane in lanes]
        block = 1 + max(map(len, proposed))
        drafts = [_filled(draft, block - 1) for draft in proposed]
        bonuses = mx.array([[lane.bonus] for lane in lanes], mx.int32)
        blocks = mx.concatenate([bonuses, mx.stack([draft.tokens for draft in drafts])], axis=1)  # [S, B]
        if block > 1:
            launch(blocks)
        drafted = perf_counter()
        self.transaction.begin(block)
        logits, rows = self.target.forward(blocks, self.transaction.caches, self._taps)
        packs = [
            lane.pack(draft, logits[row]) for row, (lane, draft) in enumerate(zip(lanes, drafts, strict=True))
        ]
        packed = mx.concatenate(packs)  # [S · (1 + B)]
        launch(packed, rows)
        values = read_tokens(packed)
        ended = perf_counter()
        width = block + 1
        verdicts = [
            unpack(values[row * width : (row + 1) * width], lane.request.stops, lane.remaining)
            for row, lane in enumerate(lanes)
        ]
        self.transaction.commit([verdict.kept for verdict in verdicts])
        share = sum(cache.nbytes for cache in self.transaction.caches) // len(lanes)
        emitted = []
        for row, (lane, verdict) in enumerate(zip(lanes, verdicts, strict=True)):
            if lane.drafter is not None:
                seen = None if rows is None else rows[row : row + 1, : verdict.kept]
                lane.drafter.observe((lane.bonus, *verdict.tokens[:-1]), seen)
            self.pace.record(block, verdict.accepted, ended - started)
            record = Round(block, verdict.accepted, drafted - started, ended - drafted)
            emitted.append(lane.emit(verdict.tokens, record, verdict.stopped, share))
        left = [row for row, lane in enumerate(lanes) if lane.finish is None]
        if len(left) < len(lanes):
            self.lanes = [lanes[row] for row in left]
            if left:
                self.transaction.filter(left)
        yield from emitted


def _filled(draft: Draft, count: int) -> Draft:
    """A draft of exactly ``count`` tokens: what it leaves open is a guess as good as any."""
    missing = count - len(draft)
    if not missing:
        return draft
    tokens = mx.concatenate([draft.tokens, mx.zeros((missing,), mx.int32)])
    if draft.q is None:
        return Draft(tokens)
    guess = (mx.arange(draft.q.shape[-1]) == 0).astype(draft.q.dtype)
    return Draft(tokens, mx.concatenate([draft.q, mx.stack([guess] * missing)]))
