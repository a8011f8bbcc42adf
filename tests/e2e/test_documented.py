"""The commands that the README and the quickstart show for the engine work as they are written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.houses import House

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
ALONE = ("kakeya_engine ", "kakeya_mac gate report.json")


def commands(page: str) -> list[str]:
    """Lines of the page's code blocks that need no request, without their comments."""
    blocks = re.findall(r"^```\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(ALONE)]


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_documented_commands_work_in_their_order(house: House, tmp_path: Path, page: str):
    found = commands(page)
    assert len(found) >= 3
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # paths are written from the checkout
    for line in found:
        program, *arguments = shlex.split(line)
        done = house.program(program, *arguments, cwd=tmp_path, timeout=300)
        assert done.code == 0, f"{line}\n{done.out}\n{done.err}"
