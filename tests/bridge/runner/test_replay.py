"""An answered request that is pushed again is refused, by all that this runner or the remote can know."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from bridge.bus.archive import prune
from bridge.git.cache import GitCache
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from tests.fixtures.runner import RunnerFixture

REPLAYED = ("refused", "replayed")


def push_again(runner: RunnerFixture, asked: Manifest, commit: str) -> None:
    """As anyone with push rights can who wants a job done again: no trace of the answer is left."""
    runner.delete(*runner.left(asked.nonce))
    for ref in (asked.result_ref, refs.INBOX + asked.nonce):
        runner.point(ref, commit)


@pytest.fixture
def asked(runner: RunnerFixture) -> Manifest:
    began = datetime.now(UTC).replace(microsecond=0)
    return runner.ask(expires_at=began + timedelta(hours=20))


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("restarted", [False, True])
def test_same_runner_refuses_it(runner: RunnerFixture, asked: Manifest, restarted: bool) -> None:
    commit, daemon = runner.tip(asked.result_ref) or "", runner.daemon()
    assert daemon.serve(once=True, idle_timeout_s=20) == 1
    push_again(runner, asked, commit)
    again = runner.daemon() if restarted else daemon
    assert again.serve(once=True, idle_timeout_s=20) == 1
    assert runner.verdict(asked.nonce) == REPLAYED


@pytest.mark.slow
def test_refused_request_is_not_run_when_the_policy_has_changed(
    runner: RunnerFixture, asked: Manifest
) -> None:
    runner.policy("allow_presets = []\n")
    commit, daemon = runner.tip(asked.result_ref) or "", runner.daemon()
    assert daemon.serve(once=True, idle_timeout_s=20) == 1
    assert runner.verdict(asked.nonce) == ("refused", "policy")
    runner.policy("")
    push_again(runner, asked, commit)
    assert daemon.serve(once=True, idle_timeout_s=20) == 1
    assert runner.verdict(asked.nonce) == REPLAYED


@pytest.mark.slow
def test_result_of_another_runner_counts_as_an_answer(runner: RunnerFixture, asked: Manifest) -> None:
    """A result that came first, while the job ran."""
    commit, daemon = runner.tip(asked.result_ref) or "", runner.daemon()
    publish = daemon.__class__._publish

    def publish_second(*args: object) -> None:
        for ref in (asked.result_ref, refs.RESULTS + asked.nonce):
            runner.point(ref, asked.workload_sha)
        publish(daemon, *args)  # type: ignore[arg-type]

    daemon._publish = publish_second  # type: ignore[method-assign,assignment]
    assert daemon.serve(once=True, idle_timeout_s=20) == 1
    push_again(runner, asked, commit)
    assert runner.serve_once() == 1
    assert runner.verdict(asked.nonce) == REPLAYED


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("name", ["mac", "another"])
def test_archived_request_is_run_by_no_machine(runner: RunnerFixture, asked: Manifest, name: str) -> None:
    commit = runner.tip(asked.result_ref) or ""
    assert runner.serve_once() == 1
    later = datetime.now(UTC) + timedelta(hours=3)
    cache = GitCache(runner.repo.root / "pruner.git", str(runner.repo.remote))
    done = prune(cache, now=later, keep=0, older_than=timedelta(hours=1))
    assert done.archived == [asked.nonce]
    push_again(runner, asked, commit)
    daemon = runner.daemon(name, state_dir=runner.state / name, now=lambda: later)
    assert daemon.serve(once=True, idle_timeout_s=20) == 1
    assert runner.verdict(asked.nonce) == REPLAYED


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("where", ["its branch", "a ref of its own"])
def test_result_on_the_remote_keeps_other_machines_from_running_it(
    runner: RunnerFixture, asked: Manifest, where: str
) -> None:
    commit = runner.tip(asked.result_ref) or ""
    if where == "a ref of its own":
        runner.hook("update", f'case "$1 $2" in "refs/heads/"*" {commit}") exit 1;; esac')
    assert runner.serve_once() == 1
    assert runner.tip(asked.result_ref if where == "its branch" else refs.RESULTS + asked.nonce) != commit
    before = runner.left(asked.nonce)
    runner.point(refs.INBOX + asked.nonce, commit)
    other = runner.daemon("another", state_dir=runner.state / "another")
    assert other.serve(once=True, idle_timeout_s=1) == 0
    assert runner.claimed() == [asked.nonce]
    assert runner.left(asked.nonce) - {refs.INBOX + asked.nonce} == before
    assert runner.verdict(asked.nonce) == ("passed", "ok")
