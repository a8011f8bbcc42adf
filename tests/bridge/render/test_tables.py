"""Lists fit the terminal they are shown on, and are left whole where there is none."""

from __future__ import annotations

import sys

import pytest

from bridge.render.terminal import WIDE, console
from tests.fixtures.terminal import CI_VARIABLES, in_terminal

SHOW = """
from rich.table import Table
from bridge.render.terminal import console
table = Table("name", "ratio", title="speed")
table.add_row("native", "1.52")
console().print(table)
"""


def test_a_pipe_is_wide(monkeypatch: pytest.MonkeyPatch):
    for name in CI_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert console().width == WIDE
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert console().width == 60


@pytest.mark.parametrize(
    ("variables", "is_plain"),
    [({}, False), ({"CI": "0"}, False), ({"CI": "true"}, True), ({"GITHUB_ACTIONS": "true"}, True)],
    ids=str,
)
def test_a_terminal_in_ci_gets_no_escape_codes(variables: dict[str, str], is_plain: bool):
    code, shown = in_terminal([sys.executable, "-c", SHOW], FORCE_COLOR="1", **variables)
    assert code == 0, shown
    assert "1.52" in shown
    assert ("\x1b" not in shown) is is_plain
