"""Lists fit the terminal they are shown on, and are left whole where there is none."""

from __future__ import annotations

import sys

import pytest

from bridge.render.terminal import WIDE, Column, console, plain, table, wrapped

LINE = "    offers   " + ", ".join(f"preset-number-{number}" for number in range(12))


def test_a_line_is_broken_between_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert wrapped(LINE) == LINE
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = wrapped(LINE).splitlines()
    assert max(map(len, lines)) <= 60
    assert {line[:13] for line in lines[1:]} == {" " * 13}
    assert " ".join(line[13:] for line in lines) == LINE[13:]


def test_a_pipe_is_wide(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert console().width == WIDE
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert console().width == 60


def test_names_end_in_an_ellipsis_and_texts_go_on(capsys: pytest.CaptureFixture[str]):
    shown = table(40, handle=Column.SHORT, name=Column.NAME, text=Column.TEXT)
    shown.add_row(*plain("a-handle-of-18-chr", "a name too long for it", "one two three four"))
    out = console()
    out.width = 40
    out.print(shown)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("a-handle-of-18-chr  a name too…  ")
    assert len(lines) > 3
