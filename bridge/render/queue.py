"""Lists of requests: what waits and runs, what ran. As rich tables and as JSON; nothing here prints.

Names and texts come from the bus: each passes `clean_line` and is shown as plain text, never as markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bridge.protocol.result import Phase
from bridge.protocol.sanitize import clean_line
from bridge.render.outcome import age_text, claim_text, older_text, run_text, start_text
from bridge.render.tables import WIDE, Column, plain, table

if TYPE_CHECKING:
    from rich.table import Table

    from bridge.client.history import Row
    from bridge.client.runs import RunView


def queue_table(
    rows: Sequence[Row], now: float, width: int = WIDE, runs: Mapping[str, RunView] | None = None
) -> Table:
    """What waits and runs, one row a request.

    Args:
        rows: From `bridge.client.history.queue`.
        now: Seconds since the epoch, for ages.
        width: Characters to a line.
        runs: The workflow runs of those that have one, by nonce.
    """
    short, name = Column.SHORT, Column.NAME
    shown = table(width, request=short, preset=name, asked=short, runner=name, state=Column.TEXT)
    for row in rows:
        run = (runs or {}).get(row.nonce)
        machine = row.runner or (run.machine if run is not None else None) or ""
        state = _queue_state(row) if run is None else f"{_queue_state(row)}, {run_text(run)}"
        shown.add_row(*plain(row.nonce, row.preset or "?", age_text(age_s(row, now)), machine, state))
    return shown


def history_table(rows: Sequence[Row], now: float, width: int = WIDE) -> Table:
    """What ran, one row a request, with the status as it was published."""
    short, name = Column.SHORT, Column.NAME
    shown = table(width, request=short, preset=name, asked=short, runner=name, status=Column.TEXT)
    for row in rows:
        shown.add_row(
            *plain(
                row.nonce,
                row.preset or "?",
                age_text(age_s(row, now)),
                row.runner or "",
                _end_state(row),
            )
        )
    return shown


def row_json(row: Row, now: float) -> dict[str, Any]:
    """One request of a list as JSON; keys that do not apply are null."""
    return {
        "nonce": row.nonce,
        "preset": _text(row.preset),
        "state": "finished" if row.phase is Phase.DONE else row.phase.value,
        "status": row.status,
        "reason": row.reason,
        "runner": _text(row.runner),
        "claim": None if row.claim is None else row.claim.to_json(),
        "attempt": row.attempt,
        "ahead": row.ahead,
        "expected_s": _rounded(row.expected_s),
        "requested_at": row.requested_at,
        "age_s": _rounded(age_s(row, now)),
        "elapsed_s": _rounded(row.elapsed_s),
        "beat_age_s": _rounded(row.beat_age_s),
        "progress": None
        if row.progress is None
        else {"done": row.progress.done, "total": row.progress.total, "step": _text(row.progress.step)},
        "cancelling": row.cancelling,
        "finished_at": row.finished_at,
        "archived": row.archived,
    }


def age_s(row: Row, now: float) -> float | None:
    """Seconds since a request was made, by its nonce; None: that names no moment."""
    if row.requested_at is None:
        return None
    from bridge.protocol.manifest import parse_time

    return now - parse_time(row.requested_at).timestamp()


def _queue_state(row: Row) -> str:
    """Where a request is, how far it is, and what there is to know about it."""
    said = [f"{row.phase} for {age_text(row.elapsed_s)}" if row.elapsed_s else str(row.phase)]
    said += [f"no sign for {age_text(row.silent_s)}"] if row.silent_s is not None else []
    said += [older_text(row.ahead)] if row.ahead else []
    said += [start_text(row.expected_s)] if row.expected_s is not None else []
    said += [f"attempt {row.attempt}"] if row.attempt is not None and row.attempt > 1 else []
    said += [claim_text(row.claim)] if row.claim is not None else []
    said += ["to be cancelled"] if row.cancelling else []
    if row.progress is not None and row.progress.total:
        said.append(f"{row.progress.done}/{row.progress.total} {row.progress.step}".rstrip())
    return ", ".join(said)


def _end_state(row: Row) -> str:
    """How a request ended, how long it took, and that it is archived."""
    status = "unreadable" if row.status is None else str(row.status)
    said = [status if row.reason is None or row.reason == "ok" else f"{status} ({row.reason})"]
    said += [f"took {age_text(row.elapsed_s)}"] if row.elapsed_s is not None else []
    said += ["archived"] if row.archived else []
    return ", ".join(said)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _text(text: str | None) -> str | None:
    return None if text is None else clean_line(text)
