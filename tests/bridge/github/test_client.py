"""The REST API against a server on this machine: what is read, what is changed, and every way it says no."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from bridge import errors
from bridge.errors import (
    ApiConflict,
    ApiError,
    ApiFault,
    ApiNotFound,
    RateLimited,
    ScopeMissing,
    TokenRejected,
)
from bridge.github import GitHub, Token, repository_of
from bridge.github.http import NoAnswer, Request, Web
from tests.houses import wait_for
from tests.servers.github import SLUG, TOKEN, Fault, GitHubServer, github_server

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@pytest.fixture
def server() -> Iterator[GitHubServer]:
    with github_server() as running:
        yield running


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def github(server: GitHubServer, slept: list[float]) -> GitHub:
    return made(server, slept)


def made(server: GitHubServer, slept: list[float], *, token: str | None = TOKEN, **changes) -> GitHub:
    repository = repository_of(f"https://github.com/{SLUG}", {"KAKEYA_GITHUB_API": server.api})
    assert repository is not None
    given = None if token is None else Token(token, "KAKEYA_GITHUB_TOKEN")
    options = {"sleep": slept.append, "now": lambda: NOW, **changes}
    return GitHub(repository, given, **options)


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


RESET = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(int(NOW.timestamp()) + 1800)}
REFUSALS: dict[str, tuple[Fault, type[ApiError], str]] = {
    "wrong token": (Fault("runs", 401, message="Bad credentials"), TokenRejected, "KAKEYA_GITHUB_TOKEN"),
    "expired token": (
        Fault("runs", 401, {"github-authentication-token-expiration": "2026-02-01 00:00:00 UTC"}),
        TokenRejected,
        "it ended on 2026-02-01",
    ),
    "missing permission": (
        Fault("runs", 403, {"x-accepted-github-permissions": "actions=write"}, "Resource not accessible"),
        ScopeMissing,
        "actions=write",
    ),
    "missing scope": (
        Fault("runs", 403, {"x-oauth-scopes": "gist", "x-accepted-oauth-scopes": "repo"}),
        ScopeMissing,
        "it has the scopes gist",
    ),
    "single sign-on": (
        Fault("runs", 403, {"x-github-sso": "required; url=https://github.com/orgs/o/sso"}),
        ScopeMissing,
        "sign-on",
    ),
    "not there": (Fault("runs", 404, message="Not Found"), ApiNotFound, "may not see it"),
    "conflict": (Fault("runs", 409), ApiConflict, "409"),
    "not processable": (Fault("runs", 422, message="No commit found"), ApiConflict, "No commit found"),
    "hourly limit": (Fault("runs", 403, RESET), RateLimited, "in 30 min"),
    "hourly limit as 429": (Fault("runs", 429, RESET), RateLimited, "in 30 min"),
    "secondary limit": (
        Fault("runs", 403, message="You have exceeded a secondary rate limit"),
        RateLimited,
        "in 60 s",
    ),
    "secondary limit with a time": (Fault("runs", 429, {"retry-after": "90"}), RateLimited, "in 90 s"),
    "a date to wait for": (
        Fault("runs", 429, {"retry-after": "Sun, 01 Mar 2026 12:05:00 GMT"}),
        RateLimited,
        "in 5 min",
    ),
    "a date that no calendar has": (
        Fault("runs", 429, {"retry-after": "Mon, 01 Jan 99999999999 00:00:00 GMT"}),
        RateLimited,
        "in 60 s",
    ),
    "a fault with a time": (Fault("runs", 502, {"retry-after": "1800"}), ApiFault, "for 30 min"),
    "a time that is none": (Fault("runs", 429, {"retry-after": "soon"}), RateLimited, "in 60 s"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_what_is_wrong_and_what_to_do(
    server: GitHubServer, github: GitHub, slept: list[float], name: str
):
    fault, kind, words = REFUSALS[name]
    server.faults.append(Fault(**{**vars(fault), "times": 99}))
    with pytest.raises(kind) as caught:
        github.run(7)
    assert type(caught.value) is kind
    assert words in f"{caught.value.message} {caught.value.remedy}"
    assert caught.value.message.startswith("the run 7")
    assert caught.value.remedy
    assert slept == []
    assert len(server.calls) == 1


def test_a_short_pause_that_the_server_asks_for_is_made(
    server: GitHubServer, github: GitHub, slept: list[float]
):
    run = server.add_run(status="completed")
    server.faults.append(Fault("runs", 429, {"retry-after": "3"}, times=2))
    assert github.run(run).id == run
    assert [round(pause) for pause in slept] == [3, 6]
    server.faults.append(Fault("rerun", 403, {"retry-after": "2"}))
    github.rerun(run)
    assert server.runs[run]["run_attempt"] == 2


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_fault_of_the_server_is_waited_out_when_reading(
    server: GitHubServer, github: GitHub, slept: list[float], status: int
):
    run = server.add_run()
    server.faults.append(Fault("runs", status, times=3))
    assert github.run(run).id == run
    assert slept == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_pause_that_a_fault_asks_for_is_made_when_reading(
    server: GitHubServer, github: GitHub, slept: list[float], status: int
):
    run = server.add_run()
    server.faults.append(Fault("runs", status, {"retry-after": "7"}))
    assert github.run(run).id == run
    assert slept == [7.0]


def test_a_fault_that_stays_is_an_error(server: GitHubServer, github: GitHub, slept: list[float]):
    server.faults.append(Fault("runs", 502, times=99))
    with pytest.raises(ApiError, match="502"):
        github.run(1)
    assert len(server.calls) == 4


@pytest.mark.parametrize("headers", [{}, {"retry-after": "1"}], ids=["at once", "after a pause"])
@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_fault_of_the_server_is_not_answered_with_a_second_change(
    server: GitHubServer, github: GitHub, slept: list[float], status: int, headers: dict[str, str]
):
    run = server.add_run(status="completed")
    server.faults.append(Fault("rerun", status, headers, times=99))
    with pytest.raises(ApiFault, match=str(status)):
        github.rerun(run)
    assert len(server.of("POST", "rerun")) == 1
    assert slept == []


STATES = [
    "This workflow run is already running",
    "Unable to retry this workflow run because it was created over a month ago",
    "This workflow run cannot be rerun; its workflow file may be broken",
]


@pytest.mark.parametrize("words", STATES)
def test_a_run_that_cannot_be_started_again_is_no_missing_permission(
    server: GitHubServer, github: GitHub, words: str
):
    run = server.add_run(status="completed")
    server.faults.append(Fault("rerun", 403, {"x-accepted-github-permissions": "actions=write"}, words))
    with pytest.raises(ApiConflict) as caught:
        github.rerun(run)
    assert words in caught.value.message


@pytest.mark.parametrize("body", [b"", b'{"id": 1', b"<html>", b"[1]", b'{"id": "x"}', b"[" * 100_000])
def test_an_answer_that_is_none_is_an_error(server: GitHubServer, github: GitHub, body: bytes):
    server.add_run()
    server.faults.append(Fault("runs", body=body, times=99))
    with pytest.raises(ApiError, match="answer to the run 1001"):
        github.run(1001)
    with pytest.raises(ApiError, match="answer to the workflow runs"):
        list(github.runs())


def test_an_answer_that_breaks_off_is_asked_for_again(
    server: GitHubServer, github: GitHub, slept: list[float]
):
    run = server.add_run()
    server.faults.append(Fault("runs", cut=20))
    assert github.run(run).id == run
    assert slept == [0.5]
    server.faults.append(Fault("runs", cut=20, times=99))
    with pytest.raises(ApiError, match="broke off"):
        github.run(run)


def test_a_slow_answer_is_an_error_in_time(server: GitHubServer, slept: list[float]):
    server.faults.append(Fault("runs", pause_s=0.6, times=99))
    with pytest.raises(ApiError, match="did not answer"):
        made(server, slept, timeout_s=0.1).run(1)


@pytest.mark.parametrize("part", ["status", "headers", "body"])
def test_an_answer_that_comes_in_drips_is_an_error_in_time(server: GitHubServer, part: str):
    """Each byte comes soon enough for the socket; the whole takes 5 s and more."""
    server.faults.append(Fault("runs", drip=part, headers={"x-long": "x" * 100}, status=200, body=b" " * 100))
    began = time.monotonic()
    with pytest.raises(NoAnswer, match="in time") as caught:
        Web().send(Request("GET", f"{server.api}/repos/{SLUG}/actions/runs/1"), 0.4)
    assert time.monotonic() - began < 2.0
    assert caught.value.status == (200 if part == "body" else None)


@pytest.mark.slow
def test_calls_that_hang_do_not_pile_up_for_ever(server: GitHubServer):
    server.faults.append(Fault("runs", drip="status", status=200, times=99))
    web, request = Web(), Request("GET", f"{server.api}/repos/{SLUG}/actions/runs/1")
    said = []
    for _ in range(12):
        with pytest.raises(NoAnswer) as caught:
            web.send(request, 0.15)
        said.append(str(caught.value))
    assert said[-1] == "earlier calls still hang"
    assert len(server.calls) < 12
    server.faults.clear()
    server.add_run(id=1)
    wait_for(lambda: answers(web, request), what="the end of what hung")


def answers(web: Web, request: Request) -> bool:
    try:
        return web.send(request, 5.0).status == 401
    except NoAnswer:
        return False


def test_an_answer_that_is_too_large_is_an_error(server: GitHubServer, slept: list[float]):
    server.faults.append(Fault("runs", body=b"x" * 200_000, times=99))
    with pytest.raises(ApiError, match="longer than 100000 bytes"):
        made(server, slept, transport=Web(limit_bytes=100_000)).run(1)


def test_nobody_at_the_address_is_an_error(server: GitHubServer, slept: list[float]):
    github = made(server, slept)
    with github_server() as gone:
        server.api = gone.api
        github = made(server, slept)
    with pytest.raises(ApiError, match="no connection"):
        github.run(1)


def test_credentials_of_a_netrc_do_not_take_the_place_of_the_token(
    server: GitHubServer, github: GitHub, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    run = server.add_run()
    assert github.run(run).id == run


@pytest.mark.parametrize("echo", ["message", "header"])
def test_the_token_is_in_nothing_that_is_shown(
    server: GitHubServer, github: GitHub, slept: list[float], echo: str
):
    """Not even where the server repeats it."""
    headers = {"x-accepted-github-permissions": f"actions={TOKEN}", "x-oauth-scopes": TOKEN}
    faults = [
        Fault("runs", 403, headers if echo == "header" else {}, f"no: {TOKEN}"),
        Fault("runs", 401, {}, TOKEN),
        Fault("runs", 404, {}, TOKEN),
        Fault("runs", 422, {}, TOKEN),
        Fault("runs", 500, {}, TOKEN, times=4),
        Fault("runs", 302, {"location": f"https://{TOKEN}@example.org/"}),
        Fault("runs", body=b'{"id": "%s"}' % TOKEN.encode()),
        Fault("runs", cut=3, times=4),
    ]
    for fault in faults:
        server.faults = [fault]
        with pytest.raises(ApiError) as caught:
            github.run(1)
        shown = "".join(traceback.format_exception(caught.value))
        assert TOKEN not in f"{shown} {caught.value!r} {caught.value.message} {caught.value.remedy}"
    assert TOKEN not in repr(github.token)
    with contextlib.suppress(ApiError):
        list(github.runs())
    assert TOKEN not in repr(vars(github))


def test_without_a_token_the_errors_say_how_to_set_one(server: GitHubServer, slept: list[float]):
    github = made(server, slept, token=None)
    with pytest.raises(TokenRejected, match="wants a token") as caught:
        github.run(1)
    assert "KAKEYA_GITHUB_TOKEN" in (caught.value.remedy or "")
    assert caught.value.exit_code == errors.BusError.exit_code
