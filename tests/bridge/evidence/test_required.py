"""A report that keeps every rule, but is not what its preset promised, is not passed."""

from collections.abc import Callable

import pytest

from bridge.evidence.gate import broken_promises, judge
from bridge.presets import Promise
from evidence_format.rules import ELSEWHERE, RULES
from tests.bridge.evidence import reports
from tests.bridge.evidence.reports import Document


def codes(promise: Promise, document: Document) -> list[str]:
    judgement = judge(reports.dump(document))
    assert judgement.accepted, judgement.violations
    return [violation.code for violation in broken_promises(promise, judgement)]


def undrafted() -> Document:
    """The throughput report of an engine that drafted nothing, and says so."""
    document = reports.throughput()
    document["claims"] = [claim for claim in document["claims"] if claim["name"] == "identical_output"]
    arm = document["arms"][1]
    arm["system"] |= {"drafter": None, "block": None}
    for row in arm["samples"]:
        step = {"block": 1, "accepted": 0, "draft_s": 0.0, "verify_s": 0.002}
        row |= {"path": "plain:kakeya.decode", "rounds": [dict(step) for _ in row["tokens"][1:]]}
    return reports.settle(document)


def looked_up() -> Document:
    """The throughput report of a drafter that has no weights."""
    document = reports.throughput()
    arm = document["arms"][1]
    arm["system"]["drafter"] = "prompt-lookup"
    for row in arm["samples"]:
        row["path"] = "speculative:prompt-lookup"
    return reports.settle(document)


def both_drafters() -> Document:
    document = looked_up()
    document["arms"][1]["system"]["drafter"] = "prompt-lookup+dflash"
    for row in document["arms"][1]["samples"]:
        row["path"] = "speculative:prompt-lookup+dflash"
    return document


def next_token_head(name: str = "mtp") -> Document:
    """The throughput report of a target's next-token head, behind look-ups where the name says so."""
    document = reports.throughput()
    document["arms"][1]["system"]["drafter"] = name
    for row in document["arms"][1]["samples"]:
        row["path"] = f"speculative:{name}"
    return reports.settle(document)


def claimed_of_native() -> Document:
    """Recall parity of an arm with native caches, and one with the promised policy that claims nothing."""
    document = reports.kv()
    native, bounded = document["arms"][1], document["arms"][3]
    native["role"], document["kind"] = "sut", "recall"
    bounded["role"] = "sut"
    document["claims"] = [{"name": "recall_parity", "arm": native["name"]}]
    return reports.settle(document)


def of_logits() -> Document:
    document = reports.parity()
    document["configuration"]["command"] = "parity --target"
    for turn in document["parity"]["rounds"]:
        turn["hidden_max_abs"] = None
    return reports.settle(document)


def in_half() -> Document:
    document = reports.parity()
    document["parity"]["dtype"] = "bfloat16"
    return reports.settle(document)


SINGLE = Promise("parity", ("parity",), dtype="float32", tolerance=1e-4, hidden_states=True)

KEPT: dict[str, tuple[Promise, Callable[[], Document]]] = {
    "throughput": (Promise("throughput", ("identical_output", "speedup"), drafter="any"), reports.throughput),
    "recall": (Promise("recall", ("recall_parity",), drafter="any"), reports.recall),
    "restoration": (
        Promise("recall", ("restoration",), drafter="any", restoration="learned"),
        reports.restoration,
    ),
    "lookups and a network": (Promise("throughput", drafter="any"), both_drafters),
    "lookups alone": (Promise("throughput"), looked_up),
    "probe": (Promise("probe", ("machine",)), reports.probe),
    "parity": (SINGLE, reports.parity),
    "a kind of drafter": (Promise("throughput", drafter="dflash"), both_drafters),
    "a next-token head": (Promise("throughput", drafter="mtp"), next_token_head),
    "look-ups and a next-token head": (
        Promise("throughput", drafter="mtp"),
        lambda: next_token_head("prompt-lookup+mtp"),
    ),
    "a head where any network will do": (Promise("throughput", drafter="any"), next_token_head),
    "a baseline": (Promise("throughput", baseline=True), reports.throughput),
    "a whole policy": (Promise("kv", kv=("sink-window:4,64", "affine")), reports.kv),
    "a switch": (Promise("throughput", configuration={"max_tokens": 96}), reports.throughput),
    "a policy": (Promise("kv", ("recall_parity",), kv=("affine",)), reports.kv),
}
BROKEN: dict[str, tuple[Promise, Callable[[], Document], str]] = {
    "another kind": (Promise("recall"), reports.throughput, "WRONG_KIND"),
    "a claim that is not made": (Promise("recall", ("restoration",)), reports.recall, "CLAIM_MISSING"),
    "no drafter": (Promise("throughput", drafter="any"), undrafted, "ENGINE_NEVER_RAN"),
    "a drafter without weights": (Promise("throughput", drafter="any"), looked_up, "ENGINE_NEVER_RAN"),
    "nothing under test": (Promise("probe", drafter="any"), reports.probe, "ENGINE_NEVER_RAN"),
    "no restoration": (Promise("recall", restoration="learned"), reports.recall, "RESTORATION_CLAIM"),
    "a claim about another arm": (
        Promise("recall", ("recall_parity",), kv=("sink-window",)),
        claimed_of_native,
        "CLAIM_MISSING",
    ),
    "another kind of drafter": (
        Promise("throughput", drafter="masked-diffusion"),
        reports.throughput,
        "ENGINE_NEVER_RAN",
    ),
    "a head where another drafter is promised": (
        Promise("throughput", drafter="dflash"),
        next_token_head,
        "ENGINE_NEVER_RAN",
    ),
    "another drafter than the head": (
        Promise("throughput", drafter="mtp"),
        reports.throughput,
        "ENGINE_NEVER_RAN",
    ),
    "no baseline": (Promise("probe", baseline=True), reports.probe, "SPEEDUP_BASELINE_LOOP"),
    "a control in the place of the projector": (
        Promise("recall", restoration="exact"),
        reports.restoration,
        "RESTORATION_CLAIM",
    ),
    "a window so wide that nothing is bounded": (
        Promise("kv", kv=("sink-window:4,32",)),
        reports.kv,
        "SILENT_FALLBACK",
    ),
    "another switch": (
        Promise("throughput", configuration={"single_graph": True}),
        reports.throughput,
        "SILENT_FALLBACK",
    ),
    "half precision": (SINGLE, in_half, "PARITY_TOLERANCE"),
    "logits alone": (SINGLE, of_logits, "PARITY_TOLERANCE"),
    "a looser tolerance": (Promise("parity", tolerance=1e-5), reports.parity, "PARITY_TOLERANCE"),
    "native caches": (Promise("recall", kv=("sliding-bounded",)), reports.recall, "SILENT_FALLBACK"),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_report_with_everything_promised_keeps_the_promise(case: str) -> None:
    promise, build = KEPT[case]
    assert codes(promise, build()) == []


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_lacking_has_its_code(case: str) -> None:
    promise, build, code = BROKEN[case]
    assert codes(promise, build()) == [code]
    assert code in ELSEWHERE | RULES


def test_a_report_that_cannot_be_read_is_the_gates_matter() -> None:
    judgement = judge(b"{}")
    assert judgement.violations
    assert list(broken_promises(Promise("recall", ("recall",)), judgement)) == []
