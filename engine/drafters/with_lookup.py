"""Prompt lookup next to another drafter: each round the one whose drafts did better in this text.

A look-up costs no forward, so it may be confirmed a little less. It is tried in every round, also where the
other drafter is asked, and how much comes true is counted by the length of the match. The other's score fades
while it is not asked, so that it gets another chance. Scores begin again with each continuation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.drafters.base import Draft, Drafter
from engine.drafters.prompt_lookup import PromptLookup
from engine.sampling import Sampler
from engine.target.model import Target

LOOKED_UP = (1.0, 2.0, 3.0, 4.0)  # drafts believed to come true after matches of 1, 2–3, 4–7 and more tokens
PROPOSED = 2.0  # … of a drafter that was not tried yet
TRUST = 2.0  # trials' worth of these beliefs
FORGET = 0.95  # weight of the past after each trial
FADE = 0.98  # … after each round in which the other drafter was not asked
FREE = 0.8  # of a round's time is left without the other's forward, measured with a DFlash drafter


class DraftScore:
    """How many drafts of a kind were confirmed a round, beginning with a belief."""

    def __init__(self, believed: float) -> None:
        self._believed, self._confirmed, self._trials = believed, 0.0, 0.0

    def add(self, confirmed: int) -> None:
        self.fade(FORGET)
        self._confirmed += confirmed
        self._trials += 1

    def fade(self, kept: float) -> None:
        self._confirmed *= kept
        self._trials *= kept

    @property
    def tokens(self) -> float:
        return 1 + (self._confirmed + TRUST * self._believed) / (self._trials + TRUST)


@dataclass
class _Guess:
    score: DraftScore  # where the outcome belongs
    tokens: list[int]  # the bonus token and the drafts
    seen: int = 0  # how many of them the text has confirmed

    def open_after(self, token: int) -> bool:
        """Whether the outcome is still open after the text's next token; when not, it is counted."""
        if token == self.tokens[self.seen]:
            self.seen += 1
            if self.seen < len(self.tokens):
                return True
        if self.seen:
            self.score.add(self.seen - 1)
        return False


class WithLookup:
    """Two drafters, told of the same tokens."""

    def __init__(self, other: Drafter) -> None:
        self._lookup, self._other = PromptLookup(), other
        self.name = f"{self._lookup.name}+{other.name}"
        self.target_layers, self.block_size = other.target_layers, other.block_size
        self._forget()

    def _forget(self) -> None:
        self._matches = [DraftScore(believed) for believed in LOOKED_UP]
        self._other_score = DraftScore(PROPOSED)
        self._guesses: list[_Guess] = []  # that the text has not decided yet
        self._asked = False  # the other, for the round on its way

    def bind(self, target: Target) -> None:
        self._other.bind(target)
        self.target_layers = self._other.target_layers

    def twin(self) -> "WithLookup":
        return WithLookup(self._other.twin())

    def start(self) -> None:
        self._lookup.start()
        self._other.start()
        self._forget()

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:
        self._lookup.observe(tokens, None)
        self._other.observe(tokens, hidden_states)
        if self._asked:
            self._asked = False
            self._other_score.add(len(tokens) - 1)
        for token in tokens if self._guesses else ():
            self._guesses = [guess for guess in self._guesses if guess.open_after(token)]

    def rewind(self, count: int) -> bool:
        if not (self._other.rewind(count) and self._lookup.rewind(count)):
            return False
        self._forget()
        return True

    def mark(self) -> Callable[[], None]:
        lookup, other = self._lookup.mark(), self._other.mark()

        def back() -> None:
            lookup()
            other()
            self._forget()

        return back

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        drafts, length = self._lookup.look_up(bonus, count)
        if drafts:
            score = self._matches[min(length.bit_length(), len(LOOKED_UP)) - 1]
            self._guesses.append(_Guess(score, [bonus, *drafts]))
            if score.tokens > FREE * self._other_score.tokens:
                self._other_score.fade(FADE)
                return Draft(mx.array(drafts, mx.int32))
        draft = self._other.propose(bonus, count, sampler)
        self._asked = len(draft) > 0
        return draft

    @property
    def nbytes(self) -> int:
        return self._lookup.nbytes + self._other.nbytes

    @property
    def mark_nbytes(self) -> int:
        return self._other.mark_nbytes

    @property
    def forwards(self) -> int:
        return self._other.forwards
