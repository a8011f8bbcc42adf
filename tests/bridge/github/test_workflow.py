"""A run's environment says which request it is, and its token goes to its own server alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.errors import MachineError, NoRemote, RequestRefused
from bridge.github.workflow import read_workflow_run

BRANCH = "refs/heads/mac-bridge/probe-20260301t120000z0123456789ab"
AGENT = "AgentMemory/mac-bridge-probe-20260301t120000z0123456789ab-5f3c"
SHA, OTHER = "a" * 40, "b" * 64
TOKEN = "ghs_0123456789abcdef"
EVENT = {"GITHUB_SHA": SHA, "GITHUB_REF": BRANCH, "GITHUB_REPOSITORY": "team/workload"}


def test_a_push_names_its_commit_its_branch_and_its_repository() -> None:
    run = read_workflow_run({**EVENT, "GITHUB_RUN_ID": "7", "GITHUB_RUN_ATTEMPT": "3"})
    assert run.request.nonce == "20260301t120000z0123456789ab"
    assert (run.request.commit, run.request.branch) == (SHA, BRANCH)
    assert run.remote == "https://github.com/team/workload"
    assert run.run_url == "https://github.com/team/workload/actions/runs/7"
    assert run.attempt == 3


def test_flags_win_over_inputs_and_inputs_over_the_event() -> None:
    inputs = {**EVENT, "KAKEYA_REQUEST_COMMIT": OTHER, "KAKEYA_REQUEST_BRANCH": AGENT}
    asked = read_workflow_run(inputs).request
    assert (asked.commit, asked.branch) == (OTHER, f"refs/heads/{AGENT}")
    asked = read_workflow_run(inputs, commit=SHA, branch=BRANCH).request
    assert (asked.commit, asked.branch) == (SHA, BRANCH)


def test_empty_inputs_are_those_of_a_run_that_was_not_dispatched() -> None:
    run = read_workflow_run(
        {**EVENT, "KAKEYA_REQUEST_COMMIT": "", "KAKEYA_REQUEST_BRANCH": "", "KAKEYA_REMOTE": ""}
    )
    assert run.request.commit == SHA
    assert run.remote == "https://github.com/team/workload"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**EVENT, "KAKEYA_REQUEST_COMMIT": OTHER},
        {**EVENT, "KAKEYA_REQUEST_BRANCH": AGENT},
        {**EVENT, "GITHUB_SHA": "main"},
        {**EVENT, "GITHUB_SHA": f"{SHA}\n"},
        {**EVENT, "GITHUB_SHA": "--upload-pack=x"},
        {**EVENT, "GITHUB_REF": "refs/heads/main"},
        {**EVENT, "GITHUB_REF": "refs/tags/mac-bridge/probe-20260301t120000z0123456789ab"},
        {**EVENT, "GITHUB_REF": BRANCH + "\n"},
        {**EVENT, "GITHUB_REF": BRANCH.replace("probe", "../../x")},
    ],
)
def test_what_names_no_request_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(RequestRefused):
        read_workflow_run(environ)


def test_without_a_repository_a_remote_must_be_named() -> None:
    with pytest.raises(NoRemote):
        read_workflow_run({**EVENT, "GITHUB_REPOSITORY": ""})


@pytest.mark.parametrize(
    ("server", "remote", "expected"),
    [
        ("", "", f"https://x-access-token:{TOKEN}@github.com/team/workload"),
        ("https://git.example", "", f"https://x-access-token:{TOKEN}@git.example/team/workload"),
        ("http://127.0.0.1:8080/", "", f"http://x-access-token:{TOKEN}@127.0.0.1:8080/team/workload"),
        ("", "https://GitHub.com/other/bus", f"https://x-access-token:{TOKEN}@GitHub.com/other/bus"),
        ("", "https://elsewhere.example/a/b", "https://elsewhere.example/a/b"),
        ("", "https://github.com.elsewhere.example/a/b", "https://github.com.elsewhere.example/a/b"),
        ("", "https://github.com:444/a/b", "https://github.com:444/a/b"),
        ("", "http://github.com/a/b", "http://github.com/a/b"),
        ("", "https://me:mine@github.com/a/b", "https://me:mine@github.com/a/b"),
        ("", "https://github.com@elsewhere.example/a/b", "https://github.com@elsewhere.example/a/b"),
        ("", "git@github.com:a/b.git", "git@github.com:a/b.git"),
        ("", "/srv/bus.git", "/srv/bus.git"),
    ],
)
def test_token_is_added_for_its_own_server_only(server: str, remote: str, expected: str) -> None:
    environ = {**EVENT, "GITHUB_SERVER_URL": server, "KAKEYA_GITHUB_TOKEN": TOKEN}
    run = read_workflow_run(environ, remote=remote or None)
    assert run.remote == expected
    assert TOKEN not in repr(run)


def test_the_time_limit_of_the_job_is_read_in_minutes() -> None:
    assert read_workflow_run({**EVENT, "KAKEYA_RUN_MINUTES": "180"}).limit_s == 10800
    assert read_workflow_run({**EVENT, "KAKEYA_RUN_MINUTES": ""}).limit_s is None
    for wrong in ("x", "0", "-1", "nan", "inf"):
        with pytest.raises(MachineError, match=f"KAKEYA_RUN_MINUTES is '{wrong}'"):
            read_workflow_run({**EVENT, "KAKEYA_RUN_MINUTES": wrong})


@pytest.mark.parametrize(
    ("environ", "api"),
    [
        ({}, "https://api.github.com"),
        (
            {"GITHUB_SERVER_URL": "https://git.example", "GITHUB_API_URL": "https://git.example/api/v1"},
            "https://git.example/api/v1",
        ),
        ({"KAKEYA_GITHUB_API": "https://api.example"}, "https://api.example"),
        ({"KAKEYA_GITHUB_API": "http://api.example"}, None),
        ({"GITHUB_REPOSITORY": "", "KAKEYA_REMOTE": "https://github.com/other/bus"}, None),
    ],
)
def test_the_api_is_that_of_the_runs_own_repository(environ: dict[str, str], api: str | None) -> None:
    given = {**EVENT, "KAKEYA_REMOTE": "https://github.com/other/bus", **environ}
    github = read_workflow_run(given).api(given)
    assert (github and github.repository.api) == api
    assert github is None or github.repository.slug == "team/workload"


def test_output_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    run = read_workflow_run({**EVENT, "GITHUB_OUTPUT": str(tmp_path)})
    with pytest.raises(MachineError, match=f"cannot write {tmp_path}"):
        run.write_outputs({"status": "passed"})


def test_an_output_can_add_no_other(tmp_path: Path) -> None:
    path = tmp_path / "output"
    run = read_workflow_run({**EVENT, "GITHUB_OUTPUT": str(path)})
    run.write_outputs({"status": "passed\ndigest=forged\nEOF\ndigest<<EOF\nforged\nEOF"})
    name, _, mark = path.read_text().splitlines()[0].partition("<<")
    assert name == "status"
    assert path.read_text().splitlines().count(mark) == 1
    assert path.read_text().endswith(f"\n{mark}\n")
    run.write_outputs({"digest": "0"})
    assert mark not in path.read_text().splitlines()[-1]
