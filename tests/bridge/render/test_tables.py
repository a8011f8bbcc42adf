"""Lists fit the terminal they are shown on, and are left whole where there is none."""

from __future__ import annotations

import sys

import pytest

from bridge.render.terminal import WIDE, console


def test_a_pipe_is_wide(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert console().width == WIDE
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert console().width == 60
