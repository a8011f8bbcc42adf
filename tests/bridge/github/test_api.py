"""The REST API against a server on this machine: what is read, what is changed, and where it leads."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from bridge.errors import ApiConflict, ApiError, ApiFault, ApiNotFound
from bridge.github.api import GitHub, Repository, Token
from tests.bridge.github.apis import api
from tests.servers.github import SLUG, TOKEN, Fault, GitHubServer, github_server


def test_runs_are_found_by_commit(server: GitHubServer, github: GitHub):
    mine = server.add_run(head_sha="a" * 40)
    server.add_run(head_sha="b" * 40)
    found = github.runs(head_sha="a" * 40).rows
    assert [run.id for run in found] == [mine]
    assert (found[0].state, found[0].conclusion) == ("queued", None)
    assert found[0].url == f"https://github.com/{SLUG}/actions/runs/{mine}"


def test_the_newest_runs_are_listed_in_one_call(server: GitHubServer, github: GitHub):
    made = [server.add_run() for _ in range(30)]
    assert [run.id for run in github.runs(limit=5).rows] == made[:-6:-1]
    assert [call.token for call in server.calls] == [TOKEN]


def test_the_live_step_of_a_job(server: GitHubServer, github: GitHub):
    run = server.add_run(status="in_progress")
    server.add_job(run, "run", ("Set up job", "completed"), ("Execute the request", "in_progress"))
    server.add_job(run, "publish")
    first, second = github.jobs(run)
    assert first.step == "Execute the request"
    assert first.runner_name == "studio"
    assert second.step is None


def test_a_run_is_cancelled_once(server: GitHubServer, github: GitHub):
    run = server.add_run(status="in_progress")
    github.cancel(run)
    assert github.run(run).conclusion == "cancelled"
    with pytest.raises(ApiConflict, match=r"409.*completed"):
        github.cancel(run)


def test_a_dispatch_gives_the_run(server: GitHubServer, github: GitHub):
    seen: list[object] = []
    server.on_dispatch = lambda *what: seen.append(what)
    number = github.dispatch("main", "b", "c")
    assert number in server.runs
    assert seen == [("mac-bridge.yaml", "main", {"branch": "b", "commit": "c"})]


def test_dispatch_works_on_servers_that_return_no_run(server: GitHubServer, github: GitHub):
    server.gives_run_id = False
    assert github.dispatch("main", "b", "c") is None
    assert len(server.runs) == 1


@pytest.mark.parametrize(
    "fault",
    [Fault("/dispatches", body=b"{}"), Fault("/dispatches", body=b"<html>")],
    ids=["no id", "no JSON"],
)
def test_dispatch_with_an_unreadable_answer_started_a_run(server: GitHubServer, fault: Fault):
    server.faults.append(fault)
    assert api(server, timeout_s=0.5).dispatch("main", "b", "c") is None
    assert len(server.runs) == 1


@pytest.mark.parametrize("fault", [Fault("/dispatches", silent=True), Fault("/dispatches", cut=5)])
def test_a_dispatch_without_a_whole_answer_is_a_fault(server: GitHubServer, github: GitHub, fault: Fault):
    server.faults.append(fault)
    with pytest.raises(ApiFault, match="did not answer"):
        github.dispatch("main", "b", "c")
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
            Fault("/cancel", 307, {"location": f"{other.api}/repos/{SLUG}/actions/runs/1/cancel"})
        )
        with pytest.raises(ApiError, match="answered 307"):
            github.cancel(run)
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
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    method: str,
):
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    github = api(server, timeout_s=5.0)
    server.faults.append(Fault("runs", 307, {"location": address}, times=99))
    with pytest.raises(ApiError):
        github.run(1) if method == "GET" else github.cancel(1)


def test_a_renamed_repository_is_followed_on_the_same_server(server: GitHubServer, github: GitHub):
    run = server.add_run()
    server.faults.append(
        Fault("/actions/runs", 301, {"location": f"{server.api}/repos/{SLUG}/actions/runs/{run}"})
    )
    assert github.run(run).id == run
    assert [call.token for call in server.calls] == [TOKEN, TOKEN]


def test_facts_of_the_repository(server: GitHubServer, github: GitHub):
    facts = github.facts()
    assert (facts.private, facts.default_branch) == (True, "main")
    assert facts.permissions == {"push": True, "pull": True}


def test_runs_without_a_list_of_one_workflow_are_found(server: GitHubServer, github: GitHub):
    """Gitea names a workflow's file with the ref, counts attempts from 0, and has no `created_at`."""
    server.lists_workflows = False
    server.add_run(path="other.yaml@refs/heads/main")
    made = [
        server.add_run(path=path, run_attempt=0, created_at=None, head_sha="a" * 40)
        for path in (".github/workflows/mac-bridge.yaml", "mac-bridge.yaml@refs/heads/x@y")
    ]
    server.add_run(path=".gitea/workflows/mac-bridge.yaml.bak", head_sha="a" * 40)
    assert [run.id for run in github.runs().rows] == made[::-1]
    [newest] = github.runs(head_sha="a" * 40, limit=1).rows
    assert newest.id == made[-1]
    assert "attempt" not in newest.sentence
    assert server.calls[-1].query["limit"] == "100"


def test_a_missing_repository_is_not_a_missing_list(server: GitHubServer):
    github = GitHub(Repository("octo/nothing", server.api), Token(TOKEN, "KAKEYA_GITHUB_TOKEN"))
    with pytest.raises(ApiNotFound, match="workflow runs of octo/nothing") as caught:
        github.runs()
    assert "check the name" in (caught.value.remedy or "")


def test_a_list_says_since_when_it_is_complete(server: GitHubServer, github: GitHub):
    made = [server.add_run(created_at=f"2026-03-01T12:00:0{i}Z") for i in range(3)]
    assert github.runs(limit=len(made)).since.year == 1
    assert github.runs(limit=2).since == datetime(2026, 3, 1, 12, 0, 1, tzinfo=UTC)
    server.runs[made[1]]["created_at"] = None
    assert github.runs(limit=2).since.year == 9999


def test_a_job_of_gitea_is_read(server: GitHubServer, github: GitHub):
    """Labels may be null, times that have not come are zero, and steps have the status of their job."""
    run = server.add_run(status="in_progress")
    steps = (("Set up job", "in_progress"), ("Execute the request", "in_progress"))
    zero = {"started_at": "0001-01-01T00:00:00Z", "completed_at": "1970-01-01T01:00:00+01:00"}
    server.add_job(run, "run", *steps, labels=None, created_at="2026-03-01T12:00:00Z", **zero)
    [job] = github.jobs(run)
    assert (job.created_at, job.started_at, job.completed_at) == ("2026-03-01T12:00:00Z", None, None)
    assert (job.labels, job.step, job.conclusion) == (None, None, None)


def test_a_server_that_cannot_cancel_runs_names_the_page(server: GitHubServer, github: GitHub):
    run = server.add_run()
    server.faults = [Fault("/cancel", 404, message="404 page not found")]
    with pytest.raises(ApiNotFound) as caught:
        github.cancel(run)
    assert "on its page" in (caught.value.remedy or "")
