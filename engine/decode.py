"""The round loop: prompt → prefill → (draft → verify → accept → commit)* → tokens.

    block  = [bonus, d1 … d(B-1)]       bonus: the last emitted token, not in the caches yet
    logits = target(block)              one forward; row i predicts the token after block[i]
    a      = length of the longest prefix of drafts that equals argmax(logits), 0 ≤ a ≤ B-1
    emit d1 … da and argmax(logits[a]); keep block[0..a] in the caches, drop the rest

A block of 1 is a plain step, pipelined as in mlx-lm's `generate_step`: the next forward is launched before
the token of the last one is read. Greedy only, one sequence. Whatever is yielded has been committed before.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx

from engine.accept import pack_greedy, unpack_greedy
from engine.cache.transaction import Transaction, new_caches
from engine.drafters.base import Drafter
from engine.errors import ConfigurationError, PromptError
from engine.host import launch, read_token, read_tokens, wait, wait_for
from engine.pace import Fixed, Pace
from engine.target import Target

CLEAR_EVERY = 256  # rounds after which mlx's pool of freed buffers is given back


@dataclass(frozen=True)
class Round:
    """One verify forward. The seconds exclude what the caller did with earlier tokens."""

    block: int  # tokens in the forward, the bonus included; 1 is a plain step
    accepted: int  # drafts confirmed, 0 … block - 1
    draft_s: float
    verify_s: float


@dataclass(frozen=True)
class Step:
    """Tokens to hand out, the round they came from (None: the prefill), and why it was the last."""

    tokens: tuple[int, ...]
    round: Round | None
    finish: str | None  # "stop" or "length" on the last step


def decode(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stops: Collection[int] = (),
    pace: Pace | None = None,
    prefill_chunk: int = 2048,
    caches: list[Any] | None = None,
) -> Iterator[Step]:
    """Continue a prompt greedily; the tokens are those of plain decoding.

    Args:
        target: the model.
        drafter: bound to ``target``; None decodes plainly.
        prompt: token ids, at least one.
        max_tokens: emit at most so many tokens.
        stops: tokens after which to stop; the stop token itself is emitted.
        pace: chooses block lengths (default: the drafter's own, 1 without a drafter).
        prefill_chunk: prompt positions per forward.
        caches: empty caches from `new_caches`, to look into afterwards; made here if not given. At every
            yield they cover the prompt and all emitted tokens, the newest perhaps excepted.

    Yields:
        The first token as soon as it is known, then the tokens of each round.

    Raises:
        PromptError: the prompt is empty.
        ConfigurationError: ``max_tokens`` is not positive, or a block was asked for without a drafter.
    """
    if not prompt:
        raise PromptError("the prompt is empty")
    if max_tokens < 1:
        raise ConfigurationError(f"max_tokens must be at least 1, not {max_tokens}")
    pace = pace or Fixed(drafter.block_size if drafter else 1)
    if drafter is None and pace.largest > 1:
        raise ConfigurationError(f"a block of {pace.largest} needs a drafter")
    run = _Run(target, drafter, pace, stops, caches or new_caches(target.model, max(pace.largest, 1)))
    try:
        with run.transaction.guarded():
            yield run.prefill(prompt, max_tokens, prefill_chunk)
            run.plan()
            while not run.finish:
                if run.block > 1:
                    yield run.verify()
                else:
                    yield from run.plain_spell()
    finally:
        run.close()


class _Run:
    """One sequence on its way: what the steps of the loop share."""

    def __init__(
        self, target: Target, drafter: Drafter | None, pace: Pace, stops: Collection[int], caches: list[Any]
    ) -> None:
        self.target, self.drafter, self.pace, self.stops = target, drafter, pace, frozenset(stops)
        self.transaction = Transaction(caches)
        self.taps = target.tap(drafter.tap_layers) if drafter and drafter.tap_layers else None
        self.finish: str | None = None
        self.block = 1  # length of the next round, decided by `plan`
        self._drafts = mx.array([], mx.int32)  # its drafts [block - 1], launched
        self._launch_s = 0.0
        self._bonus = -1
        self._remaining = 0
        self._rounds = 0

    def close(self) -> None:
        """Restore the target's layers."""
        if self.taps is not None:
            self.taps.close()

    def prefill(self, prompt: Sequence[int], max_tokens: int, chunk: int) -> Step:
        """Take in the prompt; the forward of its last token gives the first token."""
        self._remaining = max_tokens
        self.pace.start()
        if self.drafter is not None:
            self.drafter.start()
        done, last = 0, len(prompt) - 1
        while done < last:
            part = prompt[done : min(done + chunk, last)]
            _, rows = self._forward(mx.array([part]))
            wait([cache.state for cache in self.transaction.caches], rows)
            self._observe(part, rows)
            mx.clear_cache()
            done += len(part)
        logits, rows = self._forward(mx.array([prompt[last:]]))
        token = read_token(mx.argmax(logits[0, -1]))
        self._observe(prompt[last:], rows)
        return self._emit((token,), None, token in self.stops, plan=False)

    def plan(self) -> None:
        """Choose the next block and start drafting it."""
        if self.finish:
            return
        self.block = 1 if self.drafter is None else self.pace.choose(self._remaining)
        if self.drafter is not None and self.block > 1:
            started = perf_counter()
            self._drafts = self.drafter.propose(self._bonus, self.block - 1).astype(mx.int32)
            launch(self._drafts)
            self._launch_s = perf_counter() - started

    def verify(self) -> Step:
        """One round: verify the drafts that `plan` has launched, accept, commit."""
        started = perf_counter()
        drafts, self._drafts = self._drafts, mx.array([], mx.int32)
        block = mx.concatenate([mx.array([self._bonus], mx.int32), drafts])  # [B]
        self.transaction.begin(self.block)
        logits, rows = self._forward(block[None])  # [1, B, V], [1, B, K·hidden]
        packed = pack_greedy(drafts, logits)
        built = perf_counter()
        wait_for(drafts)  # the verify graph was built meanwhile; two graphs, never one giant one
        drafted = perf_counter()
        launch(packed, rows)
        verdict = unpack_greedy(read_tokens(packed), self.stops)  # [1 + B]
        ended = perf_counter()
        self.transaction.commit(verdict.kept)
        kept = (self._bonus, *verdict.tokens[:-1])
        self._observe(kept, None if rows is None else rows[:, : len(kept)])
        record = Round(
            block=self.block,
            accepted=verdict.accepted,
            draft_s=self._launch_s + drafted - built,
            verify_s=built - started + ended - drafted,
        )
        return self._emit(verdict.tokens, record, verdict.stopped)

    def plain_spell(self) -> Iterator[Step]:
        """Pipelined plain steps until the pace wants a block or the sequence ends."""
        started = perf_counter()
        self.transaction.begin(1)
        token, rows = self._launch(mx.array([[self._bonus]], mx.int32))
        self.transaction.commit(1)
        fed = self._bonus
        while True:
            ahead = None
            if self._remaining > 1 and self.pace.choose(self._remaining - 1) == 1:
                self.transaction.begin(1)
                ahead = self._launch(token.reshape(1, 1))
            value = read_token(token)
            seconds = perf_counter() - started
            if value in self.stops:
                self.transaction.abort()
            elif ahead is not None:
                self.transaction.commit(1)
            self._observe((fed,), rows)
            record, stopped = Round(1, 0, 0.0, seconds), value in self.stops
            if ahead is None or stopped:  # the last step of a spell overlaps with nothing: no cost to learn
                yield self._emit((value,), record, stopped, learn=False)
                return
            yield self._emit((value,), record, stopped, plan=False)
            started = perf_counter()
            (token, rows), fed = ahead, value

    def _launch(self, token: mx.array) -> tuple[mx.array, mx.array | None]:
        """Start a plain forward of [1, 1]; the token it predicts [] and the taps, not waited for."""
        logits, rows = self._forward(token)
        following = mx.argmax(logits[0, -1]).astype(mx.int32)
        launch(following, rows)
        return following, rows

    def _forward(self, tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        return self.target.forward(tokens, self.transaction.caches, self.taps)

    def _observe(self, tokens: Sequence[int], rows: mx.array | None) -> None:
        if self.drafter is not None:
            self.drafter.observe(tokens, rows)

    def _emit(
        self,
        tokens: tuple[int, ...],
        record: Round | None,
        stopped: bool,
        *,
        plan: bool = True,
        learn: bool = True,
    ) -> Step:
        """Book a finished round, and start drafting the next block before its tokens are handed out."""
        self._bonus = tokens[-1]
        self._remaining -= len(tokens)
        self._rounds += 1
        if record is not None and learn:
            self.pace.record(record.block, record.accepted, record.draft_s + record.verify_s)
        if stopped or self._remaining < 1:
            self.finish = "stop" if stopped else "length"
        elif plan:
            self.plan()
        if self._rounds % CLEAR_EVERY == 0:
            mx.clear_cache()
        return Step(tokens, record, self.finish)
