"""No text of others in a workflow's log is an order for GitHub's runner."""

from __future__ import annotations

import logging
import re

import pytest

from bridge.github.workflow import MAX_LOG_CHARACTERS, WorkflowFormatter, WorkflowLog, without_commands

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
@pytest.mark.parametrize("way", ["show", "annotate"])
def test_a_hostile_line_is_shown_and_not_obeyed(text: str, way: str) -> None:
    lines: list[str] = []
    log = WorkflowLog(lines.append, is_actions=True)
    if way == "annotate":
        log.annotate("error", "title", text)
        [line] = lines
        assert line.startswith("::error title=title::")
        lines = [line.removeprefix("::error title=title::")]
        assert "\n" not in line
    else:
        log.show(text)
    assert len(lines) == 1
    assert way == "annotate" or not is_order(lines[0])
    assert "##[" not in lines[0]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_line_of_the_log_is_an_order(text: str) -> None:
    record = logging.makeLogRecord({"name": "bridge", "levelname": "INFO", "msg": "%s", "args": (text,)})
    for line in WorkflowFormatter().format(record).split("\n"):
        assert not is_order(line)


def test_outside_of_a_workflow_nothing_is_ordered() -> None:
    lines: list[str] = []
    log = WorkflowLog(lines.append, is_actions=False)
    log.show("hello")
    log.annotate("error", "passed/ok", "well")
    assert lines == ["| hello", "passed/ok: well"]


def test_log_is_truncated_once_at_its_limit() -> None:
    lines: list[str] = []
    log = WorkflowLog(lines.append, is_actions=True)
    for _ in range(3 * MAX_LOG_CHARACTERS // 1000):
        log.show("x" * 1000)
    assert sum(map(len, lines)) < 2 * MAX_LOG_CHARACTERS
    assert [line for line in lines if "log.txt" in line] == lines[-1:]


def test_a_plain_line_stays_as_it_is() -> None:
    assert without_commands("  loss 0.5 :: step 3 [##]") == "  loss 0.5 :: step 3 [##]"
