"""Reports that agree with themselves and still claim what nothing did: each next to an honest one."""

from __future__ import annotations

import copy

import pytest

from bridge.evidence.gate import judge
from tests.bridge.evidence import reports
from tests.bridge.evidence.breakers import Breaker, chain, change, claims, codes, only, own_prompts, rows
from tests.bridge.evidence.reports import Document, arm, dump, filler, settle


def forged(kind: str, *changes: Breaker) -> Document:
    """A true report with changes made to it."""
    document: Document = getattr(reports, kind)()
    chain(*changes)(document)
    return document


def nothing_claimed(document: Document) -> None:
    document["claims"] = []


# --- an engine that never speculated ------------------------------------------------------------------------


def plain_steps_only(name: str, drafter_forwards: int = 1) -> Breaker:
    def apply(document: Document) -> None:
        step = {"block": 1, "accepted": 0, "draft_s": 0.0, "verify_s": 0.0045}
        claims_of_speed = [one for one in document["claims"] if one["name"] == "speedup"]
        for one in claims_of_speed:
            one["at_least"] = 1.0
        for row in rows(document, name):
            row["decode_s"] = round(0.0048 * len(row["tokens"]), 7)
            row["rounds"] = [dict(step) for _ in row["tokens"][1:]]
        settle(document)
        document["liveness"]["drafter_forwards"] = max(
            drafter_forwards, document["liveness"]["drafter_forwards"]
        )

    return apply


def one_look_at_blocks(document: Document) -> None:
    """An adaptive pace that found plain steps faster, and looked once whether blocks pay."""
    row = rows(document, "speculative")[0]
    row["rounds"][-1] |= {"block": 4, "draft_s": 1e-05}
    settle(document)


@pytest.mark.parametrize("drafter_forwards", [0, 1, 600])
def test_no_speed_up_comes_from_a_drafter_that_drafted_no_block(drafter_forwards: int) -> None:
    document = forged("throughput", only("speedup"), plain_steps_only("speculative", drafter_forwards))
    assert codes(document) == {"ENGINE_NEVER_RAN"}


@pytest.mark.parametrize("claimed", [only("identical_output"), nothing_claimed])
@pytest.mark.parametrize(
    ("block", "forwards", "warm_up_forwards", "expected"),
    [
        ("auto", 0, 0, {"ENGINE_NEVER_RAN"}),
        ("auto", 0, 2, set()),
        ("auto", 1, 0, set()),
        ("8", 600, 2, {"ENGINE_NEVER_RAN", "SILENT_FALLBACK"}),
    ],
)
def test_only_auto_may_decode_plainly_and_only_where_the_drafter_was_tried(
    claimed: Breaker, block: str, forwards: int, warm_up_forwards: int, expected: set[str]
) -> None:
    document = forged("throughput", claimed, plain_steps_only("speculative", forwards))
    document["liveness"]["warm_up_forwards"] = warm_up_forwards
    document["configuration"]["block"] = block
    for each in document["arms"]:
        if each["name"] == "speculative":
            each["system"]["block"] = block
    assert codes(document) == expected


def test_a_pace_that_looked_at_blocks_once_ran() -> None:
    document = forged(
        "throughput", only("identical_output"), plain_steps_only("speculative"), one_look_at_blocks
    )
    assert codes(document) == set()
    assert document["liveness"]["drafter_forwards"] == 1


def test_control_may_have_plain_steps_alone() -> None:
    assert codes(forged("recall", plain_steps_only("no_needle"))) == set()


@pytest.mark.parametrize(("more", "expected"), [(-1, {"ENGINE_NEVER_RAN"}), (0, set()), (5, set())])
def test_every_block_of_the_rows_was_drafted(more: int, expected: set[str]) -> None:
    document = forged("throughput")
    document["liveness"]["drafter_forwards"] += more
    assert codes(document) == expected


# --- outputs that differ --------------------------------------------------------------------------------


def ties(count: int, position: int = 1) -> Breaker:
    """Other outputs from `position` on at so many prompts, each called a tie of no gap at all."""

    def apply(document: Document) -> None:
        for i, row in enumerate(rows(document, "speculative")[:count]):
            plain = row["tokens"]
            row["tokens"] = plain[:position] + filler(500 + i, len(plain))[position:]
            row["text"] = " ".join(f"w{token}" for token in row["tokens"])
            entry = {
                "arm": "speculative",
                "prompt_id": row["prompt_id"],
                "position": position,
                "plain_gap": 0,
            }
            entry |= {"speculative_token": row["tokens"][position], "plain_token": plain[position]}
            document["divergences"].append(entry)
        settle(document)

    return apply


def test_rounding_ties_do_not_explain_most_prompts() -> None:
    judgement = judge(dump(forged("throughput", ties(5))))
    assert [violation.code for violation in judgement.violations] == ["OUTPUT_DIVERGED"]
    assert "at 5 of 8 prompts" in judgement.violations[0].message


@pytest.mark.parametrize("position", [0, 1, 40])
def test_rounding_ties_at_half_of_the_prompts_are_excused(position: int) -> None:
    assert codes(forged("throughput", ties(4, position))) == set()


def test_a_record_without_claims_may_hold_any_number_of_ties() -> None:
    assert codes(forged("throughput", nothing_claimed, ties(8))) == set()


@pytest.mark.parametrize(
    ("claimed", "expected"), [("identical_output", {"OUTPUT_DIVERGED"}), ("speedup", set())]
)
def test_identical_outputs_end_for_the_same_reason(claimed: str, expected: set[str]) -> None:
    document = forged("throughput", only(claimed))
    rows(document, "speculative")[0]["finish_reason"] = "stop"
    assert codes(document) == expected


# --- restoration --------------------------------------------------------------------------------------------


def declares_restoration(document: Document) -> None:
    """The arm under test restores; the prompts of both arms are long enough for that."""
    own_prompts(document)
    document["environment"]["models"]["projector"] = reports.model("demo-projector", "78" * 32, 12_000)
    document["arms"][1] = reports.restoring(document["arms"][1], "learned")
    for row in rows(document, "plain"):
        row["prompt_tokens"] = 200
        row["cache"]["resident_bytes"] = 900_000
    settle(document)


def with_controls(document: Document) -> None:
    """An exact control that gives the plain output, and a noise control that does not."""
    for control in ("exact", "noise"):
        other = reports.restoring(document["arms"][1], control)
        other |= {"name": control, "role": "control", "control": control}
        for row in other["samples"]:
            answer = " ".join(f"w{token}" for token in row["tokens"][:5])
            row["needle"] = {
                "needle": answer,
                "answer": answer,
                "depth": 0.5,
                "prompt_contains_answer_outside_needle": False,
                "prompt_contains_needle": True,
                "hit": True,
            }
            if control == "noise":
                row["tokens"] = [token + 1 for token in row["tokens"]]
                row["text"] = "nothing"
        document["arms"].append(other)
    settle(document)


def garbage(document: Document) -> None:
    for i, row in enumerate(rows(document, "speculative")):
        row["tokens"], row["text"] = filler(700 + i, len(row["tokens"])), f"garbage {i}"
    settle(document)


@pytest.mark.parametrize("claimed", [only("speedup"), only("identical_output"), nothing_claimed])
def test_an_arm_that_restores_needs_its_controls_whatever_is_claimed(claimed: Breaker) -> None:
    assert codes(forged("throughput", claimed, declares_restoration)) == {"CONTROL_MISSING"}
    assert codes(forged("throughput", claimed, declares_restoration, with_controls)) == set()


def test_restoration_does_not_excuse_garbage_that_was_fast() -> None:
    fast = (only("speedup"), declares_restoration)
    assert codes(forged("throughput", *fast, with_controls, garbage)) == {"OUTPUT_DIVERGED"}
    assert codes(forged("throughput", *fast, garbage)) == {"OUTPUT_DIVERGED", "CONTROL_MISSING"}


def test_restoring_arm_without_decoding_claims_may_differ() -> None:
    document = forged("throughput", only("resident_bytes"), declares_restoration, with_controls, garbage)
    assert codes(document) == set()


@pytest.mark.parametrize(
    ("claimed", "least", "expected"),
    [
        (["recall"], 0.9, set()),
        (["recall"], 0.01, {"OUTPUT_DIVERGED"}),
        (["recall_parity"], 0.9, set()),
        ([], 0.9, {"OUTPUT_DIVERGED"}),
    ],
)
def test_a_restoring_arm_may_differ_where_its_recall_is_claimed(
    claimed: list[str], least: float, expected: set[str]
) -> None:
    document = forged("restoration", change("claims", 1, "at_least", to=least))
    document["arms"].append(
        arm("plain", "baseline", reports.plain_system(), copy.deepcopy(rows(document, "oracle")))
    )
    claims(document, *claimed)
    document["claims"].append({"name": "acceptance_length", "arm": "speculative", "at_least": 2})
    rows(document, "speculative")[0]["tokens"] = filler(77, 12)
    assert codes(settle(document)) == expected


def test_what_a_control_restored_is_not_what_was_tested() -> None:
    document = forged(
        "restoration", only("recall_parity"), change("arms", 0, "system", "restoration", to=None)
    )
    assert codes(document) == {"RESTORATION_CLAIM"}


def test_a_speed_is_not_compared_with_plain_decoding_that_restores() -> None:
    document = forged("throughput", only("speedup"), declares_restoration, with_controls)
    document["arms"][0] = reports.restoring(document["arms"][0], "learned")
    assert codes(settle(document)) == {"SPEEDUP_BASELINE_LOOP"}


# --- the configuration --------------------------------------------------------------------------------------


def configured(**switches: object) -> Breaker:
    return lambda document: document["configuration"].update(switches)


def fixed_block(document: Document) -> None:
    document["arms"][1]["system"]["block"] = "8"
    rows(document, "speculative")[0]["rounds"][-1] |= {"block": 4}


def without_drafter(document: Document) -> None:
    claims(document, "identical_output")
    document["arms"][1]["system"] |= {"drafter": None, "block": None}
    for row in rows(document, "speculative"):
        decoded = len(row["tokens"]) - 1
        step = {"block": 1, "accepted": 0, "draft_s": 0.0, "verify_s": 0.0045}
        row["path"], row["rounds"] = "plain:kakeya.decode", [dict(step) for _ in range(decoded)]
        row["decode_s"] = round(0.0048 * len(row["tokens"]), 7)
    settle(document)


def unchanged(document: Document) -> None:
    """The report as it is."""


@pytest.mark.parametrize(
    ("system", "switches", "code"),
    [
        (unchanged, {"max_tokens": 71}, "ROW_INCONSISTENT"),
        (unchanged, {"max_tokens": "96"}, "ROW_INCONSISTENT"),
        (unchanged, {"drafter": "other"}, "SILENT_FALLBACK"),
        (unchanged, {"drafter": None}, "SILENT_FALLBACK"),
        (unchanged, {"block": "8"}, "SILENT_FALLBACK"),
        (unchanged, {"block": None}, "SILENT_FALLBACK"),
        (fixed_block, {"block": "auto"}, "SILENT_FALLBACK"),
        (without_drafter, {"drafter": "dflash"}, "SILENT_FALLBACK"),
        (without_drafter, {"block": "8"}, "SILENT_FALLBACK"),
        (unchanged, {"dtype": "float16"}, "SILENT_FALLBACK"),
    ],
)
def test_the_configuration_does_not_contradict_what_ran(
    system: Breaker, switches: Document, code: str
) -> None:
    assert codes(forged("throughput", system, configured(**switches))) == {code}


@pytest.mark.parametrize(
    ("system", "switches"),
    [
        (unchanged, {"max_tokens": 73}),
        (unchanged, {"max_tokens": None}),
        (unchanged, {"drafter": "dflash", "block": "auto", "dtype": "float32"}),
        (unchanged, {"dtype": None}),
        (fixed_block, {"drafter": "dflash", "block": "8"}),
        (fixed_block, {"block": 8}),
        (without_drafter, {"drafter": None, "block": "1"}),
        (without_drafter, {"block": "auto"}),
    ],
)
def test_a_configuration_that_says_what_ran_passes(system: Breaker, switches: Document) -> None:
    assert codes(forged("throughput", system, configured(**switches))) == set()


def test_a_configuration_may_leave_switches_out() -> None:
    assert codes(forged("throughput", own_prompts, change("configuration", to={}))) == set()


# --- the models ---------------------------------------------------------------------------------------------


def test_target_and_drafter_are_not_the_same_weights() -> None:
    document = forged("throughput")
    models = document["environment"]["models"]
    models["drafter"]["weights_sha256"] = models["target"]["weights_sha256"]
    assert codes(document) == {"ENVIRONMENT_INCOMPLETE"}
