"""No single-field edit of an accepted report, made up or written by the engine, changes a claim unnoticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.evidence.gate import judge
from tests.bridge.evidence.breakers import BUILDERS
from tests.bridge.evidence.mutations import edits, places, unnoticed
from tests.bridge.evidence.reports import Document, dump

FOLDER = Path(__file__).resolve().parents[2] / "data" / "evidence"
ACCEPTED: dict[str, Document] = {f"made up {kind}": build() for kind, build in BUILDERS.items()} | {
    f"measured {file.stem}": json.loads(file.read_text(encoding="utf-8"))
    for file in sorted(FOLDER.glob("*.json"))
}
PARTS = 6  # of the walk over all places, so that none takes long
LONG = {name for name in ACCEPTED if name.startswith("made up")} | {"measured kv"}
PLACES = {name: list(places(document)) for name, document in ACCEPTED.items()}


def test_there_is_a_measured_report_of_every_kind() -> None:
    assert {json.loads(file.read_text())["kind"] for file in FOLDER.glob("*.json")} == {
        "throughput",
        "recall",
        "kv",
        "parity",
        "quality",
        "probe",
    }


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_reports_are_accepted(name: str) -> None:
    judgement = judge(dump(ACCEPTED[name]))
    assert judgement.violations == ()
    assert judgement.claims


@pytest.mark.sampled(6, 4)
@pytest.mark.parametrize("name", ACCEPTED)
@settings(max_examples=25)
@given(data=st.data())
def test_one_edit_is_rejected_or_leaves_every_figure_equal(name: str, data: st.DataObject) -> None:
    document = ACCEPTED[name]
    place = data.draw(st.sampled_from(PLACES[name]))
    edit = data.draw(st.sampled_from(list(edits(document, place))))
    assert unnoticed(judge(dump(document)), edit.of(document)) is None


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.exhaustive) for part in range(1, PARTS))]
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in LONG else pytest.mark.slow)
        for name in ACCEPTED
    ],
)
def test_no_edit_at_any_place_goes_unnoticed(name: str, part: int) -> None:
    document = ACCEPTED[name]
    original = judge(dump(document))
    found = [
        (edit, change)
        for place in PLACES[name][part::PARTS]
        for edit in edits(document, place)
        if (change := unnoticed(original, edit.of(document))) is not None
    ]
    assert found == []
