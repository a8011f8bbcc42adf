"""How long the next block should be, from what rounds have cost and how often drafts were confirmed.

A round with block B costs c(B) seconds and is expected to emit E(B) = 1 + Σ_{i<B} Π_{j≤i} p_j tokens, where
p_j is the chance that draft j is confirmed when all before it were (Leviathan et al. 2023, with a p for each
position). The pace takes the B with the largest E(B) / c(B); B = 1 is a plain step with E = 1.

Costs are medians of recent rounds, kept from one sequence to the next; chances are forgotten exponentially.
When plain steps win, one round with the smallest block at the start of a sequence, and a rare one later,
looks whether speculation pays again. No clock is read here: the caller measures.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol

CANDIDATES = (4, 8, 16)
FORGET = 0.9  # weight of the past after a round
PRIOR_CHANCE, PRIOR_WEIGHT = 0.75, 2.0  # a new sequence deserves a try, whatever the last one was
KINSHIP = 0.25  # trials' worth of belief that a draft fares like the one before it
HOPE = 0.9  # an unmeasured block is guessed this much cheaper
RECENT = 9  # rounds a cost is the median of
TRIALS = 2  # measured rounds before a cost is believed
PLAIN_TRIALS = 3
PLAIN_EVERY = 64  # block rounds after which plain steps are measured again
MARGIN = 1.03  # a block must promise this much more than plain steps
PROBE_AFTER, PROBE_AT_MOST = 48, 768  # plain steps before the first probe of a sequence, longest wait


class Pace(Protocol):
    """Chooses block lengths; `Fixed` and `Adaptive` are the two kinds."""

    @property
    def largest(self) -> int:
        """The longest block it will ever ask for."""

    def start(self) -> None:
        """A new sequence begins."""

    def choose(self, remaining: int) -> int:
        """Length of the next block, 1 to ``remaining``; 1 means a plain step."""

    def record(self, block: int, accepted: int, seconds: float) -> None:
        """A round of this block took so long and confirmed so many drafts."""


class Fixed:
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


class Adaptive:
    """The block that promises the most tokens a second."""

    def __init__(self, block_size: int, candidates: Sequence[int] = CANDIDATES) -> None:
        """Consider blocks up to twice the length the drafter was made for.

        Args:
            block_size: the drafter's own block length; it is a candidate too.
            candidates: other block lengths worth a try.
        """
        fitting = {block for block in (*candidates, block_size) if 2 <= block <= 2 * block_size}
        self.blocks = tuple(sorted(fitting))
        self.largest = max(self.blocks, default=1)
        self._first = min(max(block_size, 1), self.largest)
        self._costs: dict[int, deque[float]] = {b: deque(maxlen=RECENT) for b in (1, *self.blocks)}
        self._hits: list[float] = []  # of each draft, how often it was confirmed …
        self._trials: list[float] = []  # … when those before it were; both forgotten exponentially
        self._cold = set(self.blocks)  # blocks whose first round, with its one-time costs, is to come
        self._plain_run = 0  # plain steps since the last block
        self._block_run = 0  # block rounds since plain steps were last measured
        self.start()

    def start(self) -> None:
        """Forget most of the last sequence's acceptance, keep what rounds cost."""
        before = self._hits[0] / self._trials[0] if self._trials else PRIOR_CHANCE
        self._hits = [(PRIOR_CHANCE + before) / 2 * PRIOR_WEIGHT] + [0.0] * self.largest
        self._trials = [PRIOR_WEIGHT] + [0.0] * self.largest
        self._probe_after = PROBE_AFTER
        self._fresh = True  # the first block also takes in the prompt: its cost says nothing

    def choose(self, remaining: int) -> int:
        """See `Pace.choose`."""
        if remaining <= 1 or not self.blocks:
            return 1
        return min(self._wish(), remaining)

    def _wish(self) -> int:
        plain = self._costs[1]
        if self._first in self._cold or len(self._costs[self._first]) < TRIALS:
            return self._first
        if len(plain) < PLAIN_TRIALS or self._block_run >= PLAIN_EVERY:
            return 1
        best = max(self.blocks, key=self._gain)
        if self._gain(best) > MARGIN:
            return best
        hopeless = all(b * median(plain) <= MARGIN * self.cost(b) for b in self.blocks)
        wait = PROBE_AT_MOST if hopeless else self._probe_after
        return self.blocks[0] if self._fresh or self._plain_run >= wait else 1

    def record(self, block: int, accepted: int, seconds: float) -> None:
        """See `Pace.record`."""
        if block == 1:
            if self._plain_run:  # the first step of a spell is not pipelined yet
                self._costs[1].append(seconds)
                self._block_run = 0
            self._plain_run += 1
            return
        if self._fresh or block in self._cold:
            self._cold.discard(block)
        elif block in self._costs:
            self._costs[block].append(seconds)
        self._fresh = False
        if self._plain_run >= self._probe_after:  # this was a probe; if it finds nothing, wait longer
            self._probe_after = min(2 * self._probe_after, PROBE_AT_MOST)
        self._plain_run = 0
        self._block_run += 1
        for position in range(min(block - 1, accepted + 1)):
            self._hits[position] = FORGET * self._hits[position] + (position < accepted)
            self._trials[position] = FORGET * self._trials[position] + 1

    def chances(self) -> list[float]:
        """Estimated chance that each draft is confirmed, given that those before it were."""
        chances: list[float] = []
        for hits, trials in zip(self._hits, self._trials, strict=True):
            # A position that was seldom reached is taken to be like the one before it.
            before = chances[-1] if chances else 0.0
            weight = KINSHIP if chances else 0.0
            chances.append((hits + weight * before) / (trials + weight))
        return chances

    def expected(self, block: int) -> float:
        """E(B): tokens a round with this block is expected to emit."""
        total, reach = 1.0, 1.0
        for chance in self.chances()[: block - 1]:
            reach *= chance
            total += reach
        return total

    def cost(self, block: int) -> float:
        """c(B) in seconds: the median of recent rounds, or a guess from the blocks that were measured."""
        known = self._costs[block]
        if known:
            return median(known)
        points = sorted((size, median(costs)) for size, costs in self._costs.items() if costs)
        # On the line through two neighbours, or through the two longest known; a little hopeful, so that a
        # block gets its trial when acceptance would make it worthwhile.
        above = next((index for index, (size, _) in enumerate(points) if size > block), len(points) - 1)
        (size, seconds), (longer, more) = points[max(above, 1) - 1], points[max(above, 1)]
        return HOPE * (seconds + (more - seconds) * (block - size) / (longer - size))

    def _gain(self, block: int) -> float:
        """Tokens a second with this block, relative to plain steps."""
        return self.expected(block) * median(self._costs[1]) / self.cost(block)


class Tour:
    """Tries every block of an adaptive pace in turn, so that it knows what they cost."""

    def __init__(self, pace: Adaptive) -> None:
        self._pace = pace
        self.largest = pace.largest
        self._stops = [block for block in pace.blocks for _ in range(TRIALS + 1)] + [1] * (PLAIN_TRIALS + 2)

    def start(self) -> None:
        """As the pace itself."""
        self._pace.start()

    @property
    def finished(self) -> bool:
        """Whether every stop was made."""
        return not self._stops

    def choose(self, remaining: int) -> int:
        """The next stop of the tour, then whatever the pace wants."""
        if not self._stops:
            return self._pace.choose(remaining)
        return min(self._stops[0], remaining)

    def record(self, block: int, accepted: int, seconds: float) -> None:
        """Passed on."""
        if self._stops and block == self._stops[0]:
            self._stops.pop(0)
        self._pace.record(block, accepted, seconds)
