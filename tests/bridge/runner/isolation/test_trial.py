"""What a machine would enforce is found out without a job."""

from __future__ import annotations

import dataclasses

import pytest

from bridge.doctor import basics
from bridge.errors import MachineError
from bridge.runner.isolation import trial
from bridge.runner.isolation.enforced import NOT_ENFORCED, Enforced
from tests.bridge.runner.jobs import LEVEL, as_permitted


def test_each_item_of_what_can_be_enforced_has_words_for_people() -> None:
    assert list(trial.ITEMS) == [field.name for field in dataclasses.fields(Enforced)]


def test_a_trial_finds_what_a_job_would_find(monkeypatch: pytest.MonkeyPatch) -> None:
    if LEVEL == "full":
        assert trial.enforced_here().tree == "process namespace"
    as_permitted(monkeypatch, level="none", rules=False, filters=False)
    found = trial.enforced_here()
    assert (found.network, found.writes, found.calls) == (NOT_ENFORCED, NOT_ENFORCED, NOT_ENFORCED)


def test_doctor_warns_of_each_item_that_nothing_enforces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "enforced_here", lambda: Enforced(network="own namespace"))
    checks = {check.name: check for check in basics.isolation()}
    assert checks.pop("jobs: network").level == "ok"
    assert len(checks) == 7
    assert {(check.level, check.fix) for check in checks.values()} == {("warn", trial.REMEDY)}
    assert (
        checks["jobs: writes"].finding == "nothing here keeps a job from writing outside of its own folders"
    )


def test_doctor_says_why_no_job_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Enforced:
        raise MachineError("the job supervisor cannot isolate a job here: mount: no")

    monkeypatch.setattr(trial, "enforced_here", fails)
    [check] = basics.isolation()
    assert (check.level, "mount: no" in check.finding) == ("warn", True)
