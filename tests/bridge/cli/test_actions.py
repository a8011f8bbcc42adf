"""The same commands over GitHub Actions: a git remote, and an API, both real servers on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from bridge.bus.requests import WORKFLOW_PATH, RequestState, read_request
from bridge.cli.cancel import cancel
from bridge.cli.logs import logs
from bridge.cli.output import Connection
from bridge.cli.queue import queue
from bridge.cli.run import run
from bridge.cli.status import status
from bridge.cli.wait import wait
from bridge.git.repo import GitRepo
from bridge.github import dispatch
from bridge.protocol import refs
from tests.bridge.cli.calls import call
from tests.fixtures.bus import BusFixture
from tests.fixtures.repo import Done
from tests.servers.github import TOKEN, Fault, GitHubServer, github_server

FILE = b"name: mac-bridge\n"
ASK = ("--preset", "probe", "--json")


@pytest.fixture
def server(bus: BusFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitHubServer]:
    bus.put_on_github(monkeypatch)
    with github_server() as started:
        for name in ("KAKEYA_GITHUB_API", "KAKEYA_GITHUB_TOKEN"):
            monkeypatch.setenv(name, started.environ[name])
        yield started


@pytest.fixture
def over(bus: BusFixture, server: GitHubServer, monkeypatch: pytest.MonkeyPatch) -> BusFixture:
    """A bus whose remote is a repository that has the workflow; the clone is the working directory."""
    bus.point("refs/heads/main", bus.commit("main", {WORKFLOW_PATH: FILE}))
    bus.repo.git("pull", "--quiet", "origin", "main")
    monkeypatch.chdir(bus.repo.clone)
    return bus


@pytest.fixture
def kakeya(capsys: pytest.CaptureFixture[str]):
    def typed(command: click.Command, *args: str) -> Done:
        done = call(command, capsys, *args)
        assert TOKEN not in done.out + done.err
        return done

    return typed


def test_request_is_pushed_where_the_repository_has_the_workflow(over: BusFixture, kakeya) -> None:
    done = kakeya(run, *ASK)
    assert done.code == 0, done.err
    assert (done.json["transport"], done.json["run_id"]) == ("actions", None)
    request = read_request(GitRepo(over.repo.remote), done.json["request_commit"])
    assert not request.brings_workflow
    assert b'"actions"' in request.data


def test_a_dry_run_says_how_it_would_travel(over: BusFixture, kakeya) -> None:
    before = over.repo.remote_refs()
    document = kakeya(run, *ASK, "--dry-run").json
    assert (document["transport"], document["starts_by"]) == ("actions", "push")
    assert WORKFLOW_PATH in document["transport_why"]
    asked = kakeya(run, *ASK, "--dry-run", "--transport", "embedded").json
    assert (asked["transport"], asked["starts_by"]) == ("embedded", "daemon")
    assert over.repo.remote_refs() == before


def test_an_unknown_transport_is_bad_use(over: BusFixture, kakeya) -> None:
    done = kakeya(run, *ASK, "--transport", "carrier-pigeon")
    assert done.code == 2
    assert "carrier-pigeon" in done.err


def test_inside_a_workflow_it_is_dispatched(over: BusFixture, server, kakeya, monkeypatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    done = kakeya(run, *ASK)
    assert done.code == 0, done.err
    [sent] = server.of("POST", "/dispatches")
    assert sent.body["ref"] == "main"
    assert sent.body["inputs"] == {
        "branch": done.json["ref"].removeprefix("refs/heads/"),
        "commit": done.json["request_commit"],
    }
    assert done.json["run_id"] in server.runs
    message = over.repo.git("log", "-1", "--format=%B", done.json["request_commit"], cwd=over.repo.remote)
    assert "[skip ci]" in message


def test_request_that_cannot_be_started_is_removed(over: BusFixture, server, kakeya, monkeypatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    server.faults = [Fault("/dispatches", 403, message="Resource not accessible by integration", times=9)]
    before = over.repo.remote_refs()
    done = kakeya(run, *ASK)
    assert done.code not in (0, 70)
    assert "the request was removed" in done.err
    assert "actions: write" in done.err, "which permission is missing"
    assert over.repo.remote_refs() == before


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize(
    "fault", [{"silent": True}, {"cut": 5}, {"status": 502}], ids=["silent", "cut", "a bad gateway"]
)
def test_a_request_that_may_have_a_run_stays(over: BusFixture, server, kakeya, monkeypatch, fault) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    before = over.repo.remote_refs()
    server.faults = [Fault("/dispatches", **fault)]
    done = kakeya(run, *ASK)
    assert done.code == 6
    [branch] = [ref for ref in over.repo.remote_refs() - before if ref.startswith("refs/heads/")]
    assert f"stays at {branch}" in done.err
    assert "kakeya_mac wait" in done.err


def test_a_run_whose_id_is_not_told_is_started(over: BusFixture, server, kakeya, monkeypatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    server.faults = [Fault("/dispatches", body=b"{}")]
    done = kakeya(run, *ASK)
    assert (done.code, done.json["run_id"], len(server.runs)) == (0, None, 1), done.err


def test_status_and_queue_show_the_run(over: BusFixture, server, kakeya) -> None:
    submitted = over.submit(transport="actions")
    number = server.add_run(head_sha=submitted.commit, status="in_progress")
    number_of_other = server.add_run(head_sha="f" * 40)
    server.runs[number]["head_branch"] = submitted.ref.removeprefix("refs/heads/")
    server.add_job(number, "run", ("Run the request", "in_progress"))
    shown = kakeya(status, submitted.nonce, "--json").json["run"]
    assert (shown["id"], shown["machine"], shown["step"]) == (number, "studio", "Run the request")
    assert f"/runs/{number}" in kakeya(status, submitted.nonce).out
    [row] = kakeya(queue, "--json").json["requests"]
    assert row["run"] == shown
    assert number_of_other != number
    assert "Run the request" in kakeya(queue).out


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("/actions", 401, message="Bad credentials", times=9), "KAKEYA_GITHUB_TOKEN"),
        (
            Fault(
                "/actions", 403, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "9999999999"}, times=9
            ),
            "rate limited",
        ),
    ],
    ids=["a token that has expired", "a rate limit"],
)
def test_api_refusal_is_a_warning_next_to_what_git_knows(
    over: BusFixture, server, kakeya, fault: Fault, said: str
) -> None:
    submitted = over.submit(transport="actions")
    server.faults = [fault]
    for command, args in ((status, (submitted.nonce, "--json")), (queue, ("--json",))):
        fault.times = 9
        done = kakeya(command, *args)
        assert done.code == 0
        assert said in done.err
    assert kakeya(status, submitted.nonce, "--json").json["status"] == "queued"


def test_cancel_stops_the_run_that_a_machine_has(over: BusFixture, server, kakeya) -> None:
    submitted = over.submit(transport="actions")
    number = server.add_run(head_sha=submitted.commit, status="in_progress")
    server.add_job(number, "run", ("Run the request", "in_progress"))
    done = kakeya(cancel, submitted.nonce, "--json")
    assert (done.json["status"], done.json["run"]["id"]) == ("cancelling", number)
    assert "its run was stopped" in done.err
    assert server.runs[number]["conclusion"] == "cancelled"
    assert refs.CANCELS + submitted.nonce in over.repo.remote_refs()


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("state", ["queued", "ended", "gone", "not known"])
def test_cancel_withdraws_where_no_machine_has_the_run(
    over: BusFixture, server, kakeya, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    submitted = over.submit(transport="actions")
    number = 0 if state == "gone" else server.add_run(head_sha=submitted.commit)
    if state == "ended":
        server.runs[number].update(status="completed", conclusion="cancelled")
        server.add_job(number, "run", ("Run the request", "completed"))
    if state == "not known":
        monkeypatch.delenv("KAKEYA_GITHUB_TOKEN")
    done = kakeya(cancel, submitted.nonce, "--json")
    assert (done.code, done.json["status"]) == (0, "withdrawn")
    assert refs.CANCELS + submitted.nonce not in over.repo.remote_refs()
    assert refs.INBOX + submitted.nonce not in over.repo.remote_refs()
    assert len(server.of("POST", "/cancel")) == (state == "queued")
    if state == "queued":
        assert server.runs[number]["conclusion"] == "cancelled"


def test_request_is_withdrawn_where_the_api_cannot_cancel(over: BusFixture, server, kakeya) -> None:
    submitted = over.submit(transport="actions")
    server.add_run(head_sha=submitted.commit)
    server.faults = [Fault("/cancel", 404)]
    done = kakeya(cancel, submitted.nonce, "--json")
    assert (done.code, done.json["status"]) == (0, "withdrawn")
    assert "on its page" in done.err


OLD = "20260301t120000z0123456789ab"
ENDED = {"status": "completed", "conclusion": "failure"}


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("run", [ENDED, None], ids=["ended", "gone"])
def test_status_and_queue_say_that_a_run_gives_no_result(over: BusFixture, server, kakeya, run) -> None:
    submitted = over.submit(transport="actions", nonce=OLD)
    if run is not None:
        server.add_run(head_sha=submitted.commit, head_branch=submitted.ref[11:], **run)
    problem = kakeya(status, OLD, "--json").json["run_problem"]
    said = "its run ended (failure) without a result" if run else "no workflow run of it exists"
    assert problem == f"{said}: kakeya_mac cancel {OLD} ends it, kakeya_mac again {OLD} asks again"
    assert problem in kakeya(status, OLD).out
    [row] = kakeya(queue, "--json").json["requests"]
    assert row["run_problem"] == problem
    assert f"{OLD}: {said}" in " ".join(kakeya(queue).out.split())


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("why", ["no token", "a daemon's", "in progress", "young", "the API fails"])
def test_a_request_that_may_get_a_result_has_no_run_problem(
    over: BusFixture, server, kakeya, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    transport = "embedded" if why == "a daemon's" else "actions"
    aged = {} if why == "young" else {"nonce": OLD}
    submitted = over.submit(transport=transport, **aged)
    if why == "no token":
        monkeypatch.delenv("KAKEYA_GITHUB_TOKEN")
    elif why in {"a daemon's", "in progress"}:
        run = ENDED if why == "a daemon's" else {"status": "in_progress"}
        server.add_run(head_sha=submitted.commit, head_branch=submitted.ref[11:], **run)
    elif why == "the API fails":
        server.faults = [Fault("/actions", 500, times=99)]
    assert kakeya(status, submitted.nonce, "--json").json["run_problem"] is None
    [row] = kakeya(queue, "--json").json["requests"]
    assert row["run_problem"] is None


def test_result_that_came_after_the_first_look_is_shown(
    over: BusFixture, server, kakeya, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run publishes its result before it ends."""
    submitted = over.submit(transport="actions")
    server.add_run(head_sha=submitted.commit, **ENDED)
    find = Connection.find_run

    def answered(link: Connection, state: RequestState):
        over.answer(submitted)
        return find(link, state)

    monkeypatch.setattr(Connection, "find_run", answered)
    assert kakeya(status, submitted.nonce, "--json", "--allow-unsigned").json["runner_status"] == "passed"


def test_users_of_actions_hear_nothing_of_registrations(over: BusFixture, kakeya) -> None:
    done = kakeya(run, *ASK, "--on", "chip=M4*")
    assert (done.json["transport"], done.json["runners"]) == ("actions", None)
    assert "runner" not in done.err
    shown = kakeya(status, done.json["nonce"])
    assert "for machines with chip=M4*" in shown.out
    assert "runner" not in shown.out
    assert "no runner has been seen" in kakeya(run, *ASK, "--transport", "embedded").err


def test_the_jobs_log_is_shown_when_it_has_ended(over: BusFixture, server, kakeya) -> None:
    submitted = over.submit(transport="actions")
    number = server.add_run(head_sha=submitted.commit, status="in_progress")
    job = server.add_job(number, "run", ("Run the request", "in_progress"))
    assert f"/runs/{number}" in kakeya(logs, submitted.nonce, "--json").err
    server.logs[job] = b"it said \x1b[31mthis\n"
    done = kakeya(logs, submitted.nonce)
    assert "it said this" in done.out.replace("[31m", "")
    assert "\x1b" not in done.out


def test_a_waiting_client_hears_that_its_run_gave_no_result(
    over: BusFixture, server, kakeya, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "INTERVAL_S", 0.2)
    submitted = over.submit(transport="actions")
    number = server.add_run(head_sha=submitted.commit, status="completed", conclusion="cancelled")
    done = kakeya(wait, submitted.nonce, "--json", "--seconds", "3")
    assert (done.code, done.json["run"]["id"]) == (4, number)
    assert done.err.count(done.json["run_problem"]) == 1
    assert "its run ended (cancelled) without a result" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("refusing to allow an OAuth App to create or update workflow", "scope `workflow`"),
        ("push declined due to repository rule violations", "git switch -c AgentMemory/"),
    ],
    ids=["no workflow scope", "a branch policy"],
)
def test_a_refused_push_says_what_usually_helps(over: BusFixture, kakeya, words: str, said: str) -> None:
    over.repo.git("switch", "--quiet", "--detach", "HEAD^")  # a workload without the file: it is brought
    over.hook("pre-receive", f"echo '{words}'; exit 1")
    done = kakeya(run, *ASK)
    assert done.code not in (0, 70)
    assert words in done.err
    assert said in done.err


def test_a_branch_of_an_agent_is_followed(over: BusFixture, kakeya) -> None:
    over.repo.git("switch", "--quiet", "-c", "AgentMemory/bench-a1b2")
    ref = kakeya(run, *ASK).json["ref"]
    assert ref.startswith("refs/heads/AgentMemory/mac-bridge-probe-")
    assert ref.endswith("-a1b2")
