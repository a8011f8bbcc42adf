"""A judged result as the JSON line of a command, and as lines for people.

Texts in it were written on the other side of the bus: each passes `clean_line` before it is shown, so that
none can look like a line of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bridge.bus.results import FetchedResult
from bridge.errors import EXIT_UNVERIFIED, ResultError
from bridge.protocol.result import RESULT_NAME, Phase, RunStatus, Status, parse_result
from bridge.protocol.sanitize import clean_line
from bridge.signing.trust import Signature, TrustLevel

if TYPE_CHECKING:
    from bridge.client.fetch import Judged
    from bridge.evidence.verification import Verification
    from bridge.github.dispatch import RunView

# Keys of `outcome_json` below which the runner, or whoever wrote the result, has the word.
FROM_BUS = (
    *("binding", "files", "message", "params", "phase_seconds", "preset", "result_ref", "runner"),
    *("verification", "violations"),
)

_CLAIM_TEXTS = {
    TrustLevel.UNCHECKED: "signed, but not checked: ssh-keygen is not installed",
    TrustLevel.UNSIGNED: "unsigned: no trusted runner says so",
    TrustLevel.REVOKED: "signed by a revoked key: no trusted runner says so",
    TrustLevel.UNTRUSTED_KEY: "signed by another key: no trusted runner says so",
}
_MESSAGE_LIMIT = 4000  # what a result may hold
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_SOON_S = 3.0
_TURNS = " (requesters take turns)"


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
        "verified": judged.verified,
        "binding": {
            "differences": [each.to_json() for each in judged.agreement.differences],
            "not_compared": list(judged.agreement.not_compared),
        },
        "authenticity": _line(believed.sentence),
        "phase_seconds": result.phase_seconds,
        "files": [file.model_dump() for file in result.files],
        "verification": judged.verification and judged.verification.model_dump(mode="json", by_alias=True),
    }


def outcome_lines(judged: Judged) -> Iterator[str]:
    """The same for people: verdict, broken rules, who ran it, where it is. Each is one line."""
    believed, verdict = judged.believed, judged.verdict
    result, message = believed.result, _line(verdict.message)
    yield f"{verdict.status.upper()}  {_line(result.preset or '(no preset)')}  {result.nonce}" + (
        f": {message}" if message and verdict.status is not Status.PASSED else ""
    )
    if verdict.status is not Status.PASSED:
        yield f"  verdict  {verdict.status}/{verdict.reason}"
    for violation in verdict.violations:
        yield f"  {violation.code}: {_line(violation.message)}"
    total = sum(result.phase_seconds.values())
    attempt = "" if result.attempt == 1 else f", attempt {result.attempt}"
    yield f"  ran on   {_line(result.runner.name)} ({total:.1f} s{attempt}), {_line(believed.sentence)}"
    for fact, value in result.runner.machine.items():
        if fact.startswith("model:"):
            yield f"  model    {_line(fact.removeprefix('model:'))}: {_line(str(value))}"
    if judged.agreement.not_compared and verdict.status is Status.PASSED:
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
    yield f"{record.verdict.upper()}  report {record.report.sha256[:12]}{request}"
    yield (
        f"  replayed {drawn} drawn rows of {record.draw.rows} and {len(record.rows) - drawn} more,"
        f" --seed {record.draw.seed}"
    )
    for finding in record.findings:
        yield f"  {_line(finding.where)}: {finding.check}: {_line(finding.message)}"
    for note in record.notes:
        yield f"  note     {_line(note)}"


def status_line(
    status: RunStatus | None,
    phase: str,
    ahead: int | None,
    expected_s: float | None = None,
    silent_s: float | None = None,
    *,
    claim: Signature | None = None,
) -> str:
    """Where an unfinished request is, on one line.

    Args:
        status: Its runner's last heartbeat; None: there is none.
        phase: Where it is.
        ahead: Older requests that wait, too; None: not known.
        expected_s: Seconds until it is likely to start; None: not known.
        silent_s: Seconds without a sign from its runner, if more than its lease; None: they are not.
        claim: What the signature of the heartbeat is worth; None: not known.
    """
    if status is None:
        waiting = f", {older_text(ahead)}{_TURNS}" if ahead else ""
        return f"{phase}{waiting}" + (f", {start_text(expected_s)}" if expected_s else "")
    progress = status.progress
    counted = ""
    if progress is not None and progress.total:
        counted = f" {progress.done}/{progress.total} {_line(progress.step)}".rstrip()
    held = "by" if phase == Phase.CLAIMED else "on"
    silence = f", no sign for {age_text(silent_s)}" if silent_s is not None else ""
    signed = "" if claim is None else f", {claim_text(claim)}"
    return f"{phase} {held} {_line(status.runner)}{counted} ({status.elapsed_s:.0f} s){silence}{signed}"


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


def claim_text(claim: Signature) -> str:
    """Who says that a request runs."""
    if claim.trust is TrustLevel.TRUSTED:
        return f"signed by {_line(claim.signer or '')}"
    return _CLAIM_TEXTS[claim.trust]


def waiting_line(ahead: int | None, expected_s: float | None) -> str | None:
    """What a new request has before it; None: nothing is known.

    Args:
        ahead: Older requests that wait, too; None: not known.
        expected_s: Seconds until it is likely to start; None: not known.
    """
    said = [] if ahead is None else [older_text(ahead) + (_TURNS if ahead else "")]
    if expected_s:
        said.append(start_text(expected_s))
    return ", ".join(said) or None


def older_text(ahead: int) -> str:
    """How many older requests wait, too. Not all of them need to start first."""
    return {0: "no older one waits", 1: "1 older one waits"}.get(ahead, f"{ahead} older ones wait")


def start_text(expected_s: float) -> str:
    """When a request that waits is likely to start, in one unit."""
    if expected_s < _SOON_S:
        return "likely to start soon"
    if expected_s < 90:
        return f"about {expected_s:.0f} s to wait"
    about = f"{expected_s / _MINUTE:.0f} min" if expected_s < 90 * _MINUTE else f"{expected_s / _HOUR:.1f} h"
    return f"about {about} to wait"


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
