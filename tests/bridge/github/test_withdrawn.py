"""A withdrawn request whose workflow run starts, or is in progress, all the same."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.bridge.github.jobs import WorkflowJobs
from tests.fixtures.repo import wait_for


def test_a_run_that_starts_later_publishes_nothing(jobs: WorkflowJobs) -> None:
    asked, repo = jobs.ref(jobs.request()), jobs.runner.repo
    assert repo.kakeya("cancel", asked.nonce, "--json").json["status"] == "withdrawn"
    tip = jobs.runner.tip(asked.branch)
    folder, done = jobs.sealed(asked)
    assert done.verdict.reason == "replayed"
    published = jobs.publish(asked, folder, done.digest, run_result="success")
    assert (published.is_news, published.exit_code) == (False, 5)
    assert jobs.runner.tip(asked.branch) == tip


def test_a_run_that_was_cancelled_in_the_queue_publishes_nothing(jobs: WorkflowJobs) -> None:
    asked, repo = jobs.ref(jobs.request()), jobs.runner.repo
    assert repo.kakeya("cancel", asked.nonce).code == 0
    published = jobs.publish(asked, Path("/nowhere"), "", run_result="cancelled")
    assert (published.is_news, published.exit_code) == (False, 5)


@pytest.mark.slow
def test_a_run_in_progress_stops(jobs: WorkflowJobs) -> None:
    asked, repo = jobs.ref(jobs.request("sleep")), jobs.runner.repo
    sealed = []
    thread = threading.Thread(target=lambda: sealed.append(jobs.sealed(asked)), daemon=True)
    thread.start()
    wait_for(lambda: any("sleeping soundly" in line for line in jobs.lines), 40, "the job")
    assert repo.kakeya("cancel", asked.nonce, "--json").json["status"] == "withdrawn"
    thread.join(30)
    [(folder, done)] = sealed
    assert done.verdict.status == "cancelled"
    assert "it has a result already" in done.verdict.message
    assert not jobs.publish(asked, folder, done.digest, run_result="failure").is_news
    assert jobs.runner.answer(asked.nonce).result.runner.name == "client"
