"""Where signatures are required, a claim on a signed request counts only if a known runner signed it."""

from __future__ import annotations

from typing import Any

import pytest

from bridge import signing
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.runner.config import RunnerConfig
from tests.bridge.runner.bench import Bench
from tests.houses import House, allowed_line, wait_for


@pytest.fixture
def bench(house: House) -> Bench:
    """A strict machine."""
    made = Bench(house)
    made.install({"echo": "print('hello from', arg)", "nap": "import time; time.sleep(1)"})
    made.policy("require_signature = true\n")
    return made


@pytest.fixture
def asked(bench: Bench) -> Manifest:
    """A signed request."""
    return bench.ask_signed(bench.list_signer("ann"))


def peer(bench: Bench, *, known: bool = False, **changes: Any) -> RunnerConfig:
    """A runner on another machine, whose key this one lists perhaps."""
    config = bench.config_of("othermac", state_dir=bench.house.root / "elsewhere", **changes)
    assert config.key is not None
    if known:
        line = allowed_line(signing.public_key(config.key), "othermac", signing.CLAIM_NAMESPACE)
        (bench.config / "known_runners").write_text(line)
    return config


def is_left_alone(bench: Bench) -> bool:
    return bench.runner().serve(once=True, idle_timeout_s=0.5) == 0


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "by an unknown runner"])
def test_claim_of_an_unknown_runner_does_not_count(bench: Bench, asked: Manifest, signed: bool) -> None:
    bench.claim_as(peer(bench), asked, signed=signed, attempt=999)
    runner = bench.runner()
    assert runner.serve(once=True, idle_timeout_s=20) == 1
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    assert bench.answer(asked.nonce).result.attempt == 1, "nor does what it says of attempts"


@pytest.mark.slow
def test_unlisted_key_is_reported_once(bench: Bench, asked: Manifest) -> None:
    other = peer(bench)
    bench.claim_as(other, asked)
    bench.claim_as(other, bench.ask_signed(bench.house.root / "keys" / "ann"))
    runner = bench.runner()
    for _ in range(2):
        assert runner.serve(once=True, idle_timeout_s=20) == 1
    assert sum("known_runners does not list" in line for line in bench.said) == 1


@pytest.mark.slow
def test_claim_of_a_known_runner_counts_until_its_key_is_revoked(bench: Bench, asked: Manifest) -> None:
    other = peer(bench, known=True)
    held = bench.claim_as(other, asked)
    clock = [0.0]
    runner = bench.runner(clock=lambda: clock[0])
    assert runner.serve(once=True, idle_timeout_s=0) == 0
    assert bench.tip(held.ref) == held.commit
    (bench.config / "revoked_keys").write_text(f"{other.public_key}\n")
    clock[0] += 31.0
    assert runner.serve(once=True, idle_timeout_s=0) == 1
    assert bench.verdict(asked.nonce) == ("passed", "ok")


@pytest.mark.slow
def test_claim_of_a_runner_on_the_same_machine_counts(bench: Bench, asked: Manifest) -> None:
    bench.claim_as(bench.config_of("second"), asked)
    assert is_left_alone(bench)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("strict", [True, False])
def test_unsigned_claim_counts_where_no_signature_is_required(bench: Bench, strict: bool) -> None:
    """On an unsigned request, and everywhere where the policy requires none."""
    if not strict:
        bench.policy("")
    asked = bench.ask() if strict else bench.ask_signed(bench.list_signer("ann"))
    bench.claim_as(peer(bench), asked, signed=False)
    assert is_left_alone(bench)


@pytest.mark.slow
def test_signed_claim_of_another_request_does_not_count(bench: Bench, asked: Manifest) -> None:
    held = bench.claim_as(peer(bench, known=True), asked)
    second = bench.ask_signed(bench.house.root / "keys" / "ann")
    bench.point(refs.CLAIMS + second.nonce, held.commit)
    assert bench.serve_once() == 1
    assert bench.verdict(second.nonce) == ("passed", "ok")


@pytest.mark.slow
def test_strict_machines_that_do_not_know_each_other_publish_one_result(
    bench: Bench, asked: Manifest
) -> None:
    """They take it from each other, and may give it up as lost; each says which key it does not know."""
    nap = bench.ask_signed(bench.house.root / "keys" / "ann", "nap")
    with bench.serving(bench.runner(), bench.runner(config=peer(bench))):
        for each in (asked, nap):
            wait_for(lambda each=each: bench.has_said(each.nonce, "published as"), 60, "the result")
    for each in (asked, nap):
        assert bench.left(each.nonce) == {each.result_ref}
        assert sum(each.nonce in line and "published as" in line for line in bench.said) == 1
