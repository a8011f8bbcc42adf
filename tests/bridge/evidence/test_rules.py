"""Every rule has a report that breaks only that rule; the reports they start from break none."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from bridge.evidence.gate import Binding, judge
from bridge.evidence.rules import ELSEWHERE, RULES, explain, rules_table
from bridge.evidence.rules.output import degeneration
from tests.bridge.evidence import reports
from tests.bridge.evidence.reports import Document, dump, filler, settle

BINDING = Binding(
    nonce=reports.NONCE,
    workload_sha=reports.WORKLOAD,
    preset_digest="56" * 32,
    engine_source="installed",
    started_at=datetime(2026, 3, 1, 12, 0, 4, tzinfo=UTC),
    finished_at=datetime(2026, 3, 1, 12, 1, 6, tzinfo=UTC),
)
BUILDERS = {
    "throughput": reports.throughput,
    "recall": reports.recall,
    "restoration": reports.restoration,
    "probe": reports.probe,
}


def codes(document: Document, binding: Binding | None = BINDING) -> set[str]:
    return {violation.code for violation in judge(dump(document), binding=binding).violations}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("binding", [None, BINDING], ids=["by hand", "bound"])
def test_a_true_report_passes(name: str, binding: Binding | None) -> None:
    judgement = judge(dump(BUILDERS[name]()), binding=binding)
    assert judgement.violations == ()
    assert judgement.accepted
    assert all(claim.met for claim in judgement.claims)


def rows(document: Document, arm: str) -> list[Document]:
    found: list[Document] = next(one for one in document["arms"] if one["name"] == arm)["samples"]
    return found


def both(document: Document) -> list[Document]:
    return rows(document, "plain") + rows(document, "speculative")


def claims(document: Document, *names: str) -> None:
    document["claims"] = [claim for claim in document["claims"] if claim["name"] in names]


def put(document: Document, row: Document, tokens: list[int], seconds: float) -> None:
    """Give a row other tokens, and the rounds that explain them."""
    row["tokens"], row["decode_s"] = tokens, seconds
    row["text"] = " ".join(f"w{token}" for token in tokens)
    if row["rounds"]:
        row["rounds"] = reports.rounds_for(len(tokens) - 1, seconds)


# --- one breaker a rule: it gets a valid report and breaks one thing --------------------------------------


def stale_report(document: Document) -> None:
    document["started_at"] = "2026-02-28T12:00:05Z"


def wrong_request(document: Document) -> None:
    document["request"]["nonce"] = "20260301t120000zba9876543210"


def kind_mismatch(document: Document) -> None:
    document["kind"] = "probe"
    document["claims"] = []


def row_inconsistent(document: Document) -> None:
    rows(document, "speculative")[0]["rounds"].pop()
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


def engine_never_ran(document: Document) -> None:
    document["liveness"]["drafter_forwards"] = 0


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


def prompt_contaminated(document: Document) -> None:
    for row in both(document):
        row["instruction_sha256"] = reports.QUESTION


def diverge(document: Document, plain_gap: float) -> None:
    row = rows(document, "speculative")[2]
    row["tokens"][40] += 1
    row["text"] += "!"
    entry = {"arm": "speculative", "prompt_id": row["prompt_id"], "position": 40, "plain_gap": plain_gap}
    entry |= {"speculative_token": row["tokens"][40], "plain_token": row["tokens"][40] - 1}
    document["divergences"] = [entry]
    settle(document)


def output_diverged(document: Document) -> None:
    diverge(document, plain_gap=0.5)


def rounding_implausible(document: Document) -> None:
    document["rounding"]["max_abs_logit_error"] = 3.5


def output_degenerate(document: Document) -> None:
    for row in (rows(document, "plain")[0], rows(document, "speculative")[0]):
        put(document, row, filler(3, 16) + [5, 6, 7, 8] * 12, row["decode_s"])
    settle(document)


def recall_vacuous(document: Document) -> None:
    for arm in ("speculative", "oracle"):
        rows(document, arm)[0]["needle"]["prompt_contains_answer_outside_needle"] = True


def recall_below_oracle(document: Document) -> None:
    claims(document, "recall_parity")
    for row in rows(document, "speculative")[:2]:
        row["tokens"], row["text"] = filler(77, 12), "I forgot."
    settle(document)


def restoration_claim(document: Document) -> None:
    document["liveness"]["restored_positions"] = 0


def control_missing(document: Document) -> None:
    document["arms"] = [arm for arm in document["arms"] if arm["name"] != "no_needle"]
    settle(document)


def control_failed(document: Document) -> None:
    for row in rows(document, "no_needle")[:3]:
        row["text"] = row["needle"]["answer"]
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


def memory_analytic_as_measured(document: Document) -> None:
    claims(document, "speedup")
    for row in rows(document, "plain"):
        row["cache"]["measured"] = False


def memory_claim_mismatch(document: Document) -> None:
    for row in rows(document, "plain"):
        row["cache"]["classes"] = {"QuantizedKVCache": 9}


def environment_incomplete(document: Document) -> None:
    del document["environment"]["models"]["drafter"]


def thermal_or_power(document: Document) -> None:
    document["environment"]["power_source"] = "battery"


def claim_not_met(document: Document) -> None:
    document["claims"][1]["at_least"] = 2.5


Breaker = Callable[[Document], None]
BREAKERS: dict[str, tuple[str, Breaker]] = {
    "STALE_REPORT": ("throughput", stale_report),
    "WRONG_REQUEST": ("throughput", wrong_request),
    "KIND_MISMATCH": ("throughput", kind_mismatch),
    "ROW_INCONSISTENT": ("throughput", row_inconsistent),
    "ORDER_MISMATCH": ("throughput", order_mismatch),
    "MISSING_STAGE_TIMINGS": ("throughput", missing_stage_timings),
    "TIMINGS_IMPOSSIBLE": ("throughput", timings_impossible),
    "SUMMARY_MISMATCH": ("throughput", summary_mismatch),
    "ENGINE_NEVER_RAN": ("throughput", engine_never_ran),
    "SILENT_FALLBACK": ("throughput", silent_fallback),
    "MIXED_PATHS": ("throughput", mixed_paths),
    "BASELINE_AS_SUT": ("throughput", baseline_as_sut),
    "SELF_COMPARISON": ("throughput", self_comparison),
    "PROMPT_CONTAMINATED": ("throughput", prompt_contaminated),
    "OUTPUT_DIVERGED": ("throughput", output_diverged),
    "ROUNDING_IMPLAUSIBLE": ("throughput", rounding_implausible),
    "OUTPUT_DEGENERATE": ("throughput", output_degenerate),
    "RECALL_VACUOUS": ("recall", recall_vacuous),
    "RECALL_BELOW_ORACLE": ("recall", recall_below_oracle),
    "RESTORATION_CLAIM": ("restoration", restoration_claim),
    "CONTROL_MISSING": ("recall", control_missing),
    "CONTROL_FAILED": ("recall", control_failed),
    "SPEEDUP_SAMPLES": ("throughput", speedup_samples),
    "SPEEDUP_TOKENS": ("throughput", speedup_tokens),
    "SPEEDUP_SUBSET": ("throughput", speedup_subset),
    "SPEEDUP_SCOPE": ("throughput", speedup_scope),
    "SPEEDUP_BASELINE_LOOP": ("throughput", speedup_baseline_loop),
    "SPEEDUP_NOT_INTERLEAVED": ("throughput", speedup_not_interleaved),
    "SPEEDUP_PREFILL_SPREAD": ("throughput", speedup_prefill_spread),
    "SPEEDUP_DECODE_SPREAD": ("throughput", speedup_decode_spread),
    "MEMORY_ANALYTIC_AS_MEASURED": ("throughput", memory_analytic_as_measured),
    "MEMORY_CLAIM_MISMATCH": ("throughput", memory_claim_mismatch),
    "ENVIRONMENT_INCOMPLETE": ("throughput", environment_incomplete),
    "THERMAL_OR_POWER": ("throughput", thermal_or_power),
    "CLAIM_NOT_MET": ("throughput", claim_not_met),
}


def test_every_rule_has_its_breaker() -> None:
    assert list(BREAKERS) == list(RULES)


@pytest.mark.parametrize("code", BREAKERS)
def test_a_report_that_breaks_only_this_rule_is_rejected_for_it(code: str) -> None:
    kind, breaker = BREAKERS[code]
    document = BUILDERS[kind]()
    breaker(document)
    assert codes(document) == {code}


# --- the other ways a rule is broken ------------------------------------------------------------------------


def change(*path: str | int, to: object) -> Breaker:
    def apply(document: Document) -> None:
        place = document
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return apply


def chain(*breakers: Breaker) -> Breaker:
    def apply(document: Document) -> None:
        for breaker in breakers:
            breaker(document)

    return apply


def only(*names: str) -> Breaker:
    return lambda document: claims(document, *names)


def resettle(document: Document) -> None:
    settle(document)


def claim(**fields: object) -> Breaker:
    return lambda document: document["claims"].append(fields)


def drop_baseline(document: Document) -> None:
    del document["arms"][0]
    settle(document)


def same_answers(document: Document) -> None:
    for arm in ("speculative", "oracle", "no_needle"):
        for row in rows(document, arm):
            row["needle"] |= {"answer": "4821", "needle": "The code is 4821."}
            row["text"] = "nothing" if arm == "no_needle" else "4821"
    settle(document)


def empty_answers(document: Document) -> None:
    for arm in ("speculative", "oracle", "no_needle"):
        rows(document, arm)[0]["needle"]["answer"] = ""
    settle(document)
    for arm in ("speculative", "oracle", "no_needle"):
        rows(document, arm)[0]["needle"]["hit"] = arm != "no_needle"


def short_answers(document: Document) -> None:
    for arm in ("speculative", "oracle", "no_needle"):
        rows(document, arm)[0]["needle"] |= {"answer": "4", "needle": "The digit is 4."}
    settle(document)


def deaf_oracle(document: Document) -> None:
    claims(document, "recall_parity")
    for arm in ("speculative", "oracle"):
        for row in rows(document, arm):
            row["text"] = "no idea"
    settle(document)


def fixed_block(document: Document) -> None:
    document["arms"][1]["system"]["block"] = "16"


def longer_output(document: Document) -> None:
    put(document, rows(document, "speculative")[0], filler(0, 67), 0.17)
    settle(document)


def unlisted_divergence(document: Document) -> None:
    diverge(document, 1e-5)
    document["divergences"] = []


def misplaced_divergence(document: Document) -> None:
    diverge(document, 1e-5)
    document["divergences"][0]["position"] = 39


def unmeasured_rounding(document: Document) -> None:
    claims(document, "speedup")
    diverge(document, 1e-5)
    document["rounding"] = None


def invented_divergence(document: Document) -> None:
    diverge(document, 1e-5)
    row = rows(document, "speculative")[2]
    row["tokens"][40] -= 1
    row["text"] = row["text"].rstrip("!")
    settle(document)


def always_first(document: Document) -> None:
    document["order"] = [
        run
        for row in rows(document, "plain")
        for run in (["plain", row["prompt_id"]], ["speculative", row["prompt_id"]])
    ]


def different_prompts(document: Document) -> None:
    rows(document, "speculative")[1]["prompt_sha256"] = "78" * 32


def mixed_set(document: Document) -> None:
    for arm in ("speculative", "oracle"):
        rows(document, arm)[0]["instruction_sha256"] = reports.EMPTY
    rows(document, "no_needle")[0]["instruction_sha256"] = reports.EMPTY


def texts_of_equal_tokens(document: Document) -> None:
    rows(document, "oracle")[0]["text"] += " "


def doubled_row(document: Document) -> None:
    for arm in document["arms"]:
        arm["samples"].append(copy.deepcopy(arm["samples"][0]))
    settle(document)


def equal_length_spread(document: Document) -> None:
    for arm in ("plain", "speculative"):
        rows(document, arm)[0]["prefill_s"] += 0.05
    settle(document)


def all_rounds_plain_but_declared(document: Document) -> None:
    document["arms"][1]["system"]["block"] = "8"
    row = rows(document, "speculative")[0]
    each = {"block": 1, "accepted": 0, "draft_s": 0.0, "verify_s": 0.0001}
    row["rounds"] = [dict(each) for _ in range(len(row["tokens"]) - 1)]
    settle(document)


def noise_still_answers(document: Document) -> None:
    for row in rows(document, "noise"):
        row["text"] = row["needle"]["answer"]
    settle(document)


def exact_is_lost(document: Document) -> None:
    for row in rows(document, "exact"):
        row["tokens"], row["text"] = filler(88, 12), "lost"
    settle(document)


VARIANTS: list[tuple[str, str, Breaker]] = [
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
    ("MISSING_STAGE_TIMINGS", "recall", chain(change("arms", 1, "samples", 0, "prefill_s", to=0), resettle)),
    ("TIMINGS_IMPOSSIBLE", "throughput", change("finished_at", to="2026-03-01T12:00:06Z")),
    ("TIMINGS_IMPOSSIBLE", "recall", change("arms", 0, "samples", 0, "rounds", 0, "verify_s", to=0)),
    ("SUMMARY_MISMATCH", "throughput", change("summary", "comparisons", to=[])),
    ("SUMMARY_MISMATCH", "throughput", change("summary", "arms", "plain", "recall", to=1.0)),
    ("SUMMARY_MISMATCH", "throughput", lambda document: document["summary"]["arms"].pop("plain")),
    ("SUMMARY_MISMATCH", "recall", change("summary", "arms", "no_needle", "recall", to=0.1)),
    ("ENGINE_NEVER_RAN", "throughput", change("liveness", "rounds", to=3)),
    ("ENGINE_NEVER_RAN", "throughput", change("liveness", "drafter_forwards", to=3)),
    ("SILENT_FALLBACK", "throughput", fixed_block),
    ("SILENT_FALLBACK", "throughput", chain(only("identical_output"), all_rounds_plain_but_declared)),
    (
        "SILENT_FALLBACK",
        "throughput",
        change("liveness", "fallbacks", to=[{"component": "drafter", "reason": "no weights", "count": 2}]),
    ),
    ("MIXED_PATHS", "throughput", change("arms", 0, "samples", 2, "cache", "classes", to={"KVCache": 9})),
    (
        "SELF_COMPARISON",
        "throughput",
        chain(only("identical_output"), claim(name="identical_output", arm="plain", baseline="plain")),
    ),
    ("PROMPT_CONTAMINATED", "throughput", different_prompts),
    ("PROMPT_CONTAMINATED", "recall", mixed_set),
    ("OUTPUT_DIVERGED", "throughput", unlisted_divergence),
    ("OUTPUT_DIVERGED", "throughput", misplaced_divergence),
    ("OUTPUT_DIVERGED", "throughput", unmeasured_rounding),
    ("OUTPUT_DIVERGED", "throughput", invented_divergence),
    ("OUTPUT_DIVERGED", "throughput", longer_output),
    ("ROUNDING_IMPLAUSIBLE", "throughput", change("environment", "models", "target", "dtype", to="int3")),
    ("RECALL_VACUOUS", "recall", same_answers),
    ("RECALL_VACUOUS", "recall", short_answers),
    ("RECALL_VACUOUS", "recall", deaf_oracle),
    (
        "RECALL_VACUOUS",
        "recall",
        change("arms", 0, "samples", 0, "needle", "prompt_contains_needle", to=False),
    ),
    ("RESTORATION_CLAIM", "throughput", change("liveness", "restored_positions", to=5)),
    ("RESTORATION_CLAIM", "recall", claim(name="restoration", arm="speculative")),
    ("CONTROL_MISSING", "recall", chain(lambda document: document["arms"].pop(1), resettle)),
    ("CONTROL_MISSING", "restoration", chain(lambda document: document["arms"].pop(4), resettle)),
    ("CONTROL_MISSING", "recall", chain(lambda document: document["arms"][2]["samples"].pop(), resettle)),
    ("CONTROL_FAILED", "restoration", noise_still_answers),
    ("CONTROL_FAILED", "restoration", exact_is_lost),
    ("SPEEDUP_NOT_INTERLEAVED", "throughput", always_first),
    ("SPEEDUP_SCOPE", "throughput", change("arms", 0, "timing_scope", to="end_to_end")),
    ("SPEEDUP_PREFILL_SPREAD", "throughput", equal_length_spread),
    (
        "MEMORY_ANALYTIC_AS_MEASURED",
        "throughput",
        change("arms", 1, "samples", 0, "cache", "measured", to=False),
    ),
    (
        "MEMORY_CLAIM_MISMATCH",
        "throughput",
        chain(change("arms", 0, "samples", 0, "cache", "resident_bytes", to=0), resettle),
    ),
    ("MEMORY_CLAIM_MISMATCH", "recall", change("arms", 0, "system", "kv", to="lattice:e8,38")),
    ("ENVIRONMENT_INCOMPLETE", "probe", change("environment", "chip", to="unknown")),
    ("ENVIRONMENT_INCOMPLETE", "probe", change("environment", "versions", "mlx", to=" ")),
    ("ENVIRONMENT_INCOMPLETE", "probe", change("environment", "git", "sha", to=None)),
    ("ENVIRONMENT_INCOMPLETE", "probe", change("environment", "git", "source_sha256", to="0" * 64)),
    ("ENVIRONMENT_INCOMPLETE", "probe", change("environment", "models", "target", "parameters", to=0)),
    ("THERMAL_OR_POWER", "throughput", change("environment", "thermal_state", to="serious")),
    ("THERMAL_OR_POWER", "throughput", change("environment", "swapping", to=True)),
    ("CLAIM_NOT_MET", "throughput", claim(name="no_slowdown", at_least=0.1)),
    ("CLAIM_NOT_MET", "throughput", claim(name="speedup", at_least=0.9)),
    ("CLAIM_NOT_MET", "throughput", claim(name="speedup")),
    ("CLAIM_NOT_MET", "throughput", claim(name="speedup", at_least=1.2, at_most=3)),
    ("CLAIM_NOT_MET", "throughput", claim(name="identical_output", at_least=1)),
    ("CLAIM_NOT_MET", "throughput", claim(name="resident_bytes", at_most=1000)),
    ("CLAIM_NOT_MET", "throughput", claim(name="acceptance_length", arm="nobody", at_least=2)),
    ("CLAIM_NOT_MET", "throughput", claim(name="identical_output", baseline="speculative")),
    ("CLAIM_NOT_MET", "throughput", change("rounding", to=None)),
    ("CLAIM_NOT_MET", "throughput", chain(only("identical_output"), drop_baseline)),
    ("CLAIM_NOT_MET", "recall", claim(name="speedup", at_least=1.0)),
    ("CLAIM_NOT_MET", "recall", claim(name="recall", at_least=1.5)),
    ("CLAIM_NOT_MET", "recall", claim(name="recall_parity", baseline="no_needle")),
    ("CLAIM_NOT_MET", "probe", change("claims", 0, "arm", to="plain")),
]


@pytest.mark.parametrize(
    ("code", "kind", "breaker"), VARIANTS, ids=[f"{code}-{n}" for n, (code, _, _) in enumerate(VARIANTS)]
)
def test_other_ways_to_break_a_rule(code: str, kind: str, breaker: Breaker) -> None:
    document = BUILDERS[kind]()
    breaker(document)
    assert code in codes(document)


def test_an_empty_answer_is_no_hit() -> None:
    document = reports.recall()
    empty_answers(document)
    assert {"RECALL_VACUOUS", "ROW_INCONSISTENT"} <= codes(document)


# --- what must pass -----------------------------------------------------------------------------------------


def linux_without_checkout(document: Document) -> None:
    document["environment"] |= {"system": "Linux", "chip": "AMD EPYC", "metal": False, "blas": "reference"}
    document["environment"] |= {
        "power_source": "not_applicable",
        "thermal_state": "unknown",
        "swapping": None,
    }
    document["environment"]["git"] |= {"sha": None, "dirty": None}  # source_sha256 names what ran


def slower_but_only_identical(document: Document) -> None:
    """Sequential, few, short and slow: nothing about speed is claimed."""
    claims(document, "identical_output")
    for arm in document["arms"]:
        del arm["samples"][3:]
    for row in both(document):
        put(document, row, row["tokens"][:9], 0.9)
    settle(document)
    document["order"].sort()
    document["environment"]["power_source"] = "battery"


def plain_alone(document: Document) -> None:
    document["claims"] = []
    document["rounding"] = None
    del document["arms"][1]
    del document["environment"]["models"]["drafter"]
    for row in rows(document, "plain"):
        put(document, row, [9] * 64, 0.2)  # honest about a model that loops: nothing is claimed
    settle(document)


def no_slowdown(document: Document) -> None:
    claims(document, "identical_output")
    document["claims"].append({"name": "no_slowdown", "at_least": 0.9})
    for fast, plain in zip(rows(document, "speculative"), rows(document, "plain"), strict=True):
        put(document, fast, plain["tokens"], round(plain["decode_s"] * 1.05, 7))
    settle(document)


def excused_tie(document: Document) -> None:
    diverge(document, plain_gap=1e-4)


def plain_steps_between(document: Document) -> None:
    row = rows(document, "speculative")[0]
    single = {"block": 1, "accepted": 0, "draft_s": 0.0, "verify_s": 0.002}
    row["rounds"] = [single] * 4 + row["rounds"][1:]
    settle(document)


def honest_low_recall(document: Document) -> None:
    document["claims"] = [{"name": "recall", "arm": "speculative", "at_least": 0.5}]
    for row in rows(document, "speculative")[:4]:
        row["tokens"], row["text"] = filler(99, 12), "I forgot."
    settle(document)


def fixed_block_that_shrinks(document: Document) -> None:
    document["arms"][1]["system"]["block"] = "8"
    row = rows(document, "speculative")[0]  # 64 decoded tokens: 15 rounds of 4 and the last four tokens
    row["rounds"][-1] |= {"block": 4, "accepted": 3}
    settle(document)


@pytest.mark.parametrize(
    ("kind", "variation"),
    [
        ("throughput", linux_without_checkout),
        ("throughput", slower_but_only_identical),
        ("throughput", plain_alone),
        ("throughput", no_slowdown),
        ("throughput", excused_tie),
        ("throughput", plain_steps_between),
        ("throughput", fixed_block_that_shrinks),
        ("recall", honest_low_recall),
        ("recall", linux_without_checkout),
        (
            "throughput",
            change(
                "liveness", "fallbacks", to=[{"component": "compile", "reason": "no compiler", "count": 1}]
            ),
        ),
    ],
)
def test_a_report_may_claim_less_and_pass(kind: str, variation: Breaker) -> None:
    document = BUILDERS[kind]()
    variation(document)
    assert codes(document) == set()


# --- degeneration -------------------------------------------------------------------------------------------


def templated_code(classes: int) -> list[int]:
    """Lines that repeat but for a name, as generated accessors do: 24 tokens with four of them new."""
    tokens: list[int] = []
    for i in range(classes):
        body = [11, 12, 1000 + i, 13, 14, 15, 16, 17, 18, 1000 + i, 19, 20]
        tokens += [*body, 21, 22, 500 + 3 * i, 23, 24, 25, 26, 27, 28, 29, 500 + 3 * i, 30]
    return tokens


@pytest.mark.parametrize(
    ("tokens", "degenerate"),
    [
        (filler(1, 200), False),
        (templated_code(12), False),
        ([7] * 40, False),  # too short to call
        ([1, 2, 3] * 15, False),
        (filler(1, 20) + [7] * 48, True),
        (filler(1, 20) + [1, 2, 3] * 16, True),
        (filler(1, 40) + list(range(16)) * 3, True),
        (filler(1, 40) + list(range(16)) * 3 + [99], False),  # it went on to say something else
        (filler(1, 10) + list(range(40)) * 4, True),
        (list(range(20)) * 5 + [99], True),  # most of it is a loop, though the end is not
        (filler(1, 100) + templated_code(5), False),
        ([], False),
    ],
)
def test_degeneration_is_told_from_templates(tokens: list[int], degenerate: bool) -> None:
    assert (degeneration(tuple(tokens)) is not None) == degenerate


# --- the registry -------------------------------------------------------------------------------------------


def test_every_code_is_explained_and_in_the_table() -> None:
    table = rules_table()
    assert not RULES.keys() & ELSEWHERE.keys()
    for code in RULES.keys() | ELSEWHERE.keys():
        explanation = explain(code)
        assert explanation is not None
        assert explanation.rejected_when
        assert explanation.remedy
        assert table.count(f"| `{code}` |") == 1
    assert explain("NO_SUCH_CODE") is None


def test_the_empty_instruction_is_the_empty_strings_digest() -> None:
    assert hashlib.sha256(b"").hexdigest() == reports.EMPTY
