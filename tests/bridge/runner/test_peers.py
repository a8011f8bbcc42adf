"""Where signatures are required, a claim on a signed request counts only if a known runner signed it."""

from __future__ import annotations

from typing import Any

import pytest

from bridge import signing
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.runner.config import RunnerConfig
from tests.fixtures.repo import RepoFixture, allowed_line, wait_for
from tests.fixtures.runner import RunnerFixture


@pytest.fixture
def runner(repo: RepoFixture) -> RunnerFixture:
    """A strict machine."""
    made = RunnerFixture(repo)
    made.install({"echo": "print('hello from', arg)", "nap": "import time; time.sleep(1)"})
    made.policy("require_signature = true\n")
    return made


@pytest.fixture
def asked(runner: RunnerFixture) -> Manifest:
    """A signed request."""
    return runner.ask_signed(runner.list_signer("ann"))


def peer(runner: RunnerFixture, *, known: bool = False, **changes: Any) -> RunnerConfig:
    """A runner on another machine, whose key this one lists perhaps."""
    config = runner.config_of("othermac", state_dir=runner.repo.root / "elsewhere", **changes)
    assert config.key is not None
    if known:
        line = allowed_line(signing.public_key(config.key), "othermac", signing.CLAIM_NAMESPACE)
        (runner.config / "known_runners").write_text(line)
    return config


def is_left_alone(runner: RunnerFixture) -> bool:
    return runner.daemon().serve(once=True, idle_timeout_s=0.5) == 0


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "by an unknown runner"])
def test_claim_of_an_unknown_runner_does_not_count(
    runner: RunnerFixture, asked: Manifest, signed: bool
) -> None:
    runner.claim_as(peer(runner), asked, signed=signed, attempt=999)
    daemon = runner.daemon()
    assert daemon.serve(once=True, idle_timeout_s=20) == 1
    assert runner.verdict(asked.nonce) == ("passed", "ok")
    assert runner.answer(asked.nonce).result.attempt == 1, "nor does what it says of attempts"


@pytest.mark.slow
def test_unlisted_key_is_reported_once(runner: RunnerFixture, asked: Manifest) -> None:
    other = peer(runner)
    runner.claim_as(other, asked)
    runner.claim_as(other, runner.ask_signed(runner.repo.root / "keys" / "ann"))
    daemon = runner.daemon()
    for _ in range(2):
        assert daemon.serve(once=True, idle_timeout_s=20) == 1
    assert sum("known_runners does not list" in line for line in runner.said) == 1


@pytest.mark.slow
def test_claim_of_a_known_runner_counts_until_its_key_is_revoked(
    runner: RunnerFixture, asked: Manifest
) -> None:
    other = peer(runner, known=True)
    held = runner.claim_as(other, asked)
    clock = [0.0]
    daemon = runner.daemon(clock=lambda: clock[0])
    assert daemon.serve(once=True, idle_timeout_s=0) == 0
    assert runner.tip(held.ref) == held.commit
    (runner.config / "revoked_keys").write_text(f"{other.public_key}\n")
    clock[0] += 31.0
    assert daemon.serve(once=True, idle_timeout_s=0) == 1
    assert runner.verdict(asked.nonce) == ("passed", "ok")


@pytest.mark.slow
def test_claim_of_a_runner_on_the_same_machine_counts(runner: RunnerFixture, asked: Manifest) -> None:
    runner.claim_as(runner.config_of("second"), asked)
    assert is_left_alone(runner)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("strict", [True, False])
def test_unsigned_claim_counts_where_no_signature_is_required(runner: RunnerFixture, strict: bool) -> None:
    """On an unsigned request, and everywhere where the policy requires none."""
    if not strict:
        runner.policy("")
    asked = runner.ask() if strict else runner.ask_signed(runner.list_signer("ann"))
    runner.claim_as(peer(runner), asked, signed=False)
    assert is_left_alone(runner)


@pytest.mark.slow
def test_signed_claim_of_another_request_does_not_count(runner: RunnerFixture, asked: Manifest) -> None:
    held = runner.claim_as(peer(runner, known=True), asked)
    second = runner.ask_signed(runner.repo.root / "keys" / "ann")
    runner.point(refs.CLAIMS + second.nonce, held.commit)
    assert runner.serve_once() == 1
    assert runner.verdict(second.nonce) == ("passed", "ok")


@pytest.mark.slow
def test_strict_runners_without_mutual_trust_publish_one_result(
    runner: RunnerFixture, asked: Manifest
) -> None:
    """They take it from each other, and may give it up as lost; each says which key it does not know."""
    nap = runner.ask_signed(runner.repo.root / "keys" / "ann", "nap")
    with runner.serving(runner.daemon(), runner.daemon(config=peer(runner))):
        for each in (asked, nap):
            wait_for(lambda each=each: runner.has_said(each.nonce, "published as"), 60, "the result")
    for each in (asked, nap):
        assert runner.left(each.nonce) == {each.result_ref}
        assert sum(each.nonce in line and "published as" in line for line in runner.said) == 1
