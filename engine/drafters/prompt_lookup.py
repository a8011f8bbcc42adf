"""Drafts without a model: what followed the last time the text ended like this (prompt lookup).

The longest suffix of the text that has occurred before is looked up, its most recent occurrence wins, and the
tokens that followed it are the drafts; a continuation that reaches the end of the text runs on into itself.
Measured on the shipped prompts (192 greedy tokens each): the most recent of the longest matches is confirmed
more often than the first, the most frequent or a vote; a block of more than 4·L for L tokens does not pay.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Self
from zlib import crc32

import mlx.core as mx

from engine.drafters.base import NOTHING, Draft, TextDrafter
from engine.errors import ConfigurationError
from engine.sampling import Sampler
from engine.target.model import Target

GRAMS = (4, 16)  # lengths that are indexed besides the shortest match
SLOTS = 1 << 16  # of each hash table
LOOK_AT = 32  # most recent places of a gram that are compared
LONGEST = 32  # tokens of a suffix that are compared
BELIEVED = (0.4, 0.67, 0.75, 0.8)  # chance of a draft after matches of 1, 2–3, 4–7 and more tokens
TRUST = 2.0  # trials' worth of these beliefs
FORGET = 0.95  # weight of the past after each trial
REACH = 4  # block tokens, the bonus included, that one matched token is trusted with


class TokenIndex:
    """Where each n-gram of a growing text occurred: hash chains as in LZ77 compressors.

    Place e is the position behind the e-th token. For each n, a table maps the hash of an n-gram to the last
    place one ended at, and each place to the one before. Adding and removing a token is O(1).
    """

    def __init__(self, shortest: int) -> None:
        self.grams = tuple(sorted({shortest, *(n for n in GRAMS if n > shortest)}))
        self._tokens = array("i")
        self._latest = [array("i", [0]) * SLOTS for _ in self.grams]  # by hash; 0: nowhere
        self._before = [array("i", [0]) for _ in self.grams]  # by place

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, token: int) -> None:
        self._tokens.append(token)
        place = len(self._tokens)
        for n, latest, before in zip(self.grams, self._latest, self._before, strict=True):
            if place < n:
                before.append(0)
                continue
            slot = _slot(self._tokens[-n:])
            before.append(latest[slot])
            latest[slot] = place

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.append(token)

    def __delitem__(self, last: slice) -> None:
        for _ in range(len(self) - last.start):
            self.pop()

    def pop(self) -> None:
        place = len(self._tokens)
        for n, latest, before in zip(self.grams, self._latest, self._before, strict=True):
            earlier = before.pop()
            if place >= n:
                latest[_slot(self._tokens[-n:])] = earlier
        self._tokens.pop()

    def find(self, last: int) -> tuple[int, int]:
        """Where the longest suffix of the text and a ``last`` token ended before, and its length, 0 for none.

        Of a gram that occurred at more than `LOOK_AT` places the most recent ones are compared, and suffixes
        of more than `LONGEST` tokens count as equal.
        """
        text = self._tokens[-LONGEST:]
        text.append(last)
        for n, latest, before in reversed(list(zip(self.grams, self._latest, self._before, strict=True))):
            if len(text) < n:
                continue
            best, longest = 0, 0
            place = latest[_slot(text[-n:])]
            for _ in range(LOOK_AT):
                if not place or longest == LONGEST:
                    break
                length = self._shared(text, place)
                if length > longest:
                    best, longest = place, length
                place = before[place]
            if longest >= n:
                return best, longest
        return 0, 0

    def following(self, place: int, last: int, count: int) -> list[int]:
        """``count`` tokens from a place on, running through ``last`` and then into the answer itself."""
        tokens = [*self._tokens[place : place + count], last][:count]
        period = len(self._tokens) + 1 - place  # tokens from the place to the end of the text and `last`
        while len(tokens) < count:
            tokens.append(tokens[len(tokens) - period])
        return tokens

    @property
    def nbytes(self) -> int:
        return sum(getsizeof(part) for part in (self._tokens, *self._latest, *self._before))

    def _shared(self, text: "array[int]", place: int) -> int:
        """Tokens that the text up to a place and ``text`` end with in common, `LONGEST` at most."""
        most, length = min(LONGEST, len(text), place), 0
        while length < most and self._tokens[place - 1 - length] == text[-1 - length]:
            length += 1
        return length


def _slot(gram: "array[int]") -> int:
    return crc32(gram) % SLOTS


class MatchScore:
    """How often drafts that followed a match of some length came true, beginning with a belief."""

    def __init__(self, believed: float) -> None:
        self._believed = believed
        self._counts: list[tuple[float, float]] = []  # confirmations and trials of each draft

    def add(self, confirmed: int, refused: bool) -> None:
        """Count drafts that came true and perhaps one that did not."""
        tried = confirmed + refused
        self._counts += [(0.0, 0.0)] * (tried - len(self._counts))
        for place in range(tried):
            hits, trials = self._counts[place]
            self._counts[place] = FORGET * hits + (place < confirmed), FORGET * trials + 1

    def chances(self, count: int) -> list[float]:
        """Of ``count`` drafts, each if those before it came true; one never tried is like that before."""
        chance, found = self._believed, []
        for place in range(count):
            hits, trials = self._counts[place] if place < len(self._counts) else (0.0, 0.0)
            chance = (hits + TRUST * chance) / (trials + TRUST)
            found.append(chance)
        return found


@dataclass
class _Guess:
    """A look-up the text has not decided yet."""

    place: int  # length of the text before its bonus token
    score: MatchScore  # where the outcome belongs
    tokens: list[int]  # the bonus token and the drafts
    seen: int = 0  # how many of them the text has confirmed

    def is_open_after(self, token: int) -> bool:
        """Whether the outcome is still open after the text's next token; when not, it is counted."""
        same = token == self.tokens[self.seen]
        self.seen += same
        if same and self.seen < len(self.tokens):
            return True
        if self.seen:  # else another token came than the bonus it was made for
            self.score.add(self.seen - 1, refused=not same)
        return False


class PromptLookup(TextDrafter):
    """Proposes what followed the last time; nothing where the text is new.

    Every look-up is compared with what the text went on with, whether it was verified or not: what look-ups
    are worth costs no probe. The scores begin again with each continuation.
    """

    name = "prompt-lookup"
    _tokens: TokenIndex
    block_size = 8
    forwards = 0  # there is no network
    default_shortest = 1

    def __init__(self, shortest: int = default_shortest) -> None:
        if not 1 <= shortest <= LONGEST:
            raise ConfigurationError(
                f"the shortest match of prompt-lookup must be 1 to {LONGEST}, not {shortest}"
            )
        self.shortest = shortest
        self.start()

    def bind(self, target: Target) -> None:
        """Any target will do: its own text is all that is read."""

    def twin(self) -> Self:
        return type(self)(self.shortest)

    def start(self) -> None:
        self._tokens = TokenIndex(self.shortest)
        self._forget()

    def _forget(self) -> None:
        self._scores = [MatchScore(believed) for believed in BELIEVED]
        self._guesses: list[_Guess] = []

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:
        super().observe(tokens, hidden_states)
        for token in tokens if self._guesses else ():
            self._guesses = [guess for guess in self._guesses if guess.is_open_after(token)]

    def rewind(self, count: int) -> bool:
        self._forget()
        return super().rewind(count)

    def draft_forwards(self, count: int) -> int:  # noqa: ARG002 - none for any
        return 0

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:  # noqa: ARG002
        return self.look_up(bonus, count)

    def look_up(self, bonus: int, count: int) -> Draft:
        """What followed the longest match; nothing where the text is new."""
        found, length = self._tokens.find(bonus)
        if not length:
            return NOTHING
        drafts = self._tokens.following(found, bonus, min(count, REACH * length - 1))
        score = self._scores[min(length.bit_length(), len(BELIEVED)) - 1]
        place = len(self._tokens)
        if self._guesses and self._guesses[-1].place == place:  # looked up twice, perhaps for another bonus
            self._guesses.pop()
        self._guesses.append(_Guess(place, score, [bonus, *drafts]))
        return Draft(mx.array(drafts, mx.int32), None, tuple(score.chances(len(drafts))))

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes
