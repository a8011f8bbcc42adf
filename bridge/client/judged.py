"""A believed result's evidence, judged once more by the gate installed here.

A runner judges before it publishes, but nothing forces the writer of an unsigned result to have done so. Each
report is held against the result that carries it (nonce, workload, preset digest, engine source, times), as
the runner holds it against its job. What the runner itself did not pass stays as it is; a result that it
passed and this gate does not is a rejected one. A client of another version may judge differently, so the
message says whose gate it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge import presets
from bridge.bus.results import Believed
from bridge.errors import EvidenceError, PresetError
from bridge.evidence.gate import Binding, Judgement
from bridge.evidence.gate import judge as gate
from bridge.evidence.promised import broken_promises
from bridge.evidence.verification import NAME as VERIFICATION
from bridge.evidence.verification import Verification, parse_verification
from bridge.manifest import parse_time
from bridge.presets import Promise
from bridge.result import EXIT_CODES, Reason, Result, Status, Verdict, Violation

_MAX_VIOLATIONS = 1000


@dataclass(frozen=True)
class Judged:
    """A believed result and what this client makes of it.

    Attributes:
        believed: The result.
        judgements: What the gate installed here says of each report, by path.
        verdict: The runner's, or `rejected` where the runner passed what this gate does not.
        verification: What a runner that replayed another request's report found; None: it replayed none.
    """

    believed: Believed
    judgements: Mapping[str, Judgement]
    verdict: Verdict
    verification: Verification | None = None

    @property
    def exit_code(self) -> int:
        """What a command that shows this ends with."""
        return EXIT_CODES[self.verdict.status]


def judge(believed: Believed) -> Judged:
    """Judge every report of a believed result."""
    result = believed.result
    binding = Binding(
        nonce=result.nonce,
        workload_sha=result.workload_sha,
        preset_digest=result.preset_digest,
        engine_source=result.engine_source,
        started_at=parse_time(result.started_at),
        finished_at=parse_time(result.finished_at),
    )
    judgements = {
        file.path: gate(believed.files[file.path], binding=binding)
        for file in result.files
        if file.role == "evidence"
    }
    verification, faults = _verification(believed)
    violations = []
    if result.verdict.status is Status.PASSED:
        violations = [*_broken(result, judgements), *faults]
    verdict = _rejected(violations) if violations else result.verdict
    return Judged(believed, judgements, verdict, verification)


def _verification(believed: Believed) -> tuple[Verification | None, list[Violation]]:
    """The record of a result whose preset replays a report, and what is wrong with it."""
    result, data = believed.result, believed.files.get(VERIFICATION)
    if not _replays(result.preset):
        return None, []
    if data is None:
        message = f"the preset {result.preset} promises {VERIFICATION}, and the result does not hold it"
        return None, [Violation(code="NO_EVIDENCE", message=message)]
    try:
        record = parse_verification(data)
    except EvidenceError as error:
        return None, [Violation(code="SCHEMA", message=error.message, file=VERIFICATION)]
    faults = []
    if record.request is None or record.request.nonce != result.nonce:
        faults.append(("WRONG_REQUEST", "the record answers another request"))
    if record.runners is None or record.runners.verifier.id != result.runner.id:
        faults.append(("WRONG_REQUEST", "the record names another runner as the one that verified"))
    if not record.confirmed:
        refuted = ", ".join(record.refuted_rows[:5])
        faults.append(("CLAIM_NOT_MET", f"the record refutes the report: {refuted}"))
    return record, [Violation(code=code, message=message, file=VERIFICATION) for code, message in faults]


def _replays(preset: str | None) -> bool:
    """Whether a preset replays another request's report."""
    try:
        return preset is not None and presets.get(preset).replays
    except PresetError:
        return False


def _broken(result: Result, judgements: Mapping[str, Judgement]) -> list[Violation]:
    """Every rule that the reports of a passed result break, and what its preset promised and is not there."""
    broken = [
        violation.model_copy(update={"file": path})
        for path, judgement in judgements.items()
        for violation in judgement.violations
    ]
    promise = _promise(result.preset)
    if promise is None:
        return broken
    if not judgements:
        message = f"the preset {result.preset} promises a {promise.kind} report, and the result holds none"
        broken.append(Violation(code="NO_EVIDENCE", message=message))
    for path, judgement in judgements.items():
        lacking = broken_promises(promise, judgement)
        broken += [violation.model_copy(update={"file": path}) for violation in lacking]
    return broken


def _promise(preset: str | None) -> Promise | None:
    """The evidence a preset promises; None: none, or it is a preset that is not installed here."""
    try:
        return None if preset is None else presets.get(preset).evidence
    except PresetError:
        return None


def _rejected(violations: list[Violation]) -> Verdict:
    codes = ", ".join(dict.fromkeys(violation.code for violation in violations))
    return Verdict(
        status=Status.REJECTED,
        reason=Reason.EVIDENCE,
        message=f"this client's gate rejects what the runner passed: {codes}",
        violations=tuple(violations[:_MAX_VIOLATIONS]),
    )
