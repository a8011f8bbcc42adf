"""Escape codes are for people: a job in CI may have a terminal, and gets plain lines."""

from __future__ import annotations

import sys

import pytest

from tests.fixtures.terminal import in_terminal

SHOW = """
from engine.cli.progress import shown_progress
from engine.cli.tables import print_table
with shown_progress() as progress:
    for done in range(4):
        progress(done, 3, "measure", "[bold]code[/]")
print_table("speed", ("<arm", "tok/s"), [("native", "12.0")])
"""


@pytest.mark.parametrize("variables", [{"CI": "true"}, {"CI": "1"}, {"GITHUB_ACTIONS": "true"}], ids=str)
def test_in_ci_a_terminal_gets_plain_lines(variables: dict[str, str]):
    code, shown = in_terminal([sys.executable, "-c", SHOW], FORCE_COLOR="1", **variables)
    assert code == 0, shown
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert shown.splitlines()[0] == "progress 0/3 measure [bold]code[/]"
    assert "progress 3/3 measure [bold]code[/]" in shown.splitlines()
    assert "native" in shown


@pytest.mark.parametrize("variables", [{}, {"CI": ""}, {"CI": "false"}, {"CI": "0"}], ids=str)
def test_a_person_gets_a_bar_and_colours(variables: dict[str, str]):
    code, shown = in_terminal([sys.executable, "-c", SHOW], **variables)
    assert code == 0, shown
    assert "\x1b[" in shown
    assert "progress 3/3" not in shown
