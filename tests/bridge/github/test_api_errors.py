"""Every way in which the API refuses or does not answer: an error with its remedy, without the token."""

from __future__ import annotations

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
from bridge.github.api import GitHub
from tests.bridge.github.apis import api
from tests.servers.github import TOKEN, Fault, GitHubServer, github_server

REFUSALS: dict[str, tuple[Fault, type[ApiError], str]] = {
    "wrong token": (Fault("runs", 401, message="Bad credentials"), TokenRejected, "KAKEYA_GITHUB_TOKEN"),
    "missing permission": (
        Fault("runs", 403, {"x-accepted-github-permissions": "actions=write"}, "Resource not accessible"),
        ScopeMissing,
        "actions=write",
    ),
    "missing scope": (
        Fault("runs", 403, {"x-oauth-scopes": "gist", "x-accepted-oauth-scopes": "repo"}),
        ScopeMissing,
        "needs repo",
    ),
    "not there": (Fault("runs", 404, message="Not Found"), ApiNotFound, "may see it"),
    "conflict": (Fault("runs", 409), ApiConflict, "409"),
    "not processable": (Fault("runs", 422, message="No commit found"), ApiConflict, "No commit found"),
    "hourly limit": (Fault("runs", 403, {"x-ratelimit-remaining": "0"}), RateLimited, "after 60 s"),
    "hourly limit as 429": (Fault("runs", 429, {"x-ratelimit-remaining": "0"}), RateLimited, "after 60 s"),
    "secondary limit": (
        Fault("runs", 403, message="You have exceeded a secondary rate limit"),
        RateLimited,
        "after 60 s",
    ),
    "secondary limit with a time": (Fault("runs", 429, {"retry-after": "90"}), RateLimited, "after 90 s"),
    "an invalid time": (Fault("runs", 429, {"retry-after": "soon"}), RateLimited, "after 60 s"),
    "a date": (
        Fault("runs", 429, {"retry-after": "Sun, 01 Mar 2026 12:05:00 GMT"}),
        RateLimited,
        "after 60 s",
    ),
    "a fault with a time": (Fault("runs", 503, {"retry-after": "1800"}), ApiFault, "after 1800 s"),
    "moved": (Fault("runs", 304), ApiError, "redirects"),
    "expired": (Fault("runs", 410, message="Server Error"), ApiError, "410 (expired)"),
    "not taken": (Fault("runs", 400, message="Invalid status x"), ApiError, "400: Invalid status x"),
    "not allowed": (Fault("runs", 405), ApiError, "does not take this call"),
    "a fault": (Fault("runs", 500), ApiFault, "a fault of the server: try again later"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_what_failed_and_what_to_do(server: GitHubServer, name: str):
    fault, kind, words = REFUSALS[name]
    server.faults.append(Fault(**{**vars(fault), "times": 99}))
    with pytest.raises(kind) as caught:
        api(server, retries=0).run(7)
    assert type(caught.value) is kind
    assert words in f"{caught.value.message} {caught.value.remedy}"
    assert caught.value.message.startswith("the run 7")
    assert caught.value.remedy
    assert len(server.calls) == 1


def test_the_reset_of_a_limit_is_the_time_to_wait(server: GitHubServer, github: GitHub):
    reset = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(int(time.time()) + 1800)}
    server.faults.append(Fault("runs", 403, reset))
    with pytest.raises(RateLimited, match=r"retry after 1[78]") as caught:
        github.run(1)
    assert caught.value.wait_s is not None
    assert 1700 < caught.value.wait_s <= 1800


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_read_is_retried_after_a_server_error(server: GitHubServer, github: GitHub, status: int):
    run = server.add_run()
    server.faults.append(Fault("runs", status, times=3))
    assert github.run(run).id == run


def test_retries_end(server: GitHubServer, github: GitHub):
    server.faults.append(Fault("runs", 502, times=99))
    with pytest.raises(ApiFault, match="502"):
        github.run(1)
    assert len(server.calls) == 5


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_change_is_sent_once(server: GitHubServer, github: GitHub, status: int):
    run = server.add_run(status="completed")
    server.faults.append(Fault("/cancel", status, {"retry-after": "1"}, times=99))
    with pytest.raises(ApiError, match="cancelling the run"):
        github.cancel(run)
    assert len(server.of("POST", "/cancel")) == 1


@pytest.mark.parametrize("body", [b"", b'{"id": 1', b"<html>", b"[1]", b'{"id": "x"}', b"[" * 100_000])
def test_an_invalid_body_is_an_error(server: GitHubServer, github: GitHub, body: bytes):
    server.add_run()
    server.faults.append(Fault("runs", body=body, times=99))
    with pytest.raises(ApiError, match="answer to the run 1001"):
        github.run(1001)
    with pytest.raises(ApiError, match="answer to the workflow runs"):
        github.runs()


def test_a_truncated_body_is_an_error(server: GitHubServer, github: GitHub):
    run = server.add_run()
    server.faults.append(Fault("runs", cut=20, times=99))
    with pytest.raises(ApiError, match="did not answer"):
        github.run(run)


def test_a_slow_answer_is_a_timeout(server: GitHubServer):
    server.faults.append(Fault("runs", pause_s=0.6, times=99))
    with pytest.raises(ApiFault, match="in time"):
        api(server, timeout_s=0.1, retries=0).run(1)


def test_an_unreachable_server_is_an_error(server: GitHubServer):
    with github_server() as gone:
        server.api = gone.api
    with pytest.raises(ApiFault, match="ConnectionError"):
        api(server).run(1)


def test_a_netrc_does_not_replace_the_token(
    server: GitHubServer, github: GitHub, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    run = server.add_run()
    assert github.run(run).id == run


@pytest.mark.parametrize("echo", ["message", "header"])
def test_the_token_is_never_shown_even_if_the_server_repeats_it(
    server: GitHubServer, github: GitHub, echo: str
):
    headers = {"x-accepted-github-permissions": f"actions={TOKEN}", "x-oauth-scopes": TOKEN}
    faults = [
        Fault("runs", 403, headers if echo == "header" else {}, f"no: {TOKEN}"),
        Fault("runs", 401, {}, TOKEN),
        Fault("runs", 404, {}, TOKEN),
        Fault("runs", 422, {}, TOKEN),
        Fault("runs", 500, {}, TOKEN, times=5),
        Fault("runs", 302, {"location": f"http://127.0.0.1:1/{TOKEN}"}),
        Fault("runs", body=b'{"id": "%s"}' % TOKEN.encode()),
        Fault("runs", cut=3, times=5),
    ]
    for fault in faults:
        server.faults = [fault]
        with pytest.raises(ApiError) as caught:
            github.run(1)
        shown = "".join(traceback.format_exception(caught.value))
        assert TOKEN not in f"{shown} {caught.value!r} {caught.value.message} {caught.value.remedy}"
    assert TOKEN not in repr(github.token)
    assert TOKEN not in repr(vars(github))


def test_without_a_token_the_error_says_how_to_set_one(server: GitHubServer):
    with pytest.raises(TokenRejected, match="401") as caught:
        api(server, token=None).run(1)
    assert "KAKEYA_GITHUB_TOKEN" in (caught.value.remedy or "")
    assert caught.value.exit_code == errors.BusError.exit_code
