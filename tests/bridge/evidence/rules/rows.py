"""Reports whose identity, times or rows contradict themselves, and those that do not."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from random import Random

from evidence_format.prompt_sets import known_sets
from tests.bridge.evidence import reports
from tests.bridge.evidence.breakers import (
    Breaker,
    Rules,
    chain,
    change,
    claims,
    env,
    own_prompts,
    resettle,
    rows,
)
from tests.bridge.evidence.reports import Document, settle


def texts_of_equal_tokens(document: Document) -> None:
    rows(document, "oracle")[0]["text"] += " "


def doubled_row(document: Document) -> None:
    for arm in document["arms"]:
        arm["samples"].append(copy.deepcopy(arm["samples"][0]))
    settle(document)


def stale_report(document: Document) -> None:
    document["started_at"] = "2026-02-28T12:00:05Z"


def wrong_request(document: Document) -> None:
    document["request"]["nonce"] = "20260301t120000zba9876543210"


def kind_mismatch(document: Document) -> None:
    document["kind"] = "probe"
    document["claims"] = []


def row_inconsistent(document: Document) -> None:
    rows(document, "speculative")[0]["rounds"].pop()
    document["liveness"]["rounds"] -= 1
    document["summary"] = reports.summary(document)


def order_mismatch(document: Document) -> None:
    document["order"] += [["plain", "code-900"], ["speculative", "code-900"]]


def missing_stage_timings(document: Document) -> None:
    claims(document, "identical_output")
    del rows(document, "plain")[0]["prefill_s"]
    document["summary"] = reports.summary(document)


def timings_impossible(document: Document) -> None:
    rows(document, "speculative")[0]["rounds"][0]["verify_s"] = 0.5


def summary_mismatch(document: Document) -> None:
    document["summary"]["comparisons"][0]["decode_ratio"] *= 1 + 1e-6


def verified_in_no_time(share: float) -> Breaker:
    """Blocks verified in a share of what a plain step takes."""

    def apply(document: Document) -> None:
        claims(document, "speedup")
        for row in rows(document, "speculative"):
            for turn in row["rounds"]:
                turn["verify_s"] = share * 0.005
        settle(document)

    return apply


def uncounted_forwards(document: Document) -> None:
    """Our own loop without a drafter, and without a single forward."""
    document["arms"][1]["system"] |= {"drafter": None, "block": None}
    for row in rows(document, "speculative"):
        row["path"], row["rounds"] = "plain:kakeya.decode", []
    settle(document)


def configuration_unknown(document: Document) -> None:
    document["configuration"]["turbo"] = True


def prompt_set_mismatch(document: Document) -> None:
    document["configuration"]["limit"] = 9


def drawn(document: Document) -> None:
    """Eight prompts of the set as seed 5 draws them."""
    document["configuration"]["seed"] = 5
    order = list(known_sets().sets["code"])
    Random(5).shuffle(order)  # noqa: S311 - the engine's draw again
    _rename(document, order)


def shipped_prompt_by_another_name(document: Document) -> None:
    own_prompts(document)
    for arm in document["arms"]:
        arm["samples"][2]["source_sha256"] = reports.source_of("code-003")


def another_needle(document: Document) -> None:
    """The shipped retrieval prompts, but with an answer that the text happens to hold."""
    document["configuration"]["prompts"], document["configuration"]["limit"] = "retrieval", 10
    _rename(document, known_sets().sets["retrieval"])


def _rename(document: Document, prompts: Sequence[str]) -> None:
    for arm in document["arms"]:
        for row, prompt in zip(arm["samples"], prompts, strict=False):
            row["prompt_id"], row["source_sha256"] = prompt, reports.source_of(prompt)
    settle(document)


def other_source(document: Document) -> None:
    for arm in document["arms"]:
        arm["samples"][2]["source_sha256"] = "9a" * 32


def other_tokens(document: Document) -> None:
    """The shipped target's tokens of a shipped prompt are known, too."""
    document["environment"]["models"]["target"]["weights_sha256"] = known_sets().target_sha256


RULES = Rules(
    alone={
        "CONFIGURATION_UNKNOWN": ("throughput", configuration_unknown),
        "PROMPT_SET_MISMATCH": ("throughput", prompt_set_mismatch),
        "STALE_REPORT": ("throughput", stale_report),
        "WRONG_REQUEST": ("throughput", wrong_request),
        "KIND_MISMATCH": ("throughput", kind_mismatch),
        "ROW_INCONSISTENT": ("throughput", row_inconsistent),
        "ORDER_MISMATCH": ("throughput", order_mismatch),
        "MISSING_STAGE_TIMINGS": ("throughput", missing_stage_timings),
        "TIMINGS_IMPOSSIBLE": ("throughput", timings_impossible),
        "SUMMARY_MISMATCH": ("throughput", summary_mismatch),
    },
    variants=[
        ("CONFIGURATION_UNKNOWN", "throughput", change("configuration", "temperature", to=0.7)),
        ("PROMPT_SET_MISMATCH", "throughput", change("configuration", "limit", to=None)),
        ("PROMPT_SET_MISMATCH", "throughput", change("configuration", "limit", to=False)),
        ("PROMPT_SET_MISMATCH", "throughput", change("configuration", "prompts", to="all")),
        ("PROMPT_SET_MISMATCH", "throughput", change("configuration", "prompts", to="chat,code")),
        ("PROMPT_SET_MISMATCH", "throughput", change("configuration", "limit", to=7)),
        ("PROMPT_SET_MISMATCH", "throughput", change("configuration", "seed", to=5)),
        ("PROMPT_SET_MISMATCH", "throughput", chain(drawn, change("configuration", "seed", to=6))),
        ("PROMPT_SET_MISMATCH", "throughput", chain(drawn, change("configuration", "seed", to="5"))),
        ("PROMPT_SET_MISMATCH", "throughput", change("configuration", "prompts", to="my.jsonl")),
        ("PROMPT_SET_MISMATCH", "throughput", lambda document: document["configuration"].pop("prompts")),
        ("PROMPT_SET_MISMATCH", "throughput", shipped_prompt_by_another_name),
        ("PROMPT_SET_MISMATCH", "recall", another_needle),
        ("PROMPT_SET_MISMATCH", "throughput", other_source),
        (
            "PROMPT_SET_MISMATCH",
            "throughput",
            chain(other_source, change("configuration", "prompts", to="my.jsonl")),
        ),
        ("PROMPT_SET_MISMATCH", "throughput", other_tokens),
        ("STALE_REPORT", "probe", change("finished_at", to="2026-03-01T12:00:04Z")),
        ("STALE_REPORT", "probe", change("finished_at", to="2026-03-01T12:01:09Z")),
        ("WRONG_REQUEST", "probe", lambda document: document.pop("request")),
        ("WRONG_REQUEST", "probe", change("request", "workload_sha", to="ba" * 20)),
        ("WRONG_REQUEST", "probe", change("request", "preset_digest", to="65" * 32)),
        ("WRONG_REQUEST", "probe", change("request", "engine_source", to="workload")),
        ("KIND_MISMATCH", "throughput", chain(change("arms", to=[]), change("claims", to=[]), resettle)),
        ("ROW_INCONSISTENT", "recall", change("arms", 0, "samples", 0, "tokens_sha256", to="9a" * 32)),
        ("ROW_INCONSISTENT", "recall", texts_of_equal_tokens),
        ("ORDER_MISMATCH", "throughput", lambda document: document["order"].pop()),
        ("ORDER_MISMATCH", "recall", doubled_row),
        (
            "MISSING_STAGE_TIMINGS",
            "recall",
            chain(change("arms", 1, "samples", 0, "prefill_s", to=0), resettle),
        ),
        ("TIMINGS_IMPOSSIBLE", "throughput", change("finished_at", to="2026-03-01T12:00:06Z")),
        ("TIMINGS_IMPOSSIBLE", "recall", change("arms", 0, "samples", 0, "rounds", 0, "verify_s", to=0)),
        ("TIMINGS_IMPOSSIBLE", "throughput", verified_in_no_time(0.45)),
        (
            "TIMINGS_IMPOSSIBLE",
            "throughput",
            change("arms", 1, "samples", 3, "rounds", 2, "verify_s", to=0.001),
        ),
        ("ROW_INCONSISTENT", "throughput", env("models", "target", "vocab_size", to=100)),
        ("ROW_INCONSISTENT", "throughput", env("models", "drafter", "largest_block", to=7)),
        ("ROW_INCONSISTENT", "throughput", uncounted_forwards),
        ("SUMMARY_MISMATCH", "throughput", change("summary", "comparisons", to=[])),
        ("SUMMARY_MISMATCH", "throughput", change("summary", "arms", "plain", "recall", to=1.0)),
        ("SUMMARY_MISMATCH", "throughput", lambda document: document["summary"]["arms"].pop("plain")),
        ("SUMMARY_MISMATCH", "recall", change("summary", "arms", "no_needle", "recall", to=0.1)),
    ],
    honest=[
        ("throughput", own_prompts),
        ("throughput", drawn),
        ("throughput", chain(other_tokens, change("configuration", "chat", to=True))),
        ("throughput", verified_in_no_time(0.55)),
        ("throughput", chain(verified_in_no_time(0.01), change("claims", to=[]))),
    ],
)
