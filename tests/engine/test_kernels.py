"""What the shipped pair needs compiled, one short program compiles; where nothing can be, it does nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine import kernels
from engine.blas import Blas
from engine.errors import ModelError
from engine.runtime import COMPILERS, Runtime

PYTHON = (sys.executable, "-I", "-m")
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not any(shutil.which(name) for name in COMPILERS),
    reason="mlx compiles with g++ on Linux alone",
)


def run(*argv: str, temporary: Path, **env: str) -> str:
    temporary.mkdir(exist_ok=True)
    done = subprocess.run(
        [*PYTHON, *argv],
        env={**os.environ, "TMPDIR": str(temporary), **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def libraries(temporary: Path) -> set[str]:
    return {path.name for path in temporary.rglob("*.so")}


@pytest.mark.slow
def test_without_a_compiler_it_says_so_and_leaves_nothing(tmp_path: Path):
    said = run("engine.kernels", temporary=tmp_path / "tmp", PATH=str(tmp_path))
    assert said == "no kernels are compiled on this machine\n"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_pair_that_cannot_be_loaded_is_one_clear_line(monkeypatch: pytest.MonkeyPatch):
    def broken(_: object) -> None:
        raise ModelError("the weights are damaged")

    monkeypatch.setattr(kernels, "open_engine", broken)
    runtime = Runtime(Blas("any", fast=True, how="found"), metal=False, compiles=True)
    monkeypatch.setattr(kernels, "prepare", lambda: runtime)
    with pytest.raises(SystemExit, match="the weights are damaged"):
        kernels.main()


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("block", ["auto", "5"])
def test_decoding_afterwards_compiles_nothing_more(
    block: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    made = tmp_path_factory.getbasetemp() / "kernels"  # once for all parameters
    if not made.exists():
        assert run("engine.kernels", temporary=made) == "kernels are compiled\n"
    before = libraries(made)
    assert before
    run(
        *("engine", "generate", "class BaseProject:", "--max-tokens=64", f"--block={block}"),
        f"--report={tmp_path / 'report.json'}",
        temporary=made,
    )
    assert libraries(made) == before
