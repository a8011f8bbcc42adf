"""Reports whose speed means nothing."""

from __future__ import annotations

from tests.bridge.evidence.breakers import Rules, both, change, claims, put, rows
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
    for arm in document["arms"]:
        del arm["samples"][4:]
    settle(document)


def speedup_tokens(document: Document) -> None:
    for row in both(document):
        put(document, row, row["tokens"][:32], round(row["decode_s"] / 2, 7))
    settle(document)


def speedup_subset(document: Document) -> None:
    claims(document, "speedup")
    rows(document, "speculative").pop()
    settle(document)


def speedup_scope(document: Document) -> None:
    for arm in document["arms"]:
        arm["timing_scope"] = "end_to_end"


def speedup_baseline_loop(document: Document) -> None:
    claims(document, "speedup")  # sameness asks for plain decoding, too
    document["arms"][0]["system"]["loop"] = "kakeya.decode"
    for row in rows(document, "plain"):
        row["path"] = "plain:kakeya.decode"


def speedup_not_interleaved(document: Document) -> None:
    document["order"].sort()


def speedup_prefill_spread(document: Document) -> None:
    rows(document, "speculative")[0]["prefill_s"] = 0.0404
    settle(document)


def speedup_decode_spread(document: Document) -> None:
    row = rows(document, "plain")[0]
    row["decode_s"] = round(4 * row["decode_s"], 7)
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
    },
    variants=[
        ("SPEEDUP_SAMPLES", "throughput", one_prompt_under_many_ids),
        ("SPEEDUP_NOT_INTERLEAVED", "throughput", always_first),
        ("SPEEDUP_SCOPE", "throughput", change("arms", 0, "timing_scope", to="end_to_end")),
        ("SPEEDUP_PREFILL_SPREAD", "throughput", equal_length_spread),
    ],
)
