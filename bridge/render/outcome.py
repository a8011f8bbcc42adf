"""A judged result as the JSON line of a command, and as lines for people.

Texts in it were written on the other side of the bus: each passes `clean_line` before it is shown, so that
none can look like a line of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bridge.bus.results import FetchedResult
from bridge.bus.untrusted import clean_line
from bridge.errors import ResultError
from bridge.result import RESULT_NAME, Phase, RunStatus, Status, parse_result

if TYPE_CHECKING:
    from bridge.client.judged import Judged

_MESSAGE_LIMIT = 4000  # what a result may hold


def outcome_json(judged: Judged) -> dict[str, Any]:
    """What `run --wait`, `wait`, `status` and `result` say of a finished request with ``--json``."""
    believed, verdict = judged.believed, judged.verdict
    result = believed.result
    return {
        "status": verdict.status,
        "runner_status": result.verdict.status,
        "reason": verdict.reason,
        "message": _line(verdict.message),
        "violations": [
            {"code": v.code, "message": _line(v.message), "file": None if v.file is None else _line(v.file)}
            for v in verdict.violations
        ],
        "exit_code": judged.exit_code,
        "nonce": result.nonce,
        "preset": None if result.preset is None else _line(result.preset),
        "params": result.params,
        "request_commit": result.request_commit,
        "workload_sha": result.workload_sha,
        "result_ref": believed.ref,
        "result_commit": believed.commit,
        "engine_source": result.engine_source,
        "runner": result.runner.name,
        "attempt": result.attempt,
        "signature": believed.signature,
        "signer": believed.signer,
        "authenticity": _line(believed.sentence),
        "phase_seconds": result.phase_seconds,
        "files": [file.model_dump() for file in result.files],
    }


def outcome_lines(judged: Judged) -> Iterator[str]:
    """The same for people: verdict, broken rules, who ran it, where it is. Each is one line."""
    believed, verdict = judged.believed, judged.verdict
    result, message = believed.result, _line(verdict.message)
    yield f"{verdict.status.upper()}  {_line(result.preset or '(no preset)')}  {result.nonce}" + (
        f": {message}" if message and verdict.status is not Status.PASSED else ""
    )
    for violation in verdict.violations:
        yield f"  {violation.code}: {_line(violation.message)}"
    total = sum(result.phase_seconds.values())
    attempt = "" if result.attempt == 1 else f", attempt {result.attempt}"
    yield f"  ran on   {_line(result.runner.name)} ({total:.1f} s{attempt}), {_line(believed.sentence)}"
    for fact, value in result.runner.machine.items():
        if fact.startswith("model:"):
            yield f"  model    {_line(fact.removeprefix('model:'))}: {_line(str(value))}"
    yield f"  request  {result.request_commit}"
    yield f"  result   {believed.commit} on {_line(believed.ref)}"
    for file in result.files:
        yield f"           {file.role:<8} {_line(file.path)} ({file.bytes} bytes)"


def status_line(status: RunStatus | None, phase: str, ahead: int, expected_s: float | None = None) -> str:
    """Where an unfinished request is, on one line; `expected_s` until it is likely to start, where known."""
    if status is None:
        waiting = f", {ahead} ahead" if ahead else ""
        return f"{phase}{waiting}" + (f", about {rough_text(expected_s)} to wait" if expected_s else "")
    progress = status.progress
    counted = ""
    if progress is not None and progress.total:
        counted = f" {progress.done}/{progress.total} {_line(progress.step)}".rstrip()
    held = "by" if phase == Phase.CLAIMED else "on"
    return f"{phase} {held} {_line(status.runner)}{counted} ({status.elapsed_s:.0f} s)"


def waiting_line(ahead: int | None, expected_s: float | None) -> str | None:
    """What a new request has before it; None: nothing is known.

    Args:
        ahead: Older requests that wait, too.
        expected_s: Seconds until it is likely to start.
    """
    if expected_s is None:
        return None if ahead is None else f"{ahead} ahead"
    starts = f"about {rough_text(expected_s)} to wait" if expected_s else "likely to start at once"
    return starts if ahead is None else f"{ahead} ahead, {starts}"


def rough_text(seconds: float) -> str:
    """An expected length of time in one unit: ``40 s``, ``12 min``, ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def done_line(found: FetchedResult | None) -> str:
    """That a result is there, and how long each phase took as it says; it has not been judged yet."""
    try:
        phases = parse_result(found.files.get(RESULT_NAME, b"")).phase_seconds if found else {}
    except ResultError:
        phases = {}
    took = ", ".join(f"{phase} {phases[phase]:.2f} s" for phase in Phase if phase in phases)
    return f"done ({took})" if took else "done"


def _line(text: str) -> str:
    return clean_line(text, limit=_MESSAGE_LIMIT)
