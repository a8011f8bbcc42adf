"""mlx's compiled kernels stay between jobs of the installed engine, and no other program can leave any."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bridge.runner.sandbox import SYSTEM_PATH
from tests.bridge.runner.jobs import linux
from tests.fixtures.runner import RunnerFixture

COMPILES = shutil.which("g++", path=":".join(SYSTEM_PATH)) is not None
LOOK = "import os; print(os.path.lexists(os.environ['TMPDIR'] + '/mlx'), flush=True)"


def kernels(runner: RunnerFixture) -> list[Path]:
    return sorted(runner.config_of().kernel_cache.glob("*/cpu/*.so"))


@pytest.mark.exhaustive
@linux
@pytest.mark.skipif(not COMPILES, reason="mlx compiles nothing without g++")
def test_second_job_of_the_engine_finds_the_kernels_of_the_first(runner: RunnerFixture) -> None:
    argv = ["${engine}", "generate", "class A:", "--max-tokens", "3"]
    runner.preset("generates", argv, timeout=100)
    times = []
    for _ in range(2):
        asked = runner.ask("generates")
        assert runner.serve_once() == 1
        assert runner.verdict(asked.nonce) == ("passed", "ok"), runner.log(asked.nonce)
        times.append({file.name: file.stat().st_mtime_ns for file in kernels(runner)})
    assert times[0]
    assert times[0].items() <= times[1].items(), "none was compiled again"
    assert not list(runner.config_of().jobs.iterdir())


@pytest.mark.slow
def test_other_programs_get_no_cache(runner: RunnerFixture) -> None:
    runner.config_of().kernel_cache.mkdir(mode=0o700)
    runner.install({"looks": LOOK})
    asked = runner.ask("looks")
    assert runner.serve_once() == 1
    assert runner.log(asked.nonce) == "False\n"


@pytest.mark.slow
def test_job_that_fails_empties_the_cache(runner: RunnerFixture) -> None:
    """A compiler that was killed leaves half a kernel, which would be loaded for ever."""
    half = runner.config_of().kernel_cache / "0.0" / "cpu" / "libhalf.so"
    half.parent.mkdir(parents=True, mode=0o700)
    half.write_bytes(b"half")
    runner.preset("fails", ["${engine}", "no-such-command"])
    asked = runner.ask("fails")
    assert runner.serve_once() == 1
    assert runner.verdict(asked.nonce) == ("failed", "exit_code")
    assert not half.exists()
