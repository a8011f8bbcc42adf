"""One request decoded by a foreign engine, a token at a time, with the caches of its KV channel in it.

External engines decode greedily and hand on tokens alone, so everything else that a request
may ask for is refused by name. Nothing is kept for the next turn of a conversation.
"""

from collections.abc import Generator
from contextlib import closing
from time import perf_counter
from typing import Any

from engine.cache.transaction import resident
from engine.decode import Step
from engine.external_engines.engine import ExternalEngine
from engine.server.decoding.sessions import Kept
from engine.server.decoding.work import Ended, Event, Progress, Work
from engine.server.refusals import UnsupportedError
from engine.stops import Stops
from engine.target.loading import LoadedTarget


def refuse_beyond(guest: ExternalEngine, work: Work) -> None:
    """Raise UnsupportedError for what a foreign engine does not do, ConfigurationError for its channel."""
    asked = {
        "temperature": not work.sampling.greedy,
        "logprobs": work.logprobs is not None,
        "logit_bias": bool(work.bias),
        "response_format": work.grammar is not None,
        "block": work.block is not None,
        "drafter": work.drafter != "default",
    } | dict.fromkeys(work.penalties, True)
    for field, given in asked.items():
        if given:
            raise UnsupportedError(field, f"{field} is not supported with the engine {guest.name}")
    guest.refuse(work.channel.policy)


class GuestSequence:
    """The steps of one request."""

    kept: Kept | None = None

    def __init__(self, work: Work, target: LoadedTarget, guest: ExternalEngine, submitted: float) -> None:
        """Begin.

        Args:
            work: what is to be decoded; `refuse_beyond` has nothing against it.
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
        yield Progress(0, len(work.prompt))
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

    def _ended(self, finish: str, first: float) -> Ended:
        classes, nbytes = resident(self._caches)
        return Ended(
            finish=finish,
            drafter=None,
            block=None,
            why_off=f"the engine {self._guest.name} decodes this model",
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
