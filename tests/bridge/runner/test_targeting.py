"""A request for certain machines: others leave it alone, and it is refused once it has expired."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from bridge.protocol.manifest import Fact, parse_target, unmet
from tests.fixtures.runner import RunnerFixture

FACTS: dict[str, Fact] = {
    "chip": "Apple M4 Max",
    "cpu_count": 16,
    "labels": "lab,quiet",
    "machine": "arm64",
    "memory_bytes": 64 * 2**30,
    "metal": True,
    "os_release": None,
    "system": "Darwin",
}


@pytest.mark.parametrize(
    ("target", "failing"),
    [
        ("chip=*M4*", None),
        ("chip=*m4 max", None),
        ("chip=M4*", None),
        ("chip!=M4*", "chip!=M4*"),
        ("chip=M3*", "chip=M3*"),
        ("memory>=64,cores>=8", None),
        ("memory>=64.5", "memory>=64.5"),
        ("memory<=32", "memory<=32"),
        ("memory=64", None),
        ("cores=16,cores!=8", None),
        ("label=lab,label=quiet", None),
        ("label=la", "label=la"),
        ("label=lab,chip=M3*,cores<=8", "chip=M3*, cores<=8"),
        ("label!=lab", "label!=lab"),
        ("label!=noisy", None),
        ("metal=true,system=darwin", None),
        ("runner=studio", None),
        ("runner=stud", "runner=stud"),
        (" chip = *M4* , memory >= 8 ", None),
        ("os=24.*", "os=24.*"),
    ],
)
def test_target_is_compared_with_the_machine(target: str, failing: str | None) -> None:
    found = unmet(target, FACTS, "studio")
    assert (", ".join(map(str, found)) or None) == failing


@pytest.mark.parametrize("memory", [-1, 0, 10**400, "64", True, None])
def test_memory_that_no_machine_has_meets_nothing(memory: Fact) -> None:
    assert unmet("memory>=0.001", {"memory_bytes": memory}, "mac")


def test_machine_without_labels_has_none() -> None:
    assert unmet("label=*", {"labels": None}, "mac")
    assert not unmet("label!=lab", {}, "mac")


@pytest.mark.parametrize(
    "target",
    [
        *("", "chip", "chip=", "=x", "color=red", "chip>=M4", "a=b,", "chip=" + "x" * 600),
        *("memory>=much", "memory=nan", "cores=inf"),
    ],
)
def test_broken_target_is_a_clear_error(target: str) -> None:
    with pytest.raises(ValueError, match=r"condition|number|characters|compares"):
        parse_target(target)


def test_request_for_another_machine_is_left_to_it(runner: RunnerFixture) -> None:
    asked = runner.ask(on="label=lab,memory>=0.001")
    before = runner.left(asked.nonce)
    assert runner.daemon().serve(once=True, idle_timeout_s=0.3) == 0
    assert runner.left(asked.nonce) == before
    runner.policy('labels = ["lab"]\n')
    assert (
        runner.daemon("labelled", state_dir=runner.state / "other").serve(once=True, idle_timeout_s=20) == 1
    )
    answer = runner.answer(asked.nonce)
    assert (answer.result.verdict.status, answer.result.runner.name) == ("passed", "labelled")


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("restarted", [False, True])
def test_label_that_the_owner_adds_counts_at_once(runner: RunnerFixture, restarted: bool) -> None:
    asked, daemon = runner.ask(on="label=lab"), runner.daemon()
    assert daemon.serve(once=True, idle_timeout_s=0) == 0
    runner.policy('labels = ["lab"]\n')
    again = runner.daemon() if restarted else daemon
    assert again.serve(once=True, idle_timeout_s=20) == 1
    assert runner.verdict(asked.nonce) == ("passed", "ok")


@pytest.mark.slow
def test_expired_request_for_another_machine_is_refused(runner: RunnerFixture) -> None:
    asked, moment = runner.ask(on="label=lab"), [datetime.now(UTC)]
    now: Callable[[], datetime] = lambda: moment[0]  # noqa: E731 - typed
    daemon = runner.daemon(now=now)
    assert daemon.serve(once=True, idle_timeout_s=0) == 0
    moment[0] = asked.expires_at + timedelta(seconds=1)
    assert daemon.serve(once=True, idle_timeout_s=20) == 1
    assert runner.verdict(asked.nonce) == ("refused", "expired")
    assert runner.answer(asked.nonce).result.commands == ()
