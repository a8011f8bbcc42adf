"""Paired runs: what their record must be, and what their statistics find in simulated runs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bridge.evidence.gate import judge
from bridge.evidence.paired import (
    FEWEST_BLOCKS,
    MARGIN,
    MOST_BLOCKS,
    PRECISE,
    compare_reports,
    judge_difference,
    summarise,
)
from evidence_format.figures import Binding
from evidence_format.model import Report
from evidence_format.paired import PairedRun
from tests.bridge.evidence import reports

NONCE = "20260301t120000z0123456789ab"
START = datetime(2026, 3, 1, 12, 0, 5, tzinfo=UTC)
SIDES = ("workload", "against", *("workload", "against", "against", "workload") * 12)
BINDING = Binding(NONCE, "a" * 40, "c" * 64, "workload", START, START + timedelta(hours=1))
Document = dict[str, Any]


def settled(document: Document) -> Document:
    """The document with the summary that its runs give."""
    runs = [PairedRun.model_validate_json(json.dumps(run)) for run in document["runs"]]
    document["summary"] = summarise(runs, document["request"]["nonce"]).model_dump(mode="json")
    return document


def record(slower: float = 1.2) -> Document:
    """An honest record of a workload that takes `slower` times as long."""
    draw, moment, runs = random.Random(1), START, []  # noqa: S311
    for number, side in enumerate(SIDES):
        seconds = round((slower if side == "workload" else 1.0) * math.exp(draw.gauss(0, 0.02)), 6)
        begun = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
        run = {"side": side, "warm_up": number < 2, "started_at": begun, "seconds": seconds, "value": seconds}
        runs.append(run | {"exit_code": 0, "report_sha256": None})
        moment += timedelta(seconds=seconds + 0.1)
    return settled(
        {
            "schema": "kakeya.paired/1",
            "request": {
                "nonce": NONCE,
                "workload_sha": "a" * 40,
                "preset_digest": "c" * 64,
                "engine_source": "workload",
            },
            "preset": "bench",
            "metric": "command_s",
            "workload": {"workload_sha": "a" * 40, "params": {"limit": 3}},
            "against": {"workload_sha": "b" * 40, "params": {"limit": 3}},
            "runs": runs,
        }
    )


def codes(document: Document, binding: Binding | None = BINDING) -> set[str]:
    return {violation.code for violation in judge(json.dumps(document).encode(), binding=binding).violations}


def test_an_honest_record_is_accepted_and_says_what_it_found():
    judgement = judge(json.dumps(record()).encode(), binding=BINDING)
    assert (judgement.accepted, judgement.kind, judgement.violations) == (True, "paired", ())
    assert judgement.paired is not None
    assert judgement.paired.summary.verdict == "slower"
    assert judgement.to_document()["figures"] == record()["summary"]


def change_verdict(document: Document) -> None:
    document["summary"]["verdict"] = "faster"


def swap_sides(document: Document) -> None:
    for run in document["runs"][2:6]:
        run["side"] = "against" if run["side"] == "workload" else "workload"
    settled(document)


def drop_a_run(document: Document) -> None:
    del document["runs"][7]
    settled(document)


def count_a_warm_up(document: Document) -> None:
    document["runs"][1]["warm_up"] = False
    settled(document)


def fail_a_run(document: Document) -> None:
    document["runs"][4]["exit_code"] = 1


def claim_another_value(document: Document) -> None:
    document["runs"][4]["value"] /= 2
    settled(document)


def name_no_report(document: Document) -> None:
    document["metric"] = "decode_s_per_token"


def overlap(document: Document) -> None:
    document["runs"][9] |= {"seconds": 60.0, "value": 60.0}
    settled(document)


def run_before_the_job(document: Document) -> None:
    for run in document["runs"]:
        moment = datetime.fromisoformat(run["started_at"]) - timedelta(hours=2)
        run["started_at"] = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def answer_another_request(document: Document) -> None:
    document["request"]["preset_digest"] = "d" * 64


def measure_another_commit(document: Document) -> None:
    document["workload"]["workload_sha"] = "f" * 40


def have_no_time(document: Document) -> None:
    document["runs"][4]["started_at"] = "2026-99-99T99:99:99Z"


def take_no_time(document: Document) -> None:
    document["runs"][4] |= {"seconds": 0.0, "value": 5e-324}


def be_newer(document: Document) -> None:
    document["schema"] = "kakeya.paired/2"


@pytest.mark.parametrize(
    ("breaker", "code"),
    [
        (change_verdict, "SUMMARY_MISMATCH"),
        (swap_sides, "PAIRED_ORDER"),
        (drop_a_run, "PAIRED_ORDER"),
        (count_a_warm_up, "PAIRED_ORDER"),
        (fail_a_run, "PAIRED_RUN"),
        (claim_another_value, "PAIRED_RUN"),
        (name_no_report, "PAIRED_RUN"),
        (overlap, "STALE_REPORT"),
        (run_before_the_job, "STALE_REPORT"),
        (answer_another_request, "WRONG_REQUEST"),
        (measure_another_commit, "WRONG_REQUEST"),
        (have_no_time, "SCHEMA"),
        (take_no_time, "SCHEMA"),
        (be_newer, "SCHEMA"),
    ],
)
def test_a_record_that_breaks_a_rule_is_rejected_for_it(breaker: Callable[[Document], None], code: str):
    document = record()
    breaker(document)
    assert codes(document) == {code}


def test_too_few_blocks_and_wild_times_are_inconclusive():
    assert judge_difference([0.2] * (FEWEST_BLOCKS - 1), "seed").verdict == "inconclusive"
    wild = judge_difference([(-1) ** number * 40.0 for number in range(FEWEST_BLOCKS)], "seed")
    assert (wild.verdict, wild.interval) == ("inconclusive", None)
    assert codes(record(), replace(BINDING, nonce="20260301t120000zffffffffffff")) == {"WRONG_REQUEST"}


def simulated(effect: float, seed: int, *, noise: float, spikes: float) -> tuple[str, float]:
    """The verdict on runs that differ by `effect`, sampled as a runner does; and its smallest effect."""
    draw = random.Random(seed)  # noqa: S311

    def log_time(side: str, number: int) -> float:
        drift = 0.3 * number / (4 * MOST_BLOCKS)  # the machine gets slower
        spike = draw.expovariate(2.5) if draw.random() < spikes else 0.0
        return (math.log1p(effect) if side == "workload" else 0.0) + drift + draw.gauss(0, noise) + spike

    logs = [log_time(side, number) for number, side in enumerate(SIDES[2:6] * MOST_BLOCKS)]
    blocks = [(a1 + a2 - b1 - b2) / 2 for a1, b1, b2, a2 in zip(*[iter(logs)] * 4, strict=True)]
    for count in range(FEWEST_BLOCKS, MOST_BLOCKS + 1):
        found = judge_difference(blocks[:count], f"seed {seed}")
        if found.smallest_effect is not None and found.smallest_effect <= PRECISE:
            break
    assert found.smallest_effect is not None
    return found.verdict, found.smallest_effect


@pytest.mark.parametrize(
    ("noise", "spikes"),
    [
        pytest.param(0.02, 0.05, id="disturbed", marks=pytest.mark.slow),
        pytest.param(0.04, 0.0, id="noisy", marks=pytest.mark.exhaustive),
    ],
)
def test_planted_differences_are_found_and_others_are_not(noise: float, spikes: float):
    of_twenty = [simulated(0.2, seed, noise=noise, spikes=spikes)[0] for seed in range(20)]
    assert of_twenty == ["slower"] * 20
    same = [simulated(0.0, seed, noise=noise, spikes=spikes)[0] for seed in range(20)]
    assert sum(verdict in ("slower", "faster") for verdict in same) <= 1
    for seed in range(20):
        verdict, smallest = simulated(0.05, seed, noise=noise, spikes=spikes)
        assert verdict == "slower" or (smallest > MARGIN and verdict == "inconclusive")


def test_two_reports_are_compared_in_units_of_plain_steps():
    """The second ran on a machine that was twice as slow, and its arm under test a further 30 %."""
    documents = [reports.throughput(), reports.throughput()]
    for scale, row in (
        (scale, row)
        for arm, scale in zip(documents[1]["arms"], (2.0, 2.6), strict=True)
        for row in arm["samples"]
    ):
        row["decode_s"] *= scale
    first, second = (Report.model_validate_json(reports.dump(document)) for document in documents)
    found = compare_reports(second, first, "seed")
    assert found.ratio == pytest.approx(1.3)
    assert (found.blocks, found.verdict) == (8, "inconclusive")  # too few prompts to tell
    with pytest.raises(ValueError, match="no baseline"):
        compare_reports(first.model_copy(update={"arms": first.arms[1:]}), second, "seed")
