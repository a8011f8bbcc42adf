"""A request that is followed: a view on a terminal, a line for every change elsewhere."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from bridge.bus.claims import Heartbeat
from bridge.client.watch import Update
from bridge.protocol.result import Phase, Progress, RunStatus
from bridge.render.live import LiveView, new_lines
from bridge.render.outcome import tokens_per_s
from engine.evaluation.measure import rate_text
from tests.fixtures.terminal import in_terminal

PROGRESS = Progress(done=4, total=60, step="drafting/verifying code-3 41.5 tok/s")


def running(beat: Heartbeat) -> Update:
    status = RunStatus(
        nonce="20260301t120000z0123456789ab",
        request_commit="0" * 40,
        runner="studio",
        runner_id="0" * 16,
        pid=1,
        unique="0" * 16,
        attempt=1,
        beat=1,
        lease_s=60.0,
        session="0" * 16,
        updated_at="2026-03-01T12:00:00Z",
        phase=beat.phase,
        elapsed_s=beat.elapsed_s,
        progress=beat.progress,
        log_tail=beat.log_tail,
    )
    return Update(beat.phase, status=status)


UPDATES = (
    Update(Phase.QUEUED, ahead=2),
    running(Heartbeat(Phase.RUNNING, 1.0, None, ("starting",))),
    running(Heartbeat(Phase.RUNNING, 2.0, None, ("starting",))),
    running(Heartbeat(Phase.RUNNING, 3.0, PROGRESS, ("starting", "\x1b[31mloaded", "progress 4/60 x"))),
)


def test_without_a_terminal_each_change_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView(requested_at=None) as view:
        for update in (*UPDATES, *UPDATES[-1:]):
            view.show(update)
    assert capsys.readouterr().err.splitlines() == [
        "queued, 2 requests ahead",
        "running on studio (1 s)",
        "running on studio 4/60 drafting/verifying code-3 41.5 tok/s (3 s)",
    ]


def test_a_step_that_names_a_time_is_another_line(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView(requested_at=None) as view:
        for step in ("warming up (1 s)", "warming up (2 s)"):
            view.show(running(Heartbeat(Phase.RUNNING, 3.0, Progress(done=1, total=2, step=step), ())))
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_followed_log_shows_each_line_once_and_cleaned(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView(requested_at=None, log=True) as view:
        for update in (*UPDATES, *UPDATES[-1:]):
            view.show(update)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("|")]
    assert lines == ["| starting", "| loaded"]


def test_new_lines_are_those_behind_what_both_tails_have() -> None:
    assert new_lines(["a", "b", "progress 1/2 x"], ["b", "c", "progress 2/2 x"]) == ["c"]
    assert new_lines([], ["a"]) == ["a"]
    assert new_lines(["a", "a"], ["a", "a"]) == []
    assert new_lines(["a"], ["x", "y"]) == ["x", "y"]


def test_the_rate_is_read_off_the_engines_progress() -> None:
    row = SimpleNamespace(decoded=83, decode_s=2.0)
    step = f"drafting/verifying code-3{rate_text([row, row])}"
    assert tokens_per_s(Progress(done=4, total=60, step=step)) == 41.5
    for other in ("loading", f"decoding code-1{rate_text([])}", "x tok/s", "9" * 30 + " tok/s"):
        assert tokens_per_s(Progress(done=4, total=60, step=other)) is None


SCRIPT = """
import time
from tests.bridge.render.test_live import UPDATES, LiveView
from bridge.cli import show
from bridge.render.outcome import request_table
from bridge.client.history import Row
with LiveView(requested_at="2026-03-01T12:00:00Z") as view:
    for update in UPDATES:
        view.show(update)
        time.sleep(0.1)
row = Row("20260301t120000z0123456789ab", "throughput", UPDATES[0].phase, "2026-03-01T12:00:00Z", ahead=2,
          requested_by="ann")
show(False, {}, request_table([row], 0.0, {}))
"""


@pytest.mark.slow
def test_a_terminal_shows_a_view_that_fits_it() -> None:
    code, shown = in_terminal([sys.executable, "-c", SCRIPT], COLUMNS="60")
    assert (code, "\x1b[" in shown) == (0, True)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", shown)
    assert max(map(len, plain.splitlines())) <= 60
    for words in ("queued, 2 requests ahead", "4/60", "41.5 tokens/s", "| loaded", "by ann"):
        assert words in plain, words


@pytest.mark.slow
def test_no_color_means_no_escape_code_at_all() -> None:
    code, shown = in_terminal([sys.executable, "-c", SCRIPT], COLUMNS="60", NO_COLOR="1")
    assert (code, "\x1b" in shown) == (0, False)
    assert shown.count("running on studio") == 2
