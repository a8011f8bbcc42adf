"""The round loop: prompt → prefill → (draft → verify → accept → commit)* → tokens.

    block  = [bonus, d1 … d(B-1)]       bonus: the last emitted token, not in the caches yet
    logits = target(block)              one forward; row i predicts the token after block[i]
    a      = number of drafts confirmed before the first that is not, 0 ≤ a ≤ B-1
    emit d1 … da and one token of the target; keep block[0..a] in the caches, drop the rest

A block of 1 is a plain step, pipelined as in mlx-lm's `generate_step`: the next forward is launched before
the token of the last one is read. At every yield the session holds the prompt and all emitted tokens but the
newest, so a caller may stop at any of them and go on from there.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import mlx.core as mx

from engine.acceptance import Processor, TokenSelector, unpack
from engine.cache.policy import NATIVE, KVPolicy
from engine.device import launch, read_tokens, wait_for
from engine.draft_length import Ask, DraftLength, FixedDraftLength
from engine.drafters.base import NOTHING, Draft, Drafter
from engine.errors import ConfigurationError, PromptError
from engine.logprobs import Logprobs, TokenLogprob
from engine.restoration.session import RestorationPlan
from engine.sampling import Sampler
from engine.session import Session
from engine.stops import Stops
from engine.target.model import Target

CLEAR_EVERY = 256  # rounds after which mlx's pool of freed buffers is given back


@dataclass(frozen=True)
class Round:
    """One verify forward. The seconds exclude what the caller did with earlier tokens."""

    block: int  # tokens in the forward, the bonus included; 1 is a plain step
    accepted: int  # drafts confirmed, 0 … block - 1
    # until the drafts were launched; with `stage_times`, and where the draft length asks, until computed
    draft_s: float
    verify_s: float  # the rest
    looked_up: bool = False  # its drafts are from a look-up, not from a network


@dataclass(frozen=True)
class Step:
    """Tokens to hand out, the round they came from (None: the prefill), and why it was the last."""

    tokens: tuple[int, ...]
    round: Round | None
    finish: str | None  # "stop" or "length" on the last step
    logprobs: tuple[TokenLogprob, ...] | None = None  # one a token, where they were asked for


@dataclass(frozen=True)
class Diagnosis:
    """Switches that change how the loop runs, not what it gives."""

    # Wait for the drafts separately, to tell drafting from verifying in a round's time. The device never
    # idles for it: the verify forward has been launched by then.
    stage_times: bool = False
    single_graph: bool = False  # draft and verify as one graph, which is slower where graphs are large
    compiled: bool = True  # short blocks as compiled graphs where the model allows it


def check_request(prompt: Sequence[int], max_tokens: int) -> None:
    """Refuse an empty prompt and a limit below 1."""
    if not prompt:
        raise PromptError("the prompt is empty")
    if max_tokens < 1:
        raise ConfigurationError(f"max_tokens must be at least 1, not {max_tokens}")


def default_draft_length(drafter: Drafter | None, chosen: DraftLength | None) -> DraftLength:
    """What chooses the blocks: by default the drafter's own block, 1 without a drafter."""
    draft_length = chosen or FixedDraftLength(drafter.block_size if drafter else 1)
    if drafter is None and draft_length.largest > 1:
        raise ConfigurationError(f"a block of {draft_length.largest} needs a drafter")
    return draft_length


def decode(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stops: Stops | None = None,
    sampler: Sampler | None = None,
    processors: Sequence[Processor] = (),
    logprobs: int | None = None,
    draft_length: DraftLength | None = None,
    prefill_chunk: int = 2048,
    caches: list[Any] | None = None,
    policy: KVPolicy = NATIVE,
    restoration: RestorationPlan | None = None,
    session: Session | None = None,
    diagnosis: Diagnosis | None = None,
) -> Generator[Step]:
    """Continue a prompt; the tokens are those of plain decoding, or when sampling, distributed as these.

    The drafter is bound to the target; without one every block is 1. ``processors`` change the target's
    logits before a token is chosen, as mlx-lm's do; ``logprobs`` asks for every token's log-probability and
    so many of the likeliest, 0 to 20. A token that ends the text is emitted. A ``session`` of this target and
    drafter is continued and stays open; without one, one is opened with caches, policy and restoration.

    Yields the first token as soon as it is known, then the tokens of each round. Raises InputError for an
    empty prompt, a number out of range and a block without a drafter or longer than the session was opened
    for, and ValueError on continuing after another continuation of the session was started.
    """
    check_request(prompt, max_tokens)
    if prefill_chunk < 1:
        raise ConfigurationError(f"prefill_chunk must be at least 1, not {prefill_chunk}")
    draft_length = default_draft_length(drafter, draft_length)
    if session is not None and draft_length.largest > session.headroom:
        raise ConfigurationError(
            f"a block of {draft_length.largest} needs a session opened for it, not for {session.headroom}"
        )
    records = None if logprobs is None else Logprobs(logprobs, target.vocab_size)
    diagnosis = diagnosis or Diagnosis()
    own = session or Session(
        target,
        drafter,
        headroom=max(draft_length.largest, 1),
        caches=caches,
        compiled=diagnosis.compiled,
        policy=policy,
        restoration=restoration,
    )
    selector = TokenSelector(sampler, processors, records)
    decoder = SequenceDecoder(own, draft_length, stops or Stops(), selector, max_tokens, diagnosis)
    try:
        with own.guarded() as check:
            yield decoder.prefill(prompt, prefill_chunk)
            check()
            for step in decoder.rounds():
                yield step
                check()
    finally:
        if session is None:
            own.close()


@dataclass(eq=False)
class SequenceDecoder:
    """One continuation: its rounds by itself, and what a batch needs to know of it."""

    session: Session
    draft_length: DraftLength
    stops: Stops
    selector: TokenSelector
    remaining: int  # tokens that may still be emitted
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    finish: str | None = None
    block: int = 1  # length of the next round, decided by `plan`
    draft: Draft = NOTHING  # its drafts [block - 1], launched
    launch_s: float = 0.0
    silent: bool = False  # the drafter was asked and had nothing to propose
    has_lookup: bool = False  # a look-up paid after the last plain step, so one may after the next
    bonus: int = -1
    timed: bool = (
        True  # whether the device does nothing else between rounds, so that their seconds tell costs
    )
    _rounds: int = 0

    def rounds(self) -> Iterator[Step]:
        """The steps after the first one."""
        self.plan()
        while not self.finish:
            if self.block > 1:
                yield self.verify()
            else:
                yield from self.plain_steps()

    def prefill(self, prompt: Sequence[int], chunk: int) -> Step:
        """Compute the prompt; the forward of its last token gives the first token."""
        done, last = self.session.resume(prompt), len(prompt) - 1
        while done < last:
            self.session.prefill(prompt[done : min(done + chunk, last)])
            done += chunk
        return self.first(self.launch_first(prompt))

    def launch_first(self, prompt: Sequence[int]) -> mx.array:
        """Start the forward of a prompt's last token, of which all others are in the session."""
        self.draft_length.start()
        self.stops.start(prompt)
        self.selector.start(prompt)
        _, packed, rows = self._launch([*self.session.uncached, prompt[-1]], self.selector.so_far)
        self.session.commit(prompt[-1:], rows)
        return packed

    def first(self, launched: mx.array) -> Step:
        """Wait for the first token."""
        token, *numbers = read_tokens(launched)
        return self.emit(
            (token,), None, self.stops.find((token,)) is not None, numbers, plan=False, learn=False
        )

    def plan(self) -> None:
        """Ask for the drafts of the next round."""
        self.block, self.has_lookup = 1, False
        if self.finish or self.session.drafter is None:
            return
        started = perf_counter()
        most = self.session.headroom - self.session.transaction.uncached
        (self.draft,) = self.draft_length.drafts(self.asks(self.bonus), most)
        self.block = 1 + len(self.draft)
        self.silent = self.block == 1 and self.draft_length.asked > 1
        if self.block > 1 and not self.diagnosis.single_graph:
            launch(self.draft.tokens)
        self.launch_s = perf_counter() - started

    def asks(self, bonus: int) -> list[Ask]:
        """The request for drafts after a token; none without a drafter."""
        drafter = self.session.drafter
        return [] if drafter is None else [Ask(drafter, bonus, self.remaining, self.selector.drafting)]

    def verify(self) -> Step:
        """One round: verify the drafts that `plan` has launched, accept, commit."""
        started = perf_counter()
        draft, self.draft = self.draft, NOTHING
        block = mx.concatenate([mx.array([*self.session.uncached, self.bonus], mx.int32), draft.tokens])
        before = self.selector.before(draft.tokens)
        logits, rows = self._forward(block, self.block)  # [B, V], [1, B, K·hidden]
        if before and not self.diagnosis.single_graph:
            launch(before)  # what processors may read, then the forward, which goes on while they read
            launch(logits, rows)
        packed = self.selector.of_block(draft, logits, before)
        launch(packed, rows)  # a second graph: one giant graph chokes some devices
        drafting_s = self.launch_s
        if self.diagnosis.stage_times or self.draft_length.times_drafts:
            waiting = perf_counter()
            wait_for(draft.tokens)
            drafting_s += perf_counter() - waiting
        values = read_tokens(packed)  # [1 + B], and what was recorded
        verdict = unpack(values, self.stops)
        seconds = self.launch_s + perf_counter() - started
        self.session.commit((self.bonus, *verdict.tokens[:-1]), rows)
        looked_up = draft.chances is not None
        record = Round(self.block, verdict.accepted, drafting_s, seconds - drafting_s, looked_up)
        return self.emit(verdict.tokens, record, verdict.stopped, values[1 + self.block :])

    def plain_steps(self) -> Iterator[Step]:
        """Pipelined plain steps until the draft length chooses a block or the sequence ends."""
        started, fed = perf_counter(), self.bonus
        token, packed, rows = self._launch([*self.session.uncached, fed], self.selector.so_far)
        while True:
            self.session.commit((fed,), rows)
            ahead = None
            plain = self.silent or self.draft_length.choose(self.remaining - 1) == 1
            if self.remaining > 1 and plain and not self.has_lookup:
                ahead = self._launch(token, self.selector.joined(token), 1)
            value, *numbers = read_tokens(packed)
            record = Round(1, 0, 0.0, perf_counter() - started)
            stopped = self.stops.find((value,)) is not None
            if ahead is None or stopped:  # the last plain step overlaps with nothing: no cost to learn
                self.session.transaction.abort()
                yield self.emit((value,), record, stopped, numbers, learn=False)
                return
            step = self.emit((value,), record, stopped, numbers, plan=False)
            if self.silent and (asks := self.asks(value)):
                [draft] = self.draft_length.drafts(asks, self.session.headroom)
                self.silent = self.draft_length.asked > 1 and not len(draft)
            self.has_lookup = self.draft_length.has_lookup(self.asks(value))
            yield step
            started = perf_counter()
            (token, packed, rows), fed = ahead, value

    def _launch(
        self, tokens: mx.array | list[int], so_far: mx.array, ahead: int = 0
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """Start a plain forward: the next token [1], the same with its record, and hidden states."""
        logits, rows = self._forward(tokens)
        if self.selector.processors:
            launch(so_far)
            launch(logits, rows)
        following, packed = self.selector.of_row(logits[-1:], so_far, ahead)
        launch(packed, rows)
        return following, packed, rows

    def _forward(
        self, tokens: mx.array | list[int], wanted: int | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """Open a transaction and run the tokens [N] forward.

        Logits [N, V] and hidden states [1, N, K·hidden] of the last ``wanted``, or of all that are new.
        """
        fed = mx.array(tokens, mx.int32) if isinstance(tokens, list) else tokens
        count = int(fed.shape[0])
        skipped = self.session.transaction.uncached if wanted is None else count - wanted
        self.session.transaction.begin(count)
        logits, rows = self.session.forward(fed[None])
        if skipped:
            return logits[0, skipped:], None if rows is None else rows[:, skipped:]
        return logits[0], rows

    def emit(
        self,
        tokens: tuple[int, ...],
        record: Round | None,
        stopped: bool,
        numbers: Sequence[int],
        *,
        plan: bool = True,
        learn: bool = True,
    ) -> Step:
        """Book a finished round, and start drafting the next block before its tokens are handed out."""
        self.bonus = tokens[-1]
        self.remaining -= len(tokens)
        self._rounds += 1
        self.selector.note(tokens)
        if record is not None and learn:
            self.draft_length.record(
                record.block,
                record.accepted,
                record.draft_s + record.verify_s if self.timed else 0.0,
                record.draft_s if self.timed else 0.0,
                looked_up=record.looked_up,
            )
        if stopped or self.remaining < 1:
            self.finish = "stop" if stopped else "length"
        elif plan:
            self.plan()
        if self._rounds % CLEAR_EVERY == 0:
            mx.clear_cache()
        return Step(tokens, record, self.finish, self.selector.records(tokens, numbers))
