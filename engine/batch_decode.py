"""Several sequences decoded together: one verify forward for all, each with its own drafts and acceptance.

    blocks = [[bonus, d1 … d(B-1)] of every sequence]     [S, B]
    logits = target(blocks)                               one forward, [S, B, V]
    every sequence accepts, emits and keeps its own a + 1 positions

Prompts are computed one by one, then their caches are merged. A sequence that has fewer drafts than another
gets its block filled up; the filling is never accepted. The tokens are those every sequence would have had
alone, or when sampling, distributed as these; a seed gives the same text as alone where the block is fixed
and the drafter always has drafts. Drafters draft for one sequence at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import mlx.core as mx

from engine.acceptance import next_token, pack_greedy, pack_sampled, unpack
from engine.cache.batch import BatchTransaction, merge, refuse_single
from engine.cache.policy import NATIVE, KVPolicy
from engine.cache.stats import KVUse, kept_positions, kv_use
from engine.cache.transaction import new_caches, resident
from engine.decode import CLEAR_EVERY, Round, Step, check_request, default_draft_length
from engine.device import launch, read_token, read_tokens, wait_for
from engine.draft_length import Ask, DraftLength
from engine.drafters.base import Draft, Drafter
from engine.errors import ConfigurationError
from engine.restoration.session import RestorationPlan
from engine.sampling import Sampler
from engine.session import Session
from engine.stops import Stops
from engine.target.attention import CodedAttention
from engine.target.model import Target


@dataclass(frozen=True)
class Request:
    """One sequence to be continued; the fields are those of `engine.decode.decode`."""

    prompt: Sequence[int]
    max_tokens: int
    stops: Stops = field(default_factory=Stops)
    sampler: Sampler | None = None


@dataclass(frozen=True)
class Share:
    """A sequence's part of the batch's caches, all sequences counted alike."""

    classes: dict[str, int]  # class names of the merged caches with their counts
    nbytes: int  # their bytes divided by the sequences in them
    kv: KVUse | None  # likewise what coded layers store
    kept: int | None  # see `engine.cache.stats.kept_positions`
    restored: int  # positions times layers of this sequence that were restored
    drafter_forwards: int  # of this sequence's drafter


@dataclass(frozen=True)
class Emitted:
    """A step of one sequence."""

    request: int  # its place among the requests
    step: Step  # whose round has the seconds of the whole batch's
    share: Share | None  # with the last step


def decode_batch(
    target: Target,
    drafter: Drafter | None,
    requests: Sequence[Request],
    *,
    draft_length: DraftLength | None = None,
    prefill_chunk: int = 2048,
    policy: KVPolicy = NATIVE,
    restoration: RestorationPlan | None = None,
) -> Iterator[tuple[Emitted, ...]]:
    """Continue several prompts at once; see `engine.decode.decode`.

    Each sequence gets a twin of the drafter. Each request has stops and a sampler that no other shares.

    Yields:
        The first token of each sequence when it is known, by itself; then what every sequence of a round got.
    """
    if not requests:
        raise ConfigurationError("there is nothing to decode")
    for request in requests:
        check_request(request.prompt, request.max_tokens)
    draft_length = default_draft_length(drafter, draft_length)
    refuse_single(target.model, [new_caches(target.model, 1, policy)])
    sequences: list[_Sequence] = []
    caches: list[list[Any]] = []
    draft_length.start()
    for index, request in enumerate(requests):
        sequence = _Sequence(index, request, drafter.twin() if drafter else None, request.max_tokens)
        headroom = max(draft_length.largest, 1)
        opened = Session(target, sequence.drafter, headroom=headroom, policy=policy, restoration=restoration)
        with opened as session:
            step = sequence.prefill(session, prefill_chunk)
            sequence.restored = session.restored
        if step.finish is None:
            sequences.append(sequence)
            caches.append(session.caches)
            yield (Emitted(index, step, None),)
        else:
            yield (Emitted(index, step, _share(merge(target.model, [session.caches]), 1, sequence)),)
    if not sequences:
        return
    batch = _Batch(target, sequences, merge(target.model, caches), draft_length, policy)
    caches.clear()
    del session, opened
    with closing(batch):
        yield from batch.run()


def _share(caches: list[Any], sequences: int, own: "_Sequence") -> Share:
    (classes, nbytes), use = resident(caches), kv_use(caches)
    kv = None if use is None else KVUse(use.layers, use.values // sequences, use.nbytes // sequences)
    forwards = own.drafter.forwards if own.drafter is not None else 0
    return Share(classes, nbytes // sequences, kv, kept_positions(caches), own.restored, forwards)


@dataclass
class _Sequence:
    index: int
    request: Request
    drafter: Drafter | None
    remaining: int  # tokens that may still be emitted
    restored: int = 0  # positions times layers
    bonus: int = -1  # its last token, not in the caches yet
    finish: str | None = None

    def prefill(self, session: Session, chunk: int) -> Step:
        """Compute the prompt; the forward of its last token gives the first token."""
        prompt = self.request.prompt
        self.request.stops.start(prompt)
        for done in range(0, len(prompt) - 1, chunk):
            session.prefill(prompt[done : min(done + chunk, len(prompt) - 1)])
        session.transaction.begin(1 + len(session.uncached))
        logits, rows = session.forward(mx.array([[*session.uncached, prompt[-1]]], mx.int32))
        token = read_token(next_token(logits[0, -1:], self.request.sampler))
        session.commit(prompt[-1:], rows if rows is None else rows[:, -1:])
        return self.emit((token,), None)

    def pack(self, draft: Draft, logits: mx.array) -> mx.array:
        sampler = self.request.sampler
        return pack_sampled(draft, logits, sampler) if sampler else pack_greedy(draft.tokens, logits)

    def observe(self, tokens: tuple[int, ...], rows: mx.array | None) -> None:
        if self.drafter is not None:
            self.drafter.observe(tokens, rows if rows is None else rows[:, : len(tokens)])

    def emit(self, tokens: tuple[int, ...], record: Round | None, stopped: bool | None = None) -> Step:
        if stopped is None:
            stopped = self.request.stops.find(tokens) is not None
        self.bonus = tokens[-1]
        self.remaining -= len(tokens)
        if stopped or self.remaining < 1:
            self.finish = "stop" if stopped else "length"
        return Step(tokens, record, self.finish)


class _Batch:
    def __init__(
        self,
        target: Target,
        sequences: list[_Sequence],
        caches: list[Any],
        draft_length: DraftLength,
        policy: KVPolicy,
    ) -> None:
        self.target, self.sequences, self.draft_length = target, sequences, draft_length
        drafter = sequences[0].drafter
        with ExitStack() as opened:  # what fails half way leaves the model as it was
            self.transaction = BatchTransaction(target.model, caches)
            opened.callback(self.transaction.close)
            self._hooks = (
                target.hook_layers(drafter.target_layers) if drafter and drafter.target_layers else None
            )
            if self._hooks is not None:
                opened.callback(self._hooks.close)
            if policy.attended:
                opened.callback(CodedAttention(target.model).close)
            self.close = opened.pop_all().close
        self._block = 1  # of the next round, decided by `_plan`
        self._drafts: list[Draft] = []  # of every sequence, launched
        self._launch_s = 0.0
        self._silent = False  # the drafters were asked and none had anything to propose
        self._has_lookup = False  # a look-up paid after the last plain step, so one may after the next
        self._rounds = 0

    def run(self) -> Iterator[tuple[Emitted, ...]]:
        with self.transaction.guarded():
            self._plan()
            while self.sequences:
                if self._block > 1:
                    yield self._verify()
                else:
                    yield from self._plain_steps()

    def _plan(self) -> None:
        self._block, self._silent, self._has_lookup = 1, False, False
        if not (asks := self._asks()):
            return
        started = perf_counter()
        self._drafts = self.draft_length.drafts(asks, self.draft_length.largest)
        self._block = 1 + max(map(len, self._drafts))
        self._silent = self._block == 1 and self.draft_length.asked > 1
        launch([draft.tokens for draft in self._drafts])
        self._launch_s = perf_counter() - started

    def _asks(self) -> list[Ask]:
        return [
            Ask(each.drafter, each.bonus, each.remaining, each.request.sampler)
            for each in self.sequences
            if each.drafter is not None and each.finish is None
        ]

    def _verify(self) -> tuple[Emitted, ...]:
        """One round: verify the drafts that `_plan` has launched, and let each sequence keep its own."""
        started, sequences, block = perf_counter(), self.sequences, self._block
        drafts, self._drafts = self._drafts, []
        filled = mx.stack([mx.pad(draft.tokens, (0, block - 1 - len(draft))) for draft in drafts])
        logits, rows = self._forward(mx.concatenate([self._bonuses(), filled], axis=1))  # [S, B, V]
        pairs = list(zip(sequences, drafts, strict=True))
        parts = [each.pack(draft, logits[row, : 1 + len(draft)]) for row, (each, draft) in enumerate(pairs)]
        packed = mx.concatenate(parts)
        launch(packed, rows)  # a second graph: one giant graph chokes some devices
        draft_s = self._launch_s
        if self.draft_length.times_drafts:
            waiting = perf_counter()
            for draft in drafts:
                wait_for(draft.tokens)
            draft_s += perf_counter() - waiting
        values = iter(read_tokens(packed))
        verdicts = [
            unpack([next(values) for _ in range(2 + len(draft))], each.request.stops) for each, draft in pairs
        ]
        seconds = self._launch_s + perf_counter() - started
        self.transaction.commit([verdict.kept for verdict in verdicts])
        steps = []
        for row, ((each, draft), verdict) in enumerate(zip(pairs, verdicts, strict=True)):
            each.observe((each.bonus, *verdict.tokens[:-1]), rows if rows is None else rows[row : row + 1])
            looked_up = draft.chances is not None
            record = Round(1 + len(draft), verdict.accepted, draft_s, seconds - draft_s, looked_up)
            steps.append(each.emit(verdict.tokens, record, verdict.stopped))
        # learn from one of the longest drafts, each sequence in its turn
        whole = [pair for pair in zip(drafts, verdicts, strict=True) if len(pair[0]) == block - 1]
        draft, verdict = whole[self._rounds % len(whole)]
        looked_up = draft.chances is not None
        self.draft_length.record(block, verdict.accepted, seconds, draft_s, looked_up=looked_up)
        emitted = self._emitted(steps)
        self._drop_ended()
        self._plan()
        return emitted

    def _plain_steps(self) -> Iterator[tuple[Emitted, ...]]:
        """Pipelined plain steps until the draft length chooses a block or all sequences end."""
        started = perf_counter()
        tokens, rows = self._launch(self._bonuses())
        while True:
            self.transaction.commit([1] * len(self.sequences))
            if left := self._drop_ended():  # what was launched ahead stays good for the others
                tokens, rows = tokens[left], rows if rows is None else rows[left]
            for row, each in enumerate(self.sequences):
                each.observe((each.bonus,), rows if rows is None else rows[row : row + 1])
            most = max(each.remaining for each in self.sequences) - 1
            ahead = None
            plain = self._silent or self.draft_length.choose(most) == 1
            if most and plain and not self._has_lookup:
                ahead = self._launch(tokens[:, None])
            values = read_tokens(tokens)
            record = Round(1, 0, 0.0, perf_counter() - started)
            pairs = zip(self.sequences, values, strict=True)
            emitted = self._emitted([each.emit((value,), record) for each, value in pairs])
            going = [each for each in self.sequences if each.finish is None]
            if ahead is None or not going:  # it overlapped with nothing: no cost to learn
                self.transaction.abort()
                self._drop_ended()
                self._plan()
                yield emitted
                return
            self.draft_length.record(1, 0, record.verify_s)
            if self._silent:
                drafts = self.draft_length.drafts(self._asks(), self.draft_length.largest)
                self._silent = self.draft_length.asked > 1 and not any(map(len, drafts))
            self._has_lookup = self.draft_length.has_lookup(self._asks())
            yield emitted
            started = perf_counter()
            tokens, rows = ahead

    def _bonuses(self) -> mx.array:
        """The last token of each sequence, [S, 1]."""
        return mx.array([[each.bonus] for each in self.sequences], mx.int32)

    def _launch(self, tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        """Start a plain forward over [S, 1]: the next tokens [S] and hidden states, not waited for."""
        logits, rows = self._forward(tokens)
        samplers = [each.request.sampler for each in self.sequences]
        if any(samplers):
            following = mx.concatenate([next_token(logits[row], each) for row, each in enumerate(samplers)])
        else:
            following = next_token(logits[:, -1], None)
        launch(following, rows)
        return following, rows

    def _forward(self, tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        """Open a transaction and run [S, N] tokens forward: logits [S, N, V], states [S, N, K·hidden]."""
        self.transaction.begin(tokens.shape[1])
        return self.target.forward(tokens, self.transaction.caches, self._hooks)

    def _emitted(self, steps: Sequence[Step]) -> tuple[Emitted, ...]:
        self._rounds += 1
        if self._rounds % CLEAR_EVERY == 0:
            mx.clear_cache()
        caches, count = self.transaction.caches, len(self.sequences)
        return tuple(
            Emitted(each.index, step, _share(caches, count, each) if each.finish else None)
            for each, step in zip(self.sequences, steps, strict=True)
        )

    def _drop_ended(self) -> list[int]:
        """Let the sequences that have ended leave; the rows that stay, or none of them if all do."""
        left = [row for row, each in enumerate(self.sequences) if each.finish is None]
        if len(left) == len(self.sequences):
            return []
        self.sequences = [self.sequences[row] for row in left]
        if left:
            self.transaction.filter(left)
        return left
