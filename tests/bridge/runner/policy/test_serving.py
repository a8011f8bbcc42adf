"""A real runner holds requests to its owner's policy, and publishes why it refuses."""

import shutil
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.cancels import Wished, draft, wish
from bridge.bus.git import Git
from bridge.bus.handles import Held
from bridge.bus.requests import build
from bridge.protocol import refs
from bridge.runner.policy.hours import DAYS
from tests.bridge.runner.bench import Bench
from tests.houses import wait_for

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
def test_an_inbox_entry_alone_comes_on_no_branch(bench: Bench) -> None:
    """On a server that protects branches, whoever may not push to one may still put requests in the inbox."""
    bench.policy('allow_refs = ["AgentMemory/*"]\n')
    nonce = bench.manifest("echo").nonce
    branch = refs.request_ref("echo", nonce, "AgentMemory/agent-1a2b")
    bench.ask("echo", nonce=nonce, result_ref=branch, params={"word": "honest"})
    other = bench.request_commit(bench.manifest("echo", nonce=nonce, result_ref=branch))
    bench.house.git(
        "push", "-qf", str(bench.house.remote), f"{other}:{refs.inbox_ref(nonce)}", cwd=bench.house.clone
    )
    assert bench.serve_once() == 1
    assert "refused/policy the branch AgentMemory/" in str(bench.said)
    asked = bench.ask("echo", nonce=nonce[:-6] + "abcdef", result_ref=branch.replace(nonce[-6:], "abcdef"))
    assert bench.serve_once() == 1
    assert bench.verdict(asked.nonce) == ("passed", "ok")


def test_requests_outside_the_policy_are_refused_and_the_others_served(bench: Bench, tmp_path: Path) -> None:
    bench.policy(POLICY)
    keys = {name: signing.ensure_key(tmp_path / name, name) for name in ("ann", "bob")}
    lines = [
        signing.allowed_line(signing.public_key(key), f"{name}@example.org", signing.REQUEST_NAMESPACE)
        for name, key in keys.items()
    ]
    (bench.config / "allowed_signers").write_text("".join(lines))

    def ask(preset: str, signer: str | None = None, **params: str) -> str:
        manifest = bench.manifest(preset, params=params)
        signature = None
        if signer is not None:
            signature = signing.sign(keys[signer], signing.REQUEST_NAMESPACE, manifest.to_bytes())
        bench.push_commit(manifest, build(Git(bench.house.clone), manifest, signature))
        assert bench.serve_once() == 1
        return manifest.nonce

    assert bench.verdict(ask("echo", word="12345")) == ("passed", "ok")
    assert bench.log(ask("echo")) == "hello from abc\n"
    assert bench.verdict(ask("fail", "ann")) == ("failed", "exit_code")

    refused = {
        "allows less than the preset does": ask("echo", word="123456"),
        "takes no requests of bob@example.org": ask("echo", "bob"),
        "runs fail not for unsigned requests": ask("fail"),
    }
    for words, nonce in refused.items():
        verdict = bench.answer(nonce).result.verdict
        assert (verdict.status.value, verdict.reason.value) == ("refused", "policy")
        assert words in verdict.message
        assert "ann@" not in verdict.message
    assert any(f"{nonce}: by policy.toml:10: requesters = " in line for line in bench.said)

    bench.policy('allow_refs = ["elsewhere/*"]\n')
    nonce = ask("echo")
    assert bench.verdict(nonce) == ("refused", "policy")
    assert "takes no requests on the branch mac-bridge/" in bench.answer(nonce).result.verdict.message


@pytest.mark.slow
def test_a_policy_that_changes_between_two_jobs_holds_for_the_second(bench: Bench) -> None:
    """Also one that became wrong: then nothing is taken, never by the default, and it says so."""
    bench.policy("")
    runner, stop = bench.runner(), threading.Event()
    serving = threading.Thread(target=lambda: runner.serve(stop=stop))
    serving.start()
    try:
        first = bench.ask()
        wait_for(lambda: any(f"{first.nonce}: passed/ok" in line for line in bench.said))
        bench.policy('allow_presets = ["fail"]')
        second = bench.ask()
        wait_for(lambda: any(f"{second.nonce}: refused/policy" in line for line in bench.said))
        assert any("the policy was read again; presets: fail; not allowed: " in line for line in bench.said)

        bench.policy("allow_everything = true")
        wait_for(lambda: any("nothing is taken until this is put right" in line for line in bench.said))
        assert any(f"{bench.config / 'policy.toml'}:1: unknown key" in line for line in bench.said)
        third = bench.ask()
        (bench.config / "policy.toml").unlink()
        wait_for(lambda: any("policy.toml is gone" in line for line in bench.said))
        time.sleep(1)
        assert refs.inbox_ref(third.nonce) in bench.house.remote_refs()
        assert not any(third.nonce in line for line in bench.said)

        bench.policy("")
        wait_for(lambda: any(f"{third.nonce}: passed/ok" in line for line in bench.said))
    finally:
        stop.set()
        serving.join(20)


def test_an_owners_preset_serves_a_repository_that_knows_nothing_of_us(bench: Bench) -> None:
    """The one of the owner's page: a program of this machine reads a file of the requested commit."""
    page = (Path(__file__).parents[4] / "docs/operations.md").read_text()
    block = next(block for block in page.split("```\n") if "presets/count.toml" in block)
    (bench.config / "presets/count.toml").write_text(block)
    (bench.house.clone / "notes.txt").write_text("one\ntwo\nthree\n")
    bench.house.git("add", "--all")
    bench.house.git("-c", "user.name=T", "-c", "user.email=t@example.org", "commit", "-qm", "notes")
    asked = bench.ask("count", params={"file": "notes.txt"})
    bench.serve_once()
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    assert bench.log(asked.nonce).split() == ["3", "notes.txt"]


def other_days() -> str:
    """Hours that do not come while a test runs, be it at midnight."""
    return f'hours = ["{DAYS[(datetime.now().astimezone().weekday() + 3) % 7]}"]\n'


@pytest.mark.slow
def test_outside_the_hours_requests_wait_and_run_when_they_begin(bench: Bench) -> None:
    """Refusals are answered all the same, and so is a wish to stop."""
    bench.policy(other_days() + "[presets.echo.params.word]\nmaxLength = 5\n")
    runner, stop = bench.runner(), threading.Event()
    waits, refused = bench.ask(), bench.ask(params={"word": "123456"})
    serving = threading.Thread(target=lambda: runner.serve(stop=stop))
    serving.start()
    try:
        wait_for(lambda: any(f"{refused.nonce}: refused/policy" in line for line in bench.said))
        wait_for(lambda: any(f"{waits.nonce}: waits for the hours" in line for line in bench.said))
        cancelled = bench.ask()
        wait_for(lambda: any(f"{cancelled.nonce}: waits for" in line for line in bench.said))
        git, remote = Git(bench.house.clone), str(bench.house.remote)
        inbox = refs.inbox_ref(cancelled.nonce)
        commit = bench.house.git("rev-parse", inbox, cwd=bench.house.remote)
        cancel = draft(cancelled.nonce, commit, requested_by="me")
        assert wish(git, remote, cancel, Held(inbox, commit)) is Wished.ASKED
        wait_for(lambda: any(f"{cancelled.nonce}: cancelled/requested" in line for line in bench.said))
        assert refs.claim_ref(waits.nonce) not in bench.house.remote_refs()
        bench.policy('hours = ["mon-sun"]\n')
        wait_for(lambda: any(f"{waits.nonce}: passed/ok" in line for line in bench.said))
        assert sum(f"{waits.nonce}: waits" in line for line in bench.said) == 1
    finally:
        stop.set()
        serving.join(20)


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
    first = house.git("rev-parse", "HEAD")
    house.git(*who, "commit", "--allow-empty", "-qm", "second")
    house.git("push", "-q", "origin", "main")
    second = house.git("rev-parse", "HEAD")
    house.git(*who, "commit", "--allow-empty", "-qm", "third")
    third = house.git("rev-parse", "HEAD")

    def verdict(commit: str) -> tuple[str, str]:
        asked = bench.ask(workload_sha=commit)
        assert bench.serve_once() == 1
        return bench.verdict(asked.nonce)

    assert verdict(second) == ("passed", "ok")
    assert not list(bench.state.glob("runner/mac/workloads-*"))  # a tip is seen from outside
    assert verdict(first) == ("passed", "ok")
    assert verdict(third) == ("refused", "policy")
    assert any("by policy.toml:1: allow_workloads = " in line for line in bench.said)
    house.git("push", "-q", "origin", "HEAD:refs/heads/mine")
    assert verdict(third) == ("refused", "policy")
    house.git("push", "-q", "origin", "HEAD:refs/heads/release/1")
    assert verdict(third) == ("passed", "ok")
    assert verdict(first) == ("passed", "ok")  # with the history of the new branch, which then goes
    house.git("push", "-q", "origin", ":refs/heads/release/1")
    house.git("push", "-q", "origin", f"{second}:refs/heads/release/1/below")
    assert verdict(third) == ("refused", "policy")
    (kept,) = bench.state.glob("runner/mac/workloads-*")
    shutil.rmtree(kept / "objects")
    assert verdict(first) == ("passed", "ok")  # a damaged history is fetched again
