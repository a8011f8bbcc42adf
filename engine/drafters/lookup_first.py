"""Prompt lookup where the text repeats itself, another drafter where it does not.

A look-up costs nothing beside a forward of a network, so it goes first wherever at least `SHORTEST` tokens
match; only then is the other drafter asked.
"""

from collections.abc import Sequence

import mlx.core as mx

from engine.drafters.base import Draft, Drafter
from engine.drafters.prompt_lookup import PromptLookup
from engine.sampling import Sampler
from engine.target import Target

SHORTEST = 3


class LookupFirst:
    """Two drafters, told of the same tokens; the free one is asked first."""

    def __init__(self, other: Drafter, shortest: int = SHORTEST) -> None:
        """Ask ``other`` where fewer than ``shortest`` tokens match."""
        self._lookup, self._other = PromptLookup(shortest), other
        self.name = f"{self._lookup.name}+{other.name}"
        self.tap_layers, self.block_size = other.tap_layers, other.block_size

    def bind(self, target: Target) -> None:
        """Bind the other drafter.

        Raises:
            DrafterMismatchError: it was made for another target.
        """
        self._other.bind(target)

    def twin(self) -> "LookupFirst":
        """See `Drafter.twin`."""
        return LookupFirst(self._other.twin(), self._lookup.shortest)

    def start(self) -> None:
        """Forget the sequence."""
        self._lookup.start()
        self._other.start()

    def observe(self, tokens: Sequence[int], taps: mx.array | None) -> None:
        """Tell both."""
        self._lookup.observe(tokens, None)
        self._other.observe(tokens, taps)

    def rewind(self, count: int) -> bool:
        """Both forget, or neither."""
        return self._other.rewind(count) and self._lookup.rewind(count)

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        """What followed the last time, or what the other drafter proposes."""
        draft = self._lookup.propose(bonus, count, sampler)
        return draft if len(draft) else self._other.propose(bonus, count, sampler)

    @property
    def nbytes(self) -> int:
        """Resident bytes of both."""
        return self._lookup.nbytes + self._other.nbytes
