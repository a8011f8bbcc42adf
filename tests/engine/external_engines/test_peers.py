"""The published DFlash engines, as they are on PyPI, under our channels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.external_engines.loops import ENGINES

ROOT = Path(__file__).parents[3]
PINNED = [ENGINES[name].install.split()[-1] for name in ("dflash", "dflash-mlx")]
STRATEGIES = {
    ("dflash", "qwen3"): "instance",
    ("dflash", "gemma4_text"): "instance",
    ("dflash", "qwen3_5"): "native",
    ("dflash", "shipped"): "instance",
    ("dflash-mlx", "qwen3"): "attribute",
    ("dflash-mlx", "gemma4_text"): "instance",
}


def test_the_registry_installs_what_the_benchmark_does():
    wanted = (ROOT / "benchmarks" / "peers-requirements.txt").read_text(encoding="utf-8").split()
    assert set(PINNED) <= set(wanted)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("peers")
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--no-deps"]
    target = ["--python", sys.executable, "--target", str(folder / "packages")]
    subprocess.run([*uv, *target, *PINNED], check=True)
    path = os.pathsep.join([str(ROOT), str(folder / "packages")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.external_engines.peers", str(folder)],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.exhaustive
def test_each_engine_takes_caches_in_the_way_that_was_found_and_decodes_as_we_do(rows):
    served = [row for row in rows if "strategy" in row]
    found = {(row["engine"], row["pair"]): row["strategy"] for row in served}
    found.pop(("dflash-mlx", "qwen3_5"), None)  # its kernels are there on Metal alone
    assert found == STRATEGIES
    assert [row for row in served if not row["same"]] == []
    assert [row for row in served if not (row["rounds"] and row["rounds"] + row["accepted"] >= 39)] == []
    assert [row for row in rows if not row["clean"] or not row.get("clean_midway", True)] == []
    channels = {
        name: [row["channel"] for row in served if (row["engine"], row["pair"]) == name]
        for name in STRATEGIES
    }
    assert channels["dflash", "shipped"] == ["native", "sink-window:2,6", "rotated:4,32", "lattice:e8,38@all"]
    assert channels["dflash", "gemma4_text"] == ["native", "sink-window:2,6", "lattice:e8,38@all"]
    assert channels["dflash-mlx", "qwen3"] == ["native", "sink-window:2,6", "lattice:e8,38@all"]
    assert channels["dflash", "qwen3_5"] == ["native"]


@pytest.mark.exhaustive
def test_what_they_cannot_do_is_refused_with_the_reason(rows):
    refused = {(row["engine"], row["pair"], row.get("channel")): row.get("refused", "") for row in rows}
    assert "Unsupported target architecture" in refused["dflash-mlx", "shipped", None]
    assert "keeps its own caches (it takes" in refused["dflash", "qwen3_5", "sink-window:2,6"]
    assert "head dimension" in refused["dflash", "qwen3", "rotated:4,32"]
