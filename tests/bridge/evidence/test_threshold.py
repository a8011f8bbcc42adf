"""Thresholds on figures: how they are written, and which figures they can name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bridge.errors import ParameterError
from bridge.evidence.gate import judge_file
from bridge.evidence.threshold import Threshold, figures_of, parse_threshold

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [("ratio>=1.5", 1.5, True), (" recall > 0.9 ", 0.9, False), ("max_resident_bytes<=1e9", 2e9, False)],
)
def test_a_threshold_is_a_name_an_operator_and_a_number(text: str, value: float, holds: bool) -> None:
    threshold = parse_threshold(text)
    assert threshold.holds(value) is holds
    assert not threshold.holds(math.nan)
    assert parse_threshold(str(threshold)) == threshold


@pytest.mark.parametrize(
    "text", ["", "ratio", "ratio=1", "ratio>=", "ratio>=1.2.3", "ratio>=1e999", "1>=ratio"]
)
def test_what_is_no_threshold_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ParameterError, match="no threshold") as caught:
        parse_threshold(text)
    assert caught.value.exit_code == 2
    assert repr(text) in caught.value.message


def test_figures_are_those_of_the_arms_under_test() -> None:
    judgement = judge_file(RESULTS / "throughput-code.json")
    figures, report = figures_of(judgement), judgement.report
    assert report is not None
    assert figures["ratio"] == figures["decode_ratio"]
    assert len(figures["acceptance_length"]) == len(report.with_role("sut"))
    assert parse_threshold("ratio>=1") == Threshold("ratio", ">=", 1.0)
