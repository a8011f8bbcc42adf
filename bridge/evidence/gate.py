"""The gate: a pure function from a report's bytes to a judgement. No warnings, no modes, no clock.

It cannot tell whether a program that was free to write any rows wrote true ones: see
`request.engine_source` and the signature of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from bridge.errors import EvidenceError
from bridge.evidence import paired
from bridge.presets import Promise
from bridge.protocol.result import Violation
from evidence_format.figures import Binding, Case
from evidence_format.model import WEIGHTLESS, ParityComparison, Report, Summary, System
from evidence_format.paired import Paired, is_paired, parse_paired
from evidence_format.parse import MAX_BYTES, Unreadable, is_report, parse
from evidence_format.policies import policy_of
from evidence_format.rules import RULES
from evidence_format.rules.claims import ClaimFigure, claim_figures
from evidence_format.text import several, shown

__all__ = ["Binding", "Judgement", "judge", "judge_file"]

MESSAGES_PER_RULE = 10
MESSAGE_CHARACTERS = 2000


@dataclass(frozen=True)
class Judgement:
    """What the gate says of one report; one that could not be read has violations alone."""

    accepted: bool
    kind: str | None
    violations: tuple[Violation, ...]
    claims: tuple[ClaimFigure, ...] = ()
    figures: Summary | None = None  # recomputed from the rows
    report: Report | None = None
    paired: Paired | None = None  # of a paired run, which has no report

    def to_document(self) -> dict[str, object]:
        """The judgement as plain JSON values, without the report's rows."""
        figures = self.figures if self.paired is None else self.paired.summary
        return {
            "accepted": self.accepted,
            "kind": self.kind,
            "violations": [each.model_dump(include={"code", "message"}) for each in self.violations],
            "claims": [asdict(claim) for claim in self.claims],
            "figures": figures and figures.model_dump(mode="json", exclude_unset=True),
        }


def judge(report: bytes, *, binding: Binding | None = None) -> Judgement:
    """Judge a report, by itself or as that of a request. Hostile bytes give violations, no exception."""
    try:
        if is_paired(report):
            return _judge_paired(parse_paired(report), binding)
        case = Case(parse(report), binding)
    except Unreadable as error:
        return Judgement(accepted=False, kind=None, violations=tuple(_told(*fault) for fault in error.faults))
    broken = _ask({code: rule.check(case) for code, rule in RULES.items()})
    claims = tuple(claim_figures(case))
    return Judgement(not broken, case.kind, broken, claims, case.figures, case.report)


def _judge_paired(record: Paired, binding: Binding | None) -> Judgement:
    broken = _ask({code: rule(record, binding) for code, rule in paired.RULES.items()})
    return Judgement(not broken, "paired", broken, paired=record)


def _ask(found: Mapping[str, Iterator[str]]) -> tuple[Violation, ...]:
    """The messages of rules, by code, as violations; of each rule so many."""
    broken: list[Violation] = []
    for code, each in found.items():
        messages = list(islice(each, MESSAGES_PER_RULE + 1))
        if len(messages) > MESSAGES_PER_RULE:
            messages[-1] = "... and more of the same"
        broken += [_told(code, message) for message in messages]
    return tuple(broken)


def _told(code: str, message: str) -> Violation:
    return Violation(code=code, message=message[:MESSAGE_CHARACTERS])


def find_reports(folder: Path) -> tuple[list[Path], list[Path]]:
    """The reports among the JSON files of a folder and its subfolders, and the other JSON files, sorted."""
    found = {
        path: is_report(data := _read(path)) or is_paired(data)
        for path in sorted(folder.rglob("*.json"))
        if path.is_file()
    }
    return [path for path in found if found[path]], [path for path in found if not found[path]]


def _is_evidence(data: bytes) -> bool:
    return is_report(data) or is_paired(data)


def judge_file(path: Path, *, binding: Binding | None = None) -> Judgement:
    """Judge a report file; EvidenceError where it cannot be read."""
    return judge(_read(path), binding=binding)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)  # one byte too many is enough to refuse it
    except OSError as error:
        message = f"cannot read the report {str(path)!r}: {error.strerror or error}"
        raise EvidenceError(message, "Give the path of an evidence report.") from None


def broken_promises(promise: Promise, judgement: Judgement) -> Iterator[Violation]:
    """Each way in which a judged report is not what its preset promises; none where it cannot be read."""
    report = judgement.report
    if report is None:
        return
    if report.kind != promise.kind:
        message = f"the preset promises a {promise.kind} report, this is a {report.kind} report"
        yield Violation(code="WRONG_KIND", message=message)
        return
    problems = (*_claim_problems(promise, report), *_component_problems(promise, report))
    for code, problem in (*problems, *_parity_problems(promise, report.parity)):
        yield Violation(code=code, message=f"the preset promises {problem}")


def _claim_problems(promise: Promise, report: Report) -> Iterator[tuple[str, str]]:
    for name in promise.claims:
        of = [report.arm(claim.arm) if claim.arm else None for claim in report.claims if claim.name == name]
        if not of:
            made = several(sorted({claim.name for claim in report.claims})) or "none"
            yield "CLAIM_MISSING", f"a claim of {name}; the report makes {made}"
        elif not any(arm is None or _is_promised(arm.system, promise) for arm in of):
            yield "CLAIM_MISSING", f"a claim of {name} about what it tests; the report makes it of others"


def _component_problems(promise: Promise, report: Report) -> Iterator[tuple[str, str]]:
    tested, source = [arm.system for arm in report.with_role("sut")], promise.restoration
    if promise.drafter is not None:
        drafting = tested and all(_drafts(system, promise.drafter) for system in tested)
        if not drafting or "drafter" not in report.environment.models:
            declared = several([str(system.drafter) for system in tested])
            problem = f"a drafter with weights ({promise.drafter}) in every arm under test, and in the models"
            yield "ENGINE_NEVER_RAN", f"{problem}; the arms declare {declared or 'none'}"
    if promise.baseline and not any(arm.system.is_plain for arm in report.with_role("baseline")):
        yield "SPEEDUP_BASELINE_LOOP", "mlx-lm's plain decoding, and no baseline is that"
    if source is not None and not any(system.restoration == source for system in tested):
        yield "RESTORATION_CLAIM", f"{source} restoration, and no arm under test declares it"
    for policy in promise.kv:
        if not any(_uses(system, policy) for system in tested):
            yield "SILENT_FALLBACK", f"a {policy} KV cache, and no arm under test declares it"
    for switch, value in promise.configuration.items():
        stated = report.configuration.get(switch)
        if stated != value or type(stated) is not type(value):
            yield "SILENT_FALLBACK", f"{switch} {value}, and configuration says {shown(stated)}"


def _parity_problems(promise: Promise, parity: ParityComparison | None) -> Iterator[tuple[str, str]]:
    if parity is None:
        return
    if promise.dtype not in (None, parity.dtype):
        yield "PARITY_TOLERANCE", f"a comparison in {promise.dtype}, and this one is in {shown(parity.dtype)}"
    if promise.tolerance is not None and parity.tolerance > promise.tolerance:
        limits = f"{promise.tolerance:g}, and this one is {parity.tolerance:g}"
        yield "PARITY_TOLERANCE", f"a tolerance of {limits}"
    if promise.hidden_states and not parity.compares_hidden:
        yield "PARITY_TOLERANCE", "a comparison of hidden states, and this one has logits alone"


def _is_promised(system: System, promise: Promise) -> bool:
    return (
        promise.restoration in (None, system.restoration)
        and (not promise.kv or any(_uses(system, policy) for policy in promise.kv))
        and (promise.drafter is None or _drafts(system, promise.drafter))
    )


def _drafts(system: System, kind: str) -> bool:
    """Whether an arm's drafter is a network, of that kind or ``any``, perhaps behind look-ups."""
    network = (system.drafter or "").rpartition("+")[2]
    return network not in ("", WEIGHTLESS) and kind in ("any", network)


def _uses(system: System, promised: str) -> bool:
    policy = system.policy
    return policy is not None and (policy == policy_of(promised) or policy.kind == promised)
