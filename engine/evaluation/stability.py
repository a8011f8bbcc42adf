"""Whether the machine did identical work in about the same time: what a measurement watches as it goes.

A speed that was taken while something else had the processor says nothing. The limits are those of the gate's
SPEEDUP_PREFILL_SPREAD, SPEEDUP_DECODE_SPREAD and BASELINE_SLOW. Only identical work is looked at, never the
ratio of the arms: a measurement that is begun again for this reason is not begun again for its result.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from statistics import median
from typing import Any

from evidence_format.claims import (
    FEWEST_SAMPLES,
    LARGEST_SPREAD,
    MOST_LOOP_GAIN,
    MOST_TOTAL_LOOP_GAIN,
    SAME_LENGTH,
    SPREAD_S,
    SPREAD_TOKENS,
)


def disturbance(
    plain: Sequence[dict[str, Any]],
    ours: Sequence[dict[str, Any]],
    own: Sequence[dict[str, Any]] = (),
) -> str | None:
    """What took too differently long so far, in a sentence; None: the machine is steady.

    Args:
        plain: The baseline's rows.
        ours: The other arm's rows, of the same prompts.
        own: Those of our loop at block 1, which does the baseline's work.
    """
    theirs = {row["prompt_id"]: row["prefill_s"] for row in ours}
    prefills: list[list[float]] = [
        [row["prefill_s"], theirs[row["prompt_id"]]] for row in plain if row["prompt_id"] in theirs
    ]
    for rows in (plain, ours):
        prefills.extend(_of_equal_length(rows))
    for times in prefills:
        low, high = min(times), max(times)
        if high > LARGEST_SPREAD * low and high - low > SPREAD_S:
            return f"prefills of about equal length took {low:.4f} and {high:.4f} s"
    decoded = [(row["decode_s"], len(row["tokens"]) - 1) for row in plain]
    rates = [seconds / tokens for seconds, tokens in decoded if tokens >= SPREAD_TOKENS]
    if rates and max(rates) > LARGEST_SPREAD * min(rates):
        return f"one token of plain decoding took {1e3 * min(rates):.2f} and {1e3 * max(rates):.2f} ms"
    steps = {row["prompt_id"]: row["decode_s"] for row in own}
    pairs = [(row["decode_s"], steps[row["prompt_id"]]) for row in plain if row["prompt_id"] in steps]
    return None if len(pairs) < FEWEST_SAMPLES else _slow_baseline(pairs)


def _slow_baseline(pairs: Sequence[tuple[float, float]]) -> str | None:
    """Whether plain decoding took too long compared with our loop at block 1."""
    total = sum(plain for plain, _ in pairs) / (sum(own for _, own in pairs) or inf)
    middle = median(plain / (own or inf) for plain, own in pairs)
    if total <= MOST_TOTAL_LOOP_GAIN and middle <= MOST_LOOP_GAIN:
        return None
    return f"plain decoding took {total:.2f} times as long as block 1, {middle:.2f} in the median row"


def _of_equal_length(rows: Sequence[dict[str, Any]]) -> Iterable[list[float]]:
    groups: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        groups[round(math.log(row["prompt_tokens"]) / math.log(SAME_LENGTH))].append(row["prefill_s"])
    return groups.values()
