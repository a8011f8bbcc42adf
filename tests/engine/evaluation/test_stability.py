"""What the measurement calls a disturbance is what the gate rejects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.evidence.gate import judge
from engine.evaluation.environment import disturbance
from tests.bridge.evidence import reports
from tests.bridge.evidence.rules.speed import block_1

SPREADS = {"SPEEDUP_PREFILL_SPREAD", "SPEEDUP_DECODE_SPREAD"}
SLOW = {"BASELINE_SLOW"}


def rejected(document: dict[str, Any], codes: set[str] = SPREADS) -> bool:
    judgement = judge(json.dumps(document).encode())
    return bool(codes & {violation.code for violation in judgement.violations})


def test_a_steady_measurement_is_steady():
    plain, ours = reports.throughput()["arms"]
    assert disturbance(plain["samples"], ours["samples"]) is None
    assert disturbance(plain["samples"][:1], []) is None


@pytest.mark.slow
@given(
    row=st.integers(0, 7),
    arm=st.integers(0, 1),
    stage=st.sampled_from(["prefill_s", "decode_s"]),
    factor=st.floats(0.5, 12.0),
    prompt_tokens=st.sampled_from([60, 66, 70, 300]),
)
def test_the_gate_and_the_measurement_agree(
    row: int, arm: int, stage: str, factor: float, prompt_tokens: int
):
    document = reports.throughput()
    for part in document["arms"]:
        part["samples"][row]["prompt_tokens"] = prompt_tokens
    sample = document["arms"][arm]["samples"][row]
    sample[stage] = round(sample[stage] * factor, 7)
    plain, ours = (part["samples"] for part in document["arms"])
    assert (disturbance(plain, ours) is not None) == rejected(reports.settle(document))


@pytest.mark.slow
@given(seconds=st.floats(0.001, 0.004), disturbed=st.integers(0, 8), factor=st.floats(1.0, 2.9))
def test_gate_and_measurement_find_a_slow_baseline(seconds: float, disturbed: int, factor: float):
    document = reports.throughput()
    block_1(document, seconds)
    plain, ours, own = (part["samples"] for part in document["arms"])
    for sample in plain[:disturbed]:
        sample["decode_s"] = round(sample["decode_s"] * factor, 7)
    assert (disturbance(plain, ours, own) is not None) == rejected(reports.settle(document), SPREADS | SLOW)
    assert disturbance(plain[:4], ours[:4], own[:4]) == disturbance(plain[:4], ours[:4])
