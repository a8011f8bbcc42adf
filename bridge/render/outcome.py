"""Requests and results as JSON, lines and tables. In lines, texts of others pass `clean_line`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from bridge.bus.results import NO_RUNNER_ID
from bridge.client.fetch import Judged
from bridge.client.history import Row, has_expired, heartbeat_age_s, requested_at, started_at
from bridge.client.runners import eta_s, expected_wait_s
from bridge.client.watch import Update
from bridge.github.api import RunView
from bridge.presets import Preset, measures_commit
from bridge.protocol.manifest import Manifest, parse_time
from bridge.protocol.result import Phase, Progress, Reason, Status
from bridge.protocol.sanitize import clean_line
from bridge.render import terminal
from bridge.signing.trust import Signature, TrustLevel
from evidence_format.paired import Paired, PairedSummary
from evidence_format.verification import Verification

# Keys of `outcome_json` and `open_json` whose texts others wrote: runner, requester, author of the result.
FROM_BUS = (
    *("binding", "evidence", "files", "heartbeat", "message", "on", "paired", "params", "phase_seconds"),
    *("preset", "requested_by", "result_ref", "runner", "verification", "violations"),
)
TRUST_TEXTS = {
    TrustLevel.TRUSTED: "trusted",
    TrustLevel.REVOKED: "its key was revoked here",
    TrustLevel.UNTRUSTED_KEY: "its key is not trusted here",
    TrustLevel.UNSIGNED: "unsigned",
    TrustLevel.UNCHECKED: "signed, but not checked: ssh-keygen is not installed",
}
_METRICS = {"command_s": "seconds of the command", "decode_s_per_token": "seconds a decoded token"}
_line = functools.partial(clean_line, limit=4000)  # what a result may hold
_RESULT_FIELDS = {
    *("nonce", "preset", "params", "request_commit", "workload_sha", "engine_source"),
    *("attempt", "phase_seconds", "files", "started_at", "finished_at"),
}
# Characters of a requester's name in a list, and the least of a terminal that shows lists as tables.
_NAME, _TABLE_WIDTH = 40, 110
# How the engine ends the step of its progress: tokens per second so far.
_RATE = re.compile(r"(?:^|.* )([0-9]{1,9}(?:\.[0-9]{1,3})?) tok/s")


def bare_table() -> Table:
    """A table without columns: a line under the headings, two spaces between columns, nothing around."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def plain(*cells: str) -> list[str]:
    """Cells without terminal escapes, and with rich's markup escaped."""
    return [escape(clean_line(cell)) for cell in cells]


def outcome_json(judged: Judged) -> dict[str, Any]:
    """What `run --wait`, `wait`, `status` and `result` say of a finished request with ``--json``."""
    believed, verdict, record = judged.believed, judged.verdict, judged.verification
    result = believed.result
    asked = believed.expected
    return result.model_dump(mode="json", include=_RESULT_FIELDS) | {
        "terminal": True,
        "requested_by": asked and asked.requested_by and _line(asked.requested_by),
        "requested_at": requested_at(result.nonce),
        "eta_s": None,
        "cancelling": False,
        "expired": verdict.reason is Reason.EXPIRED,
        **verdict.model_dump(mode="json"),
        "runner_status": result.verdict.status,
        "exit_code": judged.exit_code,
        "commit_measured": judged.commit_measured,
        "result_ref": believed.ref,
        "result_commit": believed.commit,
        "runner": result.runner.name,
        "evidence": judged.evidence,
        "signature": believed.signature,
        "signer": believed.signer,
        "verified": judged.verified,
        "binding": {
            "differences": [each.to_json() for each in judged.agreement.differences],
            "not_compared": list(judged.agreement.not_compared),
        },
        "authenticity": _line(believed.sentence),
        "verification": record and record.model_dump(mode="json", by_alias=True),
        "paired": None if judged.paired is None else paired_json(judged.paired),
    }


def open_json(
    nonce: str,
    preset: str | None,
    update: Update,
    now: datetime,
    *,
    asked: Manifest | None = None,
    typical_s: float | None = None,
    measured: bool | None = None,
) -> dict[str, Any]:
    """What commands say of an unfinished request with ``--json``; null: it does not apply, or is not known.

    `asked`: what it asks, where that was read; `typical_s`: how long its preset usually takes; `measured`:
    whether its result will say anything of the commit.
    """
    beat, ahead = update.status, update.ahead
    elapsed_s, progress = (beat.elapsed_s, beat.progress) if beat else (None, None)
    is_queued = update.phase is Phase.QUEUED
    return {
        "status": update.phase,
        "terminal": False,
        "nonce": nonce,
        "preset": preset,
        "commit_measured": measured,
        "requested_by": asked and clean_line(asked.requested_by),
        "requested_at": requested_at(nonce),
        "expired": has_expired(asked, not is_queued, now),
        "cancelling": update.cancelling,
        "on": asked and asked.on,
        "ahead": ahead,
        "expected_s": expected_wait_s(typical_s, ahead) if is_queued else None,
        "eta_s": eta_s(typical_s, ahead=ahead, elapsed_s=elapsed_s, progress=progress),
        "runner": beat and beat.runner,
        "attempt": beat and beat.attempt,
        "started_at": beat and started_at(beat),
        "tokens_per_s": tokens_per_s(progress),
        "beat_age_s": beat and round(heartbeat_age_s(beat, now), 1),
        "heartbeat": beat and beat.model_dump(mode="json"),
        "claim": update.claim and update.claim.to_json(),
    }


def not_measured(preset: str, verb: str = "was") -> str:
    """What to know of a result whose preset reads nothing of the commit."""
    why = f"{_line(preset)} runs what its machine has installed and reads nothing of it"
    return f"the commit {verb} not measured: {why}"


def tokens_per_s(progress: Progress | None) -> float | None:
    """The rate at the end of what the engine says of its progress; None: it names none."""
    match = None if progress is None else _RATE.fullmatch(progress.step)
    return None if match is None else float(match[1])


def outcome_lines(judged: Judged) -> Iterator[str]:
    """The same for people: verdict, broken rules, who ran it, where it is. Each is one line."""
    believed, verdict = judged.believed, judged.verdict
    result, has_passed = believed.result, verdict.status is Status.PASSED
    message = "" if has_passed or not verdict.message else f": {_line(verdict.message)}"
    yield f"{verdict.status.upper()}  {_line(result.preset or '(no preset)')}  {result.nonce}{message}"
    if not has_passed:
        yield f"  verdict  {verdict.status}/{verdict.reason}"
    for violation in verdict.violations:
        yield f"  {violation.code}: {_line(violation.message)}"
    total = sum(result.phase_seconds.values())
    attempt = "" if result.attempt == 1 else f", attempt {result.attempt}"
    if result.runner.id == NO_RUNNER_ID:
        yield f"  written by {_line(result.runner.name)}, by no runner; {_line(believed.sentence)}"
    else:
        yield f"  ran on   {_line(result.runner.name)} ({total:.1f} s{attempt}), {_line(believed.sentence)}"
    for fact, value in result.runner.machine.items():
        if fact.startswith("model:"):
            yield f"  model    {_line(fact.removeprefix('model:'))}: {_line(str(value))}"
    if judged.agreement.not_compared and has_passed:
        yield f"  binding  not compared: {_line('; '.join(judged.agreement.not_compared))}"
    if judged.commit_measured is False:
        yield f"  commit   {not_measured(result.preset or '')}"
    yield f"  request  {result.request_commit}"
    yield f"  result   {believed.commit} on {_line(believed.ref)}"
    if judged.paired is not None:
        yield from (f"  {line}" for line in paired_lines(judged.paired))
    if judged.verification is not None:
        yield from (f"  {line}" for line in verification_lines(judged.verification))
    for file in result.files:
        yield f"           {file.role:<8} {_line(file.path)} ({file.bytes} bytes)"


def paired_json(record: Paired) -> dict[str, Any]:
    """What a paired run found, without its runs."""
    return {
        "metric": record.metric,
        "workload": record.workload.model_dump(),
        "against": record.against.model_dump(),
        **record.summary.model_dump(mode="json"),
    }


def paired_lines(record: Paired) -> Iterator[str]:
    """The same for people. Each is one line."""
    found, other = record.summary, record.against
    differing = {
        name: value for name, value in other.params.items() if record.workload.params.get(name) != value
    }
    sides = [] if other.workload_sha == record.workload.workload_sha else [other.workload_sha[:12]]
    sides += [f"{name}={value}" for name, value in differing.items()]
    yield f"{found.verdict.upper()}  against {_line(' '.join(sides) or 'the same commit and parameters')}"
    if found.ratio is not None:
        within = "" if found.interval is None else f", {found.confidence:.0%} interval {_interval(found)}"
        yield f"  time ratio {found.ratio:.3f}{within} ({_METRICS[record.metric]}; above 1 is slower)"
    if found.smallest_effect is None:
        yield f"  {found.blocks} blocks of A B B A, too few to tell: allow more time with --timeout"
    else:
        yield f"  smallest effect it could see {found.smallest_effect:.1%}, {found.blocks} blocks of A B B A"


def _interval(found: PairedSummary) -> str:
    low, high = found.interval or (0.0, 0.0)
    return f"{low:.3f} to {high:.3f}"


def verification_lines(record: Verification) -> Iterator[str]:
    """What a replay of a report found, for people. Each is one line."""
    drawn = sum(row.drawn for row in record.rows)
    request = "" if record.report.nonce is None else f" of request {record.report.nonce}"
    replayed = f"replayed {drawn} drawn rows of {record.draw.rows} and {len(record.rows) - drawn} more"
    yield f"{record.verdict.upper()}  report {record.report.sha256[:12]}{request}"
    yield f"  {replayed}, --seed {record.draw.seed}"
    for finding in record.findings:
        yield f"  {_line(finding.where)}: {finding.check}: {_line(finding.message)}"
    for note in record.notes:
        yield f"  note     {_line(note)}"


def status_line(update: Update, silent_s: float | None = None, *, elapsed: bool = True) -> str:
    """Where an unfinished request is, on one line, by its runner's last heartbeat.

    `silent_s`: seconds without a sign from that runner, where they are more than its lease; without `elapsed`
    the line stays the same while only time passes.
    """
    status, phase = update.status, update.phase
    if update.notice:
        return f"{phase} (no answer from the remote: {_line(update.notice)})"
    if status is None or phase is Phase.DONE:
        return _joined(
            phase, waiting_text(update.ahead, None), "to be cancelled" if update.cancelling else ""
        )
    held = "by" if phase is Phase.CLAIMED else "on"
    where = f"{phase} {held} {_line(status.runner)} {_progress_text(status.progress)}".rstrip()
    silence = f"no heartbeat for {age_text(silent_s)}" if silent_s else ""
    cancelling = "to be cancelled" if update.cancelling else ""
    since = f" ({status.elapsed_s:.0f} s)" if elapsed else ""
    return _joined(where + since, silence, _claim_text(update.claim), cancelling)


def waiting_text(ahead: int | None, expected_s: float | None) -> str:
    """How many older requests wait, too (requesters take turns), and how long this one is likely to wait."""
    older = "1 request ahead" if ahead == 1 else f"{ahead} requests ahead" if ahead else ""
    return _joined(older, f"about {age_text(expected_s)} to wait" if expected_s else "")


def request_table(
    rows: Sequence[Row],
    now: float,
    installed: Mapping[str, Preset],
    runs: Mapping[str, RunView] | None = None,
) -> list[str | Table]:
    """Requests that wait and run, or that ran, with their workflow runs by nonce, as a table.

    A narrow terminal gets three lines a request instead. `now` is in seconds since the epoch, `installed` the
    presets that this client knows.
    """
    found = []
    for row in rows:
        run = (runs or {}).get(row.nonce)
        unmeasured = row.phase is Phase.DONE and measures_commit(row.preset, installed) is False
        state = _joined(
            _state(row, now), "commit not measured" if unmeasured else "", run.sentence if run else ""
        )
        machine = row.runner or (run and run.machine) or ""
        by = clean_line(row.requested_by or "", limit=_NAME)
        found.append((row.nonce, row.preset or "?", by, minute_text(row.requested_at), machine, state))
    if terminal.width() < _TABLE_WIDTH:
        return [line for cells in found for line in _narrow([*map(clean_line, cells)])]
    table = bare_table()
    for heading in ("request", "preset", "by", "asked", "runner", "state"):
        table.add_column(heading, no_wrap=heading in {"request", "asked"}, overflow="fold")
    for cells in found:
        table.add_row(*plain(*cells))
    return [table]


def _narrow(cells: Sequence[str]) -> Iterator[str]:
    nonce, preset, by, asked, runner, state = cells
    yield f"{nonce}  {preset}"
    yield f"  {state}"
    yield "  " + " ".join(
        f"{word} {value}" for word, value in (("by", by), ("at", asked), ("on", runner)) if value
    )


def minute_text(moment: str | None) -> str:
    """A moment of the protocol as ``2026-03-01 12:00Z``; empty when unknown."""
    return "" if moment is None else f"{moment[:10]} {moment[11:16]}Z"


def row_json(row: Row, now: float, installed: Mapping[str, Preset]) -> dict[str, Any]:
    """One request of a list as JSON; keys that do not apply are null."""
    values = {name: value for name, value in vars(row).items() if name not in {"phase", "place", "silent_s"}}
    values |= {
        "handle": row.nonce,
        "terminal": row.phase is Phase.DONE,
        "commit_measured": measures_commit(row.preset, installed),
        "state": "finished" if row.phase is Phase.DONE else row.phase.value,
        "tokens_per_s": tokens_per_s(row.progress),
        "claim": row.claim and row.claim.to_json(),
        "progress": row.progress and row.progress.model_dump(),
        "age_s": _age_s(row, now),
    }
    return {name: round(value, 1) if isinstance(value, float) else value for name, value in values.items()}


def _state(row: Row, now: float) -> str:
    """Where a request is and how far, or how it ended, and what else there is to know about it."""
    took = age_text(row.elapsed_s)
    if row.phase is Phase.DONE:
        reason = "" if row.reason in (None, "ok") else f" ({row.reason})"
        ended = "unreadable" if row.status is None else f"{row.status}{reason}"
        return _joined(ended, took and f"took {took}", "archived" if row.archived else "")
    waits = age_text(_age_s(row, now)) if row.ahead is not None else ""
    return _joined(
        f"{row.phase} for {took or waits}" if took or waits else str(row.phase),
        "expired" if row.expired else "",
        f"no heartbeat for {age_text(row.silent_s)}" if row.silent_s else "",
        waiting_text(row.ahead, row.expected_s),
        f"attempt {row.attempt}" if (row.attempt or 1) > 1 else "",
        _claim_text(row.claim),
        "to be cancelled" if row.cancelling else "",
        _progress_text(row.progress),
    )


def _age_s(row: Row, now: float) -> float | None:
    """Seconds since a request was made, by its nonce; None: that names no moment."""
    return None if row.requested_at is None else now - parse_time(row.requested_at).timestamp()


def age_text(seconds: float | None) -> str:
    """A length of time as ``1 day, 1:00:00`` or ``0:05:02``; empty when unknown."""
    return "" if seconds is None else str(timedelta(seconds=max(0, int(seconds))))


def _claim_text(claim: Signature | None) -> str:
    """Who says that a request runs."""
    if claim is None:
        return ""
    is_trusted = claim.trust is TrustLevel.TRUSTED
    return f"signed by {_line(claim.signer or '')}" if is_trusted else TRUST_TEXTS[claim.trust]


def _progress_text(progress: Progress | None) -> str:
    if progress is None or not progress.total:
        return ""
    return f"{progress.done}/{progress.total} {_line(progress.step)}".rstrip()


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))
