"""Requests and judged results as JSON, as lines for people and as rows of a table. Nothing here prints.

Texts in them were written on the other side of the bus: each passes `clean_line` before it is shown, so that
none can look like a line of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bridge.bus.results import FetchedResult
from bridge.client.fetch import Judged
from bridge.client.history import Row
from bridge.errors import EXIT_UNVERIFIED, ResultError
from bridge.evidence.verification import Verification
from bridge.github.dispatch import RunView
from bridge.protocol.manifest import parse_time
from bridge.protocol.result import RESULT_NAME, Phase, Progress, RunStatus, Status, parse_result
from bridge.protocol.sanitize import clean_line
from bridge.render.terminal import bare_table, console, plain
from bridge.signing.trust import Signature, TrustLevel

if TYPE_CHECKING:
    from rich.table import Table

# Keys of `outcome_json` whose texts come from the runner, or from the author of the result.
FROM_BUS = (
    *("binding", "files", "message", "params", "phase_seconds", "preset", "result_ref", "runner"),
    *("verification", "violations"),
)
_RESULT_FIELDS = {
    *("nonce", "params", "request_commit", "workload_sha", "engine_source"),
    *("attempt", "phase_seconds", "files"),
}

_CLAIM_TEXTS = {
    TrustLevel.UNCHECKED: "signed, but not checked: ssh-keygen is not installed",
    TrustLevel.UNSIGNED: "unsigned: no trusted runner says so",
    TrustLevel.REVOKED: "signed by a revoked key: no trusted runner says so",
    TrustLevel.UNTRUSTED_KEY: "signed by another key: no trusted runner says so",
}
_MESSAGE_LIMIT = 4000  # what a result may hold
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_SOON_S = 3.0


def outcome_json(judged: Judged) -> dict[str, Any]:
    """What `run --wait`, `wait`, `status` and `result` say of a finished request with ``--json``."""
    believed, verdict = judged.believed, judged.verdict
    result = believed.result
    return result.model_dump(mode="json", include=_RESULT_FIELDS) | {
        "status": verdict.status,
        "runner_status": result.verdict.status,
        "reason": verdict.reason,
        "message": _line(verdict.message),
        "violations": [
            {"code": each.code, "message": _line(each.message), "file": _line_or_none(each.file)}
            for each in verdict.violations
        ],
        "exit_code": judged.exit_code,
        "preset": _line_or_none(result.preset),
        "result_ref": believed.ref,
        "result_commit": believed.commit,
        "runner": result.runner.name,
        "signature": believed.signature,
        "signer": believed.signer,
        "verified": judged.verified,
        "binding": {
            "differences": [each.to_json() for each in judged.agreement.differences],
            "not_compared": list(judged.agreement.not_compared),
        },
        "authenticity": _line(believed.sentence),
        "verification": judged.verification and judged.verification.model_dump(mode="json", by_alias=True),
    }


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
    yield f"  ran on   {_line(result.runner.name)} ({total:.1f} s{attempt}), {_line(believed.sentence)}"
    for fact, value in result.runner.machine.items():
        if fact.startswith("model:"):
            yield f"  model    {_line(fact.removeprefix('model:'))}: {_line(str(value))}"
    if judged.agreement.not_compared and has_passed:
        yield f"  binding  not compared: {_line('; '.join(judged.agreement.not_compared))}"
    yield f"  request  {result.request_commit}"
    yield f"  result   {believed.commit} on {_line(believed.ref)}"
    if judged.verification is not None:
        yield from (f"  {line}" for line in verification_lines(judged.verification))
    for file in result.files:
        yield f"           {file.role:<8} {_line(file.path)} ({file.bytes} bytes)"


def unverified_lines(judged: Judged) -> Iterator[str]:
    """Why a command ends with the code 7, and what to do; nothing where it does not."""
    if judged.exit_code == EXIT_UNVERIFIED:
        known = _line(judged.believed.sentence)
        yield f"passed, but no trusted key signed it: {known} (exit code {EXIT_UNVERIFIED})"
        yield "  pin the runner's key: kakeya_mac runners trust --first; or accept it: --allow-unsigned"


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


def status_line(
    status: RunStatus | None,
    phase: str,
    ahead: int | None,
    *,
    silent_s: float | None = None,
    claim: Signature | None = None,
) -> str:
    """Where an unfinished request is, on one line, by its runner's last heartbeat (None: there is none).

    `silent_s`: seconds without a sign from that runner, where they are more than its lease.
    """
    if status is None:
        return ", ".join(filter(None, (phase, waiting_line(ahead or None, None))))
    held = "by" if phase == Phase.CLAIMED else "on"
    where = f"{phase} {held} {_line(status.runner)} {_progress_text(status.progress)}".rstrip()
    said = [f"{where} ({status.elapsed_s:.0f} s)"]
    said += [f"no sign for {age_text(silent_s)}"] if silent_s is not None else []
    return ", ".join([*said, *([claim_text(claim)] if claim is not None else [])])


def run_text(run: RunView) -> str:
    """Where a request's workflow run is, on one line, with its page."""
    if run.is_evicted:
        said = "evicted before a machine had it"
    elif run.is_done:
        said = f"ended: {run.conclusion or 'unknown'}"
    else:
        where = f" on {run.machine}" if run.machine is not None else ""
        doing = " / ".join(part for part in (run.job, run.step) if part)
        said = f"{run.state.replace('_', ' ')}{where}{', ' if doing else ''}{doing}"
    again = "" if run.attempt == 1 else f", attempt {run.attempt}"
    return f"run {said}{again}: {run.url}"


def waiting_line(ahead: int | None, expected_s: float | None) -> str:
    """How many older requests wait, too, and when this one is likely to start; None: not known."""
    turns = " (requesters take turns)" if ahead else ""
    said = [] if ahead is None else [_older_text(ahead) + turns]
    return ", ".join([*said, *([_start_text(expected_s)] if expected_s else [])])


def done_line(found: FetchedResult | None) -> str:
    """That a result is there, and how long each phase took as it says; it has not been judged yet."""
    try:
        phases = parse_result(found.files.get(RESULT_NAME, b"")).phase_seconds if found else {}
    except ResultError:
        phases = {}
    took = ", ".join(f"{phase} {phases[phase]:.2f} s" for phase in Phase if phase in phases)
    return f"done ({took})" if took else "done"


def request_table(
    rows: Sequence[Row], now: float, width: int | None = None, runs: Mapping[str, RunView] | None = None
) -> Table:
    """Requests that wait and run, or that ran, one row each, with their workflow runs by nonce.

    `now` is in seconds since the epoch; `width` in characters, None: those of the terminal.
    """
    longest_name = 20 if (width or console().width) >= 100 else 11
    table = bare_table()
    for heading in ("request", "preset", "asked", "runner"):
        is_name = heading in {"preset", "runner"}
        most = longest_name if is_name else None
        table.add_column(heading, no_wrap=True, overflow="ellipsis", max_width=most)
    table.add_column("state", overflow="fold")
    for row in rows:
        run = (runs or {}).get(row.nonce)
        state = _state(row) if run is None else f"{_state(row)}, {run_text(run)}"
        machine = row.runner or (run and run.machine) or ""
        table.add_row(*plain(row.nonce, row.preset or "?", age_text(_age_s(row, now)), machine, state))
    return table


def row_json(row: Row, now: float) -> dict[str, Any]:
    """One request of a list as JSON; keys that do not apply are null."""
    progress = row.progress and row.progress.model_dump() | {"step": _line(row.progress.step)}
    return {
        **{name: value for name, value in vars(row).items() if name not in {"phase", "silent_s"}},
        "preset": _line_or_none(row.preset),
        "state": "finished" if row.phase is Phase.DONE else row.phase.value,
        "runner": _line_or_none(row.runner),
        "claim": None if row.claim is None else row.claim.to_json(),
        "progress": progress,
        "age_s": _rounded(_age_s(row, now)),
        "expected_s": _rounded(row.expected_s),
        "elapsed_s": _rounded(row.elapsed_s),
        "beat_age_s": _rounded(row.beat_age_s),
    }


def _state(row: Row) -> str:
    """Where a request is and how far, or how it ended, and what else there is to know about it."""
    if row.phase is Phase.DONE:
        status = "unreadable" if row.status is None else str(row.status)
        said = [status if row.reason is None or row.reason == "ok" else f"{status} ({row.reason})"]
        said += [f"took {age_text(row.elapsed_s)}"] if row.elapsed_s is not None else []
        return ", ".join([*said, *(["archived"] if row.archived else [])])
    said = [f"{row.phase} for {age_text(row.elapsed_s)}" if row.elapsed_s else str(row.phase)]
    said += [f"no sign for {age_text(row.silent_s)}"] if row.silent_s is not None else []
    said += [_older_text(row.ahead)] if row.ahead else []
    said += [_start_text(row.expected_s)] if row.expected_s else []
    said += [f"attempt {row.attempt}"] if row.attempt is not None and row.attempt > 1 else []
    said += [claim_text(row.claim)] if row.claim is not None else []
    said += ["to be cancelled"] if row.cancelling else []
    return ", ".join(filter(None, [*said, _progress_text(row.progress)]))


def _age_s(row: Row, now: float) -> float | None:
    """Seconds since a request was made, by its nonce; None: that names no moment."""
    return None if row.requested_at is None else now - parse_time(row.requested_at).timestamp()


def age_text(seconds: float | None) -> str:
    """A length of time in its largest two units: ``3d 4h``, ``5m 02s``, ``7s``; empty when unknown."""
    if seconds is None:
        return ""
    whole = max(0, int(seconds))
    if whole >= _DAY:
        return f"{whole // _DAY}d {whole % _DAY // _HOUR}h"
    if whole >= _HOUR:
        return f"{whole // _HOUR}h {whole % _HOUR // _MINUTE:02}m"
    if whole >= _MINUTE:
        return f"{whole // _MINUTE}m {whole % _MINUTE:02}s"
    return f"{whole}s"


def claim_text(claim: Signature) -> str:
    """Who says that a request runs."""
    if claim.trust is TrustLevel.TRUSTED:
        return f"signed by {_line(claim.signer or '')}"
    return _CLAIM_TEXTS[claim.trust]


def _progress_text(progress: Progress | None) -> str:
    if progress is None or not progress.total:
        return ""
    return f"{progress.done}/{progress.total} {_line(progress.step)}".rstrip()


def _older_text(ahead: int) -> str:
    """How many older requests wait, too. Not all of them need to start first."""
    return {0: "no older one waits", 1: "1 older one waits"}.get(ahead, f"{ahead} older ones wait")


def _start_text(expected_s: float) -> str:
    """When a request that waits is likely to start, in one unit."""
    if expected_s < _SOON_S:
        return "likely to start soon"
    if expected_s < 90:
        return f"about {expected_s:.0f} s to wait"
    about = f"{expected_s / _MINUTE:.0f} min" if expected_s < 90 * _MINUTE else f"{expected_s / _HOUR:.1f} h"
    return f"about {about} to wait"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _line(text: str) -> str:
    return clean_line(text, limit=_MESSAGE_LIMIT)


def _line_or_none(text: str | None) -> str | None:
    return None if text is None else _line(text)
