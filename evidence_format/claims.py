"""What a report may claim: the form of each claim, and the limits of a claim of speed.

The engine holds a measurement against them before it claims, the gate the report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SPEED_CLAIMS = frozenset({"speedup", "no_slowdown"})
FEWEST_SAMPLES, FEWEST_TOKENS = 5, 32  # of a speed
FEWEST_CHUNKS = 8  # of an interval of perplexity
LARGEST_SPREAD = 3.0
# A row this short, or a difference this small, is a hiccup of the scheduler and not a spread of the work.
SPREAD_TOKENS, SPREAD_S = 16, 0.025
SAME_LENGTH = 1.1  # prompts whose lengths differ by less are the same amount of prefill
# Plain steps of mlx-lm's loop took 1.2 to 1.8 times as long as ours at block 1 where models were small.
# One slow row weighs more in the total than in the median, also on a quiet machine.
MOST_LOOP_GAIN, MOST_TOTAL_LOOP_GAIN = 2.0, 2.25
# CPU time of other processes as a share of all cores', of a service as a share of one core; and the share of
# the timed seconds for which both must be known.
MOST_OTHER_CPU, MOST_SERVICE_CPU, WATCHED = 0.10, 0.10, 0.9

# The loosest tolerance that still says something, by dtype: outputs of one network differ by the order of its
# additions, and half precision rounds every value on the way.
PARITY_LIMITS = {"float32": 1e-3, "float16": 0.5, "bfloat16": 1.0}
# Half precision cannot tell near ties apart; single precision has to choose alike in every row.
FEWEST_EQUAL = {"float32": 1.0, "float16": 0.9, "bfloat16": 0.9}


@dataclass(frozen=True)
class ClaimKind:
    """The form of one claim; a bound under `lowest` claims nothing, one over `highest` cannot be meant."""

    bound: Literal["at_least", "at_most"] | None = None
    against: Literal["baseline", "oracle"] | None = None  # the role of the arm it compares with
    lowest: float = 0.0
    highest: float = 1e15
    of_arm: bool = True


# Those without a bound are decided by RECALL_BELOW_ORACLE and the restoration rules; the environment block by
# ENVIRONMENT_INCOMPLETE; that outputs agree with a reference's, in every round, by PARITY_TOLERANCE, too.
CLAIMS = {
    "identical_output": ClaimKind(against="baseline"),
    "exact_match": ClaimKind("at_least", "baseline", lowest=0.5, highest=1.0),
    "speedup": ClaimKind("at_least", "baseline", lowest=1.0),
    "no_slowdown": ClaimKind("at_least", "baseline", lowest=0.8, highest=1.0),
    "acceptance_length": ClaimKind("at_least", lowest=1.0, highest=1024),
    "recall": ClaimKind("at_least", lowest=0.01, highest=1.0),
    "recall_parity": ClaimKind(against="oracle"),
    "resident_bytes": ClaimKind("at_most", lowest=1),
    "restoration": ClaimKind(),
    "natural_stops": ClaimKind("at_least", lowest=0.5, highest=1.0),
    "machine": ClaimKind(of_arm=False),
    "parity": ClaimKind("at_most", lowest=-1e15, of_arm=False),
    "nll_increase": ClaimKind("at_most", highest=100.0, of_arm=False),  # of its interval's upper end
}
# Claims of the same tokens, and of a figure over the arm's own prompts.
SAMENESS = frozenset({"identical_output", "exact_match"})
SHARES = frozenset({"acceptance_length", "natural_stops", "recall", "recall_parity", "restoration"})
