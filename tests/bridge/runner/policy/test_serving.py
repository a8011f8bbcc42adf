"""A real runner holds requests to its owner's policy, and publishes why it refuses."""

import shutil
from datetime import datetime
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.cancels import CancelOutcome, request_cancel
from bridge.bus.requests import RefValue
from bridge.git.cache import GitCache
from bridge.protocol import refs
from bridge.protocol.manifest import new_cancel
from bridge.runner.policy import DAYS
from tests.fixtures.repo import allowed_line, wait_for
from tests.fixtures.runner import RunnerFixture

POLICY = """
allow_refs = ["mac-bridge/*"]
allow_requesters = ["ann@*", "unsigned"]

[presets.echo.params.word]
maxLength = 5
default = "abc"

[presets.fail]
requesters = ["ann@example.org"]
"""


@pytest.mark.slow
def test_requests_outside_the_policy_are_refused_and_the_others_served(
    runner: RunnerFixture, tmp_path: Path
) -> None:
    runner.policy(POLICY)
    keys = {name: signing.ensure_key(tmp_path / name, name) for name in ("ann", "bob")}
    lines = [
        allowed_line(signing.public_key(key), f"{name}@example.org", signing.REQUEST_NAMESPACE)
        for name, key in keys.items()
    ]
    (runner.config / "allowed_signers").write_text("".join(lines))

    def ask(preset: str, signer: str | None = None, **params: str) -> str:
        if signer is None:
            manifest = runner.ask(preset, params=params)
        else:
            manifest = runner.ask_signed(keys[signer], preset, params=params)
        assert runner.serve_once() == 1
        return manifest.nonce

    assert runner.verdict(ask("echo", word="12345")) == ("passed", "ok")
    assert runner.log(ask("echo")) == "hello from abc\n"
    assert runner.verdict(ask("fail", "ann")) == ("failed", "exit_code")

    refused = {
        "allows less than the preset does": ask("echo", word="123456"),
        "bob@example.org may not ask this machine": ask("echo", "bob"),
        "unsigned requests may not run the preset fail": ask("fail"),
    }
    for words, nonce in refused.items():
        verdict = runner.answer(nonce).result.verdict
        assert (verdict.status.value, verdict.reason.value) == ("refused", "policy")
        assert words in verdict.message
        assert "ann@" not in verdict.message
    assert any(f"{nonce}: by policy.toml: presets.fail.requesters = " in line for line in runner.said)

    runner.policy('allow_refs = ["elsewhere/*"]\n')
    nonce = ask("echo")
    assert runner.verdict(nonce) == ("refused", "policy")
    assert "policy: requests on the branch mac-bridge/" in runner.answer(nonce).result.verdict.message


def test_an_owners_preset_serves_a_repository_that_knows_nothing_of_us(runner: RunnerFixture) -> None:
    """The one of the owner's page: a program of this machine reads a file of the requested commit."""
    page = (Path(__file__).parents[4] / "docs/operations.md").read_text()
    block = next(block for block in page.split("```\n") if "presets/count.toml" in block)
    (runner.config / "presets/count.toml").write_text(block)
    runner.commit({"notes.txt": "one\ntwo\nthree\n"})
    asked = runner.ask("count", params={"file": "notes.txt"})
    runner.serve_once()
    assert runner.verdict(asked.nonce) == ("passed", "ok")
    assert runner.log(asked.nonce).split() == ["3", "notes.txt"]


def other_days() -> str:
    """Hours that do not come while a test runs, even at midnight."""
    return f'hours = ["{DAYS[(datetime.now().astimezone().weekday() + 3) % 7]}"]\n'


@pytest.mark.slow
def test_outside_the_hours_requests_wait_and_run_when_they_begin(runner: RunnerFixture) -> None:
    """Refusals are answered all the same, and so is a cancel request."""
    runner.policy(other_days() + "[presets.echo.params.word]\nmaxLength = 5\n")
    waits, refused = runner.ask(), runner.ask(params={"word": "123456"})
    with runner.serving(runner.daemon()):
        wait_for(lambda: runner.has_said(f"{refused.nonce}: refused/policy"))
        wait_for(lambda: runner.has_said(waits.nonce, "waits for the hours"))
        cancelled = runner.ask()
        wait_for(lambda: runner.has_said(cancelled.nonce, "waits for"))
        cache = GitCache(runner.repo.root / "client.git", str(runner.repo.remote))
        commit = runner.tip(cancelled.result_ref)
        assert commit is not None
        cancel = new_cancel(cancelled.nonce, commit, requested_by="me")
        target = RefValue(cancelled.result_ref, commit)
        assert request_cancel(cache, cancel, target) is CancelOutcome.ASKED
        wait_for(lambda: runner.has_said(f"{cancelled.nonce}: cancelled/requested"))
        assert refs.CLAIMS + waits.nonce not in runner.repo.remote_refs()
        runner.policy('hours = ["mon-sun"]\n')
        wait_for(lambda: runner.has_said(f"{waits.nonce}: passed/ok"))
        assert sum(waits.nonce in line and "waits for" in line for line in runner.said) == 1


def test_requests_outside_the_hours_are_refused_if_configured(runner: RunnerFixture) -> None:
    runner.policy(other_days() + 'outside_hours = "refuse"\n')
    asked = runner.ask()
    assert runner.serve_once() == 1
    assert runner.verdict(asked.nonce) == ("refused", "outside_hours")
    message = runner.answer(asked.nonce).result.verdict.message
    assert "runs jobs only within " in message
    assert "; next at " in message


@pytest.mark.slow
def test_only_commits_of_trusted_branches_run_if_configured(runner: RunnerFixture) -> None:
    """A tip, or what lies in its history; a request's own branch vouches for nothing."""
    repo, who = runner.repo, ("-c", "user.name=T", "-c", "user.email=t@example.org")
    runner.policy('allow_workloads = ["main", "release/*", "mac-bridge/*", "mac-bridge-*"]\n')
    first = repo.head()
    repo.git(*who, "commit", "--allow-empty", "-qm", "second")
    repo.git("push", "-q", "origin", "main")
    second = repo.head()
    repo.git(*who, "commit", "--allow-empty", "-qm", "third")
    third = repo.head()

    def verdict(commit: str) -> tuple[str, str]:
        asked = runner.ask(workload_sha=commit)
        assert runner.serve_once() == 1
        return runner.verdict(asked.nonce)

    assert verdict(second) == ("passed", "ok")
    assert not list(runner.state.rglob("histories-*.git"))  # a tip is seen from outside
    assert verdict(first) == ("passed", "ok")
    assert verdict(third) == ("refused", "policy")
    assert runner.has_said("by policy.toml: allow_workloads = ")
    repo.git("push", "-q", "origin", "HEAD:refs/heads/mine")
    assert verdict(third) == ("refused", "policy")
    repo.git("push", "-q", "origin", "HEAD:refs/heads/release/1")
    assert verdict(third) == ("passed", "ok")
    assert verdict(first) == ("passed", "ok")  # with the history of the new branch, which then goes
    repo.git("push", "-q", "origin", ":refs/heads/release/1")
    repo.git("push", "-q", "origin", f"{second}:refs/heads/release/1/below")
    assert verdict(third) == ("refused", "policy")
    (kept,) = runner.state.rglob("histories-*.git")
    shutil.rmtree(kept / "objects")
    assert verdict(first) == ("passed", "ok")  # a damaged history is fetched again
