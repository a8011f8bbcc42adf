"""`kakeya_mac demo`: the main job over a real remote, with and without a fast BLAS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import warnings
from pathlib import Path

import pytest

from tests.e2e.busy import when_quiet
from tests.fixtures.repo import BIN, Done, RepoFixture

pytestmark = [pytest.mark.e2e, pytest.mark.quiet]


def run_demo(repo: RepoFixture, folder: Path, *params: str, **env: str) -> tuple[Done, dict]:
    words = ("demo", "--folder", str(folder), *(word for param in params for word in ("-p", param)))
    done = when_quiet(lambda: repo.program("kakeya_mac", *words, cwd=repo.root, timeout=300, **env))
    assert done.code == 0, done.out + done.err
    return done, done.json


@pytest.mark.parametrize("blas", ["as found", pytest.param("reference", marks=pytest.mark.exhaustive)])
def test_demo_passes_and_its_result_holds_an_accepted_report(repo: RepoFixture, tmp_path: Path, blas: str):
    env = {} if blas == "as found" else {"KAKEYA_BLAS": "reference"}
    done, last = run_demo(repo, tmp_path / "demo", "limit=5", **env)  # as few as a speed-up needs
    assert last["status"] == "passed"
    assert last["signature"] == "trusted"
    remote = Path(last["remote"])
    folder = f".mac-bridge/results/{last['nonce']}"
    result = json.loads(repo.git("show", f"{last['result_commit']}:{folder}/result.json", cwd=remote))
    [evidence] = [file for file in result["files"] if file["role"] == "evidence"]
    report = tmp_path / "report.json"
    report.write_text(
        repo.git("show", f"{last['result_commit']}:{folder}/{evidence['path']}", cwd=remote) + "\n"
    )
    gate = repo.program("kakeya_mac", "gate", str(report), "--json", cwd=tmp_path)
    assert gate.code == 0, gate.out
    claims = {claim["name"] for claim in gate.json["files"][0]["claims"]}
    document = json.loads(report.read_text())
    assert "identical_output" in claims
    if reason := document["configuration"]["speed_not_claimed"]:  # other processes kept the machine busy
        assert not claims & {"speedup", "no_slowdown"}
        assert "not claimed" in done.out
        warnings.warn(f"no speed was claimed: {reason}", stacklevel=1)
    elif document["environment"]["blas"] == "reference" and not document["environment"]["metal"]:
        assert "no_slowdown" in claims
        assert "speedup" not in claims
    else:
        assert "speedup" in claims
    for word in ("plain", "speculative", "acceptance", "identical", "passed"):
        assert word in done.out.lower()
    total = sum(len(arm["samples"]) for arm in document["arms"])
    steps = ("queued", "running on", f"/{total} ")
    seen = [done.err.find(word) for word in steps]
    assert seen == sorted(seen)
    assert seen[0] >= 0
    slow = document["environment"]["blas"] == "reference" and document["environment"]["system"] == "Linux"
    assert ("apt install" in done.out) == slow
    derived = document["summary"]["comparisons"][0]
    derived["decode_ratio"] *= 1.5
    report.write_text(json.dumps(document))
    edited = repo.program("kakeya_mac", "gate", str(report), cwd=tmp_path)
    assert edited.code == 3
    assert "SUMMARY_MISMATCH" in edited.out


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGHUP, 143, marks=pytest.mark.exhaustive),
    ],
)
def test_stopped_demo_stops_its_runner_and_the_next_starts_clean(
    repo: RepoFixture, tmp_path: Path, number: signal.Signals, code: int
):
    started = time.monotonic()
    demo = subprocess.Popen(
        [str(BIN / "kakeya_mac"), "demo", "--folder", str(tmp_path / "demo")],
        env=repo.env,
        cwd=repo.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stderr is not None
    runner = 0
    for line in demo.stderr:
        if line.startswith("started a runner as process "):
            runner = int(line.split()[5].rstrip(":"))
        if line.startswith("running on"):
            break
    os.kill(demo.pid, number)
    demo.communicate(timeout=30)
    assert demo.returncode == code
    with pytest.raises(ProcessLookupError):
        os.kill(runner, 0)
    assert time.monotonic() - started < 60
    if number == signal.SIGINT:
        assert run_demo(repo, tmp_path / "demo", "limit=2", "max_tokens=16")[1]["status"] == "passed"
