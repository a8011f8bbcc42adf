"""How the blocks of a paired run end."""

from __future__ import annotations

import pytest

from bridge.protocol.manifest import Against
from bridge.protocol.result import Reason
from bridge.runner.job import make_verdict
from bridge.runner.paired import RunFailed, run_blocks
from evidence_format.paired import PairedRun, SideName
from tests.fixtures.runner import RunnerFixture

BEFORE = 6  # both warm-ups and one block


def end_after(count: int, reason: Reason) -> list[PairedRun]:
    """The runs that count when the one after so many fails."""
    runs: list[PairedRun] = []

    def run(side: SideName, warm_up: bool, _: float) -> PairedRun:
        if len(runs) == count:
            raise RunFailed(make_verdict(reason, "it failed"))
        seconds = 0.01 * (len(runs) + 1)
        values = {"started_at": "2026-03-01T12:00:00Z", "seconds": seconds, "value": seconds}
        values |= {"exit_code": 0, "report_sha256": None}
        runs.append(PairedRun(side=side, warm_up=warm_up, **values))
        return runs[-1]

    return run_blocks(run, limit_s=60, seed="", on_progress=lambda _: None)


def test_a_run_out_of_time_ends_the_sampling_and_blocks_before_it_count() -> None:
    assert len(end_after(BEFORE + 2, Reason.TIMEOUT)) == BEFORE


@pytest.mark.parametrize(
    ("count", "reason"), [(BEFORE + 2, Reason.EVIDENCE), (BEFORE - 1, Reason.TIMEOUT), (0, Reason.TIMEOUT)]
)
def test_any_other_failure_ends_the_job(count: int, reason: Reason) -> None:
    with pytest.raises(RunFailed):
        end_after(count, reason)


def test_two_commits_of_a_preset_that_reads_neither_are_refused(runner: RunnerFixture) -> None:
    """A client that has not this preset of the owner's cannot know."""
    other = Against(workload_sha=runner.repo.head(), params={})
    runner.commit({"file": "text"})
    asked = runner.ask(against=other)
    assert runner.serve_once() == 1
    assert runner.verdict(asked.nonce) == ("refused", "bad_parameter")
