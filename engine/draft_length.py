"""How long the next block should be, from what rounds have cost and how often drafts were confirmed.

A round with block B costs c(B) seconds and is expected to emit E(B) = 1 + Σ_{i<B} Π_{j≤i} p_j tokens, where
p_j is the chance that draft j is confirmed when all before it were (Leviathan et al. 2023, with a p for each
position). The controller takes the B with the largest E(B) / c(B); B = 1 is a plain step with E = 1.

A machine is slower now and faster then, by more than blocks differ, so only rounds that follow each other
are compared: what the first rounds after a change of blocks took, with what those before it took. Costs agree
with these comparisons as ratings of players do with their games (Elo 1978), and lie near a line where there
were few. A length that was not used for long gets a round now and then.

Chances begin with those of all sequences so far and follow the present one. When plain steps win, a short
block at the start of each sequence, and again after ever more plain steps, looks whether speculation pays
again. No clock is read here: the caller measures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Protocol

CANDIDATES = (4, 8, 12, 16)
FORGET, FORGET_SLOWLY = 0.9, 0.998  # weight of the past after a round: of this sequence, of all of them
PRIOR_CHANCE = 0.75  # of a draft nobody has tried
KINSHIP = 1.0  # trials' worth of belief that a draft fares like the one before it
HERITAGE = 4.0  # trials' worth of belief that a sequence fares like those before it
HOPE = 0.95  # an unmeasured block is guessed this much cheaper
COMPARED = 2  # rounds after a change of blocks that are compared with those before it
SWAY = 0.3  # weight of a round in what rounds take at present
GIVE = 1 / 16  # least weight of a comparison in what is known of a cost
OUTLIER = 0.7  # largest surprise that counts: logarithm of a factor of two
LEAST = 0.5  # of the cheapest known cost a guessed one is at least so much
TRIALS = 2  # measured rounds, and comparisons, before a cost is believed
PLAIN_TRIALS = 3
AGAIN, SELDOM = 96, 768  # block rounds after which a length that was compared often is tried again …
OFTEN = 32  # … sooner, where it was compared less often than this
FAR_AHEAD = 1.4  # … seldom, where it is so much slower than the best
LOYALTY = 1.06  # another block than the drafter's own must promise this much more
PROBE_AFTER, PROBE_AT_MOST = 16, 256  # plain steps before the first probe of a sequence, longest wait
NOMINAL_ROUND, NOMINAL_TOKEN = 1.3, 0.035  # plain steps a block and each of its tokens cost, unmeasured


class DraftLength(Protocol):
    """Chooses block lengths; `FixedDraftLength` and `AdaptiveDraftLength` are the two kinds."""

    @property
    def largest(self) -> int:
        """The longest block it will ever ask for."""

    def start(self) -> None:
        """A new sequence begins."""

    def choose(self, remaining: int) -> int:
        """Length of the next block, 1 to ``remaining``; 1 means a plain step."""

    def record(self, block: int, accepted: int, seconds: float) -> None:
        """A round of this block took so long and confirmed so many drafts."""


class FixedDraftLength:
    """Always the same block."""

    def __init__(self, block: int) -> None:
        self.largest = block

    def start(self) -> None:
        """Nothing to forget."""

    def choose(self, remaining: int) -> int:
        """The block, or what is left of the sequence."""
        return min(self.largest, remaining)

    def record(self, block: int, accepted: int, seconds: float) -> None:
        """Nothing to learn."""


class AdaptiveDraftLength:
    """The block that promises the most tokens a second."""

    def __init__(
        self, block_size: int, candidates: Sequence[int] = CANDIDATES, *, nominal: bool = False
    ) -> None:
        """Consider blocks up to twice the length the drafter was made for.

        Args:
            block_size: the drafter's own block length; it is a candidate too.
            candidates: other block lengths worth a try.
            nominal: reckon with fixed costs instead of measured ones, so that the choice of blocks depends
                on nothing but the tokens, and sampling with a seed can be repeated.
        """
        fitting = {block for block in (*candidates, block_size) if 2 <= block <= 2 * block_size}
        self.blocks = tuple(sorted(fitting))
        self.largest = max(self.blocks, default=1)
        self._first = min(max(block_size, 1), self.largest)
        self._costs = Costs(self.blocks, nominal=nominal)
        self._measures = not nominal
        self._chances = Chances(self.largest - 1)
        self._ages = dict.fromkeys((1, *self.blocks), 0)  # block rounds since a length was last measured
        self.start()

    def start(self) -> None:
        """See `DraftLength.start`. Costs are kept."""
        self._costs.pause()
        self._chances.start()
        self._plain_run = 0  # plain steps since the last block
        self._wait = PROBE_AFTER
        self._fresh = True  # no block yet; the first also takes in the prompt, and its cost says nothing
        self._probing = False
        self._wished = 0  # the length asked for last

    def choose(self, remaining: int) -> int:
        """See `DraftLength.choose`."""
        if remaining <= 1 or not self.blocks:
            return 1
        self._wished = min(self._wish(remaining), remaining)
        return self._wished

    def _wish(self, remaining: int) -> int:
        if not self._costs.knows(self._first, TRIALS):
            return self._first
        if not self._costs.knows(1, PLAIN_TRIALS):
            return 1
        best = max(self.blocks, key=self._promise)
        if self._rate(best) > self._rate(1):
            return self._forgotten(best, remaining) or best
        self._probing = self._fresh or self._plain_run >= self._wait
        return self.blocks[0] if self._probing else 1

    def _forgotten(self, best: int, remaining: int) -> int | None:
        """A length that was not measured for long, while blocks were used, and that there is room for."""
        if not self._measures or self._fresh:
            return None
        fast = self._rate(best) / FAR_AHEAD
        for block, age in self._ages.items():
            wait = AGAIN if self._rate(block) > fast else SELDOM
            due = age >= wait * min(max(self._costs.comparisons(block), 1) / OFTEN, 1)
            if due and block != best and block <= remaining:
                return block
        return None

    def record(self, block: int, accepted: int, seconds: float) -> None:
        """See `DraftLength.record`."""
        if block == 1:
            if self._plain_run:  # the first step of a spell is not pipelined yet
                self._costs.record(1, seconds)
                self._ages[1] = 0
            self._plain_run += 1
            return
        tried = max(block, self._wished)  # a drafter may have less to propose than it was asked for
        self._ages = {each: 0 if each == tried else age + 1 for each, age in self._ages.items()}
        if not self._fresh and block == tried:  # short drafts of a mixed drafter are of the cheap kind
            self._costs.record(block, seconds)
        self._chances.record(block, accepted)
        if self._probing:  # if a probe changes nothing, wait longer for the next
            pays = max(map(self._rate, self.blocks)) > self._rate(1)
            self._wait = PROBE_AFTER if pays else min(2 * self._wait, PROBE_AT_MOST)
        self._fresh = self._probing = False
        self._plain_run = 0

    def expected(self, block: int) -> float:
        """E(B): tokens a round with this block is expected to emit."""
        return self._chances.expected()[block - 1]

    def cost(self, block: int) -> float:
        """c(B), to be compared with those of other blocks; see `Costs.of`."""
        return self._costs.of(block)

    def _rate(self, block: int) -> float:
        """Tokens a second."""
        return self.expected(block) / self.cost(block)

    def _promise(self, block: int) -> float:
        """The rate, as blocks are compared: chances learned with one of them flatter the others a little."""
        return self._rate(block) * (LOYALTY if block == self._first else 1.0)


class Chances:
    """p_j: how often the draft at each position is confirmed, given that those before it were."""

    def __init__(self, drafts: int) -> None:
        self._all = [[0.0, 0.0] for _ in range(drafts)]  # confirmations and trials, all sequences
        self._own = [[0.0, 0.0] for _ in range(drafts)]  # … of the present one
        self._expected: list[float] | None = None

    def start(self) -> None:
        """A new sequence begins."""
        self._own = [[0.0, 0.0] for _ in self._all]
        self._expected = None

    def record(self, block: int, accepted: int) -> None:
        """A round confirmed the first ``accepted`` drafts; the next one, if any, was tried and was not."""
        for position in range(min(block - 1, accepted + 1)):
            for table, kept in ((self._all, FORGET_SLOWLY), (self._own, FORGET)):
                table[position][0] = kept * table[position][0] + (position < accepted)
                table[position][1] = kept * table[position][1] + 1
        self._expected = None

    def expected(self) -> list[float]:
        """E(1), E(2) … by the chances as they are believed to be."""
        if self._expected is None:
            self._expected, chance, reached = [1.0], PRIOR_CHANCE, 1.0
            for (hits, trials), (own_hits, own_trials) in zip(self._all, self._own, strict=True):
                prior = (hits + KINSHIP * chance) / (trials + KINSHIP)
                chance = (own_hits + HERITAGE * prior) / (own_trials + HERITAGE)
                reached *= chance
                self._expected.append(self._expected[-1] + reached)
        return self._expected


class Costs:
    """c(B): what a round costs beside others, from the rounds that were measured."""

    def __init__(self, blocks: Sequence[int], *, nominal: bool) -> None:
        self._nominal = nominal
        self._cold = set(blocks)  # blocks whose first round, with its one-time costs, is to come
        self._rounds = dict.fromkeys((1, *blocks), 0)
        self._comparisons = dict.fromkeys((1, *blocks), 0)
        self._logs: dict[int, float] = {}  # of costs, as far as they were measured
        self._known: dict[int, float] = {}
        self.pause()

    def pause(self) -> None:
        """What comes next is too long after what came before to be compared with it."""
        self._spell: _Spell | None = None  # of rounds with the same block
        self._before: _Spell | None = None

    def knows(self, block: int, rounds: int) -> bool:
        """Whether so many rounds of this block were measured."""
        return self._nominal or self._rounds[block] >= rounds

    def comparisons(self, block: int) -> int:
        """How often this block was compared with others."""
        return self._comparisons[block]

    def record(self, block: int, seconds: float) -> None:
        """A round took so long; the first of each block is not counted, nor are blocks cut short."""
        if self._nominal or block not in self._rounds or seconds <= 0:
            return
        if block in self._cold:
            self._cold.discard(block)
            return
        cost = log(seconds)
        self._rounds[block] += 1
        if self._spell is None or block != self._spell.block:
            self._before, self._spell = self._spell, _Spell(block, cost)
        self._spell.add(cost)
        if not self._logs:
            self._logs[block] = cost
        elif self._before is not None and self._spell.rounds <= COMPARED:
            self._compare(block, self._before.block, cost - self._before.level)

    def _compare(self, block: int, other: int, difference: float) -> None:
        """The costs' logarithms were seen to differ so much: both give way, the lesser known one more."""
        if other not in self._logs and block not in self._logs:
            return
        if block not in self._logs:
            self._logs[block] = self._logs[other] + difference
        elif other not in self._logs:
            self._logs[other] = self._logs[block] - difference
        else:
            surprise = difference - (self._logs[block] - self._logs[other])
            surprise = min(max(surprise, -OUTLIER), OUTLIER)
            self._logs[block] += surprise * self._give(block)
            self._logs[other] -= surprise * self._give(other)
        self._comparisons[block] += 1
        self._comparisons[other] += 1
        self._known.clear()

    def _give(self, block: int) -> float:
        return max(1 / (self._comparisons[block] + 2), GIVE)

    def of(self, block: int) -> float:
        """What a round of this block takes, measured or guessed, beside others: in seconds of the very first
        round, as fast as the machine was then, or, if nominal, in plain steps.
        """
        if self._nominal:
            return 1.0 if block == 1 else NOMINAL_ROUND + NOMINAL_TOKEN * block
        if block not in self._known:
            self._known[block] = self._estimate(block)
        return self._known[block]

    def _estimate(self, block: int) -> float:
        trials = self._comparisons[block]
        if block not in self._logs:  # a little hope, so that it gets its trial when it would matter
            return HOPE * self._line(block)
        own = exp(self._logs[block])
        return own if block == 1 or trials > TRIALS else (trials * own + self._line(block)) / (trials + 1)

    def _line(self, block: int) -> float:
        """The cost on a straight line through the blocks that were measured, by least squares."""
        points = [(size, exp(cost), 1 + self._comparisons[size]) for size, cost in self._logs.items()]
        blocks = [point for point in points if point[0] > 1]
        points = blocks if len(blocks) > 1 else points
        total = sum(weight for *_, weight in points)
        size = sum(weight * x for x, _, weight in points) / total
        seconds = sum(weight * y for _, y, weight in points) / total
        spread = sum(weight * (x - size) ** 2 for x, _, weight in points)
        slope = sum(w * (x - size) * (y - seconds) for x, y, w in points) / spread if spread else 0.0
        return max(seconds + max(slope, 0.0) * (block - size), LEAST * min(cost for _, cost, _ in points))


@dataclass
class _Spell:
    """Rounds of the same block, one after the other.

    Attributes:
        block: their length.
        level: the logarithm of what they take at present.
        rounds: how many there were.
    """

    block: int
    level: float
    rounds: int = 0

    def add(self, cost: float) -> None:
        """One more round; ``cost`` is a logarithm."""
        self.level += SWAY * (cost - self.level)
        self.rounds += 1


class Tour:
    """Tries every block of an adaptive draft length in turn, so that it knows what they cost."""

    def __init__(self, draft_length: AdaptiveDraftLength) -> None:
        self._pace = draft_length
        self.largest = draft_length.largest
        self._asked = 0
        self._stops = [block for block in draft_length.blocks for _ in range(TRIALS + 1)] + [1] * (
            PLAIN_TRIALS + 2
        )

    def start(self) -> None:
        """As the draft length itself."""
        self._pace.start()

    @property
    def finished(self) -> bool:
        """Whether every stop was made."""
        return not self._stops

    def choose(self, remaining: int) -> int:
        """The next stop of the tour, then whatever the draft length wants."""
        if not self._stops:
            return self._pace.choose(remaining)
        self._asked = min(self._stops[0], remaining)
        return self._asked

    def record(self, block: int, accepted: int, seconds: float) -> None:
        """Passed on."""
        if self._stops and self._stops[0] in (block, self._asked):  # a drafter may propose less
            self._stops.pop(0)
        self._pace.record(block, accepted, seconds)
