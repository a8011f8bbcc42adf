"""Which blocks `auto` chooses on Metal's cost curve: published costs replayed, drafts simulated, no clock.

    python benchmarks/draft_length.py [--seeds N]

On Metal a verify forward of 1, 2, 3, 4, 6 and 8 rows was published to cost 1, 1.03, 1.22, 1.47, 2.07 and 2.69
plain steps; between them the costs are linear, and so beyond 8. Drafting costs nothing, a quarter of a plain
step a block (a block drafter), or so much a draft (a small model; a next-token head, which makes 4 at most).
Drafts are confirmed with a fixed chance p, so a round of B tokens emits E(B) = 1 + p + … + p^(B-1), and the
best length has the largest E(B) / c(B). The table shows it beside the length that was used most in the second
half, and the speed reached, the first sequences included, as a share of the best and of plain decoding.

The last line is one JSON line. The figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine.draft_length import AdaptiveDraftLength  # noqa: E402
from engine.drafters.mtp import DEPTH  # noqa: E402

METAL = {1: 1.0, 2: 1.03, 3: 1.22, 4: 1.47, 6: 2.07, 8: 2.69}  # rows: plain steps
CHANCES = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
SEQUENCES, TOKENS = 30, 128
NOISE = 0.05  # of a round's seconds, to either side


@dataclass(frozen=True)
class Drafting:
    """What drafting costs."""

    name: str
    forward: float  # plain steps
    forwards: Callable[[int], int]  # for so many drafts
    block_size: int = 8
    most_drafts: int | None = None

    def cost(self, block: int) -> float:
        """Plain steps of a round with this block."""
        return verify_cost(block) + (self.forward * self.forwards(block - 1) if block > 1 else 0.0)


DRAFTING = (
    Drafting("free", 0.0, lambda _: 1),
    Drafting("block drafter, 0.25 a block", 0.25, lambda _: 1),
    Drafting("small model, 0.1 a draft", 0.1, lambda count: count),
    Drafting("small model, 0.5 a draft", 0.5, lambda count: count),
    Drafting("next-token head, 0.1 a draft", 0.1, lambda count: count, DEPTH + 1, DEPTH),
    Drafting("next-token head, 0.4 a draft", 0.4, lambda count: count, DEPTH + 1, DEPTH),
    Drafting("slower than the target, 2 a draft", 2.0, lambda count: count),
)


@dataclass(frozen=True)
class Row:
    """What came of one drafter at one chance."""

    drafting: str
    chance: float
    best: int  # the length with the largest E(B) / c(B)
    used: int  # the one used most in the second half
    of_used: float  # E(B) / c(B) of the length used, as a share of the best's
    of_best: float  # speed reached, as a share of the best length's
    of_plain: float  # … of plain decoding's


def verify_cost(rows: int) -> float:
    """Plain steps of a forward over so many rows."""
    known = sorted(METAL)
    low, high = next((pair for pair in pairwise(known) if rows <= pair[1]), (known[-2], known[-1]))
    return METAL[low] + (METAL[high] - METAL[low]) * (rows - low) / (high - low)


def tokens_of(block: int, chance: float) -> float:
    """E(B)."""
    return sum(chance**place for place in range(block))


def replay(drafting: Drafting, chance: float, seed: int = 1, sequences: int = SEQUENCES) -> Row:
    """Decode sequences one after the other, with simulated drafts, and compare with the best length."""
    draft_length = AdaptiveDraftLength(
        drafting.block_size, forwards=drafting.forwards, most_drafts=drafting.most_drafts
    )
    drafts, noise = Random(seed), Random(seed + 1)  # noqa: S311 - a simulation
    seconds, blocks = 0.0, []
    for _ in range(sequences):
        draft_length.start()
        done = 0
        while done < TOKENS:
            block, accepted = draft_length.choose(TOKENS - done), 0
            while accepted < block - 1 and drafts.random() < chance:
                accepted += 1
            speed = noise.uniform(1 - NOISE, 1 + NOISE)
            whole, verifying = drafting.cost(block) * speed, verify_cost(block) * speed
            draft_length.record(block, accepted, whole, whole - verifying)
            seconds += whole
            done += accepted + 1
            blocks.append(block)

    def rate(block: int) -> float:
        return tokens_of(block, chance) / drafting.cost(block)

    longest = (drafting.most_drafts or draft_length.largest) + 1
    best = max((b for b in (1, *draft_length.blocks) if b <= longest), key=rate)
    used = Counter(blocks[len(blocks) // 2 :]).most_common(1)[0][0]
    speed = sequences * TOKENS / seconds
    return Row(drafting.name, chance, best, used, rate(used) / rate(best), speed / rate(best), speed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="replays of each; the table shows the first")
    seeds = parser.parse_args().seeds
    rows = [[replay(d, chance, seed) for seed in range(1, seeds + 1)] for d in DRAFTING for chance in CHANCES]
    print(f"{'drafting':34} {'p':>4} {'best':>4} {'used':>4} {'its rate':>8} {'of best':>8} {'of plain':>8}")
    for row, *_ in rows:
        print(
            f"{row.drafting:34} {row.chance:4.2f} {row.best:4} {row.used:4} "
            f"{row.of_used:8.3f} {row.of_best:8.3f} {row.of_plain:8.3f}"
        )
    every = [row for replays in rows for row in replays]
    document = {
        "metal_costs": METAL,
        "seeds": seeds,
        "least_of_plain": round(min(row.of_plain for row in every), 4),
        "least_of_best": round(min(row.of_best for row in every), 4),
        "least_rate_of_used": round(min(row.of_used for row in every), 4),
        "rows": [asdict(row) for row, *_ in rows],
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
