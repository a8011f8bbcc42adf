"""Arms are interleaved; what a journal kept is not run again; the rest runs as if nothing had happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigurationError
from engine.evaluation.journal import Entry, Journal
from engine.evaluation.measure import RESTARTS, ArmRun, Measured, measure
from engine.evaluation.prompts import raw_prompt
from engine.evaluation.report import sample
from engine.generate import Outcome
from evidence_format.model import Restart, Sample
from tests.engine.evaluation.test_report import arm_of, outcome

NAMES = ("ours", "oracle", "control")
TOGETHER = {"ours", "control"}


class Killed(BaseException):
    """Stands for an interrupt."""


class Recorded:
    """Arms whose runs are recorded, and which can be killed at a run."""

    def __init__(self, prompts: int, *, killed_at: int = -1, together: bool = False) -> None:
        self.runs: list[tuple[str, list[int]]] = []
        self.killed_at = killed_at
        asked = [raw_prompt("x", f"p-{number}") for number in range(prompts)]
        self.arms = [
            ArmRun(
                arm_of(name, "sut"),
                asked,
                [[number] for number in range(prompts)],
                run=lambda some, name=name: self._run(name, some),
                row=sample,
                phase=f"running {name}",
                batched=together and name in TOGETHER,
            )
            for name in NAMES
        ]

    def _run(self, name: str, encoded: Sequence[list[int]]) -> list[Outcome]:
        if len(self.runs) == self.killed_at:
            raise Killed
        self.runs.append((name, [tokens[0] for tokens in encoded]))
        return [outcome(3 + tokens[0], 0.5, drafter_forwards=2 + tokens[0]) for tokens in encoded]

    def go(self, **more: Any) -> Measured:
        return measure(self.arms, progress=lambda *_: None, **more)

    @property
    def rows(self) -> list[list[Sample]]:
        return [each.samples for each in self.arms]

    @property
    def forwards(self) -> list[int]:
        return [each.drafter_forwards for each in self.arms]


def test_every_second_prompt_runs_the_arms_in_reverse():
    recorded = Recorded(3)
    order = recorded.go().order
    assert [arm for arm, _ in order] == [*NAMES, *reversed(NAMES), *NAMES]
    assert [identifier for _, identifier in order] == ["p-0"] * 3 + ["p-1"] * 3 + ["p-2"] * 3


def test_a_batch_is_one_turn_and_one_run_where_batched():
    recorded = Recorded(5, together=True)
    recorded.go(batch=2)
    one = [("ours", [0, 1]), ("oracle", [0]), ("oracle", [1]), ("control", [0, 1])]
    other = [("control", [2, 3]), ("oracle", [2]), ("oracle", [3]), ("ours", [2, 3])]
    assert recorded.runs == [*one, *other, ("ours", [4]), ("oracle", [4]), ("control", [4])]
    assert all([row.prompt_id for row in rows] == [f"p-{n}" for n in range(5)] for rows in recorded.rows)


@pytest.mark.parametrize(("together", "batch", "runs"), [(False, 1, 12), (True, 2, 8), (True, 3, 8)])
def test_a_run_killed_anywhere_resumes(tmp_path: Path, together: bool, batch: int, runs: int):
    whole = Recorded(4, together=together)
    order = whole.go(batch=batch).order
    assert len(whole.runs) == runs
    for killed_at in range(runs):
        path = tmp_path / f"{killed_at}.jsonl"
        first, second = (Recorded(4, killed_at=at, together=together) for at in (killed_at, -1))
        journal = Journal(path).open({})
        with pytest.raises(Killed):
            first.go(batch=batch, journal=journal)
        journal.close()
        journal = Journal(path).open({})
        measured = second.go(batch=batch, journal=journal)
        journal.remove()
        assert first.runs + second.runs == whole.runs
        assert measured.order == order
        assert measured.resumed == sum(len(prompts) for _, prompts in first.runs)
        assert second.rows == whole.rows
        assert second.forwards == whole.forwards == [2 + 3 + 4 + 5] * 3


def test_a_disturbance_drops_all_rows_also_for_a_later_process(tmp_path: Path):
    path = tmp_path / "j.jsonl"
    reasons = iter([None, "busy", None])
    recorded = Recorded(4, killed_at=8)
    journal = Journal(path).open({})
    with pytest.raises(Killed):
        recorded.go(journal=journal, watch=lambda: next(reasons))
    journal.close()
    again = Recorded(4)
    measured = again.go(journal=Journal(path).open({}), watch=lambda: None)
    assert measured.restarts == [Restart(after_samples=6, reason="busy")]
    assert (measured.resumed, len(measured.order)) == (2, 12)
    assert len(again.runs) == 10
    assert again.forwards == [2 + 3 + 4 + 5] * 3


@pytest.mark.parametrize("most", [None, 0, 1])
def test_after_the_last_restart_nothing_is_watched(most: int | None):
    recorded = Recorded(2)
    measured = recorded.go(watch=lambda: "busy", **({} if most is None else {"restarts": most}))
    assert len(measured.restarts) == (RESTARTS if most is None else most)
    assert recorded.forwards == [2 + 3] * 3
    assert len(measured.order) == 6


def test_rows_of_another_measurement_are_refused(tmp_path: Path):
    journal = Journal(tmp_path / "j.jsonl").open({})
    journal.add(Entry("oracle", [{"prompt_id": "p-0"}]))
    journal.close()
    with pytest.raises(ConfigurationError, match="oracle where ours comes next"):
        Recorded(2).go(journal=Journal(tmp_path / "j.jsonl").open({}))


def test_progress_counts_rows_and_names_the_phase():
    recorded, seen = Recorded(2), []
    measure(recorded.arms, progress=lambda *told: seen.append(told))
    assert seen[0] == (0, 6, "running ours", "p-0")
    assert [done for done, *_ in seen] == list(range(6))
