"""How long the next block should be, from what rounds have cost and how often drafts were confirmed.

A round with block B costs c(B) seconds and is expected to emit E(B) = 1 + Σ_{i<B} Π_{j≤i} p_j tokens, where
p_j is the chance that draft j is confirmed when all before it were (Leviathan et al. 2023, with a p for each
position). The controller takes the B with the largest E(B) / c(B); B = 1 is a plain step with E = 1.
A machine's speed drifts by more than blocks differ, so only rounds right before and right after a change of
blocks are compared. Costs follow these comparisons as ratings of players follow their games (Elo 1978).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from engine.errors import ConfigurationError

LARGEST_BLOCK = 1024  # that a --block may ask for
CANDIDATES = (4, 8, 12, 16)
SEQUENCE_DECAY, GLOBAL_DECAY = 0.9, 0.998  # weight of the past after a round: of this sequence, of all
PRIOR_CHANCE = 0.75  # of a draft that was never tried
PRIOR_STRENGTH = 1.0  # trials' worth of belief that a draft fares like the one before it
GLOBAL_PRIOR_STRENGTH = 4.0  # trials' worth of belief that a sequence fares like those before it
OPTIMISM = 0.95  # an unmeasured block is guessed this much cheaper, so that it gets a trial if it matters
COMPARED = 2  # rounds after a change of blocks that are compared with those before it
EMA_ALPHA = 0.3  # weight of a round in what rounds take at present
MIN_STEP, MAX_SURPRISE = 1 / 16, 0.7  # least weight of a comparison; largest logarithm that counts
MIN_COST = 0.5  # of the cheapest known cost: no guess is below it
TRIALS, PLAIN_TRIALS = 2, 3  # measured rounds, and comparisons, before a cost is believed
REMEASURE_AFTER, REMEASURE_SLOW_AFTER = 96, 768  # block rounds until a length is tried again, or a slow one
SLOW, WELL_COMPARED = 1.4, 32  # times slower than the best; with fewer comparisons it is tried sooner
SWITCH_MARGIN = 1.06  # another block than the drafter's own must promise this much more
PROBE_AFTER, PROBE_AT_MOST = 16, 256  # plain steps before the first probe of a sequence, longest wait
NOMINAL_ROUND, NOMINAL_TOKEN = 1.3, 0.035  # plain steps a block and each of its tokens cost, unmeasured


class DraftLength:
    """Chooses the blocks of one sequence after another: by itself always the same block."""

    def __init__(self, largest: int) -> None:
        self.largest = largest  # the longest block it ever asks for

    def start(self) -> None:
        """Begin a sequence."""

    def choose(self, remaining: int) -> int:
        """Length of the next block, 1 to ``remaining``; 1 means a plain step."""
        return min(self.largest, remaining)

    def record(self, block: int, accepted: int, seconds: float) -> None:
        """Learn from a round: its block, how many drafts it confirmed, how long it took."""


class FixedDraftLength(DraftLength):
    """Always the same block, or what is left of the sequence."""


@dataclass
class _Length:
    """What is known of one block length."""

    rounds: int  # measured; -1 for a block whose first round, with one-time costs, is to come
    comparisons: int = 0
    log_cost: float | None = None
    age: int = 0  # block rounds since it was last measured


class AdaptiveDraftLength(DraftLength):
    """The block that promises the most tokens a second; with ``nominal`` costs it depends on tokens alone."""

    def __init__(self, block_size: int, others: Sequence[int] = CANDIDATES, *, nominal: bool = False) -> None:
        self.blocks = tuple(sorted({b for b in (*others, block_size) if 2 <= b <= 2 * block_size}))
        super().__init__(max(self.blocks, default=1))
        self._own, self._nominal = block_size, nominal
        self._lengths = {b: _Length(PLAIN_TRIALS if nominal else -1) for b in (1, *self.blocks)}
        self._lengths[1].rounds = max(self._lengths[1].rounds, 0)
        nominal_costs = {1: 1.0} | {b: NOMINAL_ROUND + NOMINAL_TOKEN * b for b in self.blocks}
        self._costs = nominal_costs if nominal else {}  # as believed at present
        self._all = [(0.0, 0.0)] * (self.largest - 1)  # confirmations and trials of each draft, all sequences
        self.start()

    def start(self) -> None:
        """Begin a sequence; costs and the chances of all sequences are kept."""
        self._block, self._level, self._rounds = 0, 0.0, 0  # of the rounds with the present block
        self._before: tuple[int, float] = 0, 0.0  # block and level of the rounds before these
        self._sequence = [(0.0, 0.0)] * (self.largest - 1)  # as `_all`, of this sequence
        self._expected: list[float] = []
        self._plain_run, self._wait = 0, PROBE_AFTER  # plain steps since the last block, and until a probe
        self._fresh = True  # no block yet: the first also takes in the prompt, its cost says nothing
        self._probing = False
        self._asked = 0  # the length chosen last

    def choose(self, remaining: int) -> int:
        """A length to be measured, the best one, or now and then a short one to see whether blocks pay."""
        if remaining <= 1 or not self.blocks:
            return 1
        block = 1
        if self._lengths[self._own].rounds < TRIALS:
            block = self._own
        elif self._lengths[1].rounds >= PLAIN_TRIALS:
            best = max(self.blocks, key=lambda b: self._rate(b) * (SWITCH_MARGIN if b == self._own else 1.0))
            if self._rate(best) > self._rate(1):
                block = best if self._nominal or self._fresh else self._overdue(best, remaining)
            elif self._fresh or self._plain_run >= self._wait:
                self._probing, block = True, self.blocks[0]
        self._asked = min(block, remaining)
        return self._asked

    def _overdue(self, best: int, remaining: int) -> int:
        """A length that was not measured for long while blocks were used, and that fits; else the best."""
        for block, length in self._lengths.items():
            wait = REMEASURE_SLOW_AFTER if SLOW * self._rate(block) <= self._rate(best) else REMEASURE_AFTER
            due = length.age >= wait * min(max(length.comparisons, 1) / WELL_COMPARED, 1)
            if due and block != best and block <= remaining:
                return block
        return best

    def record(self, block: int, accepted: int, seconds: float) -> None:
        """Learn from a round."""
        if block == 1:
            if self._plain_run:  # the first plain step after a block is not pipelined yet
                self._measure(1, seconds)
                self._lengths[1].age = 0
            self._plain_run += 1
            return
        tried = max(block, self._asked)
        for size, length in self._lengths.items():
            length.age = 0 if size == tried else length.age + 1
        if not self._fresh and block == tried:  # short drafts of a mixed drafter are of the cheap kind
            self._measure(block, seconds)
        for position in range(min(block - 1, accepted + 1)):  # the draft after the confirmed ones was refused
            for table, decay in ((self._all, GLOBAL_DECAY), (self._sequence, SEQUENCE_DECAY)):
                hits, trials = table[position]
                table[position] = decay * hits + (position < accepted), decay * trials + 1
        self._expected.clear()
        if self._probing:  # if a probe changes nothing, wait longer for the next
            pays = max(map(self._rate, self.blocks)) > self._rate(1)
            self._wait = PROBE_AFTER if pays else min(2 * self._wait, PROBE_AT_MOST)
        self._fresh = self._probing = False
        self._plain_run = 0

    def _measure(self, block: int, seconds: float) -> None:
        """Compare a round's cost with the cost before a change of blocks; both lengths learn from it."""
        new = self._lengths.get(block)
        if self._nominal or new is None or seconds <= 0:  # None: a block cut short
            return
        new.rounds, cost = new.rounds + 1, log(seconds)
        if new.rounds < 1:
            return
        if block != self._block:
            self._before, self._block, self._level, self._rounds = (self._block, self._level), block, cost, 0
        self._level += EMA_ALPHA * (cost - self._level)
        self._rounds += 1
        if all(length.log_cost is None for length in self._lengths.values()):
            new.log_cost = cost
        if not self._before[0] or self._rounds > COMPARED:
            return
        old, difference = self._lengths[self._before[0]], cost - self._before[1]
        if new.log_cost is not None and old.log_cost is not None:
            surprise = min(max(difference - new.log_cost + old.log_cost, -MAX_SURPRISE), MAX_SURPRISE)
            new.log_cost += surprise * max(1 / (new.comparisons + 2), MIN_STEP)
            old.log_cost -= surprise * max(1 / (old.comparisons + 2), MIN_STEP)
        elif old.log_cost is not None:
            new.log_cost = old.log_cost + difference
        elif new.log_cost is not None:
            old.log_cost = new.log_cost - difference
        else:
            return
        new.comparisons += 1
        old.comparisons += 1
        self._costs.clear()

    def expected(self, block: int) -> float:
        """E(B): tokens a round with this block is expected to emit."""
        if not self._expected:
            self._expected, chance, reached = [1.0], PRIOR_CHANCE, 1.0
            for (hits, trials), (own_hits, own_trials) in zip(self._all, self._sequence, strict=True):
                prior = (hits + PRIOR_STRENGTH * chance) / (trials + PRIOR_STRENGTH)
                chance = (own_hits + GLOBAL_PRIOR_STRENGTH * prior) / (own_trials + GLOBAL_PRIOR_STRENGTH)
                reached *= chance
                self._expected.append(self._expected[-1] + reached)
        return self._expected[block - 1]

    def cost(self, block: int) -> float:
        """c(B), relative to other blocks; where little is known of it, near a least-squares line of these."""
        if block in self._costs:
            return self._costs[block]
        lengths, length = self._lengths.items(), self._lengths[block]
        points = [(b, exp(n.log_cost), 1 + n.comparisons) for b, n in lengths if n.log_cost is not None]
        points = [point for point in points if point[0] > 1] if len(points) > 2 else points
        total = sum(w for *_, w in points)
        mean, level = sum(w * x for x, _, w in points) / total, sum(w * y for _, y, w in points) / total
        spread = sum(w * (x - mean) ** 2 for x, _, w in points)
        slope = sum(w * (x - mean) * (y - level) for x, y, w in points) / spread if spread else 0.0
        cost = max(level + max(slope, 0.0) * (block - mean), MIN_COST * min(y for _, y, _ in points))
        if length.log_cost is None:
            cost *= OPTIMISM
        else:
            trials, own = length.comparisons, exp(length.log_cost)
            cost = own if block == 1 or trials > TRIALS else (trials * own + cost) / (trials + 1)
        self._costs[block] = cost
        return cost

    def _rate(self, block: int) -> float:
        return self.expected(block) / self.cost(block)


def check_block(block: int, nominal: int) -> None:
    """Refuse a block of more than twice the length that a drafter was made for."""
    if block > 2 * nominal:
        raise ConfigurationError(
            f"--block {block} is more than {2 * nominal}, twice what this drafter was made for"
        )


def parse_block(block: str) -> int | None:
    """A ``--block`` text as a length, None for ``auto``; ConfigurationError for anything else."""
    if block == "auto":
        return None
    if not re.fullmatch("[0-9]{1,9}", block) or not 1 <= int(block) <= LARGEST_BLOCK:
        raise ConfigurationError(f"--block must be auto or a number from 1 to {LARGEST_BLOCK}, not {block!r}")
    return int(block)
