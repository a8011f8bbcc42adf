"""The commands that the README and the engine's page show for the engine work as they are written."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.busy import was_busy, when_quiet
from tests.fixtures.repo import Done, RepoFixture

pytestmark = [pytest.mark.e2e, pytest.mark.quiet]

ROOT = Path(__file__).resolve().parents[2]
GATE = "kakeya_mac gate report.json"
SERVE = "kakeya_engine serve"
ALONE = ("kakeya_engine ", GATE)


def commands(page: str) -> list[str]:
    """Lines of the page's code blocks that need no request, without their comments."""
    blocks = re.findall(r"^```\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(ALONE)]


def serves(folder: Path) -> bool:
    """Whether the server says where it is, and ends as it should when it is asked to."""
    program = [str(Path(sys.executable).with_name("kakeya_engine")), "serve"]
    with subprocess.Popen(program, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        server.terminate()
        return bool(ready["url"] == "http://127.0.0.1:8080/v1" and server.wait(60) == 0)


# Of the README's commands the engine's page has the most; the others are those of jobs in test_presets.py.
@pytest.mark.parametrize("page", [pytest.param("README.md", marks=pytest.mark.exhaustive), "docs/engine.md"])
def test_the_documented_commands_work_in_their_order(repo: RepoFixture, tmp_path: Path, page: str):
    found = commands(page)
    assert len(found) >= 3
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # paths are written from the checkout

    def run(line: str) -> Done:
        program, *arguments = shlex.split(line)
        return repo.program(program, *arguments, cwd=tmp_path, timeout=300)

    def measure_and_judge() -> Done:
        [evaluation] = [line for line in found if "--report report.json" in line]
        measured = run(evaluation)
        return run(GATE) if measured.code == 0 else measured

    for line in found:
        if line == SERVE:
            assert serves(tmp_path)
            continue
        done = run(line)
        if line == GATE and was_busy(done):
            done = when_quiet(measure_and_judge)
        assert done.code == 0, f"{line}\n{done.out}\n{done.err}"
