"""A request that was withdrawn while a runner took it: one result, and the runner stops."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import settings
from bridge.bus.requests import RequestState
from bridge.client.cancel import cancel
from bridge.client.remotes import resolve_remote
from bridge.client.signing_key import RequestSigner
from bridge.git.repo import GitRepo
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from tests.fixtures.repo import RepoFixture, wait_for
from tests.fixtures.runner import RunnerFixture

LONG = """
    import time
    open("up", "w").close()
    time.sleep(90)
"""


@pytest.fixture
def runner(repo: RepoFixture) -> RunnerFixture:
    made = RunnerFixture(repo)
    made.install({"echo": "print('hello from', arg)", "long": LONG})
    return made


def withdraw(
    runner: RunnerFixture, asked: Manifest, meanwhile: Callable[[RequestState], object] = lambda _: None
) -> str:
    """Withdraw a request; `meanwhile` happens between the client's look and its push."""
    git = GitRepo(runner.repo.clone)

    def is_on_machine(state: RequestState) -> bool:
        meanwhile(state)
        return False

    return cancel(
        settings.load(requested_by="me"),
        git,
        resolve_remote(git, str(runner.repo.remote)),
        asked.nonce,
        reason="enough",
        signer=RequestSigner(None),
        is_on_machine=is_on_machine,
    ).outcome


@pytest.fixture(autouse=True)
def own_state(runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in runner.repo.env.items():
        monkeypatch.setenv(name, value)


def test_withdrawn_request_is_answered_and_never_runs(runner: RunnerFixture) -> None:
    asked = runner.ask()
    assert withdraw(runner, asked) == "withdrawn"
    result = runner.answer(asked.nonce).result
    assert (result.verdict.status, result.verdict.reason) == ("cancelled", "requested")
    assert (result.runner.name, result.commands, result.files) == ("client", (), ())
    assert result.verdict.message == "withdrawn by me: enough"
    assert runner.left(asked.nonce) == {asked.result_ref}, "inbox and branch in one push"
    assert runner.daemon().serve(once=True, idle_timeout_s=1) == 0
    assert runner.claimed() == []
    assert withdraw(runner, asked) == "already-finished"


@pytest.mark.slow
@pytest.mark.parametrize("signed", [False, True], ids=["", "where signatures are required"])
def test_runner_that_claims_meanwhile_stops(runner: RunnerFixture, signed: bool) -> None:
    if signed:
        ann = runner.list_signer("ann")
        runner.policy("require_signature = true\n")
    asked = runner.ask_signed(ann, "long") if signed else runner.ask("long")
    with contextlib.ExitStack() as stack:

        def serve(state: RequestState) -> None:
            stack.enter_context(runner.serving(runner.daemon()))
            wait_for(lambda: runner.in_workspaces("up"), 40, "the job")

        assert withdraw(runner, asked, serve) == "withdrawn"
        wait_for(lambda: runner.has_said(asked.nonce, "not published"), 30, "the end of the job")
    result = runner.answer(asked.nonce).result
    assert (result.runner.name, result.attempt) == ("client", 1)
    assert asked.nonce not in {ref.rpartition("/")[2] for ref in runner.left(asked.nonce)}, "no claim"
    assert runner.daemon().serve(once=True, idle_timeout_s=1) == 0


def test_runner_that_finishes_meanwhile_has_the_say(runner: RunnerFixture) -> None:
    asked = runner.ask()
    assert withdraw(runner, asked, lambda _: runner.serve_once()) == "already-finished"
    assert runner.verdict(asked.nonce) == ("passed", "ok")


@pytest.mark.parametrize("branch", ["deleted", "moved"])
def test_request_without_its_branch_is_withdrawn_on_a_ref_of_its_own(
    runner: RunnerFixture, branch: str
) -> None:
    asked = runner.ask()
    if branch == "deleted":
        runner.delete(asked.result_ref)
    else:
        runner.point(asked.result_ref, runner.repo.head())
    assert withdraw(runner, asked) == "withdrawn"
    assert refs.INBOX + asked.nonce not in runner.repo.remote_refs()
    assert runner.answer(asked.nonce).ref == refs.RESULTS + asked.nonce
    assert runner.daemon().serve(once=True, idle_timeout_s=1) == 0


def test_request_that_cannot_be_read_is_withdrawn(runner: RunnerFixture) -> None:
    asked = runner.manifest()
    runner.commit({".mac-bridge/request.json": "{"})
    runner.push_commit(asked, runner.repo.head())
    assert withdraw(runner, asked) == "withdrawn"
    result = runner.answer(asked.nonce).result
    assert (result.preset, result.workload_sha, result.verdict.status) == (None, None, "cancelled")


def test_client_that_trusts_runners_reads_the_withdrawal(runner: RunnerFixture) -> None:
    asked, repo = runner.ask(), runner.repo
    key = runner.config_of().public_key
    assert repo.kakeya("runners", "trust", "mac", "--key", str(key)).code == 0
    done = repo.kakeya("cancel", asked.nonce, "--wait", "30", "--json")
    assert done.code == 5, done.err
    document = json.loads(done.out)
    assert (document["status"], document["cancel"], document["verified"]) == ("cancelled", "withdrawn", False)
    assert "by no runner; unsigned" in repo.kakeya("result", asked.nonce).out


def test_server_that_takes_only_branches_lets_a_request_be_withdrawn(
    runner: RunnerFixture, tmp_path: Path
) -> None:
    runner.hook("update", 'case "$1" in refs/heads/*) exit 0;; *) exit 1;; esac')
    asked = runner.ask()
    assert withdraw(runner, asked) == "withdrawn"
    assert runner.left(asked.nonce) == {asked.result_ref}
    assert runner.verdict(asked.nonce) == ("cancelled", "requested")
