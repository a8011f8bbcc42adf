"""The gate as a whole: it is pure, it reads files, and it recomputes every derived figure."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import EvidenceError
from bridge.evidence.gate import MESSAGES_PER_RULE, Binding, judge, judge_file
from evidence_format.parse import MAX_BYTES
from tests.bridge.evidence import reports
from tests.bridge.evidence.breakers import BUILDERS
from tests.bridge.evidence.mutations import places
from tests.bridge.evidence.reports import dump

ACCEPTED = {kind: build() for kind, build in BUILDERS.items()}


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("kind", ["throughput", "recall", "parity"])
def test_every_edit_of_a_derived_figure_is_a_summary_mismatch(kind: str) -> None:
    for place in places(ACCEPTED[kind]):
        document = copy.deepcopy(ACCEPTED[kind])
        parent: Any = document
        for step in place[:-1]:
            parent = parent[step]
        value = parent[place[-1]]
        if place[0] != "summary" or not isinstance(value, int | float):
            continue
        parent[place[-1]] = value + 1 if isinstance(value, int) else (value * 0.999 or 0.5)
        assert {violation.code for violation in judge(dump(document)).violations} == {"SUMMARY_MISMATCH"}, (
            place
        )


def test_judgement_is_repeatable_and_ignores_key_order() -> None:
    document = ACCEPTED["throughput"]
    again = json.dumps(document, sort_keys=True, indent=1).encode()
    assert judge(dump(document)) == judge(dump(document)) == judge(again)


def test_seconds_too_few_to_divide_by_give_no_figure() -> None:
    document = copy.deepcopy(ACCEPTED["throughput"])
    for row in document["arms"][1]["samples"]:
        row["decode_s"] = 5e-324
        for turn in row["rounds"]:
            turn |= {"draft_s": 0, "verify_s": 5e-324}
    judgement = judge(dump(document))
    assert not judgement.accepted
    assert "Infinity" not in json.dumps(judgement.to_document())
    json.dumps(judgement.to_document(), allow_nan=False)


def test_a_rule_broken_everywhere_gives_a_bounded_list() -> None:
    document = copy.deepcopy(ACCEPTED["throughput"])
    for arm in document["arms"]:
        for row in arm["samples"]:
            row["tokens_sha256"] = "0" * 64
    violations = judge(dump(document)).violations
    assert len(violations) == MESSAGES_PER_RULE + 1
    assert {violation.code for violation in violations} == {"ROW_INCONSISTENT"}


def test_hostile_texts_do_not_reach_messages_raw() -> None:
    document = copy.deepcopy(ACCEPTED["recall"])
    for arm in document["arms"]:
        arm["samples"][0]["needle"] |= {
            "answer": "\x1b[2J\u202e\n",
            "prompt_contains_answer_outside_needle": True,
        }
        arm["samples"][0]["text"] = "\x1b[2J\u202e\n"
    violations = judge(dump(reports.settle(document))).violations
    assert {violation.code for violation in violations} >= {"RECALL_VACUOUS"}
    assert all(violation.message.isascii() and violation.message.isprintable() for violation in violations)


def test_a_binding_of_the_nonce_alone_checks_the_nonce() -> None:
    report = dump(ACCEPTED["probe"])
    assert judge(report, binding=Binding(reports.NONCE)).accepted
    other = judge(report, binding=Binding("20260301t120000zffffffffffff"))
    assert [violation.code for violation in other.violations] == ["WRONG_REQUEST"]


def test_a_judgement_can_be_written_as_json() -> None:
    document = json.loads(json.dumps(judge(dump(ACCEPTED["recall"])).to_document()))
    assert document["accepted"] is True
    assert document["claims"][0] == {
        "name": "recall_parity",
        "arm": "speculative",
        "against": "oracle",
        "bound": None,
        "figure": 1.0,
        "met": True,
    }
    assert document["figures"]["arms"]["no_needle"]["recall"] == 0
    rejected = judge(b"{}").to_document()
    assert rejected["figures"] is None
    assert rejected["accepted"] is False


def test_a_file_is_judged_like_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(dump(ACCEPTED["throughput"]))
    assert judge_file(file) == judge(file.read_bytes())
    with file.open("wb") as sparse:
        sparse.truncate(MAX_BYTES + 10)
    assert "at most" in judge_file(file).violations[0].message


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(EvidenceError, match="cannot read the report"):
        judge_file(tmp_path / name)
