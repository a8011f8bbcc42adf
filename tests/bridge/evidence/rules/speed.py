"""Reports whose speed means nothing."""

from __future__ import annotations

import copy

from tests.bridge.evidence.breakers import (
    Breaker,
    Rules,
    both,
    chain,
    change,
    claims,
    only,
    own_prompts,
    put,
    rows,
)
from tests.bridge.evidence.reports import Document, settle


def always_first(document: Document) -> None:
    document["order"] = [
        run
        for row in rows(document, "plain")
        for run in (["plain", row["prompt_id"]], ["speculative", row["prompt_id"]])
    ]


def equal_length_spread(document: Document) -> None:
    for arm in ("plain", "speculative"):
        rows(document, arm)[0]["prefill_s"] += 0.05
    settle(document)


def speedup_samples(document: Document) -> None:
    document["configuration"]["limit"] = 4
    for arm in document["arms"]:
        del arm["samples"][4:]
    settle(document)


def speedup_tokens(document: Document) -> None:
    for row in both(document):
        put(document, row, row["tokens"][:32], round(row["decode_s"] / 2, 7))
    settle(document)


def speedup_subset(document: Document) -> None:
    claims(document, "speedup")
    own_prompts(document)
    rows(document, "speculative").pop()
    settle(document)


def speedup_scope(document: Document) -> None:
    for arm in document["arms"]:
        arm["timing_scope"] = "end_to_end"


def speedup_baseline_loop(document: Document) -> None:
    claims(document, "speedup")  # sameness asks for plain decoding, too
    document["arms"][0]["system"]["loop"] = "kakeya.decode"
    for row in rows(document, "plain"):
        row["path"], row["rounds"] = "plain:kakeya.decode", plain_steps(row)
    settle(document)


def plain_steps(row: Document) -> list[Document]:
    """Rounds of one token, one for each that was decoded."""
    decoded = len(row["tokens"]) - 1
    seconds = round(0.9 * row["decode_s"] / decoded, 7)
    return [{"block": 1, "accepted": 0, "draft_s": 0.0, "verify_s": seconds} for _ in range(decoded)]


def block_1(document: Document, seconds: float = 0.004) -> None:
    """Our own loop at block 1, of so many seconds a token, as one more arm."""
    own = copy.deepcopy(document["arms"][0])
    own |= {"name": "block-1", "role": "control", "control": "block_1"}
    own["system"] |= {"loop": "kakeya.decode"}
    for row in own["samples"]:
        row["path"], row["decode_s"] = "plain:kakeya.decode", round(seconds * len(row["tokens"]), 7)
        row["rounds"] = plain_steps(row)
    document["arms"].append(own)
    settle(document)


def some_rows_slow(document: Document) -> None:
    """Three plain rows that something disturbed, each by less than the spread that is rejected."""
    for row in rows(document, "plain")[1:4]:
        row["decode_s"] = round(2.9 * row["decode_s"], 7)
    settle(document)


def scaled(arm: str, factor: float) -> Breaker:
    """All decoding times of an arm, rounds included, so many times as long."""

    def apply(document: Document) -> None:
        for row in rows(document, arm):
            row["decode_s"] = round(factor * row["decode_s"], 7)
            for turn in row["rounds"]:
                turn |= {name: round(factor * turn[name], 7) for name in ("draft_s", "verify_s")}
        settle(document)

    return apply


QUIET = {"spotlight": 0.0, "time_machine": 0.0, "photos": 0.0}


def loaded(**fields: object) -> Breaker:
    return lambda document: document["environment"]["load"].update(fields)


def speedup_not_interleaved(document: Document) -> None:
    document["order"].sort()


def speedup_prefill_spread(document: Document) -> None:
    rows(document, "speculative")[0]["prefill_s"] = 0.0404
    settle(document)


def speedup_decode_spread(document: Document) -> None:
    row = rows(document, "plain")[0]
    row["decode_s"] = round(4 * row["decode_s"], 7)
    settle(document)


def undrafted_time(document: Document) -> None:
    """A decode time shorter than the forwards allow, with rounds that still fit into it."""
    for row in rows(document, "speculative"):
        row["decode_s"] = round(0.0011 * len(row["tokens"]), 7)
        for turn in row["rounds"]:
            turn |= {"draft_s": 0.0001, "verify_s": 0.0026}
    settle(document)


def one_prompt_under_many_ids(document: Document) -> None:
    for arm in document["arms"]:
        for row in arm["samples"]:
            row["prompt_sha256"] = "ab" * 32


RULES = Rules(
    alone={
        "SPEEDUP_SAMPLES": ("throughput", speedup_samples),
        "SPEEDUP_TOKENS": ("throughput", speedup_tokens),
        "SPEEDUP_SUBSET": ("throughput", speedup_subset),
        "SPEEDUP_SCOPE": ("throughput", speedup_scope),
        "SPEEDUP_BASELINE_LOOP": ("throughput", speedup_baseline_loop),
        "SPEEDUP_NOT_INTERLEAVED": ("throughput", speedup_not_interleaved),
        "SPEEDUP_PREFILL_SPREAD": ("throughput", speedup_prefill_spread),
        "SPEEDUP_DECODE_SPREAD": ("throughput", speedup_decode_spread),
        "SPEEDUP_IMPOSSIBLE": ("throughput", chain(only("speedup"), undrafted_time)),
        "BASELINE_SLOW": ("throughput", chain(block_1, scaled("block-1", 0.6))),
        "MACHINE_BUSY": ("throughput", loaded(other_cpu_share=0.11)),
    },
    variants=[
        ("SPEEDUP_SAMPLES", "throughput", one_prompt_under_many_ids),
        ("SPEEDUP_NOT_INTERLEAVED", "throughput", always_first),
        ("SPEEDUP_SCOPE", "throughput", change("arms", 0, "timing_scope", to="end_to_end")),
        ("SPEEDUP_PREFILL_SPREAD", "throughput", equal_length_spread),
        ("SPEEDUP_IMPOSSIBLE", "throughput", scaled("speculative", 0.4)),
        ("SPEEDUP_IMPOSSIBLE", "throughput", scaled("plain", 2.3)),
        ("SPEEDUP_IMPOSSIBLE", "throughput", chain(block_1, scaled("speculative", 0.35))),
        ("TIMINGS_IMPOSSIBLE", "throughput", chain(block_1, scaled("speculative", 0.7))),
        ("BASELINE_SLOW", "throughput", scaled("plain", 3.0)),
        ("BASELINE_SLOW", "throughput", chain(lambda d: block_1(d, 0.003), some_rows_slow)),
        ("MACHINE_BUSY", "throughput", loaded(other_cpu_share=None)),
        ("MACHINE_BUSY", "throughput", loaded(seconds=1.0)),
        ("MACHINE_BUSY", "throughput", loaded(services=QUIET | {"spotlight": 6.1})),
        ("MACHINE_BUSY", "throughput", loaded(services=QUIET | {"time_machine": 30.0})),
        ("MACHINE_BUSY", "throughput", loaded(services={})),
    ],
    honest=[
        ("throughput", block_1),
        ("throughput", chain(block_1, scaled("plain", 1.2))),
        ("throughput", chain(only("identical_output"), scaled("speculative", 0.2))),
        ("throughput", chain(only("identical_output"), scaled("plain", 5.0))),
        ("throughput", chain(only("identical_output"), loaded(other_cpu_share=0.9))),
        ("throughput", chain(only("identical_output"), loaded(seconds=0.0, other_cpu_share=None))),
    ],
)
