"""The gate as a whole: it is pure, it reads files, and no single edit changes a claim's figure unnoticed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import EvidenceError
from bridge.evidence.gate import MESSAGES_PER_RULE, Binding, judge, judge_file
from bridge.evidence.parse import MAX_BYTES
from tests.bridge.evidence import reports
from tests.bridge.evidence.reports import Document, dump

ACCEPTED = {
    "throughput": reports.throughput(),
    "recall": reports.recall(),
    "restoration": reports.restoration(),
    "probe": reports.probe(),
}


def paths(value: Any, prefix: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place of a document, a few of the tokens standing for all of them."""
    if prefix:
        yield prefix
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, (*prefix, key))
    elif isinstance(value, list):
        step = max(1, len(value) // 6) if prefix[-1] == "tokens" else 1
        for index in range(0, len(value), step):
            yield from paths(value[index], (*prefix, index))


PLACES = {kind: sorted(paths(document), key=str) for kind, document in ACCEPTED.items()}
POOL: list[object] = [
    0,
    1,
    -1,
    2,
    7.5,
    0.9,
    1e9,
    "",
    "x",
    "4858",
    "plain",
    "speculative",
    "oracle",
    "noise",
    "sut",
]
POOL += ["baseline", "control", "length", "decode", "machine", "speedup", "recall", None, True, False, [], {}]


def edited(document: Document, place: tuple[str | int, ...], data: st.DataObject) -> Document:
    """The document with one field replaced, scaled or removed."""
    document = copy.deepcopy(document)
    parent: Any = document
    for step in place[:-1]:
        parent = parent[step]
    old = parent[place[-1]]
    how = data.draw(st.sampled_from(["replace", "remove", "nudge"]))
    if how == "remove":
        del parent[place[-1]]
    elif how == "nudge" and isinstance(old, int | float) and not isinstance(old, bool):
        parent[place[-1]] = old + data.draw(st.sampled_from([1, -1])) if isinstance(old, int) else old * 1.01
    elif how == "nudge" and isinstance(old, str):
        parent[place[-1]] = old + data.draw(st.sampled_from(["1", " 4821", "z"]))
    else:
        parent[place[-1]] = data.draw(st.sampled_from(POOL))
    return document


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ACCEPTED)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_edit_is_rejected_or_leaves_every_figure_equal(kind: str, data: st.DataObject) -> None:
    original = judge(dump(ACCEPTED[kind]))
    assert original.accepted
    place = data.draw(st.sampled_from(PLACES[kind]))
    judgement = judge(dump(edited(ACCEPTED[kind], place, data)))
    if not judgement.accepted:
        assert judgement.violations
        return
    assert judgement.figures == original.figures
    known = {claim.name: claim.figure for claim in original.claims}
    for claim in judgement.claims:
        assert claim.met
        assert claim.figure == known.get(claim.name, claim.figure)


@pytest.mark.parametrize("kind", ["throughput", "recall"])
def test_every_edit_of_a_derived_figure_is_a_summary_mismatch(kind: str) -> None:
    for place in PLACES[kind]:
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


def test_judging_twice_gives_the_same_and_order_of_keys_does_not_matter() -> None:
    document = ACCEPTED["throughput"]
    again = json.dumps(document, sort_keys=True, indent=1).encode()
    assert judge(dump(document)) == judge(dump(document)) == judge(again)


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
