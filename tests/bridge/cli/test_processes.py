"""How much git a client starts: a request that is followed costs a bounded number of processes."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.fixtures.repo import RepoFixture

JOB = """
import time
for step in range(22):
    print('progress %d/22 step' % (step + 1), flush=True)
    time.sleep(0.5)
"""
PRESET = f"""
name = "pause"
summary = "A test program."
argv = ["${{python}}", "-I", "-c", {json.dumps(JOB)}]
timeout_s = 60
engine = "installed"
workspace = "none"
"""


def counting_git(folder: Path) -> Path:
    """A `git` that writes a line for each start; returns that file."""
    folder.mkdir()
    log, program = folder / "starts", folder / "git"
    program.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec {shutil.which("git")} "$@"\n')
    program.chmod(0o755)
    return log


@pytest.mark.slow
def test_following_an_11_second_job_starts_at_most_25_git_processes(repo: RepoFixture):
    presets = repo.root / "config" / "presets"
    presets.mkdir(parents=True)
    (presets / "pause.toml").write_text(PRESET)
    log = counting_git(repo.root / "bin")
    with repo.runner():
        path = f"{log.parent}{os.pathsep}{repo.env['PATH']}"
        began = time.monotonic()
        done = repo.kakeya("run", "--preset", "pause", "--wait", "60", PATH=path)
    assert done.code == 0, done.err
    # GitPython asks for git's version, twice, when it is imported.
    starts = [line for line in log.read_text().splitlines() if line != "version"]
    late_s = max(0.0, time.monotonic() - began - 14)  # a busy machine: it looks once or twice a second
    assert len(starts) <= 25 + 2 * late_s, "\n".join(starts)
