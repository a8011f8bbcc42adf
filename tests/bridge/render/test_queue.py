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


def text_of(table: Table, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(table)
    return out.getvalue()


def test_hostile_texts_are_shown_plainly():
    progress = Progress(done=1, total=4, step=HOSTILE)
    row = Row(NONCE, HOSTILE, Phase.RUNNING, "2026-03-01T12:00:00Z", runner=HOSTILE, progress=progress)
    for table in (request_table([row], NOON), request_table([row], NOON)):
        text = text_of(table)
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "[bold]red line" in text
    assert row_json(row, NOON)["progress"]["step"] == "[bold]red line"


def test_a_queue_says_what_is_ahead_and_what_is_to_be_cancelled():
    waiting = Row(NONCE, None, Phase.QUEUED, None, ahead=3, cancelling=True)
    text = text_of(request_table([waiting], NOON))
    assert "queued, 3 older ones wait, to be cancelled" in text
    soon = Row(NONCE, None, Phase.QUEUED, None, ahead=3, expected_s=150.0)
    assert "queued, 3 older ones wait, about 2 min to wait" in text_of(request_table([soon], NOON))
    assert row_json(soon, NOON)["expected_s"] == 150.0
    assert row_json(waiting, NOON)["age_s"] is None
    first = Row(NONCE, None, Phase.QUEUED, None, ahead=0, expected_s=0.0)
    assert "to wait" not in text_of(request_table([first], NOON))


def test_a_runner_that_gives_no_sign_any_more_is_said_to_give_none():
    row = Row(NONCE, None, Phase.RUNNING, None, runner="mac", elapsed_s=12.0, beat_age_s=34.0, silent_s=34.0)
    assert "running for 12s, no sign for 34s" in text_of(request_table([row], NOON))


def test_a_history_says_why_a_request_did_not_pass():
    failed = Row(
        NONCE, "probe", Phase.DONE, "2026-03-01T12:00:00Z", status=Status.FAILED, reason=Reason.TIMEOUT
    )
    text = text_of(request_table([failed], NOON + 90))
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


def test_at_80_columns_handles_stay_whole_and_no_word_of_a_state_is_broken():
    progress = Progress(done=3, total=10, step="decode")
    names = {"preset": "drafter-parity-fp32", "runner": "studio-in-the-cellar", "requested_at": None}
    running = Row(NONCE, phase=Phase.PUBLISHING, elapsed_s=86_000.0, attempt=2, progress=progress, **names)
    ended = Row(
        NONCE,
        phase=Phase.DONE,
        elapsed_s=1.0,
        status=Status.REFUSED,
        reason=Reason.WRONG_AUDIENCE,
        archived=True,
        **names,
    )
    for table, words in (
        (request_table([running], NOON, 80), ["publishing for 23h 53m,", "attempt", "2,", "3/10", "decode"]),
        (request_table([ended], NOON, 80), ["refused", "(wrong_audience),", "took", "1s,", "archived"]),
    ):
        lines = text_of(table, 80).splitlines()
        assert max(map(len, lines)) <= 80
        assert NONCE in lines[2]
        shown = " ".join(line[-22:] for line in lines[2:])
        for word in " ".join(words).split():
            assert word in shown.split()
