"""Lists of requests are one line a request, and no text of theirs is obeyed by a terminal or by rich."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from bridge.client.history import Row
from bridge.protocol.result import Phase, Progress, Reason, Status
from bridge.render.outcome import age_text, request_table, row_json

NONCE = "20260301t120000z0123456789ab"
NOON = 1772366400.0  # 2026-03-01T12:00:00Z
HOSTILE = "\x1b[31m[bold]red\u202e\nline"


def text_of(lines: list[str | Table], width: int = 200) -> str:
    out = io.StringIO()
    for line in lines:
        Console(file=out, width=width, force_terminal=False).print(line)
    return out.getvalue()


def test_hostile_texts_are_shown_plainly():
    progress = Progress(done=1, total=4, step=HOSTILE)
    row = Row(NONCE, HOSTILE, Phase.RUNNING, "2026-03-01T12:00:00Z", runner=HOSTILE, progress=progress)
    text = text_of(request_table([row], NOON, {}))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[bold]red line" in text


def test_a_queue_says_what_is_ahead_and_what_is_to_be_cancelled():
    waiting = Row(NONCE, None, Phase.QUEUED, None, ahead=3, cancelling=True)
    text = text_of(request_table([waiting], NOON, {}))
    assert "queued, 3 requests ahead, to be cancelled" in text
    soon = Row(NONCE, None, Phase.QUEUED, None, ahead=3, expected_s=150.0)
    assert "queued, 3 requests ahead, about 0:02:30 to wait" in text_of(request_table([soon], NOON, {}))
    assert row_json(soon, NOON, {})["expected_s"] == 150.0
    assert row_json(waiting, NOON, {})["age_s"] is None
    first = Row(NONCE, None, Phase.QUEUED, None, ahead=0, expected_s=0.0)
    assert "to wait" not in text_of(request_table([first], NOON, {}))


def test_a_runner_that_gives_no_sign_any_more_is_said_to_give_none():
    row = Row(NONCE, None, Phase.RUNNING, None, runner="mac", elapsed_s=12.0, beat_age_s=34.0, silent_s=34.0)
    assert "running for 0:00:12, no heartbeat for 0:00:34" in text_of(request_table([row], NOON, {}))


def test_a_history_says_why_a_request_did_not_pass():
    failed = Row(
        NONCE, "probe", Phase.DONE, "2026-03-01T12:00:00Z", status=Status.FAILED, reason=Reason.TIMEOUT
    )
    text = text_of(request_table([failed], NOON + 90, {}))
    assert "failed (timeout)" in text
    assert "2026-03-01 12:00Z" in text
    document = row_json(failed, NOON + 90, {})
    assert (document["state"], document["status"], document["age_s"]) == ("finished", "failed", 90.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (-5, "0:00:00"), (59.9, "0:00:59"), (90_000, "1 day, 1:00:00")],
)
def test_length_of_time(seconds: float | None, text: str):
    assert age_text(seconds) == text


def test_at_80_columns_handles_stay_whole():
    progress = Progress(done=3, total=10, step="decode")
    names = {"preset": "drafter-parity-fp32", "runner": "studio-in-the-cellar", "requested_at": None}
    running = Row(NONCE, phase=Phase.PUBLISHING, elapsed_s=86_000.0, attempt=2, progress=progress, **names)
    lines = text_of(request_table([running], NOON, {}), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert NONCE in lines[2]
    assert {"publishing", "23:53:20,", "attempt", "2,", "3/10", "decode"} <= set(" ".join(lines).split())
