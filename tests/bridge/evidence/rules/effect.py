"""Reports whose KV policy bounds nothing, or only what it bounds by its own account."""

from __future__ import annotations

from tests.bridge.evidence.breakers import Breaker, Rules, chain, change, only, resettle, rows
from tests.bridge.evidence.reports import Document


def bounded(policy: str, kept: int, *, own: int | None = 31, full: int = 3) -> Breaker:
    """The speculative arm under a bounding policy; contexts have 125 to 132 positions, windows of its own 32.

    Args:
        policy: declared by the arm.
        kept: what its layers with a window keep.
        own: what those of the plain arm keep; None: they do not say.
        full: layers that see everything.
    """

    def apply(document: Document) -> None:
        document["arms"][1]["system"]["kv"] = policy
        for row in rows(document, "speculative"):
            row["kept_positions"] = kept
            row["cache"]["classes"] = {"KVCache": full, "SlidingRing": 9 - full}
            if not full:
                del row["cache"]["classes"]["KVCache"]
        for row in rows(document, "plain") if own is not None else ():
            row["kept_positions"] = own

    return chain(only(), apply, resettle)


def slides_everywhere(document: Document) -> None:
    """A model without full layers."""
    for row in rows(document, "plain"):
        row["cache"]["classes"] = {"RotatingKVCache": 9}


RULES = Rules(
    alone={"POLICY_NO_EFFECT": ("throughput", bounded("sliding-bounded:4,64@sliding", 31))},
    variants=[
        ("POLICY_NO_EFFECT", "throughput", bounded("sliding-bounded:0,32@sliding", 31)),
        ("POLICY_NO_EFFECT", "throughput", bounded("sliding-bounded:4,64@sliding", 67, own=None)),
        ("POLICY_NO_EFFECT", "throughput", bounded("sliding-bounded:4,512@sliding", 130, own=130)),
        ("POLICY_NO_EFFECT", "throughput", bounded("sink-window:4,4096@all", 130, full=0)),
        ("POLICY_NO_EFFECT", "throughput", bounded("sink-window:4,4096@full", 130, full=0)),
        (
            "POLICY_NO_EFFECT",
            "throughput",
            chain(bounded("sink-window:4,64@all", 31, full=0), slides_everywhere),
        ),
        (
            "POLICY_NO_EFFECT",
            "throughput",
            chain(
                bounded("sliding-bounded:4,64@sliding", 31),
                change(
                    "claims",
                    to=[
                        {"name": "identical_output", "arm": "speculative", "baseline": "plain"},
                        {"name": "speedup", "arm": "speculative", "baseline": "plain", "at_least": 1.5},
                    ],
                ),
            ),
        ),
    ],
    honest=[
        ("throughput", bounded("sliding-bounded:0,31@sliding", 30)),
        ("throughput", bounded("sliding-bounded:4,28@sliding", 31)),  # 4 pinned, 4 fewer of the newest
        ("throughput", bounded("sliding-bounded:4,64@sliding", 67, own=124)),
        ("throughput", bounded("sink-window:4,64@all", 67, full=0)),
        ("throughput", bounded("sink-window:4,64@full", 67, full=0)),
        ("throughput", chain(bounded("sink-window:4,24@all", 27, full=0), slides_everywhere)),
        # that nothing changes is all that is claimed
        (
            "quality",
            chain(
                bounded("sink-window:4,4096@all", 130, full=0),
                change(
                    "claims", to=[{"name": "identical_output", "arm": "speculative", "baseline": "plain"}]
                ),
            ),
        ),
    ],
)
