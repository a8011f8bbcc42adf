"""No speed is believed of a machine that does other work: neither by `--claim auto` nor by the gate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.repo import RepoFixture

pytestmark = [pytest.mark.e2e, pytest.mark.quiet]
FEW = ("--prompts", "code", "--limit", "5", "--max-tokens", "40")


@pytest.fixture
def busy() -> Iterator[None]:
    """Every core runs an endless loop of another process."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("claim", ["auto", pytest.param("speedup", marks=pytest.mark.exhaustive)])
def test_a_busy_machine_gets_no_speed_accepted(repo: RepoFixture, tmp_path: Path, claim: str):
    report = tmp_path / "report.json"
    words = ("eval", "throughput", *FEW, "--claim", claim, "--report", str(report))
    done = repo.program("kakeya_engine", *words, cwd=tmp_path, timeout=300)
    assert done.code == 0, done.err
    gate = repo.program("kakeya_mac", "gate", str(report), "--json", cwd=tmp_path)
    [judged] = gate.json["files"]
    if claim == "speedup":
        assert gate.code == 3
        assert "the gate will reject the speed claim: other processes used" in done.out
        assert "MACHINE_BUSY" in {violation["code"] for violation in judged["violations"]}
        return
    assert gate.code == 0, gate.out
    assert [each["name"] for each in judged["claims"]] == ["identical_output"]
    assert json.loads(report.read_text())["environment"]["load"]["other_cpu_share"] > 0.1
    assert "no speed is claimed" in done.out
    [ratios] = [line for line in done.out.splitlines() if line.startswith("speculative / plain:")]
    assert "; not claimed: decode " in ratios
