"""`kakeya_mac actions init` writes a whole workflow, which uses inputs that the action has."""

from __future__ import annotations

from pathlib import Path

import yaml

from bridge.cli.actions import WORKFLOW
from tests.fixtures.repo import RepoFixture

ACTION = "team/kakeya-mac@" + "ab" * 20
ROOT = Path(__file__).parents[3]


def test_init_writes_a_workflow_for_pull_requests(repo: RepoFixture):
    asked = ("actions", "init", "--action", ACTION, "--preset", "throughput", "--threshold", "ratio >= 1.5")
    done = repo.kakeya(*asked)
    assert done.code == 0, done.err
    assert "the commit is not measured: throughput" in done.err
    assert "KAKEYA_TRUSTED_RUNNERS" in done.out
    document = yaml.safe_load((repo.clone / WORKFLOW).read_text())
    assert list(document[True]) == ["pull_request", "push"]
    job = document["jobs"]["mac"]
    assert "head.repo.full_name == github.repository" in job["if"]  # a fork's run could not ask
    step = job["steps"][-1]
    assert (step["uses"], step["with"]["preset"], step["with"]["threshold"]) == (
        ACTION,
        "throughput",
        "ratio>=1.5",
    )
    known = yaml.safe_load((ROOT / "action.yml").read_text())["inputs"]
    assert set(step["with"]) <= set(known)
    assert repo.kakeya(*asked).code == 0
    (repo.clone / WORKFLOW).write_text("mine")
    assert repo.kakeya(*asked).code == 2


def test_init_refuses_what_it_cannot_write(repo: RepoFixture):
    for words, said in (
        (("--action", "team/kakeya-mac@main"), "--action is no OWNER/NAME@COMMIT"),
        (("--action", ACTION, "--branch", "a]\nb"), "--branch cannot be"),
        (("--action", ACTION, "--threshold", "fast"), "no threshold: 'fast'"),
    ):
        done = repo.kakeya("actions", "init", *words)
        assert (done.code, said in done.err) == (2, True), done.err
    assert not (repo.clone / WORKFLOW).exists()
