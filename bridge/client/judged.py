"""A believed result, held against its request, its evidence judged once more by the gate installed here.

A result that answers something else than was asked is rejected whatever its figures say
(`bridge.client.binding`).

A runner judges before it publishes, but nothing forces the writer of an unsigned result to have done so. Each
report is held against the result that carries it (nonce, workload, preset digest, engine source, times), as
the runner holds it against its job. What the runner itself did not pass stays as it is; a result that it
passed and this gate does not is a rejected one. A client of another version may judge differently, so the
message says whose gate it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bridge import presets
from bridge.bus.results import Believed
from bridge.bus.standing import Standing
from bridge.client.binding import Agreement, compare
from bridge.errors import EXIT_UNVERIFIED, EvidenceError, PresetError
from bridge.evidence.gate import Binding, Judgement
from bridge.evidence.gate import judge as gate
from bridge.evidence.promised import broken_promises
from bridge.evidence.verification import NAME as VERIFICATION
from bridge.evidence.verification import Verification, parse_verification
from bridge.presets import Preset
from bridge.protocol.manifest import parse_time
from bridge.protocol.result import EXIT_CODES, Reason, Result, Status, Verdict, Violation

_MAX_VIOLATIONS = 1000


@dataclass(frozen=True)
class Judged:
    """A believed result and what this client makes of it.

    Attributes:
        believed: The result.
        judgements: What the gate installed here says of each report, by path.
        verdict: The runner's, or `rejected` where it is of something else than was asked, or the runner
            passed what this gate does not.
        agreement: Where request, result and reports differ.
        allow_unsigned: Whether a pass counts that no trusted key signed.
        verification: What a runner that replayed another request's report found; None: it replayed none.
    """

    believed: Believed
    judgements: Mapping[str, Judgement]
    verdict: Verdict
    agreement: Agreement = field(default_factory=Agreement)
    allow_unsigned: bool = False
    verification: Verification | None = None

    @property
    def verified(self) -> bool:
        """Whether a key that is trusted here signed the result."""
        return self.believed.signature is Standing.TRUSTED

    @property
    def exit_code(self) -> int:
        """What a command that shows this ends with."""
        if self.verdict.status is Status.PASSED and not (self.verified or self.allow_unsigned):
            return EXIT_UNVERIFIED
        return EXIT_CODES[self.verdict.status]


def judge(
    believed: Believed, *, installed: Mapping[str, Preset] | None = None, allow_unsigned: bool = False
) -> Judged:
    """Hold a believed result against its request, and judge every report of it.

    Args:
        believed: The result.
        installed: The presets that are installed here, by name; None: the bundled ones.
        allow_unsigned: Whether a pass counts that no trusted key signed.

    Raises:
        PresetError: A bundled preset is broken.
    """
    result = believed.result
    preset = _installed(result.preset, installed)
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
    passed = result.verdict.status is Status.PASSED
    read = {path: each.report for path, each in judgements.items() if each.report is not None}
    verification, faults = _verification(believed, preset)
    replayed = verification if passed else None
    agreement = compare(believed.asked, result, read if passed else {}, preset, replayed)
    violations = [*_broken(result, judgements, preset), *faults] if passed else []
    verdict = result.verdict
    if agreement.differences:
        verdict = _unbound(agreement, violations)
    elif violations:
        verdict = _rejected(violations)
    return Judged(believed, judgements, verdict, agreement, allow_unsigned, verification)


def _verification(believed: Believed, preset: Preset | None) -> tuple[Verification | None, list[Violation]]:
    """The record of a result whose preset replays a report, and what is wrong with it."""
    result, data = believed.result, believed.files.get(VERIFICATION)
    if preset is None or not preset.replays:
        return None, []
    if data is None:
        message = f"the preset {result.preset} promises {VERIFICATION}, and the result does not hold it"
        return None, [Violation(code="NO_EVIDENCE", message=message)]
    try:
        record = parse_verification(data)
    except EvidenceError as error:
        return None, [Violation(code="SCHEMA", message=error.message, file=VERIFICATION)]
    if record.confirmed:
        return record, []
    message = f"the record refutes the report: {', '.join(record.refuted_rows[:5])}"
    return record, [Violation(code="CLAIM_NOT_MET", message=message, file=VERIFICATION)]


def _broken(result: Result, judgements: Mapping[str, Judgement], preset: Preset | None) -> list[Violation]:
    """Every rule that the reports of a passed result break, and what its preset promised and is not there."""
    broken = [
        violation.model_copy(update={"file": path})
        for path, judgement in judgements.items()
        for violation in judgement.violations
    ]
    promise = None if preset is None else preset.evidence
    if promise is None:
        return broken
    if not judgements:
        message = f"the preset {result.preset} promises a {promise.kind} report, and the result holds none"
        broken.append(Violation(code="NO_EVIDENCE", message=message))
    for path, judgement in judgements.items():
        lacking = broken_promises(promise, judgement)
        broken += [violation.model_copy(update={"file": path}) for violation in lacking]
    return broken


def _installed(name: str | None, installed: Mapping[str, Preset] | None) -> Preset | None:
    """The preset of that name that is installed here; None: there is none."""
    known = dict(presets.load_all() if installed is None else installed)
    try:
        return None if name is None else presets.find(name, known)
    except PresetError:
        return None


def _unbound(agreement: Agreement, violations: list[Violation]) -> Verdict:
    """Of a result that answers something else than was asked, with both values of each difference."""
    told = [
        Violation(code="BINDING", message=str(each)[:4000], file=each.file) for each in agreement.differences
    ]
    return Verdict(
        status=Status.REJECTED,
        reason=Reason.BINDING,
        message=f"the result does not match the request: {agreement.differences[0]}"[:4000],
        violations=tuple([*told, *violations][:_MAX_VIOLATIONS]),
    )


def _rejected(violations: list[Violation]) -> Verdict:
    codes = ", ".join(dict.fromkeys(violation.code for violation in violations))
    return Verdict(
        status=Status.REJECTED,
        reason=Reason.EVIDENCE,
        message=f"this client's gate rejects what the runner passed: {codes}",
        violations=tuple(violations[:_MAX_VIOLATIONS]),
    )
