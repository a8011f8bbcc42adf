"""A request's way over a real remote: taken once, done, published whole, and nothing left behind."""

import threading
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.results import Standing
from bridge.protocol.result import Status
from tests.bridge.runner.bench import Bench
from tests.houses import wait_for


def test_a_request_comes_home_signed_with_its_log_and_facts(bench: Bench, tmp_path: Path) -> None:
    asked = bench.ask(params={"word": "across the wire"})
    assert bench.serve_once() == 1
    station = bench.station()
    trusted = tmp_path / "trusted"
    assert station.key is not None
    trusted.write_text(signing.allowed_line(signing.public_key(station.key), "mac", signing.RESULT_NAMESPACE))
    answer = bench.answer(asked.nonce, trusted)
    result = answer.result
    assert result.verdict.status is Status.PASSED
    assert answer.signature is Standing.TRUSTED
    assert answer.files["log.txt"] == b"hello from across the wire\n"
    assert result.params == {"word": "across the wire"}
    assert result.workload_sha == asked.workload_sha
    assert result.preset_digest == station.presets["echo"].digest
    assert result.attempt == 1
    assert set(result.phase_seconds) == {"workspace", "running", "gating"}
    assert result.commands[0].exit_code == 0
    assert result.commands[0].argv[-1] == "across the wire"
    assert result.runner.machine["memory_bytes"]
    assert "isolation_network" in result.runner.machine
    assert {"python", "git"} <= set(result.tools)


def test_afterwards_only_the_result_is_left(bench: Bench) -> None:
    asked = bench.ask()
    bench.serve_once()
    assert bench.house.remote_refs() == {"refs/heads/main", asked.result_ref}
    folder = bench.station().folder
    assert not list((folder / "jobs").glob("*"))
    assert not list(folder.glob("spool-*/*"))


def test_without_ssh_keygen_results_go_out_unsigned(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.signing.available", lambda: False)
    asked = bench.ask()
    bench.serve_once()
    assert bench.answer(asked.nonce).signature is Standing.UNSIGNED


@pytest.mark.slow
def test_a_request_for_a_workflow_is_left_alone(bench: Bench) -> None:
    bench.ask(transport="actions")
    before = bench.house.remote_refs()
    assert bench.runner().serve(once=True, idle_timeout_s=1) == 0
    assert bench.house.remote_refs() == before | {"refs/mac-bridge/runners/mac"}


@pytest.mark.slow
def test_many_runners_answer_each_request_once(bench: Bench) -> None:
    nonces = [bench.ask(params={"word": f"number {index}"}).nonce for index in range(6)]
    stop = threading.Event()
    # Each its own state folder: each its own machine.
    runners = [bench.runner(f"mac{index}", state_dir=bench.state / str(index)) for index in range(3)]
    threads = [
        threading.Thread(target=runner.serve, kwargs={"stop": stop}, daemon=True) for runner in runners
    ]
    for thread in threads:
        thread.start()

    def done() -> bool:
        return sum("published as" in line for line in bench.said) == len(nonces)

    wait_for(done, 60, "all results")
    stop.set()
    for thread in threads:
        thread.join(20)
    assert [bench.log(nonce) for nonce in nonces] == [f"hello from number {index}\n" for index in range(6)]
    assert sum("claimed" in line for line in bench.said) == len(nonces)
