"""A request over a real remote: claimed once, done, published whole, and nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bridge import signing
from bridge.errors import MachineError
from bridge.protocol.result import Status
from bridge.signing.trust import TrustLevel
from tests.fixtures.repo import allowed_line, wait_for
from tests.fixtures.runner import RunnerFixture


def test_result_comes_back_signed_with_log_and_facts(runner: RunnerFixture, tmp_path: Path) -> None:
    asked = runner.ask(params={"word": "across the wire"})
    assert runner.serve_once() == 1
    config, trusted = runner.config_of(), tmp_path / "trusted"
    assert config.key is not None
    trusted.write_text(allowed_line(signing.public_key(config.key), "mac", signing.RESULT_NAMESPACE))
    answer = runner.answer(asked.nonce, trusted)
    result = answer.result
    assert result.verdict.status is Status.PASSED
    assert answer.signature is TrustLevel.TRUSTED
    assert answer.files["log.txt"] == b"hello from across the wire\n"
    assert result.params == {"word": "across the wire"}
    assert result.workload_sha == asked.workload_sha
    assert result.preset_digest == config.presets["echo"].digest
    assert result.attempt == 1
    assert set(result.phase_seconds) == {"workspace", "running", "gating"}
    assert (result.commands[0].exit_code, result.commands[0].argv[-1]) == (0, "across the wire")
    assert result.runner.machine["memory_bytes"]
    assert "isolation_network" in result.runner.machine
    assert {"python", "git"} <= set(result.tools)
    assert runner.repo.remote_refs() == {"refs/heads/main", asked.result_ref}
    assert not list(config.jobs.iterdir())


@pytest.mark.slow
def test_results_are_unsigned_without_ssh_keygen(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.signing.available", lambda: False)
    asked = runner.ask()
    runner.serve_once()
    assert runner.answer(asked.nonce).signature is TrustLevel.UNSIGNED


@pytest.mark.slow
def test_request_for_a_workflow_is_left_alone(runner: RunnerFixture) -> None:
    runner.ask(transport="actions")
    before = runner.repo.remote_refs()
    assert runner.daemon().serve(once=True, idle_timeout_s=0.5) == 0
    assert runner.repo.remote_refs() == before | {"refs/mac-bridge/runners/mac"}


@pytest.mark.slow
def test_request_on_a_server_of_branches_alone_is_answered(runner: RunnerFixture) -> None:
    runner.hook("update", 'case "$1" in refs/heads/*) exit 0;; *) echo "only branches"; exit 1;; esac')
    asked, second = runner.ask(), runner.ask()
    daemon = runner.daemon()
    while len(runner.claimed()) < 2:
        assert daemon.serve(once=True, idle_timeout_s=20) == 1, runner.said
    assert runner.verdict(asked.nonce) == runner.verdict(second.nonce) == ("passed", "ok")
    assert daemon.serve(once=True, idle_timeout_s=1) == 0, runner.said
    assert runner.repo.remote_refs() >= {"refs/heads/main", asked.result_ref, second.result_ref}
    assert runner.left(asked.nonce) == {asked.result_ref}


@pytest.mark.slow
def test_server_that_deletes_nothing_gets_one_result_of_each_request(runner: RunnerFixture) -> None:
    runner.repo.git("config", "receive.denyDeletes", "true", cwd=runner.repo.remote)
    asked = [runner.ask() for _ in range(2)]
    daemon = runner.daemon()
    while sum("published as" in line for line in runner.said) < 2:
        assert daemon.serve(once=True, idle_timeout_s=20) == 1, runner.said
    tips = [runner.tip(each.result_ref) for each in asked]
    for again in (daemon, runner.daemon()):  # the claim and the inbox entry are still there
        assert again.serve(once=True, idle_timeout_s=0.5) == 0, runner.said
    assert [runner.tip(each.result_ref) for each in asked] == tips
    assert [runner.verdict(each.nonce) for each in asked] == [("passed", "ok")] * 2


def test_second_runner_of_one_name_is_a_clear_error(runner: RunnerFixture) -> None:
    lock = runner.config_of().folder / "lock"
    with runner.serving(runner.daemon()):
        wait_for(lambda: runner.tip("refs/mac-bridge/runners/mac"), what="the runner to have its name")
        with pytest.raises(MachineError, match="already runs"):
            runner.daemon()
        [held] = [number for number in range(3, 1024) if _is_open_on(number, lock)]
        inherited = os.dup(held)  # as a program that is being started has it until it runs
    try:
        assert runner.daemon().serve(once=True, idle_timeout_s=0) == 0
    finally:
        os.close(inherited)


def _is_open_on(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
