"""A believed result as the JSON line of a command, and as lines for people.

Texts in it were written on the other side of the bus: each passes `clean` before it is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridge.bus.results import Believed, FetchedResult
from bridge.bus.untrusted import clean
from bridge.errors import ResultError
from bridge.result import EXIT_CODES, RESULT_NAME, Phase, RunStatus, Status, parse_result


def outcome_json(believed: Believed) -> dict[str, Any]:
    """What `run --wait`, `wait`, `status` and `result` say of a finished request with ``--json``."""
    result, verdict = believed.result, believed.result.verdict
    return {
        "status": verdict.status,
        "reason": verdict.reason,
        "message": clean(verdict.message),
        "violations": [
            {"code": v.code, "message": clean(v.message), "file": v.file} for v in verdict.violations
        ],
        "exit_code": EXIT_CODES[verdict.status],
        "nonce": result.nonce,
        "preset": result.preset,
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
        "authenticity": believed.sentence,
        "phase_seconds": result.phase_seconds,
        "files": [file.model_dump() for file in result.files],
    }


def outcome_lines(believed: Believed) -> Iterator[str]:
    """The same for people: verdict, broken rules, who ran it, where it is."""
    result, verdict = believed.result, believed.result.verdict
    message = clean(verdict.message)
    yield f"{verdict.status.upper()}  {result.preset or '(no preset)'}  {result.nonce}" + (
        f": {message}" if message and verdict.status is not Status.PASSED else ""
    )
    for violation in verdict.violations:
        yield f"  {violation.code}: {clean(violation.message)}"
    total = sum(result.phase_seconds.values())
    attempt = "" if result.attempt == 1 else f", attempt {result.attempt}"
    yield f"  ran on   {result.runner.name} ({total:.1f} s{attempt}), {clean(believed.sentence)}"
    yield f"  request  {result.request_commit}"
    yield f"  result   {believed.commit} on {believed.ref}"
    for file in result.files:
        yield f"           {file.role:<8} {file.path} ({file.bytes} bytes)"


def status_line(status: RunStatus | None, phase: str, ahead: int) -> str:
    """Where an unfinished request is, on one line."""
    if status is None:
        waiting = f", {ahead} ahead" if ahead else ""
        return f"{phase}{waiting}"
    progress = status.progress
    counted = ""
    if progress is not None and progress.total:
        counted = f" {progress.done}/{progress.total} {clean(progress.step)}".rstrip()
    held = "by" if phase == Phase.CLAIMED else "on"
    return f"{phase} {held} {clean(status.runner)}{counted} ({status.elapsed_s:.0f} s)"


def done_line(found: FetchedResult | None) -> str:
    """That a result is there, and how long each phase took as it says; it has not been judged yet."""
    try:
        phases = parse_result(found.files.get(RESULT_NAME, b"")).phase_seconds if found else {}
    except ResultError:
        phases = {}
    took = ", ".join(f"{phase} {phases[phase]:.2f} s" for phase in Phase if phase in phases)
    return f"done ({took})" if took else "done"
