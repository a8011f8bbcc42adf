"""How long the next block should be, from what rounds have cost and how often drafts were confirmed.

A round with block B costs c(B) = V(B) + D(B), verifying and drafting, and is expected to emit
E(B) = 1 + Σ_{i<B} Π_{j≤i} p_j tokens, where p_j is the chance that draft j is confirmed when all before it
were (Leviathan et al. 2023, with a p for each position). The controller takes the B with the largest
E(B) / c(B); B = 1 is a plain step with E = 1. Look-ups bring their own chances and cost V(B) alone.

A machine's speed drifts by more than blocks differ, so only rounds right before and right after a change of
blocks are compared. Costs follow these comparisons as ratings of players follow their games (Elo 1978).

What cannot pay is not tried: B / c(B) is the most a block can bring, whatever is confirmed. What a network
must read first (the prompt, the tokens of plain steps) is a cost of the rest of the sequence. Probes are
paid for by the plain steps before them, so that they take no more than a fixed share of the time.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from time import perf_counter
from typing import NamedTuple

from engine.drafters.base import NOTHING, Draft, Drafter, Proposal
from engine.errors import ConfigurationError
from engine.sampling import Sampler

LARGEST_BLOCK = 1024  # that a --block may ask for
CANDIDATES = (2, 3, 4, 6, 8, 12, 16)
GROWTH = 2  # no block is tried that is so many times longer than any that was measured
SEQUENCE_DECAY, GLOBAL_DECAY = 0.9, 0.998  # weight of the past after a round: of this sequence, of all
FADE = 0.97  # of this sequence's past after a plain step: it may have become as others are
PRIOR_CHANCE = 0.75  # of a draft that was never tried
PRIOR_STRENGTH = 1.0  # trials' worth of belief that a draft fares like the one before it
GLOBAL_PRIOR_STRENGTH = 4.0  # trials' worth of belief that a sequence fares like those before it
OPTIMISM = 0.95  # an unmeasured block is guessed this much cheaper, so that it gets a trial if it matters
COMPARED = 2  # rounds after a change of blocks that are compared with those before it
EMA_ALPHA = 0.3  # weight of a round in what rounds take at present
MIN_STEP, MAX_SURPRISE = 1 / 16, 0.7  # least weight of a comparison; largest logarithm that counts
MIN_COST = 0.5  # of the cheapest known cost: no guess is below it
TRIALS, PLAIN_TRIALS = 2, 3  # comparisons before a block's cost is believed; plain steps before anything else
REMEASURE_AFTER, REMEASURE_SLOW_AFTER = 96, 768  # block rounds until a length is tried again, or a slow one
SLOW, WELL_COMPARED = 1.4, 32  # times slower than the best; with fewer comparisons it is tried sooner
SWITCH_MARGIN = 1.06  # another block than the drafter's own must promise this much more
LEAVING = 0.5  # plain steps that a look-up between plain steps costs besides, measured on two CPU cores
PROBE_SHARE, RECHECK_SHARE = 0.02, 0.002  # of the time, for blocks that may pay, and for those that cannot
LONGEST_WAIT = 16  # times the wait that the share asks for, after probes that changed nothing
FORWARD_TRIALS = 2  # forwards; the cheapest tells what drafting costs; until then it costs nothing
CAUGHT_UP = 32  # tokens that enter with a draft; more are a cost of their own
CATCH_UP_SHARE = 0.25  # of a drafter's forward, for each token it must read first; until measured


class Ask(NamedTuple):
    """A sequence that could take drafts."""

    drafter: Drafter
    bonus: int
    remaining: int  # tokens that may still be emitted
    sampler: Sampler | None = None


class DraftLength:
    """Chooses the blocks of one sequence after another: by itself always the same block."""

    times_drafts = False  # whether `record` needs to know when drafts were computed, not only launched

    def __init__(self, largest: int) -> None:
        self.largest = largest  # the longest block it ever asks for
        self.asked = 1  # the block that was last asked of drafters
        # whether to try lengths whose costs are not known; for nothing where `record` gets no seconds
        self.exploring = True

    def start(self) -> None:
        """Begin a sequence."""

    def choose(self, remaining: int) -> int:
        """Length of the next block, 1 to ``remaining``; 1 means a plain step, or look-ups at most."""
        return min(self.largest, remaining)

    def drafts(self, asks: Sequence[Ask], most: int) -> list[Draft]:
        """The drafts of the next round, one for each sequence, in blocks of up to ``most`` tokens."""
        self.asked = min(self.choose(max(ask.remaining for ask in asks)), most)
        return _proposed(asks, self.asked)

    def has_lookup(self, asks: Sequence[Ask]) -> bool:  # noqa: ARG002 - others look
        """Whether a look-up pays that `choose` does not know of."""
        return False

    def record(
        self,
        block: int,
        accepted: int | Sequence[int],
        seconds: float,
        draft_s: float = 0.0,
        *,
        looked_up: bool = False,
    ) -> None:
        """Learn from a round: its block, how many drafts it confirmed, how long it took.

        In a batch, ``accepted`` has a number for each sequence that had all drafts of the block. ``draft_s``
        of the seconds went into drafting; drafts ``looked_up`` tell nothing of the network. 0 seconds are not
        known: the device did something else meanwhile.
        """


def _proposed(asks: Sequence[Ask], block: int) -> list[Draft]:
    """Ask the drafters, those of one kind together."""
    found, kinds = [NOTHING] * len(asks), dict[str, list[int]]()
    wanted = [Proposal(a.drafter, a.bonus, min(block, a.remaining) - 1, a.sampler) for a in asks]
    for index, each in enumerate(wanted):
        if each.count > 0:
            kinds.setdefault(each.drafter.name, []).append(index)
    for indices in kinds.values():
        first, *others = [wanted[index] for index in indices]
        if others:
            drafts = first.drafter.propose_together([first, *others])
        else:
            drafts = [first.drafter.propose(first.bonus, first.count, first.sampler)]
        for index, draft in zip(indices, drafts, strict=True):
            found[index] = draft
    return found


class FixedDraftLength(DraftLength):
    """Always the same block, or what is left of the sequence."""


@dataclass
class _Length:
    """What is known of verifying one block length."""

    rounds: int  # measured; -1 for a block whose first round, with one-time costs, is to come
    comparisons: int = 0
    log_cost: float | None = None
    age: int = 0  # block rounds since it was last measured


class AdaptiveDraftLength(DraftLength):
    """The block that promises the most tokens a second."""

    times_drafts = True

    def __init__(
        self,
        block_size: int,
        others: Sequence[int] = CANDIDATES,
        *,
        forwards: Callable[[int], int] = lambda _: 1,
        most_drafts: int | None = None,
        margin: float = 1.0,
    ) -> None:
        """Choose among blocks up to twice ``block_size`` that promise ``margin`` times what plain steps make.

        See `Drafter` for ``most_drafts``, and its `draft_forwards` for ``forwards``.
        """
        self.blocks = tuple(sorted({b for b in (*others, block_size) if 2 <= b <= 2 * block_size}))
        super().__init__(max(self.blocks, default=1))
        self._most = self.largest if most_drafts is None else most_drafts + 1  # of the network's blocks
        self._own, self._forwards, self._margin = block_size, forwards, margin
        self._lengths = {1: _Length(0)} | {b: _Length(-1) for b in self.blocks}
        self._verify_costs: dict[int, float] = {}  # as believed at present
        self._all = [(0.0, 0.0)] * (self.largest - 1)  # confirmations and trials of each draft, all sequences
        self._forward_cost, self._forward_trials = 0.0, 0  # of a forward of the drafter; 0: not known
        self._token_cost: float | None = None  # of each token that the drafter must read first
        self._unprobed: float | None = (
            None  # cost of the plain steps since the last probe; None: no probe yet
        )
        self._patience = 1  # times the wait for a probe
        self.start()

    @classmethod
    def of(cls, drafter: Drafter, margin: float = 1.0) -> "AdaptiveDraftLength":
        """For a drafter as it describes itself."""
        forwards = drafter.twin().draft_forwards  # a method keeps its drafter, and that its caches
        return cls(drafter.block_size, forwards=forwards, most_drafts=drafter.most_drafts, margin=margin)

    def start(self) -> None:
        """Begin a sequence; costs and the chances of all sequences are kept."""
        self._block, self._level, self._rounds = 0, 0.0, 0  # of the rounds with the present block
        self._before: tuple[int, float] = 0, 0.0  # block and level of the rounds before these
        self._sequence = [(0.0, 0.0)] * (self.largest - 1)  # as `_all`, of this sequence
        self._expected: list[float] = []
        self._plain_run = 0  # plain steps since the last block
        self._probing = False
        self._backlog = 0  # tokens that the drafter would read first

    def choose(self, remaining: int) -> int:
        """The best length, one to be measured, or now and then a short one to see whether blocks pay."""
        self._probing = False
        if remaining <= 1 or not self.blocks or not self._forwards(1):
            return 1
        if not self._measured(1):
            return 1
        block, best = 1, self._best(remaining)
        if self._gain(self._rate(best) / self._margin, remaining) > 0:
            overdue = self._overdue(best, self._rate, min(remaining, self._most))
            block = best if self._backlog > CAUGHT_UP else overdue
        elif self.exploring and self._probe_due(remaining):
            self._probing, block = True, self.blocks[0]
        self.asked = min(block, remaining)
        return self.asked

    def drafts(self, asks: Sequence[Ask], most: int) -> list[Draft]:
        """Look-ups where they promise more than the network and plain steps; else what `choose` says."""
        remaining = max(ask.remaining for ask in asks)
        self.note_backlog(asks)
        if self.choose(remaining) > 1:
            self.try_forward(asks[0].drafter)
        self.asked = block = min(self.choose(remaining), most)
        found = self._looked_up(asks, most)
        if (cut := self._cut(found, block, len(asks))) > 1:
            self.asked, self._probing = cut, False
            return [draft.first(cut - 1) for draft in found]
        return _proposed(asks, block)

    def has_lookup(self, asks: Sequence[Ask]) -> bool:
        """See `DraftLength.has_lookup`."""
        return self._cut(self._looked_up(asks, self.largest), 1, len(asks)) > 1

    def _looked_up(self, asks: Sequence[Ask], most: int) -> list[Draft]:
        counts = [min(self.largest, ask.remaining, most) - 1 for ask in asks]
        return [
            ask.drafter.look_up(ask.bonus, count) if count > 0 else NOTHING
            for ask, count in zip(asks, counts, strict=True)
        ]

    def _cut(self, found: Sequence[Draft], block: int, sequences: int) -> int:
        """The block that makes the most of look-ups; 1 where ``block`` without them promises more."""
        if not any(map(len, found)) or not self._measured(1):
            return 1
        reached = [[1.0, *draft.expected] for draft in found]

        # The plain steps before and after a block are not pipelined.
        leaving = LEAVING * self._verify_cost(1) if self._plain_run else 0.0

        def rate(block: int) -> float:
            tokens = sum(tokens[min(block, len(tokens)) - 1] for tokens in reached)
            return tokens / (self._verify_cost(block) + leaving)

        longest = min(max(map(len, reached)), self._longest())
        fitting = [b for b in self.blocks if b <= longest and self._may_ask(b)]
        best = max(fitting, key=rate, default=1)
        if rate(best) <= sequences * max(self._rate(block), self._margin * self._rate(1)):
            return 1
        return self._overdue(best, rate, longest)

    def _may_ask(self, block: int) -> bool:
        return self.exploring or self._lengths[block].comparisons > 0

    def _measured(self, block: int) -> bool:
        return self._lengths[block].rounds >= (PLAIN_TRIALS if block == 1 else 1)

    def _longest(self) -> int:
        """The longest block that may be tried: costs are learned step by step."""
        measured = [b for b in self.blocks if self._measured(b)]
        return max(GROWTH * max(measured, default=1), self.blocks[0])

    def _best(self, remaining: int) -> int:
        longest = min(self._longest(), self._most, remaining)
        fitting = [b for b in self.blocks if b <= longest] or [self.blocks[0]]
        fitting = [b for b in fitting if self._may_ask(b)] or [1]
        return max(fitting, key=lambda b: self._rate(b) * (SWITCH_MARGIN if b == self._own else 1.0))

    def _gain(self, rate: float, remaining: int) -> float:
        """Cost saved until the end of the sequence at a rate, less what the drafter must read first."""
        return remaining * (self.cost(1) - 1 / rate) - self._reading()

    def _reading(self) -> float:
        unseen = max(self._backlog - CAUGHT_UP, 0)
        return unseen * (
            CATCH_UP_SHARE * self._forward_cost if self._token_cost is None else self._token_cost
        )

    def may_pay(self, block: int, remaining: int) -> bool:
        """Whether a block of the network's would pay if all its drafts were confirmed, as far as is known."""
        return self._gain(block / self.cost(block), remaining) > 0

    def _probe_due(self, remaining: int) -> bool:
        """Whether the plain steps since the last probe pay for one; the first is free where it may pay."""
        may_pay = any(self.may_pay(block, remaining) for block in self.blocks)
        if self._unprobed is None:
            return may_pay
        at_start = 1 if self._sequence[0][1] else 2  # a new sequence may differ from those before
        share = at_start * (PROBE_SHARE if may_pay else RECHECK_SHARE)
        price = self.cost(self.blocks[0]) + self._reading()  # as if nothing came of it
        return self._unprobed * share >= price * self._patience

    def note_backlog(self, asks: Sequence[Ask]) -> None:
        """Note how much the drafters must read before they draft."""
        self._backlog = sum(ask.drafter.backlog for ask in asks)

    def try_forward(self, drafter: Drafter) -> None:
        """Time forwards of one token, once: a drafter that needs one a draft may be too slow by itself."""
        if self._forwards(2) == 1 or not self._backlog or not self._measured(1):
            return
        while self._forward_trials < FORWARD_TRIALS:
            started = perf_counter()
            drafter.try_forward()
            self.record_forward(perf_counter() - started)

    def record_forward(self, seconds: float) -> None:
        """Learn from a forward of the drafter by itself, right after a round."""
        self._learn_forward(exp(log(seconds) - self._level) * self._verify_cost(self._block))

    def _learn_forward(self, cost: float) -> None:
        believed = self._forward_cost
        if self._forward_trials < FORWARD_TRIALS:  # one of them may have had one-time costs
            self._forward_cost = min(cost, believed or cost)
        else:
            self._forward_cost = _moved(believed, min(cost, believed * exp(MAX_SURPRISE)))
        self._forward_trials += 1

    def _overdue(self, best: int, rate: Callable[[int], float], longest: int) -> int:
        """A length that was not measured for long while blocks were used, and that fits; else the best."""
        if not self.exploring:
            return best
        for block, length in self._lengths.items():
            if block == best or block > longest or (block > 1 and not self._measured(block)):
                continue
            wait = REMEASURE_SLOW_AFTER if SLOW * rate(block) <= rate(best) else REMEASURE_AFTER
            if length.age >= wait * min(max(length.comparisons, 1) / WELL_COMPARED, 1):
                return block
        return best

    def record(
        self,
        block: int,
        accepted: int | Sequence[int],
        seconds: float,
        draft_s: float = 0.0,
        *,
        looked_up: bool = False,
    ) -> None:
        """Learn from a round."""
        if block == 1:
            if self._plain_run:  # the first plain step after a block is not pipelined yet
                self._measure(1, seconds)
                self._lengths[1].age = 0
            self._plain_run += 1
            self._sequence = [(FADE * hits, FADE * trials) for hits, trials in self._sequence]
            self._expected.clear()
            if self._unprobed is not None and self._measured(1):
                self._unprobed += self.cost(1)
            return
        tried = max(block, self.asked)
        for size, length in self._lengths.items():
            length.age = 0 if size == tried else length.age + 1
        self._measure(block, seconds - draft_s)
        self._plain_run = 0
        if looked_up:
            return
        # not the first, which may compile kernels; and at the end of a text a block may be of no known length
        if block in self._lengths and self._lengths[block].rounds > 0:
            self._measure_drafting(block, seconds, draft_s)
        self._backlog = 0
        each = (accepted,) if isinstance(accepted, int) else accepted
        for position in range(block - 1):
            # the draft after the confirmed ones was refused; a round of a batch is one trial, or part of one
            share = sum(count >= position for count in each) / max(len(each), 1)
            confirmed = sum(count > position for count in each) / max(len(each), 1)
            if not share:
                break
            for table, decay in ((self._all, GLOBAL_DECAY), (self._sequence, SEQUENCE_DECAY)):
                hits, trials = table[position]
                table[position] = decay * hits + confirmed, decay * trials + share
        self._expected.clear()
        if self._probing:  # if a probe changes nothing, wait longer for the next
            pays = max(map(self._rate, self.blocks)) > self._rate(1)
            self._patience = 1 if pays else min(2 * self._patience, LONGEST_WAIT)
        self._unprobed = 0.0
        self._probing = False

    def _measure_drafting(self, block: int, seconds: float, draft_s: float) -> None:
        """Learn what a forward of the drafter costs, or, where it had much to read, what that cost."""
        if not 0 < draft_s < seconds:
            return
        cost = draft_s / (seconds - draft_s) * self._verify_cost(block)
        if self._backlog > CAUGHT_UP:
            rest = max(cost - self._drafting(block), 0.0) / self._backlog
            self._token_cost = rest if self._token_cost is None else _moved(self._token_cost, rest)
        else:
            self._learn_forward(cost / max(self._forwards(block - 1), 1))

    def _measure(self, block: int, seconds: float) -> None:
        """Compare a round's cost with the cost before a change of blocks; both lengths learn from it."""
        new = self._lengths.get(block)
        if new is None or seconds <= 0:  # None: a block cut short
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
        self._verify_costs.clear()

    def expected(self, block: int) -> float:
        """E(B): tokens a round with this block of the network's is expected to emit."""
        if not self._expected:
            self._expected, chance, reached = [1.0], PRIOR_CHANCE, 1.0
            for (hits, trials), (own_hits, own_trials) in zip(self._all, self._sequence, strict=True):
                prior = (hits + PRIOR_STRENGTH * chance) / (trials + PRIOR_STRENGTH)
                chance = (own_hits + GLOBAL_PRIOR_STRENGTH * prior) / (own_trials + GLOBAL_PRIOR_STRENGTH)
                reached *= chance
                self._expected.append(self._expected[-1] + reached)
        return self._expected[block - 1]

    def cost(self, block: int) -> float:
        """c(B) of a block of the network's, relative to other blocks."""
        return self._verify_cost(block) + self._drafting(block)

    def _drafting(self, block: int) -> float:
        if block == 1 or self._forward_trials < FORWARD_TRIALS:
            return 0.0
        return self._forward_cost * self._forwards(block - 1)

    def _verify_cost(self, block: int) -> float:
        """V(B); where little is known of it, near a least-squares line of the others."""
        if block in self._verify_costs:
            return self._verify_costs[block]
        lengths, length = self._lengths.items(), self._lengths[block]
        points = [(b, exp(n.log_cost), 1 + n.comparisons) for b, n in lengths if n.log_cost is not None]
        # A block costs something by itself, so the step from 1 to the first says too much of the next.
        damped = 1.0 if len(points) > 2 else 0.5
        points = [point for point in points if point[0] > 1] if len(points) > 2 else points
        total = sum(w for *_, w in points)
        mean, level = sum(w * x for x, _, w in points) / total, sum(w * y for _, y, w in points) / total
        spread = sum(w * (x - mean) ** 2 for x, _, w in points)
        slope = sum(w * (x - mean) * (y - level) for x, y, w in points) / spread if spread else 0.0
        farthest, known = max((x, y) for x, y, _ in points)
        if damped < 1 and block > farthest:
            cost = known + damped * max(slope, 0.0) * (block - farthest)
        else:
            cost = level + max(slope, 0.0) * (block - mean)
        cost = max(cost, MIN_COST * min(y for _, y, _ in points))
        if length.log_cost is None:
            cost *= OPTIMISM
        else:
            trials, own = length.comparisons, exp(length.log_cost)
            cost = own if block == 1 or trials > TRIALS else (trials * own + cost) / (trials + 1)
        self._verify_costs[block] = cost
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


def _moved(before: float, now: float) -> float:
    return before + EMA_ALPHA * (now - before)
