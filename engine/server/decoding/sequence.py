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

from engine.cache.stats import kept_positions, kv_use
from engine.cache.transaction import resident
from engine.decode import Processor, Round, Step, decode
from engine.draft_length import DraftLength, FixedDraftLength
from engine.errors import GenerationError
from engine.sampling import Sampler
from engine.server.decoding.sessions import Kept
from engine.server.decoding.work import Ended, Event, Progress, Work
from engine.stops import Stops
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
        yield Progress(done, total)
        for end in (min(work.lasting, total - 1), total - 1):
            while done < end:
                upto = min(done + self._chunk, end)
                session.take_in(work.prompt[done:upto])
                done = upto
                yield Progress(done, total)
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

    def _ended(self) -> Ended:
        drafter = self.kept.drafter
        classes, nbytes = resident(self.kept.session.caches)
        spoke = any(record.block > 1 for record in self._rounds)
        return Ended(
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


def _sampler(work: Work) -> Sampler | None:
    sampling = work.sampling
    if sampling.greedy:
        return None
    if sampling.seed is not None and sampling.seed < 0:
        sampling = replace(sampling, seed=sampling.seed + DIVIDE)
    return Sampler(sampling)


def _processors(work: Work) -> list[Processor]:
    """The grammar comes last: nothing may bring back what it forbids."""
    mlx_lm: Any = make_logits_processors
    processors: list[Processor] = mlx_lm(dict(work.bias) or None, **work.penalties)
    if work.grammar is not None:
        processors.append(work.grammar.processor(len(work.prompt)))
    return processors
