"""The harness itself: a seed decides a run, its deadline holds, and it can be ended at any time."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.faults import plan, procs

ROOT = Path(__file__).resolve().parents[3]
ENTRY = [sys.executable, "-m", "tests.e2e.faults"]
# The interpreter drops what is raised in a hook of fork, as it does in its own, which hold logging's lock.
LOST = """
import os, signal, subprocess, sys, time
from tests.e2e.faults import __main__ as harness
harness._AGAIN_S = 1
for number in harness._STOPS:
    signal.signal(number, harness._interrupt)
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGINT))
try:
    subprocess.run(["true"], preexec_fn=lambda: None)
    print("lost", flush=True)
    time.sleep(20)
except KeyboardInterrupt:
    print("raised again")
"""


def started(folder: Path, *options: str) -> subprocess.Popen[str]:
    """The harness, with its files below `folder`."""
    return subprocess.Popen(
        [*ENTRY, *options],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_seed_decides_requests_clients_and_faults():
    for seed in (1, 2):
        assert plan.asks(seed, 50, cancels=True) == plan.asks(seed, 50, cancels=True)
        assert plan.clients(seed, 50) == plan.clients(seed, 50)
        first, again = (list(itertools.islice(plan.blows(seed, 4, 4.0), 50)) for _ in range(2))
        assert first == again
        assert {blow.fault for blow in first} == set(plan.Fault)
    assert plan.asks(1, 50, cancels=True) != plan.asks(2, 50, cancels=True)
    assert all(ask.kind is not plan.RequestKind.CANCEL for ask in plan.asks(1, 200, cancels=False))


@pytest.mark.e2e
def test_an_interrupt_that_is_lost_in_a_fork_is_raised_again():
    done = subprocess.run([sys.executable, "-c", LOST], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n") == ["lost", "raised again", ""], done.stderr


@pytest.mark.e2e
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)], ids=["int", "term"]
)
def test_an_interrupted_run_leaves_no_process_and_no_file(tmp_path: Path, number: signal.Signals):
    harness = started(tmp_path, "--requests", "500", "--seed", "1")
    assert harness.stderr is not None
    while "answered 0" in (line := harness.stderr.readline()) or "answered" not in line:
        assert line, "the harness ended by itself"
    assert len(procs.belonging_to(tmp_path)) > 4
    harness.send_signal(number)
    harness.communicate(timeout=30)
    assert harness.returncode == 130
    assert not procs.belonging_to(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.e2e
def test_run_past_its_deadline_lists_open_requests_and_is_cleaned_up(tmp_path: Path):
    harness = started(tmp_path, "--requests", "500", "--seed", "1", "--limit", "4", "--json")
    out, _ = harness.communicate(timeout=60)
    assert harness.returncode == 1, out
    assert "unfinished" in out
    assert "kept" in out
    assert not procs.belonging_to(tmp_path)
    document = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert document["status"] == "failed"
    assert document["problems"] == 1, out


@pytest.mark.e2e
@pytest.mark.exhaustive  # `make faults` is a larger one
def test_a_small_run_holds_every_promise(tmp_path: Path):
    harness = started(tmp_path, "--requests", "24", "--seed", "7", "--runners", "3", "--json")
    out, err = harness.communicate(timeout=170)
    assert harness.returncode == 0, out + err
    document = json.loads(out.splitlines()[-1])
    assert document["accepted"] == 24
    assert document["results"] >= 24
    assert not list(tmp_path.iterdir())


@pytest.mark.e2e
def test_where_nothing_fails_no_lease_is_lost(tmp_path: Path):
    harness = started(tmp_path, "--requests", "24", "--seed", "8", "--calm", "--json")
    out, err = harness.communicate(timeout=170)
    assert harness.returncode == 0, out + err
    document = json.loads(out.splitlines()[-1])
    assert list(document["attempts"]) == ["1"]
    assert not any(document["faults"].values())
