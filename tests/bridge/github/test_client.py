"""The REST API against a server on this machine: what is read, what is changed, and where it leads."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from bridge.errors import (
    ApiConflict,
    ApiError,
    ApiFault,
)
from bridge.github import GitHub
from tests.bridge.github.apis import made
from tests.servers.github import SLUG, TOKEN, Fault, GitHubServer, github_server


def test_runs_are_found_by_commit_and_branch(server: GitHubServer, github: GitHub):
    mine = server.add_run(head_sha="a" * 40, head_branch="mac-bridge/probe-1")
    server.add_run(head_sha="b" * 40)
    server.add_run(head_sha="a" * 40, event="workflow_dispatch")
    found = list(github.runs(head_sha="a" * 40, event="push", branch="mac-bridge/probe-1"))
    assert [run.id for run in found] == [mine]
    assert found[0].status == "queued"
    assert found[0].conclusion is None
    assert not found[0].done
    assert found[0].html_url == f"https://github.com/{SLUG}/actions/runs/{mine}"


def test_every_page_is_read_and_no_row_twice(server: GitHubServer, github: GitHub):
    server.page = 7
    made = [server.add_run() for _ in range(45)]
    assert [run.id for run in github.runs(limit=1000)] == sorted(made, reverse=True)
    assert len(server.calls) == 7
    assert all(call.token == TOKEN for call in server.calls)


def test_no_more_pages_are_asked_for_than_are_wanted(server: GitHubServer, github: GitHub):
    server.page = 5
    for _ in range(30):
        server.add_run()
    assert len(list(github.runs(limit=5))) == 5
    assert len(server.calls) == 1


def test_a_next_page_on_another_server_is_not_asked(server: GitHubServer, github: GitHub):
    server.add_run()
    with github_server() as other:
        server.headers["link"] = f'<{other.api}/repos/{SLUG}/actions/runs?page=2>; rel="next"'
        with pytest.raises(ApiError, match="another server"):
            list(github.runs(limit=1000))
        assert other.calls == []


def test_the_live_step_of_a_job(server: GitHubServer, github: GitHub):
    run = server.add_run(status="in_progress")
    server.add_job(run, "run", ("Set up job", "completed"), ("Execute the request", "in_progress"))
    server.add_job(run, "publish")
    first, second = github.jobs(run)
    assert first.step is not None
    assert first.step.name == "Execute the request"
    assert first.runner_name == "studio"
    assert second.step is None


def test_a_run_is_started_again_and_stopped(server: GitHubServer, github: GitHub):
    run = server.add_run(status="completed", conclusion="cancelled")
    github.rerun(run)
    assert github.run(run).run_attempt == 2
    github.cancel(run)
    assert github.run(run).conclusion == "cancelled"
    with pytest.raises(ApiConflict, match=r"409.*completed"):
        github.cancel(run)


def test_a_dispatch_gives_the_run(server: GitHubServer, github: GitHub):
    seen: list[object] = []
    server.on_dispatch = lambda *what: seen.append(what)
    number = github.dispatch("mac-bridge.yaml", "main", {"branch": "b", "commit": "c"})
    assert number in server.runs
    assert seen == [("mac-bridge.yaml", "main", {"branch": "b", "commit": "c"})]


def test_a_server_that_gives_no_run_of_a_dispatch_is_asked_as_it_knows_it(
    server: GitHubServer, github: GitHub
):
    server.gives_run_id = False
    assert github.dispatch("mac-bridge.yaml", "main", {}) is None
    assert len(server.runs) == 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault("/dispatches", cut=5),
        Fault("/dispatches", body=b"{}"),
        Fault("/dispatches", body=b"<html>"),
        Fault("/dispatches", drip="body"),
    ],
    ids=["cut", "no id", "no JSON", "slow"],
)
def test_a_dispatch_that_took_effect_has_started_a_run_whatever_becomes_of_the_answer(
    server: GitHubServer, slept: list[float], fault: Fault
):
    server.faults.append(fault)
    assert made(server, slept, timeout_s=0.5).dispatch("mac-bridge.yaml", "main", {}) is None
    assert len(server.runs) == 1


def test_of_a_dispatch_without_an_answer_nobody_knows(server: GitHubServer, github: GitHub):
    server.faults.append(Fault("/dispatches", silent=True))
    with pytest.raises(ApiFault, match="did not answer"):
        github.dispatch("mac-bridge.yaml", "main", {})
    assert len(server.of("POST", "/dispatches")) == len(server.runs) == 1


def test_a_log_is_fetched_where_the_api_says_and_the_token_stays(server: GitHubServer, github: GitHub):
    with github_server() as store:
        server.logs[5] = b"here"
        store.logs[5] = b"2026-03-01T12:00:00Z hello\n"
        server.log_host = store.api
        assert github.job_log(5) == b"2026-03-01T12:00:00Z hello\n"
        assert [call.token for call in store.calls] == [None]


def test_a_change_is_not_sent_to_another_server(server: GitHubServer, github: GitHub):
    run = server.add_run(status="completed")
    with github_server() as other:
        server.faults.append(
            Fault("/rerun", 307, {"location": f"{other.api}/repos/{SLUG}/actions/runs/1/rerun"})
        )
        with pytest.raises(ApiError, match="another server"):
            github.rerun(run)
        assert other.calls == []


ADDRESSES = [
    "http://[::1",
    f"http://{'a' * 70}.example/",
    "http://127.0.0.1:99999/",
    "http://127.0.0.1:port/",
    "http://",
    "http://a b\x01/",
    "http://xn--\x80.example/",
    "gopher://127.0.0.1/",
]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_is_none_is_an_error_of_the_api(
    server: GitHubServer,
    slept: list[float],
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    method: str,
):
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    github = made(server, slept, timeout_s=5.0)
    server.faults.append(Fault("runs", 307, {"location": address}, times=99))
    with pytest.raises(ApiError):
        github.run(1) if method == "GET" else github.rerun(1)


@pytest.mark.parametrize("api", [f"https://{'a' * 70}.example", "https://..", "https://127.0.0.1:0"])
def test_an_api_whose_address_leads_nowhere_is_an_error_of_the_api(
    server: GitHubServer, slept: list[float], api: str
):
    server.api = api
    with pytest.raises(ApiError, match="did not answer"):
        made(server, slept, timeout_s=5.0).run(1)


@pytest.mark.parametrize("name", ["https_proxy", "REQUESTS_CA_BUNDLE"])
def test_an_environment_that_lets_no_call_through_is_an_error_of_the_api(
    server: GitHubServer, slept: list[float], monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setenv(name, "foo:///nowhere")
    server.api = "https://127.0.0.1:1"
    with pytest.raises(ApiError, match="did not answer"):
        made(server, slept, timeout_s=5.0).run(1)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-ratelimit-remaining": "9" * 5000},
        {"github-authentication-token-expiration": "0001-01-01 00:00:00 -2359"},
    ],
)
def test_facts_of_a_token_that_are_none_are_no_fault(
    server: GitHubServer, github: GitHub, headers: dict[str, str]
):
    server.headers = headers
    assert github.token_facts().remaining is None


def test_a_renamed_repository_is_followed_on_the_same_server(server: GitHubServer, github: GitHub):
    run = server.add_run()
    server.faults.append(
        Fault("/actions/runs", 301, {"location": f"{server.api}/repos/{SLUG}/actions/runs/{run}"})
    )
    assert github.run(run).id == run
    assert [call.token for call in server.calls] == [TOKEN, TOKEN]


def test_redirects_in_a_circle_end(server: GitHubServer, github: GitHub):
    here = f"{server.api}/repos/{SLUG}/actions/runs/1"
    server.faults.append(Fault("/actions/runs", 302, {"location": here}, times=99))
    with pytest.raises(ApiError, match="place to place"):
        github.run(1)


def test_facts_files_artifacts_and_runners(server: GitHubServer, github: GitHub):
    server.files["a/b.yaml", "main"] = b"on: push\n"
    run = server.add_run()
    server.artifacts[run] = [{"id": 1, "name": "result", "size_in_bytes": 10, "expired": False}]
    server.runners = [
        {
            "id": 1,
            "name": "studio",
            "os": "macOS",
            "status": "online",
            "busy": False,
            "labels": [{"id": 1, "name": "kakeya-mac", "type": "custom"}],
        }
    ]
    assert github.facts().private
    assert github.facts().default_branch == "main"
    assert github.file("a/b.yaml", "main") == b"on: push\n"
    assert github.file("a/c.yaml", "main") is None
    assert [item.name for item in github.artifacts(run)] == ["result"]
    assert github.runners()[0].label_names == ("kakeya-mac",)
    assert github.registration_token() == "AABBCCDD"
    assert github.remove_token() == "AABBCCDD"


def test_what_a_token_may_do(server: GitHubServer, github: GitHub):
    server.headers = {
        "x-oauth-scopes": "repo, workflow",
        "github-authentication-token-expiration": "2026-04-01 00:00:00 UTC",
        "x-ratelimit-remaining": "4999",
    }
    facts = github.token_facts()
    assert facts.scopes == ("repo", "workflow")
    assert facts.expires_at == datetime(2026, 4, 1, tzinfo=UTC)
    assert facts.remaining == 4999
