"""No text of others in a workflow's log is an order for GitHub's runner."""

from __future__ import annotations

import re

import pytest

from bridge.workflow.log import MOST_CHARACTERS, Log, harmless

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
@pytest.mark.parametrize("way", ["say", "show", "announce"])
def test_a_hostile_line_is_shown_and_not_obeyed(text: str, way: str) -> None:
    lines: list[str] = []
    log = Log(lines.append, is_actions=True)
    if way == "announce":
        log.announce("error", "title", text)
        [line] = lines
        assert line.startswith("::error title=title::")
        lines = [line.removeprefix("::error title=title::")]
        assert "\n" not in line
    else:
        getattr(log, way)(text)
    assert len(lines) == 1
    assert way == "announce" or not is_order(lines[0])
    assert "##[" not in lines[0]


def test_while_a_job_prints_no_line_is_obeyed_at_all() -> None:
    lines: list[str] = []
    log = Log(lines.append, is_actions=True)
    for _ in range(2):
        with log.quiet():
            log.show("hello")
    first, second = lines[0].removeprefix("::stop-commands::"), lines[3].removeprefix("::stop-commands::")
    assert lines == [
        *(f"::stop-commands::{first}", "| hello", f"::{first}::"),
        *(f"::stop-commands::{second}", "| hello", f"::{second}::"),
    ]
    assert first != second
    assert len(first) > 32


def test_the_log_is_obeyed_again_after_a_failure() -> None:
    lines: list[str] = []
    log = Log(lines.append, is_actions=True)
    with pytest.raises(ValueError, match="x"), log.quiet():
        raise ValueError("x")
    assert lines[-1] == lines[0].replace("::stop-commands", "") + "::"


def test_outside_of_a_workflow_nothing_is_ordered() -> None:
    lines: list[str] = []
    log = Log(lines.append, is_actions=False)
    with log.quiet():
        log.show("hello")
    log.announce("error", "passed/ok", "well")
    assert lines == ["| hello", "passed/ok: well"]


def test_a_flood_is_cut_in_the_log_and_said_once() -> None:
    lines: list[str] = []
    log = Log(lines.append, is_actions=True)
    for _ in range(3 * MOST_CHARACTERS // 1000):
        log.show("x" * 1000)
    assert sum(map(len, lines)) < 2 * MOST_CHARACTERS
    assert [line for line in lines if "log.txt" in line] == lines[-1:]


def test_a_plain_line_stays_as_it_is() -> None:
    assert harmless("  loss 0.5 :: step 3 [##]") == "  loss 0.5 :: step 3 [##]"
