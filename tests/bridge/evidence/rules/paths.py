"""Reports in which something else ran than was declared, or was compared with itself."""

from __future__ import annotations

from tests.bridge.evidence.breakers import Breaker, Rules, chain, change, claim, claims, only, rows
from tests.bridge.evidence.reports import Document, settle


def fixed_block(document: Document) -> None:
    document["arms"][1]["system"]["block"] = "16"


def all_rounds_plain_but_declared(document: Document) -> None:
    document["arms"][1]["system"]["block"] = "8"
    row = rows(document, "speculative")[0]
    each = {"block": 1, "accepted": 0, "draft_s": 0.0, "verify_s": 0.0001}
    row["rounds"] = [dict(each) for _ in range(len(row["tokens"]) - 1)]
    settle(document)


def short_finds(document: Document) -> None:
    """A fixed block, and rounds that are shorter here and there, as look-ups give them."""
    document["arms"][1]["system"]["block"] = "8"
    for row in rows(document, "speculative"):
        row["rounds"][0]["block"] = 5
    settle(document)


def looked_up(document: Document) -> None:
    """A round whose drafts were found in the text."""
    rows(document, "speculative")[0]["rounds"][0]["looked_up"] = True


def engine_never_ran(document: Document) -> None:
    document["liveness"]["drafter_forwards"] = 0


def drafter(name: str, drafter_forwards: int) -> Breaker:
    """Another drafter, whose network ran so often."""

    def apply(document: Document) -> None:
        document["arms"][1]["system"]["drafter"] = name
        for row in rows(document, "speculative"):
            row["path"] = f"speculative:{name}"
        document["liveness"]["drafter_forwards"] = drafter_forwards

    return apply


def silent_fallback(document: Document) -> None:
    for row in rows(document, "speculative"):
        row["path"] = "plain:kakeya.decode"


def mixed_paths(document: Document) -> None:
    rows(document, "speculative")[3]["path"] = "plain:kakeya.decode"


def baseline_as_sut(document: Document) -> None:
    claims(document, "identical_output")
    document["claims"].append({"name": "resident_bytes", "arm": "plain", "at_most": 500_000})


def self_comparison(document: Document) -> None:
    claims(document, "identical_output")
    for fast, plain in zip(rows(document, "speculative"), rows(document, "plain"), strict=True):
        fast["prefill_s"], fast["decode_s"] = plain["prefill_s"], plain["decode_s"]
    settle(document)


def plain_steps_between(document: Document) -> None:
    row = rows(document, "speculative")[0]
    single = {"block": 1, "accepted": 0, "draft_s": 0.0, "verify_s": 0.002}
    row["rounds"] = [single] * 4 + row["rounds"][1:]
    settle(document)


def plain_steps_alone(document: Document) -> None:
    for row in rows(document, "speculative"):
        single = {"block": 1, "accepted": 0, "draft_s": 0.0, "verify_s": 0.0001}
        row["rounds"] = [dict(single) for _ in row["tokens"][1:]]


def fixed_block_that_shrinks(document: Document) -> None:
    document["arms"][1]["system"]["block"] = "8"
    row = rows(document, "speculative")[0]  # 64 decoded tokens: 15 rounds of 4 and the last four tokens
    row["rounds"][-1] |= {"block": 4, "accepted": 3}
    settle(document)


def same_policy_spelt_otherwise(document: Document) -> None:
    """Two arms of one policy, one of them called the baseline."""
    native, coded = document["arms"][1:3]
    native["system"]["kv"] = coded["system"]["kv"]
    coded["system"]["kv"] = "affine"


RULES = Rules(
    alone={
        "ENGINE_NEVER_RAN": ("throughput", engine_never_ran),
        "SILENT_FALLBACK": ("throughput", silent_fallback),
        "MIXED_PATHS": ("throughput", mixed_paths),
        "BASELINE_AS_SUT": ("throughput", baseline_as_sut),
        "SELF_COMPARISON": ("throughput", self_comparison),
    },
    variants=[
        ("ENGINE_NEVER_RAN", "throughput", change("liveness", "rounds", to=3)),
        ("ENGINE_NEVER_RAN", "throughput", change("liveness", "drafter_forwards", to=3)),
        ("ENGINE_NEVER_RAN", "throughput", drafter("autoregressive", 3)),
        ("ENGINE_NEVER_RAN", "throughput", drafter("prompt-lookup+dflash", 0)),
        ("ENGINE_NEVER_RAN", "throughput", chain(drafter("prompt-lookup", 0), plain_steps_alone)),
        ("SILENT_FALLBACK", "throughput", fixed_block),
        ("SILENT_FALLBACK", "throughput", short_finds),
        ("SILENT_FALLBACK", "throughput", looked_up),
        ("SILENT_FALLBACK", "throughput", chain(only("identical_output"), all_rounds_plain_but_declared)),
        (
            "SILENT_FALLBACK",
            "throughput",
            change(
                "liveness", "fallbacks", to=[{"component": "drafter", "reason": "no weights", "count": 2}]
            ),
        ),
        ("MIXED_PATHS", "throughput", change("arms", 0, "samples", 2, "cache", "classes", to={"KVCache": 9})),
        (
            "SELF_COMPARISON",
            "throughput",
            chain(only("identical_output"), claim(name="identical_output", arm="plain", baseline="plain")),
        ),
        ("SILENT_FALLBACK", "throughput", change("configuration", "kv", to="affine")),
        ("SILENT_FALLBACK", "parity", change("parity", "subject", "sha256", to="12" * 32)),
        ("SILENT_FALLBACK", "parity", change("configuration", "tolerance", to=1e-3)),
        ("SILENT_FALLBACK", "parity", change("configuration", "dtype", to="bfloat16")),
        ("SELF_COMPARISON", "kv", same_policy_spelt_otherwise),
    ],
    honest=[
        ("throughput", chain(drafter("prompt-lookup", 0), short_finds)),
        ("throughput", chain(drafter("prompt-lookup+dflash", 5000), short_finds)),
        ("throughput", chain(drafter("prompt-lookup+dflash", 5000), looked_up)),
        ("throughput", drafter("prompt-lookup", 0)),
        ("throughput", drafter("prompt-lookup+dflash", 1)),
        ("throughput", drafter("autoregressive", 5000)),
        ("throughput", plain_steps_between),
        ("throughput", fixed_block_that_shrinks),
        (
            "throughput",
            change(
                "liveness", "fallbacks", to=[{"component": "compile", "reason": "no compiler", "count": 1}]
            ),
        ),
        ("throughput", change("configuration", "kv", to="native")),
        ("throughput", change("configuration", "kv", to=None)),
        ("kv", change("configuration", "kv", to="every")),
        ("parity", lambda document: document["configuration"].update(dtype="float32", tolerance=1e-4)),
    ],
)
