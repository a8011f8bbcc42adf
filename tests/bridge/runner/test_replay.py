"""An answered request that is pushed again is refused, by all that this runner or the remote can know."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from bridge.bus.archive import prune
from bridge.git.cache import GitCache
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from tests.bridge.runner.bench import Bench

REPLAYED = ("refused", "replayed")


def push_again(bench: Bench, asked: Manifest, commit: str) -> None:
    """As anyone with push rights can who wants a job done again: no trace of the answer is left."""
    bench.delete(*bench.left(asked.nonce))
    for ref in (asked.result_ref, refs.INBOX + asked.nonce):
        bench.point(ref, commit)


@pytest.fixture
def asked(bench: Bench) -> Manifest:
    began = datetime.now(UTC).replace(microsecond=0)
    return bench.ask(expires_at=began + timedelta(hours=20))


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("restarted", [False, True])
def test_same_runner_refuses_it(bench: Bench, asked: Manifest, restarted: bool) -> None:
    commit, runner = bench.tip(asked.result_ref) or "", bench.runner()
    assert runner.serve(once=True, idle_timeout_s=20) == 1
    push_again(bench, asked, commit)
    again = bench.runner() if restarted else runner
    assert again.serve(once=True, idle_timeout_s=20) == 1
    assert bench.verdict(asked.nonce) == REPLAYED


@pytest.mark.slow
def test_refused_request_is_not_run_when_the_policy_has_changed(bench: Bench, asked: Manifest) -> None:
    bench.policy("allow_presets = []\n")
    commit, runner = bench.tip(asked.result_ref) or "", bench.runner()
    assert runner.serve(once=True, idle_timeout_s=20) == 1
    assert bench.verdict(asked.nonce) == ("refused", "policy")
    bench.policy("")
    push_again(bench, asked, commit)
    assert runner.serve(once=True, idle_timeout_s=20) == 1
    assert bench.verdict(asked.nonce) == REPLAYED


@pytest.mark.slow
def test_result_of_another_runner_counts_as_an_answer(bench: Bench, asked: Manifest) -> None:
    """A result that came first, while the job ran."""
    commit, runner = bench.tip(asked.result_ref) or "", bench.runner()
    publish = runner.__class__._publish

    def publish_second(*args: object) -> None:
        for ref in (asked.result_ref, refs.RESULTS + asked.nonce):
            bench.point(ref, asked.workload_sha)
        publish(runner, *args)  # type: ignore[arg-type]

    runner._publish = publish_second  # type: ignore[method-assign,assignment]
    assert runner.serve(once=True, idle_timeout_s=20) == 1
    push_again(bench, asked, commit)
    assert bench.serve_once() == 1
    assert bench.verdict(asked.nonce) == REPLAYED


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("name", ["mac", "another"])
def test_archived_request_is_run_by_no_machine(bench: Bench, asked: Manifest, name: str) -> None:
    commit = bench.tip(asked.result_ref) or ""
    assert bench.serve_once() == 1
    later = datetime.now(UTC) + timedelta(hours=3)
    cache = GitCache(bench.house.root / "pruner.git", str(bench.house.remote))
    done = prune(cache, now=later, keep=0, older_than=timedelta(hours=1))
    assert done.archived == [asked.nonce]
    push_again(bench, asked, commit)
    runner = bench.runner(name, state_dir=bench.state / name, now=lambda: later)
    assert runner.serve(once=True, idle_timeout_s=20) == 1
    assert bench.verdict(asked.nonce) == REPLAYED


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("where", ["its branch", "a ref of its own"])
def test_result_on_the_remote_keeps_other_machines_from_running_it(
    bench: Bench, asked: Manifest, where: str
) -> None:
    commit = bench.tip(asked.result_ref) or ""
    if where == "a ref of its own":
        bench.hook("update", f'case "$1 $2" in "refs/heads/"*" {commit}") exit 1;; esac')
    assert bench.serve_once() == 1
    assert bench.tip(asked.result_ref if where == "its branch" else refs.RESULTS + asked.nonce) != commit
    before = bench.left(asked.nonce)
    bench.point(refs.INBOX + asked.nonce, commit)
    other = bench.runner("another", state_dir=bench.state / "another")
    assert other.serve(once=True, idle_timeout_s=1) == 0
    assert bench.claimed() == [asked.nonce]
    assert bench.left(asked.nonce) - {refs.INBOX + asked.nonce} == before
    assert bench.verdict(asked.nonce) == ("passed", "ok")
