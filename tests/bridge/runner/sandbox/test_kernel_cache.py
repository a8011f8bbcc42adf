"""mlx's compiled kernels stay between jobs of the installed engine, and no other program can leave any."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bridge.runner.sandbox import SYSTEM_PATH
from tests.bridge.runner.bench import Bench
from tests.bridge.runner.jobs import linux

COMPILES = shutil.which("g++", path=":".join(SYSTEM_PATH)) is not None
LOOK = "import os; print(os.path.lexists(os.environ['TMPDIR'] + '/mlx'), flush=True)"


def kernels(bench: Bench) -> list[Path]:
    return sorted(bench.config_of().kernel_cache.glob("*/cpu/*.so"))


@pytest.mark.slow
@linux
@pytest.mark.skipif(not COMPILES, reason="mlx compiles nothing without g++")
def test_second_job_of_the_engine_finds_the_kernels_of_the_first(bench: Bench) -> None:
    argv = ["${engine}", "generate", "class A:", "--max-tokens", "3"]
    bench.preset("generates", argv, timeout=100)
    times = []
    for _ in range(2):
        asked = bench.ask("generates")
        assert bench.serve_once() == 1
        assert bench.verdict(asked.nonce) == ("passed", "ok"), bench.log(asked.nonce)
        times.append({file.name: file.stat().st_mtime_ns for file in kernels(bench)})
    assert times[0]
    assert times[0].items() <= times[1].items(), "none was compiled again"
    assert not list(bench.config_of().jobs.iterdir())


@pytest.mark.slow
def test_other_programs_get_no_cache(bench: Bench) -> None:
    bench.config_of().kernel_cache.mkdir(mode=0o700)
    bench.install({"looks": LOOK})
    asked = bench.ask("looks")
    assert bench.serve_once() == 1
    assert bench.log(asked.nonce) == "False\n"


@pytest.mark.slow
def test_job_that_fails_empties_the_cache(bench: Bench) -> None:
    """A compiler that was killed leaves half a kernel, which would be loaded for ever."""
    half = bench.config_of().kernel_cache / "0.0" / "cpu" / "libhalf.so"
    half.parent.mkdir(parents=True, mode=0o700)
    half.write_bytes(b"half")
    bench.preset("fails", ["${engine}", "no-such-command"])
    asked = bench.ask("fails")
    assert bench.serve_once() == 1
    assert bench.verdict(asked.nonce) == ("failed", "exit_code")
    assert not half.exists()
