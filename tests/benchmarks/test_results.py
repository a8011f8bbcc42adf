"""What we state of ourselves passes our own gate."""

from __future__ import annotations

from pathlib import Path

import pytest
import results_file

from bridge.evidence.gate import judge_file

STORED = sorted(results_file.RESULTS.iterdir())


def test_a_speed_and_a_recall_are_stored() -> None:
    claimed = {claim.name for path in STORED for claim in judge_file(path).claims}
    assert {"speedup", "identical_output", "recall_parity", "restoration"} <= claimed


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_every_stored_result_is_a_report_that_the_gate_accepts(path: Path) -> None:
    judgement = judge_file(path)
    assert judgement.violations == ()
    assert judgement.claims
