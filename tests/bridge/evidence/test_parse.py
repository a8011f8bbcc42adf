"""The gate's first stage: what is no report of this schema is called that, and nothing raises or hangs."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from bridge.evidence.gate import judge
from evidence_format.parse import MAX_BYTES, MAX_DEPTH, MAX_FIELDS, MAX_ROWS
from tests.bridge.evidence import reports
from tests.bridge.evidence.reports import Document, dump

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((ROOT / "docs/schema/evidence.json").read_text(encoding="utf-8"))


def verdict(data: bytes) -> tuple[set[str], str]:
    judgement = judge(data)
    assert not judgement.accepted
    text = " / ".join(violation.message for violation in judgement.violations)
    assert text.isprintable()
    return {violation.code for violation in judgement.violations}, text


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "must be a JSON object, got list"),
        (b"\xff\xfe{}", "not UTF-8 (byte 0)"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"x": {"a": 1, "b": 2, "a": 3}}', "'a' appears twice"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
        (b'{"a": 1e400}', "larger than anything"),
        (b'{"a": 1' + b"0" * 400 + b"}", "larger than anything"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "\\ud800"}', "unpaired"),
        (b'{"\\ud800": 1}', "unpaired"),
        (b'{"text": "\\udfff"}', "half of a surrogate pair"),
        (b'{"a": ["\\u001b[2J"]}', "control"),
        (b'{"a": "\\u202e"}', "bidirectional"),
        (b'{"a": ' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}", "nested deeper"),
        (b"[" * 300_000, "nested deeper"),
        (b'{"a":' * 100_000, "nested deeper"),
        pytest.param(
            b'{"a": [' + b"[]," * 300_000 + b"[]]}", "more than 250000 objects", marks=pytest.mark.slow
        ),
        (b'{"a": "' + b"[" * 2_100_000 + b'"}', "too many brackets"),
        (b" " * (MAX_BYTES + 1), "at most"),
        (b'{"schema": "kakeya.evidence/1"} trailing', "not valid JSON"),
    ],
)
def test_what_is_not_strict_json_breaks_the_schema(data: bytes, expected: str) -> None:
    codes, text = verdict(data)
    assert codes == {"SCHEMA"}
    assert expected in text


@pytest.mark.parametrize("stated", [None, "kakeya.evidence/0", "k3-evidence-2", 1, ["kakeya.evidence/1"]])
def test_another_schema_is_legacy(stated: object) -> None:
    document = reports.throughput() | {"schema": stated}
    assert verdict(dump(document))[0] == {"LEGACY_SCHEMA"}


@pytest.mark.parametrize("kind", ["speed", "Recall", "", None, 3, ["throughput"], {}])
def test_a_kind_the_gate_cannot_judge_is_rejected(kind: object) -> None:
    assert verdict(dump(reports.throughput() | {"kind": kind}))[0] == {"UNKNOWN_KIND"}


@pytest.mark.parametrize(
    "place", ["", "environment", "arms.0", "arms.0.samples.0", "arms.1.samples.0.rounds.0", "claims.0"]
)
def test_an_unknown_field_is_named_with_its_place(place: str) -> None:
    document = reports.throughput()
    part: Any = document
    for step in place.split(".") if place else ():
        part = part[int(step)] if isinstance(part, list) else part[step]
    part["believe_me"] = True
    codes, text = verdict(dump(document))
    assert codes == {"UNKNOWN_FIELD"}
    assert "'believe_me'" in text
    assert place.split(".", maxsplit=1)[0] in text


def mutated(path: list[str | int], value: object) -> Document:
    document = reports.throughput()
    place: Any = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (["started_at"], "2026-03-01 12:00", "started_at: must match"),
        (["started_at"], "2026-02-31T12:00:05Z", "impossible value"),
        (["started_at"], "2026-03-01T12:00:05Z\n", "holds control"),
        (["started_at"], "٢026-03-01T12:00:05Z", "started_at: must match"),
        (["request", "nonce"], "x", "request.nonce: must match"),
        (["arms", 0, "samples", 0, "tokens", 3], -1, "arms[0].samples[0].tokens"),
        (["arms", 0, "samples", 0, "tokens", 3], 1.0, "arms[0].samples[0].tokens"),
        (["arms", 0, "samples", 0, "tokens", 3], True, "arms[0].samples[0].tokens"),
        (["arms", 0, "samples", 0, "tokens"], [0] * 65_537, "arms[0].samples[0].tokens: has more than 65536"),
        (["arms", 0, "samples", 0, "tokens"], "1 2 3", "tokens: must be of type array, got '1 2 3'"),
        (["arms", 0, "samples", 0, "prompt_tokens"], 60.0, "prompt_tokens: must be of type integer"),
        (["arms", 1, "samples", 0, "rounds", 0, "block"], 0, "block: must be at least 1, got 0"),
        (["arms", 1, "system", "block"], "-8", "block: must match"),
        (["arms", 0], "arm", "arms[0]: must be of type object"),
        (["arms"], {"0": {}}, "arms: must be of type array, got an object of 1 fields"),
        (["arms", 0, "role"], "winner", "arms[0].role: must be one of"),
        (["claims", 0, "name"], "faster_than_light", "claims[0].name: must be one of"),
        (
            ["environment", "versions"],
            {"python": "3.12"},
            "environment.versions: lacks 'mlx', 'mlx_lm', 'kakeya'",
        ),
        (
            ["rounding"],
            {"max_abs_logit_error": "small"},
            "rounding.max_abs_logit_error: must be of type number",
        ),
        (["configuration", "nested"], {"a": 1}, "configuration.nested: must be of type string or number"),
    ],
)
def test_a_broken_value_is_named_with_its_place(path: list[str | int], value: object, expected: str) -> None:
    codes, text = verdict(dump(mutated(path, value)))
    assert codes == {"SCHEMA"}
    assert expected in text


@pytest.mark.parametrize(
    ("path", "value", "accepted"),
    [
        ([], None, True),
        (["request"], None, False),  # it may be left out, but not be null
        (["rounding"], None, True),
        (["arms", 0, "control"], None, True),
        (["arms", 0, "samples", 0, "prefill_s"], None, False),
        (["arms", 0, "samples", 0, "prefill_s"], True, False),
        (["arms", 0, "samples", 0, "prefill_s"], 1, True),
        (["arms", 0, "samples", 0, "cache", "classes"], {}, False),
        (["order", 0], ["plain"], False),
        (["configuration"], {str(i): i for i in range(65)}, False),
        (["claims"], [{"name": "machine"}] * 33, False),
        (["environment", "load", "services"], {"dropbox": 1.0}, False),
    ],
)
def test_the_published_schema_and_the_types_agree(
    path: list[str | int], value: object, accepted: bool
) -> None:
    document = mutated(path, value) if path else reports.throughput()
    assert Draft202012Validator(SCHEMA).is_valid(document) is accepted
    assert (judge(dump(document)).report is not None) is accepted


def test_a_layer_named_twice_breaks_the_schema() -> None:
    document = reports.kv()
    row = next(row for arm in document["arms"] for row in arm["samples"] if "kv" in row)
    row["kv"]["layers"] = [2, 2]
    assert verdict(dump(document))[0] == {"SCHEMA"}


def test_of_each_array_one_fault_is_reported() -> None:
    document = reports.throughput()
    for row in document["arms"][0]["samples"]:
        row["tokens"] = [-1] * 1000
    assert [violation.message for violation in judge(dump(document)).violations] == [
        "arms[0].samples[0].tokens[0]: must be at least 0, got -1"
    ]


def test_object_with_too_many_fields_is_refused_before_validation() -> None:
    document = reports.throughput() | {f"x{i}": 0 for i in range(MAX_FIELDS)}
    codes, text = verdict(dump(document))
    assert codes == {"SCHEMA"}
    assert f"more than {MAX_FIELDS} fields" in text


def test_a_model_of_another_name_is_an_unknown_field() -> None:
    document = reports.throughput()
    document["environment"]["models"]["judge"] = document["environment"]["models"]["target"]
    assert "UNKNOWN_FIELD" in verdict(dump(document))[0]


def test_messages_stay_short_and_few_whatever_the_report_holds() -> None:
    document = reports.throughput()
    for row in document["arms"][0]["samples"]:
        row |= {"finish_reason": "\x1b[31m" + "x" * 10_000, "path": 5, "cache": None}
    violations = judge(dump(document)).violations
    assert 0 < len(violations) <= 20
    assert all(len(violation.message) < 300 and violation.message.isprintable() for violation in violations)


@pytest.mark.slow
def test_a_large_true_report_is_judged_in_seconds() -> None:
    document = reports.throughput()
    for i in range(60):
        tokens = reports.filler(i, 2000)
        for name, arm in zip(("plain", "speculative"), document["arms"], strict=True):
            arm["samples"].append(
                reports.sample(f"code-{100 + i}", tokens, speculative=name == "speculative", seconds=0.02)
            )
    started = time.process_time()
    judgement = judge(dump(reports.settle(document)))
    assert judgement.kind == "throughput"
    assert time.process_time() - started < 30


@pytest.mark.slow
def test_the_largest_report_is_judged_in_under_ten_seconds() -> None:
    """As many rows and bytes as are read; every text is held against the answers of other prompts."""
    document = reports.recall()
    for arm in document["arms"]:
        rows = []
        for i in range(MAX_ROWS // len(document["arms"])):
            row = copy.deepcopy(arm["samples"][i % len(arm["samples"])])
            row["needle"] |= {"answer": f"{i:05}", "needle": f"The code is {i:05}."}
            text = "many words " * 260 + ("nothing" if "control" in arm else f"{i:05}")
            row |= {"prompt_id": f"needle-{i}", "text": text}
            rows.append(row)
        arm["samples"] = rows
    data = dump(reports.settle(document))
    assert 0.9 * MAX_BYTES < len(data) < MAX_BYTES
    started = time.process_time()
    judgement = judge(data)
    assert judgement.kind == "recall"
    assert time.process_time() - started < 10


@pytest.mark.slow
def test_a_report_of_more_rows_than_are_judged_breaks_the_schema() -> None:
    document = reports.throughput()
    arm = document["arms"][0]
    arm["samples"] = [arm["samples"][0]] * (MAX_ROWS + 1)
    codes, text = verdict(dump(document))
    assert codes == {"SCHEMA"}
    assert "rows, but at most 8000 are judged" in text


@given(st.data())
def test_any_damage_to_the_bytes_is_judged(data: st.DataObject) -> None:
    whole = dump(reports.recall())
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 50)))
    judge(whole[:start] + data.draw(st.binary(max_size=20)) + whole[end:])


EARLIER = [
    {
        "schema_version": 2,
        "kind": "k3_integrated_niah_acceptance_mac",
        "config": {},
        "results": {"a": "one\ntwo"},
    },
    {"schema_version": 1, "kind": "k1e_niah_validation", "config": {"seed": 42}, "results": {}},
    {"kind": "k3_kv_quant_eval", "schema_version": 1, "results": {}},
    {"kind": "k3_e2e_gpu_bench", "config": {"gen_tokens": 16}, "results": []},
    {"kind": "throughput", "config": {}, "gate": {}},
]


@pytest.mark.parametrize("document", EARLIER, ids=lambda document: document["kind"])
def test_a_report_of_the_earlier_system_is_called_one(document: dict[str, object]) -> None:
    codes, text = verdict(dump(document))
    assert codes == {"LEGACY_SCHEMA"}
    assert "was written by the earlier system" in text
    assert repr(document["kind"]) in text


@pytest.mark.parametrize("document", [{}, {"kind": "recall"}, {"schema_version": 1}, {"config": {}}])
def test_what_only_lacks_a_schema_is_not_called_the_earlier_systems(document: dict[str, object]) -> None:
    codes, text = verdict(dump(document))
    assert codes == {"LEGACY_SCHEMA"}
    assert "names no schema" in text
