"""Who waits hears of the run, evicted ones are started anew, and what the API refuses is said once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridge.client.attendant import INTERVAL_S, MOST_AGAIN, PATIENCE_S, Attendant
from bridge.client.runs import Request, run_of, runs_by_nonce
from bridge.github import GitHub, find_token, repository_of
from tests.servers.github import TOKEN, Fault, GitHubServer, github_server

NONCE = "20260301t120000z0123456789ab"
BRANCH = f"refs/heads/mac-bridge/probe-{NONCE}"
COMMIT = "a" * 40


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> Iterator[GitHubServer]:
    with github_server() as started:
        yield started


@pytest.fixture
def clock() -> Clock:
    return Clock()


def api(server: GitHubServer) -> GitHub:
    repository = repository_of("/anywhere", server.environ)
    assert repository is not None
    return GitHub(repository, find_token(server.environ), patience_s=0.0)


def attendant(server: GitHubServer, clock: Clock, *, wished_away: bool = False, run_id: int | None = None):
    request = Request(NONCE, BRANCH, COMMIT, run_id)
    return Attendant(request, api(server), is_wished_away=lambda: wished_away, clock=clock)


def later(attended: Attendant, clock: Clock, seconds: float = INTERVAL_S) -> str:
    clock.now += seconds
    return "\n".join(attended.look())


def test_it_tells_of_the_run_its_machine_and_its_step(server: GitHubServer, clock: Clock) -> None:
    run = server.add_run(head_sha=COMMIT)
    attended = attendant(server, clock)
    first = later(attended, clock, 0)
    assert f"/actions/runs/{run}" in first
    assert "its run is queued" in first
    assert later(attended, clock, 1) == "", "no more than one look an interval"
    server.runs[run]["status"] = "in_progress"
    server.add_job(run, "run", ("Check out", "completed"), ("Run the request", "in_progress"))
    assert later(attended, clock) == "its run goes on on studio: run / Run the request"
    assert later(attended, clock) == "", "nothing new"
    server.runs[run].update(status="completed", conclusion="success")
    assert later(attended, clock) == "its run has ended: success"
    assert attended.run is not None
    assert attended.run.as_json()["machine"] == "studio"


def test_an_evicted_run_is_started_anew_but_not_for_ever(server: GitHubServer, clock: Clock) -> None:
    run = server.add_run(head_sha=COMMIT)
    attended = attendant(server, clock)
    later(attended, clock, 0)
    for attempt in range(1, MOST_AGAIN + 1):
        server.runs[run].update(status="completed", conclusion="cancelled")
        said = later(attended, clock)
        assert f"attempt {attempt}" in said
        assert "queue: max" in said
        assert server.runs[run]["run_attempt"] == attempt + 1
    server.runs[run].update(status="completed", conclusion="cancelled")
    assert "not once more" in later(attended, clock)
    assert later(attended, clock) == ""
    assert len(server.of("POST", "/rerun")) == MOST_AGAIN


def test_of_two_who_see_the_same_eviction_the_slower_one_goes_on(server: GitHubServer, clock: Clock) -> None:
    run = server.add_run(head_sha=COMMIT, status="completed", conclusion="cancelled")
    quick, said = attendant(server, clock), []

    def in_between() -> bool:
        said.append(later(quick, clock))
        return False

    slow = Attendant(Request(NONCE, BRANCH, COMMIT), api(server), is_wished_away=in_between, clock=clock)
    told = later(slow, clock, 0)
    assert "started anew" in said[0]
    assert "This workflow run is already running" in told
    assert "goes on without" not in told
    assert server.runs[run]["run_attempt"] == 2
    assert later(slow, clock) == "its run is queued"
    assert not slow.is_helpless
    server.runs[run].update(status="completed", conclusion="cancelled")
    later(slow, clock)
    assert server.runs[run]["run_attempt"] == 3, "of another eviction it is not the slower one for ever"


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(
    "words",
    [
        "Unable to retry this workflow run because it was created over a month ago",
        "Resource not accessible by personal access token",
    ],
)
def test_a_run_that_cannot_be_started_anew_is_said_once_and_asked_for_once(
    server: GitHubServer, clock: Clock, words: str
) -> None:
    server.add_run(head_sha=COMMIT, status="completed", conclusion="cancelled")
    server.faults = [Fault("/rerun", 403, message=words, times=99)]
    attended = attendant(server, clock)
    assert words in later(attended, clock, 0)
    assert [later(attended, clock) for _ in range(9)] == [""] * 9
    assert len(server.of("POST", "/rerun")) == 1
    assert attended.is_helpless
    assert attended.run is not None, "what it may read it goes on to read"


def test_a_run_cancelled_with_its_request_stays_cancelled(server: GitHubServer, clock: Clock) -> None:
    server.add_run(head_sha=COMMIT, status="completed", conclusion="cancelled")
    assert "so was the request" in later(attendant(server, clock, wished_away=True), clock, 0)
    assert server.of("POST", "/rerun") == []


def test_a_run_that_a_machine_had_is_not_started_anew(server: GitHubServer, clock: Clock) -> None:
    run = server.add_run(head_sha=COMMIT, status="completed", conclusion="cancelled")
    server.add_job(run, "run", ("Run the request", "completed"), status="completed", conclusion="cancelled")
    assert "has ended: cancelled" in later(attendant(server, clock), clock, 0)
    assert server.of("POST", "/rerun") == []


def test_a_dispatched_run_is_found_by_its_id_or_by_its_name(server: GitHubServer) -> None:
    server.add_run(event="workflow_dispatch", display_title="mac-bridge/other")
    named = server.add_run(event="workflow_dispatch", display_title=BRANCH.removeprefix("refs/heads/"))
    server.add_run(event="workflow_dispatch", display_title="mac-bridge/newest")
    for request in (Request(NONCE, BRANCH, COMMIT), Request(NONCE, BRANCH, COMMIT, named)):
        found = run_of(api(server), request)
        assert found is not None
        assert found.id == named
    assert set(runs_by_nonce(api(server), [NONCE, "20260301t120000zffffffffffff"])) == {NONCE}


def test_no_run_and_no_machine_are_said_after_a_minute(server: GitHubServer, clock: Clock) -> None:
    attended = attendant(server, clock)
    assert later(attended, clock, 0) == ""
    assert "no run was started" in later(attended, clock, PATIENCE_S)
    run = server.add_run(head_sha=COMMIT)
    server.add_job(run, "run")
    assert "labels self-hosted, macOS" in later(attended, clock)


FAILURES = {
    "401": (Fault("/actions", 401, message="Bad credentials"), "token", False),
    "403 scope": (
        Fault("/actions", 403, message="Resource not accessible by personal access token"),
        "not accessible",
        False,
    ),
    "404": (Fault("/actions", 404, message="Not Found"), "", False),
    "rate limit": (
        Fault("/actions", 429, {"retry-after": "40"}, message="API rate limit exceeded"),
        "limit",
        True,
    ),
    "500": (Fault("/actions", 500, message="oops"), "500", True),
    "cut off": (Fault("/actions", cut=20), "", True),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_the_api_refuses_is_said_once_and_git_goes_on(
    server: GitHubServer, clock: Clock, name: str
) -> None:
    fault, said, comes_back = FAILURES[name]
    fault = Fault(**{**vars(fault), "times": 2})
    server.faults = [fault]
    server.add_run(head_sha=COMMIT)
    attended = attendant(server, clock)
    first = later(attended, clock, 0)
    assert said in first
    assert "git goes on" in first
    assert TOKEN not in first
    told = [later(attended, clock, 600) for _ in range(4)]
    assert not any("git goes on" in line for line in told), told
    assert any("its run is queued" in line for line in told) is comes_back


HELPLESS = {
    "401": (Fault("/actions", 401, message="Bad credentials"), 1),
    "403": (Fault("/actions", 403, message="Resource not accessible by personal access token"), 1),
    "404 at first": (Fault("/actions", 404, message="Not Found"), 1),
    "429": (Fault("/actions", 429, {"retry-after": "600"}), None),
    "502 for minutes": (Fault("/actions", 502), 5),
    "503 with a pause": (Fault("/actions", 503, {"retry-after": "30"}), 5),
}


@pytest.mark.parametrize("name", HELPLESS)
def test_it_says_when_it_can_do_nothing(server: GitHubServer, clock: Clock, name: str) -> None:
    fault, looks = HELPLESS[name]
    server.faults = [Fault(**{**vars(fault), "times": 99})]
    server.add_run(head_sha=COMMIT)
    attended = attendant(server, clock)
    told = []
    for _ in range(9):
        later(attended, clock, 600)
        told.append(attended.is_helpless)
    assert told == [looks is not None and number >= looks for number in range(1, 10)]
    server.faults = []
    later(attended, clock, 600)
    assert attended.is_helpless is (looks == 1), "an API that comes back is asked again"


def test_without_an_api_it_can_do_nothing(clock: Clock) -> None:
    assert Attendant(Request(NONCE, BRANCH, COMMIT), None, clock=clock).is_helpless


ODD = {
    "an address that is none": Fault("/actions", 302, {"location": "http://[::1"}),
    "a label too long": Fault("/actions", 302, {"location": f"http://{'a' * 70}/"}),
    "a port that is none": Fault("/actions", 302, {"location": "http://127.0.0.1:99999/"}),
    "a year that is none": Fault("/actions", 429, {"retry-after": "Mon, 01 Jan 99999999999 00:00:00 GMT"}),
    "half a character": Fault("/actions", body=b'{"workflow_runs": [{"id": 1, "status": "\\ud800"}]}'),
    "a number of thousands of digits": Fault(
        "/actions", body=b'{"workflow_runs": [{"id": %s}]}' % (b"9" * 9999)
    ),
    "a number that no address holds": Fault(
        "/actions", body=b'{"workflow_runs": [{"id": %s}]}' % (b"9" * 99)
    ),
    "a list of lists": Fault("/actions", body=b'{"workflow_runs": [[]]}'),
    "a next page that is none": Fault(
        "/actions", 200, {"link": '<http://[::1>; rel="next"'}, body=b'{"workflow_runs": []}'
    ),
    "no end": Fault("/actions", drip="headers"),
}


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("name", ODD)
def test_nothing_that_the_api_answers_ends_the_wait(
    server: GitHubServer, clock: Clock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    server.faults = [Fault(**{**vars(ODD[name]), "times": 99})]
    repository = repository_of("/anywhere", server.environ)
    assert repository is not None
    github = GitHub(repository, find_token(server.environ), patience_s=0.0, timeout_s=0.5)
    attended = Attendant(Request(NONCE, BRANCH, COMMIT), github, clock=clock)
    for _ in range(3):
        assert TOKEN not in later(attended, clock, 600)


def test_a_limit_is_waited_out_before_the_next_call(server: GitHubServer, clock: Clock) -> None:
    server.faults = [Fault("/actions", 429, {"retry-after": "40"}, message="API rate limit exceeded")]
    attended = attendant(server, clock)
    later(attended, clock, 0)
    calls = len(server.calls)
    later(attended, clock, 39)
    assert len(server.calls) == calls
    later(attended, clock, 2)
    assert len(server.calls) > calls
