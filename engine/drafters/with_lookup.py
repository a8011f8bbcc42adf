"""Prompt lookup beside another drafter: each round the one whose drafts have fared better in this text.

A look-up costs nothing beside a forward of a network, so it may be confirmed a little less. How much a match
is worth depends on its length and on the text. What a look-up would have drafted is known in every round,
also where the other drafter was asked, and how much of it comes true is counted as the text goes on.

Nothing is remembered from one text to the next, so the choice depends on the text's own tokens alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.drafters.base import Draft, Drafter
from engine.drafters.prompt_lookup import PromptLookup
from engine.sampling import Sampler
from engine.target import Target

CLASSES = 4  # of matches, by length: 1, 2 or 3, 4 to 7, longer
FORGET = 0.95  # weight of the past after each trial
TRUST = 2.0  # trials' worth of belief in what is expected beforehand
FREE = 0.8  # of a round's time is left where the other drafter is not asked
EXPECTED = 2.0  # confirmed drafts of a drafter nobody has tried


@dataclass
class Record:
    """How many drafts of a kind were confirmed, beginning with a belief."""

    believed: float
    _confirmed: float = 0.0
    _trials: float = 0.0

    def add(self, confirmed: int) -> None:
        """One more trial."""
        self._confirmed = FORGET * self._confirmed + confirmed
        self._trials = FORGET * self._trials + 1

    @property
    def tokens(self) -> float:
        """Tokens that a round with such drafts is expected to emit."""
        return 1 + (self._confirmed + TRUST * self.believed) / (self._trials + TRUST)


@dataclass
class _Guess:
    """Looked-up drafts on trial.

    Attributes:
        record: where the outcome belongs.
        tokens: the bonus token and the drafts.
        seen: how many of them the text has confirmed.
    """

    record: Record
    tokens: list[int]
    seen: int = 0

    def open_after(self, token: int) -> bool:
        """Whether the outcome is still open after the text's next token; when not, it is booked."""
        if token == self.tokens[self.seen]:
            self.seen += 1
            if self.seen < len(self.tokens):
                return True
        if self.seen:
            self.record.add(self.seen - 1)
        return False


class WithLookup:
    """Two drafters, told of the same tokens."""

    def __init__(self, other: Drafter) -> None:
        """Look up, or ask ``other``."""
        self._lookup, self._other = PromptLookup(), other
        self.name = f"{self._lookup.name}+{other.name}"
        self.tap_layers, self.block_size = other.tap_layers, other.block_size
        self._guesses: list[_Guess] = []
        self._asked = False  # the other, in the round that is on its way
        self._forget()

    def bind(self, target: Target) -> None:
        """Bind the other drafter.

        Raises:
            DrafterMismatchError: it was made for another target.
        """
        self._other.bind(target)

    def twin(self) -> "WithLookup":
        """See `Drafter.twin`."""
        return WithLookup(self._other.twin())

    def start(self) -> None:
        """Forget the sequence."""
        self._lookup.start()
        self._other.start()
        self._forget()

    def observe(self, tokens: Sequence[int], taps: mx.array | None) -> None:
        """Tell both, and book how the drafts have fared."""
        self._lookup.observe(tokens, None)
        self._other.observe(tokens, taps)
        if self._asked:
            self._asked = False
            self._fared.add(len(tokens) - 1)
        for token in tokens if self._guesses else ():
            self._guesses = [guess for guess in self._guesses if guess.open_after(token)]

    def rewind(self, count: int) -> bool:
        """Both forget, or neither."""
        if not (self._other.rewind(count) and self._lookup.rewind(count)):
            return False
        self._drop()
        return True

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        """What followed the last time, or what the other drafter proposes."""
        drafts, length = self._lookup.look_up(bonus, count)
        if drafts:
            record = self._matches[min(length.bit_length(), CLASSES) - 1]
            self._guesses.append(_Guess(record, [bonus, *drafts]))
            if record.tokens > FREE * self._fared.tokens:
                return Draft(mx.array(drafts, mx.int32))
        draft = self._other.propose(bonus, count, sampler)
        self._asked = len(draft) > 0
        return draft

    @property
    def nbytes(self) -> int:
        """Resident bytes of both."""
        return self._lookup.nbytes + self._other.nbytes

    def _forget(self) -> None:
        self._matches = [Record(believed=1.0 + kind) for kind in range(CLASSES)]
        self._fared = Record(believed=EXPECTED)
        self._drop()

    def _drop(self) -> None:
        """Rounds that have not come to their end never will."""
        self._guesses = []
        self._asked = False
