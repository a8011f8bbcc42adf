"""Lists of requests are one line a request, and no text of theirs is obeyed by a terminal or by rich."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from bridge.client.history import Row
from bridge.render.queue import age_text, history_table, queue_table, row_json
from bridge.result import Phase, Progress, Reason, Status

NONCE = "20260301t120000z0123456789ab"
NOON = 1772366400.0  # 2026-03-01T12:00:00Z
HOSTILE = "\x1b[31m[bold]red\u202e\nline"


def text_of(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=False).print(table)
    return out.getvalue()


def test_hostile_texts_are_shown_plainly():
    progress = Progress(done=1, total=4, step=HOSTILE)
    row = Row(NONCE, HOSTILE, Phase.RUNNING, "2026-03-01T12:00:00Z", runner=HOSTILE, progress=progress)
    for table in (queue_table([row], NOON), history_table([row], NOON)):
        text = text_of(table)
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "[bold]red line" in text
    assert row_json(row, NOON)["progress"]["step"] == "[bold]red line"


def test_a_queue_says_what_is_ahead_and_what_is_to_be_cancelled():
    waiting = Row(NONCE, None, Phase.QUEUED, None, ahead=3, cancelling=True)
    text = text_of(queue_table([waiting], NOON))
    assert "queued, 3 ahead, to be cancelled" in text
    assert row_json(waiting, NOON)["age_s"] is None


def test_a_history_says_why_a_request_did_not_pass():
    failed = Row(
        NONCE, "probe", Phase.DONE, "2026-03-01T12:00:00Z", status=Status.FAILED, reason=Reason.TIMEOUT
    )
    text = text_of(history_table([failed], NOON + 90))
    assert "failed (timeout)" in text
    assert "1m 30s" in text
    document = row_json(failed, NOON + 90)
    assert (document["state"], document["status"], document["age_s"]) == ("finished", "failed", 90.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (-5, "0s"), (59.9, "59s"), (62, "1m 02s"), (3720, "1h 02m"), (90_000, "1d 1h")],
)
def test_a_length_of_time_is_two_units(seconds: float | None, text: str):
    assert age_text(seconds) == text
