"""The walled level: the workflow waits, and a daemon under another account does everything."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.bus.standing import Standing
from bridge.protocol import refs
from bridge.runner.serve import Runner
from tests.bridge.runner.bench import Bench
from tests.bridge.workflow.desk import Desk
from tests.bridge.workflow.runs import Run, ask
from tests.houses import BIN, wait_for

WAITS = '[actions]\nexecute = "daemon"\n'


def walled(run: Run) -> Path:
    """The state and configuration of the account that GitHub's runner has: it only waits."""
    config = run.house.root / "unprivileged"
    config.mkdir()
    (config / "policy.toml").write_text(WAITS)
    (config / "policy.toml").chmod(0o600)
    run.env |= {"KAKEYA_CONFIG": str(config), "KAKEYA_STATE": str(run.house.root / "unprivileged-state")}
    return config


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def execute(run: Run, started: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """`runner execute` beside this test."""
    argv = [str(BIN / "kakeya_mac"), "runner", "execute", "--out", str(run.out), "--name", "waits"]
    env = {**run.house.env, **run.environment("run")}
    with (run.folder / "log").open("wb") as log:
        started.append(subprocess.Popen(argv, env=env, cwd=run.house.root, stdout=log, stderr=log))
    return started[-1]


@pytest.mark.parametrize(
    ("transports", "taken"), [({"embedded"}, 0), ({"actions"}, 1), ({"embedded", "actions"}, 2)]
)
@pytest.mark.sampled(0, 1)
def test_a_daemon_takes_the_transports_it_was_told_to(bench: Bench, transports: set[str], taken: int) -> None:
    both = [bench.ask(), bench.ask(transport="actions")]
    station = dataclasses.replace(bench.station(), transports=frozenset(transports))
    runner = Runner(station, say=bench.said.append, idle_s=0.1)
    answered = sum(runner.serve(once=True, idle_timeout_s=0.5) for _ in both)
    assert answered == (taken or 1)
    left = {
        manifest.nonce for manifest in both if refs.inbox_ref(manifest.nonce) in bench.house.remote_refs()
    }
    assert left == {manifest.nonce for manifest in both if manifest.transport not in transports}


@pytest.mark.slow
def test_the_workflow_waits_and_the_daemon_answers(
    bench: Bench, started: list[subprocess.Popen[bytes]]
) -> None:
    manifest, run = ask(bench, "echo")
    walled(run)
    process = execute(run, started)
    wait_for(lambda: "waiting for its answer" in (run.folder / "log").read_text())
    with bench.house.runner("--transport", "actions", "--once", name="studio"):
        assert process.wait(60) == 0
    assert run.outputs("run")["status"] == "passed"
    assert run.outputs("run")["digest"] == ""
    assert not run.out.exists()
    published = run.publish("--run-result", "success", "--json")
    assert published.code == 0, published.out + published.err
    assert published.json["published"] == "false"
    believed = bench.answer(manifest.nonce)
    assert believed.result.runner.name == "studio"
    assert believed.signature is Standing.UNTRUSTED_KEY


@pytest.mark.slow
def test_a_run_that_is_cancelled_has_the_daemon_stop(
    bench: Bench, started: list[subprocess.Popen[bytes]]
) -> None:
    manifest, run = ask(bench, "sleep")
    walled(run)
    with bench.house.runner("--transport", "both", name="studio"):
        process = execute(run, started)
        wait_for(lambda: bench.running("sleep.py"))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 4
        published = run.publish("--run-result", "cancelled")
        assert published.code == 5, published.out + published.err
        assert not bench.running("sleep.py")
    believed = bench.answer(manifest.nonce)
    assert bench.verdict(manifest.nonce) == ("cancelled", "requested")
    assert believed.result.runner.name == "studio"
    assert "its run was cancelled" in believed.result.verdict.message


@pytest.mark.slow
def test_the_waiting_account_needs_nothing_that_runs_or_counts(
    bench: Bench, started: list[subprocess.Popen[bytes]]
) -> None:
    _, run = ask(bench, "no-such-preset")
    config = walled(run)
    process = execute(run, started)
    started.append(bench.daemon("studio"))  # takes embedded requests only
    wait_for(lambda: "waiting for its answer" in (run.folder / "log").read_text())
    assert process.poll() is None
    assert os.listdir(config) == ["policy.toml"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 4
    assert "the workflow run was cancelled" in (run.folder / "log").read_text()


def test_an_embedded_request_is_left_alone_without_a_wait(desk: Desk) -> None:
    _, run = ask(desk.bench, transport="embedded")
    walled(run)
    done = run.execute()
    assert done.code == 0, done.err
    assert "left alone" in done.out
