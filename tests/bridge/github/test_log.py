"""No text of others in a workflow's log is an order for GitHub's runner."""

from __future__ import annotations

import logging
import re

import pytest

from bridge.github.workflow import WorkflowFormatter, annotation, without_commands

HOSTILE = [
    "::set-output name=digest::forged",
    "  ::add-mask::a",
    "\t::stop-commands::x",
    "\ufeff::error::x",
    "\x1b[31m::error::x",
    "a\r::error::x",
    "a\n::error::x",
    "a\u2028::error::x",
    "##[error]x",
    "text ##[command]x",
    "##\u200b[error]x",
]


def is_order(line: str) -> bool:
    """As GitHub's runner (and act) recognise one, generously."""
    return (
        any(part.lstrip().startswith("::") for part in re.split(r"[\r\n\u2028\u2029\x85]", line))
        or "##[" in line
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_line_is_shown_and_not_obeyed(text: str) -> None:
    assert not is_order(without_commands(text))
    line = annotation("error", "title", text)
    assert line.startswith("::error title=title::")
    assert "\n" not in line
    assert "##[" not in line


@pytest.mark.parametrize("text", HOSTILE)
def test_no_line_of_the_log_is_an_order(text: str) -> None:
    record = logging.makeLogRecord({"name": "bridge", "levelname": "INFO", "msg": "%s", "args": (text,)})
    for line in WorkflowFormatter().format(record).split("\n"):
        assert not is_order(line)


def test_a_plain_line_stays_as_it_is() -> None:
    assert without_commands("  loss 0.5 :: step 3 [##]") == "  loss 0.5 :: step 3 [##]"
