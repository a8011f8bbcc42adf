"""Every rule has a report that breaks only that rule; the reports they start from break none."""

from __future__ import annotations

import hashlib
import importlib
import json

import pytest

from bridge.evidence.gate import Binding, judge
from evidence_format.rules import ELSEWHERE, RULES
from tests.bridge.evidence import reports
from tests.bridge.evidence.breakers import BINDING, BUILDERS, Breaker, broken, codes
from tests.bridge.evidence.reports import Document, dump
from tests.bridge.evidence.rules import (
    claims,
    effect,
    memory,
    output,
    parity,
    paths,
    perplexity,
    restoration,
    retrieval,
    rows,
    speed,
    stops,
)

MODULES = (rows, paths, output, retrieval, restoration, speed)
MODULES += (memory, parity, perplexity, claims, effect, stops)
FAMILIES = {module.__name__.rpartition(".")[2]: module.RULES for module in MODULES}
ALONE = {code: case for family in FAMILIES.values() for code, case in family.alone.items()}
VARIANTS = [case for family in FAMILIES.values() for case in family.variants]
HONEST = [case for family in FAMILIES.values() for case in family.honest]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("binding", [None, BINDING], ids=["by hand", "bound"])
def test_a_true_report_passes(name: str, binding: Binding | None) -> None:
    judgement = judge(dump(BUILDERS[name]()), binding=binding)
    assert judgement.violations == ()
    assert judgement.accepted
    assert all(claim.met for claim in judgement.claims)


@pytest.mark.parametrize("code", ALONE)
def test_a_report_that_breaks_only_this_rule_is_rejected_for_it(code: str) -> None:
    assert codes(broken(*ALONE[code])) == {code}


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize(
    ("code", "kind", "breaker"), VARIANTS, ids=[f"{code}-{n}" for n, (code, _, _) in enumerate(VARIANTS)]
)
def test_other_ways_to_break_a_rule(code: str, kind: str, breaker: Breaker) -> None:
    assert code in codes(broken(kind, breaker))


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize(("kind", "variation"), HONEST)
def test_a_report_may_differ_or_claim_less_and_pass(kind: str, variation: Breaker) -> None:
    assert codes(broken(kind, variation)) == set()


# --- codes that are raised before the rules, or outside the gate --------------------------------------------


def without_a_field(document: Document) -> None:
    del document["order"]


def older(document: Document) -> None:
    document["schema"] = "kakeya.evidence/0"


def unknown_kind(document: Document) -> None:
    document["kind"] = "speed"


def unknown_field(document: Document) -> None:
    document["arms"][0]["samples"][0]["note"] = "true"


UNREADABLE: dict[str, Breaker] = {
    "SCHEMA": without_a_field,
    "LEGACY_SCHEMA": older,
    "UNKNOWN_KIND": unknown_kind,
    "UNKNOWN_FIELD": unknown_field,
}
# Where the codes that others than the gate raise are shown to be raised.
OUTSIDE = {
    "WRONG_KIND": "tests.bridge.evidence.test_required",
    "CLAIM_MISSING": "tests.bridge.evidence.test_required",
    "NO_EVIDENCE": "tests.bridge.client.test_fetch",
    "PAIRED_ORDER": "tests.bridge.evidence.test_paired",
    "PAIRED_RUN": "tests.bridge.evidence.test_paired",
    "SECRET_IN_EVIDENCE": "tests.bridge.runner.test_reports",
    "EVIDENCE_DIGEST": "tests.bridge.bus.test_results",
}


@pytest.mark.parametrize("code", UNREADABLE)
def test_a_report_that_cannot_be_read_has_one_code(code: str) -> None:
    assert codes(broken("throughput", UNREADABLE[code])) == {code}


@pytest.mark.parametrize("code", OUTSIDE)
def test_what_others_raise_is_tested_there(code: str) -> None:
    module = importlib.import_module(OUTSIDE[code])
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as source:
        assert code in source.read()


def test_every_code_has_a_report_that_breaks_it_alone() -> None:
    assert ALONE.keys() == RULES.keys()
    assert UNREADABLE.keys() | OUTSIDE.keys() == ELSEWHERE.keys()


# --- the registry -------------------------------------------------------------------------------------------


def test_every_code_is_explained() -> None:
    assert not RULES.keys() & ELSEWHERE.keys()
    for rule in (ELSEWHERE | RULES).values():
        assert rule.rejected_when
        assert rule.remedy


def test_the_empty_instruction_is_the_empty_strings_digest() -> None:
    assert hashlib.sha256(b"").hexdigest() == reports.EMPTY


def test_an_empty_answer_is_no_hit() -> None:
    document = reports.recall()
    for arm in document["arms"]:
        arm["samples"][0]["needle"] |= {"answer": "", "hit": arm["name"] != "no_needle"}
    assert {"RECALL_VACUOUS", "ROW_INCONSISTENT"} <= codes(json.loads(dump(document)))
