"""Every way in which the API says no, or nothing: an error with its remedy, in time, without the token."""

from __future__ import annotations

import contextlib
import time
import traceback

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
from bridge.github import GitHub
from bridge.github.http import NoAnswer, Request, Web
from tests.bridge.github.apis import NOW, made
from tests.houses import wait_for
from tests.servers.github import SLUG, TOKEN, Fault, GitHubServer, github_server

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
