"""One request being decoded, a turn at a time: a chunk of its prompt, or a round.

The engine's thread gives every sequence its turn, see `engine.server.decoding.worker`. A sequence that is
left midway is closed; its session stays good.
"""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from time import perf_counter
from typing import Any

from mlx_lm.sample_utils import make_logits_processors

from engine.decode import Processor, Round
from engine.draft_length import DraftLength, FixedDraftLength
from engine.generate import Outcome, SamplingOptions, generate_in_session
from engine.sampling import Sampling
from engine.server.decoding.sessions import Kept
from engine.server.decoding.work import Ended, Event, Progress, Work
from engine.target.loading import LoadedTarget

DIVIDE = 2**63  # seeds below zero count from the end, as clients may send any number of 64 bits


class Sequence:
    """The steps of one request in a session of its own."""

    def __init__(
        self,
        work: Work,
        target: LoadedTarget,
        kept: Kept,
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
        self._cached = 0
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
        yield Progress(done, total)
        for end in (min(work.lasting, total - 1), total - 1):
            while done < end:
                upto = min(done + self._chunk, end)
                session.take_in(work.prompt[done:upto])
                done = upto
                yield Progress(done, total)
            if done == work.lasting:
                session.mark()
        steps = generate_in_session(
            self._target,
            session,
            work.prompt,
            work.max_tokens,
            SamplingOptions(
                _sampling(work),
                tuple(_processors(work)),
                work.stop_texts,
                logprobs=work.logprobs,
            ),
            draft_length=self._pace,
            prefill_chunk=self._chunk,
            started=self._began,
            text=False,
        )
        with closing(steps):
            for step in steps:
                yield step
        if step.outcome is not None:
            yield self._ended(step.outcome)

    def _ended(self, outcome: Outcome) -> Ended:
        drafter = self.kept.drafter
        return Ended(
            finish=outcome.finish,
            drafter=drafter.name if drafter else None,
            block=self._work.block or ("auto" if drafter else None),
            why_off=None if outcome.verify_rounds else self._why_off or _silence(outcome.rounds),
            rounds=tuple(outcome.rounds),
            drafter_forwards=outcome.drafter_forwards,
            cached_tokens=self._cached,
            queue_s=self._began - self._submitted,
            prefill_s=outcome.prefill_s,
            decode_s=outcome.decode_s,
            resident_bytes=outcome.resident_bytes,
            cache_classes=outcome.cache_classes,
            kept_positions=outcome.kept,
            coded=outcome.kv,
        )


def _silence(rounds: list[Round]) -> str:
    """Why nothing was verified though something might have been drafted."""
    if not rounds:
        return "the answer ended with its first token"
    return "the drafter had nothing to propose, or plain steps were the faster ones here"


def pace_of(work: Work, kept: Kept, fresh: Callable[[], DraftLength]) -> DraftLength:
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


def _sampling(work: Work) -> Sampling:
    sampling = work.sampling
    if not sampling.greedy and sampling.seed is not None and sampling.seed < 0:
        return replace(sampling, seed=sampling.seed + DIVIDE)
    return sampling


def _processors(work: Work) -> list[Processor]:
    """The grammar comes last: nothing may bring back what it forbids."""
    mlx_lm: Any = make_logits_processors
    processors: list[Processor] = mlx_lm(dict(work.bias) or None, **work.penalties)
    if work.grammar is not None:
        processors.append(work.grammar.processor(len(work.prompt)))
    return processors
