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
from tests.bridge.runner.bench import Bench
from tests.houses import allowed_line, wait_for

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
def test_requests_outside_the_policy_are_refused_and_the_others_served(bench: Bench, tmp_path: Path) -> None:
    bench.policy(POLICY)
    keys = {name: signing.ensure_key(tmp_path / name, name) for name in ("ann", "bob")}
    lines = [
        allowed_line(signing.public_key(key), f"{name}@example.org", signing.REQUEST_NAMESPACE)
        for name, key in keys.items()
    ]
    (bench.config / "allowed_signers").write_text("".join(lines))

    def ask(preset: str, signer: str | None = None, **params: str) -> str:
        if signer is None:
            manifest = bench.ask(preset, params=params)
        else:
            manifest = bench.ask_signed(keys[signer], preset, params=params)
        assert bench.serve_once() == 1
        return manifest.nonce

    assert bench.verdict(ask("echo", word="12345")) == ("passed", "ok")
    assert bench.log(ask("echo")) == "hello from abc\n"
    assert bench.verdict(ask("fail", "ann")) == ("failed", "exit_code")

    refused = {
        "allows less than the preset does": ask("echo", word="123456"),
        "bob@example.org may not ask this machine": ask("echo", "bob"),
        "unsigned requests may not run the preset fail": ask("fail"),
    }
    for words, nonce in refused.items():
        verdict = bench.answer(nonce).result.verdict
        assert (verdict.status.value, verdict.reason.value) == ("refused", "policy")
        assert words in verdict.message
        assert "ann@" not in verdict.message
    assert any(f"{nonce}: by policy.toml: presets.fail.requesters = " in line for line in bench.said)

    bench.policy('allow_refs = ["elsewhere/*"]\n')
    nonce = ask("echo")
    assert bench.verdict(nonce) == ("refused", "policy")
    assert "policy: requests on the branch mac-bridge/" in bench.answer(nonce).result.verdict.message


def test_an_owners_preset_serves_a_repository_that_knows_nothing_of_us(bench: Bench) -> None:
    """The one of the owner's page: a program of this machine reads a file of the requested commit."""
    page = (Path(__file__).parents[4] / "docs/operations.md").read_text()
    block = next(block for block in page.split("```\n") if "presets/count.toml" in block)
    (bench.config / "presets/count.toml").write_text(block)
    bench.commit({"notes.txt": "one\ntwo\nthree\n"})
    asked = bench.ask("count", params={"file": "notes.txt"})
    bench.serve_once()
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    assert bench.log(asked.nonce).split() == ["3", "notes.txt"]


def other_days() -> str:
    """Hours that do not come while a test runs, even at midnight."""
    return f'hours = ["{DAYS[(datetime.now().astimezone().weekday() + 3) % 7]}"]\n'


@pytest.mark.slow
def test_outside_the_hours_requests_wait_and_run_when_they_begin(bench: Bench) -> None:
    """Refusals are answered all the same, and so is a cancel request."""
    bench.policy(other_days() + "[presets.echo.params.word]\nmaxLength = 5\n")
    waits, refused = bench.ask(), bench.ask(params={"word": "123456"})
    with bench.serving(bench.runner()):
        wait_for(lambda: bench.has_said(f"{refused.nonce}: refused/policy"))
        wait_for(lambda: bench.has_said(waits.nonce, "waits for the hours"))
        cancelled = bench.ask()
        wait_for(lambda: bench.has_said(cancelled.nonce, "waits for"))
        cache = GitCache(bench.house.root / "client.git", str(bench.house.remote))
        commit = bench.tip(cancelled.result_ref)
        assert commit is not None
        cancel = new_cancel(cancelled.nonce, commit, requested_by="me")
        target = RefValue(cancelled.result_ref, commit)
        assert request_cancel(cache, cancel, target) is CancelOutcome.ASKED
        wait_for(lambda: bench.has_said(f"{cancelled.nonce}: cancelled/requested"))
        assert refs.CLAIMS + waits.nonce not in bench.house.remote_refs()
        bench.policy('hours = ["mon-sun"]\n')
        wait_for(lambda: bench.has_said(f"{waits.nonce}: passed/ok"))
        assert sum(waits.nonce in line and "waits for" in line for line in bench.said) == 1


def test_outside_the_hours_requests_are_refused_where_the_owner_wants_that(bench: Bench) -> None:
    bench.policy(other_days() + 'outside_hours = "refuse"\n')
    asked = bench.ask()
    assert bench.serve_once() == 1
    assert bench.verdict(asked.nonce) == ("refused", "policy")
    assert "runs jobs only within " in bench.answer(asked.nonce).result.verdict.message


@pytest.mark.slow
def test_only_commits_of_trusted_branches_are_run_where_the_owner_wants_that(bench: Bench) -> None:
    """A tip, or what lies in its history; a request's own branch vouches for nothing."""
    house, who = bench.house, ("-c", "user.name=T", "-c", "user.email=t@example.org")
    bench.policy('allow_workloads = ["main", "release/*", "mac-bridge/*", "mac-bridge-*"]\n')
    first = house.head()
    house.git(*who, "commit", "--allow-empty", "-qm", "second")
    house.git("push", "-q", "origin", "main")
    second = house.head()
    house.git(*who, "commit", "--allow-empty", "-qm", "third")
    third = house.head()

    def verdict(commit: str) -> tuple[str, str]:
        asked = bench.ask(workload_sha=commit)
        assert bench.serve_once() == 1
        return bench.verdict(asked.nonce)

    assert verdict(second) == ("passed", "ok")
    assert not list(bench.state.rglob("histories-*.git"))  # a tip is seen from outside
    assert verdict(first) == ("passed", "ok")
    assert verdict(third) == ("refused", "policy")
    assert bench.has_said("by policy.toml: allow_workloads = ")
    house.git("push", "-q", "origin", "HEAD:refs/heads/mine")
    assert verdict(third) == ("refused", "policy")
    house.git("push", "-q", "origin", "HEAD:refs/heads/release/1")
    assert verdict(third) == ("passed", "ok")
    assert verdict(first) == ("passed", "ok")  # with the history of the new branch, which then goes
    house.git("push", "-q", "origin", ":refs/heads/release/1")
    house.git("push", "-q", "origin", f"{second}:refs/heads/release/1/below")
    assert verdict(third) == ("refused", "policy")
    (kept,) = bench.state.rglob("histories-*.git")
    shutil.rmtree(kept / "objects")
    assert verdict(first) == ("passed", "ok")  # a damaged history is fetched again
