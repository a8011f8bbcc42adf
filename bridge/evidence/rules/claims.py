"""What each claim needs, which figure decides it, and whether the rows reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from bridge.evidence.figures import SPEED_CLAIMS, Case, compare, parity_difference
from bridge.evidence.model import Arm, ReportClaim, Sample, quotient
from bridge.evidence.rules.paths import is_plain
from bridge.evidence.rules.recall import IGNORE_STOPS
from bridge.evidence.text import shown

Figure = Callable[[Case, Arm, Arm | None], float | None]


@dataclass(frozen=True)
class ClaimKind:
    """The form of one claim.

    Attributes:
        figure: The number the claim is about, of its arm and the arm it compares with.
        bound: The one bound the claim carries, or None.
        against: The role of the arm it compares with, or None.
        lowest: A bound below this claims nothing.
        highest: A bound above this cannot be meant.
    """

    figure: Figure
    bound: Literal["at_least", "at_most"] | None
    against: Literal["baseline", "oracle"] | None = None
    lowest: float = 0.0
    highest: float = 1e15


@dataclass(frozen=True)
class ClaimFigure:
    """A claim with the figure the rows give; `figure` is None where they give none."""

    name: str
    arm: str | None
    against: str | None
    bound: float | None
    figure: float | None
    met: bool


def _identity(_case: Case, arm: Arm, baseline: Arm | None) -> float | None:
    pair = compare(arm, baseline) if baseline else None
    return quotient(pair.identical_samples, pair.compared_samples) if pair else None


def _speed(_case: Case, arm: Arm, baseline: Arm | None) -> float | None:
    return compare(arm, baseline).decode_ratio if baseline else None


def _of_arm(field: Literal["acceptance_length", "recall", "max_resident_bytes"]) -> Figure:
    return lambda case, arm, _: getattr(case.figures.arms[arm.name], field)


def _natural_stops(_case: Case, arm: Arm, _other: Arm | None) -> float | None:
    return quotient(sum(sample.finish_reason == "stop" for sample in arm.samples), len(arm.samples))


# Those without a bound are decided by RECALL_BELOW_ORACLE and the restoration rules.
CLAIMS: dict[str, ClaimKind] = {
    "identical_output": ClaimKind(_identity, None, "baseline"),
    "exact_match": ClaimKind(_identity, "at_least", "baseline", lowest=0.5, highest=1.0),
    "speedup": ClaimKind(_speed, "at_least", "baseline", lowest=1.0),
    "no_slowdown": ClaimKind(_speed, "at_least", "baseline", lowest=0.8, highest=1.0),
    "acceptance_length": ClaimKind(_of_arm("acceptance_length"), "at_least", lowest=1.0, highest=1024),
    "recall": ClaimKind(_of_arm("recall"), "at_least", lowest=0.01, highest=1.0),
    "recall_parity": ClaimKind(_of_arm("recall"), None, "oracle"),
    "resident_bytes": ClaimKind(_of_arm("max_resident_bytes"), "at_most", lowest=1),
    "restoration": ClaimKind(_of_arm("recall"), None),
    "natural_stops": ClaimKind(_natural_stops, "at_least", lowest=0.5, highest=1.0),
}
# Claims of the same tokens, and of a figure over the arm's own prompts.
SAMENESS = frozenset({"identical_output", "exact_match"})
SHARES = frozenset({"acceptance_length", "natural_stops", "recall", "recall_parity", "restoration"})
# The claims about no arm: the environment block describes the machine (ENVIRONMENT_INCOMPLETE judges it), and
# outputs agree with a reference's (PARITY_TOLERANCE judges every round, too).
MACHINE, PARITY = "machine", "parity"


def claim_not_met(case: Case) -> Iterator[str]:
    """A claim is malformed, names an arm that is not there, leaves out prompts that the arm it is held
    against ran, calls another baseline than plain decoding its original, calls ends of texts natural that
    other texts go on past, was not asked for by the configuration, or is not reached by the rows.
    """
    for claim in case.report.claims:
        problem = _problem(case, claim) or _not_configured(claim, case.report.configuration)
        if problem:
            yield f"{claim.name}: {problem}"


def _not_configured(claim: ReportClaim, configuration: Mapping[str, object]) -> str | None:
    """Why `eval throughput`, with the switches that the report states, would not have made a claim."""
    speed = claim.name in SPEED_CLAIMS
    if speed and (reason := configuration.get("speed_not_claimed")) is not None:
        return f"configuration.speed_not_claimed says why none was claimed: {shown(reason)}"
    asked = configuration.get("claim")
    if (asked == "none" and (speed or claim.name == "identical_output")) or (asked == "identity" and speed):
        return f"configuration.claim is {shown(asked)}"
    least = configuration.get("min_speedup", claim.at_least)
    if claim.name == "speedup" and least != claim.at_least:
        return f"claims at_least {shown(claim.at_least)}, but configuration.min_speedup is {shown(least)}"
    return None


def claim_figures(case: Case) -> tuple[ClaimFigure, ...]:
    """Every claim with its recomputed figure."""
    return tuple(_claim_figure(case, claim) for claim in case.report.claims)


def _claim_figure(case: Case, claim: ReportClaim) -> ClaimFigure:
    met = _problem(case, claim) is None
    if claim.name == MACHINE:
        return ClaimFigure(claim.name, None, None, None, None, met)
    if claim.name == PARITY:
        return ClaimFigure(claim.name, None, None, claim.at_most, _parity_difference(case), met)
    kind = CLAIMS[claim.name]
    arm, other = case.arm_of(claim), _against(case, claim, kind)
    return ClaimFigure(
        name=claim.name,
        arm=arm.name if arm else claim.arm,
        against=other.name if other else None,
        bound=getattr(claim, kind.bound) if kind.bound else None,
        figure=kind.figure(case, arm, other) if arm else None,
        met=met,
    )


def _parity_difference(case: Case) -> float | None:
    return None if case.report.parity is None else parity_difference(case.report.parity)


def _against(case: Case, claim: ReportClaim, kind: ClaimKind) -> Arm | None:
    if kind.against == "oracle":
        return case.oracle_of(claim)
    return case.baseline_of(claim) if kind.against == "baseline" else None


def _problem(case: Case, claim: ReportClaim) -> str | None:
    """What is wrong with a claim, or None when it holds."""
    if claim.name in (MACHINE, PARITY):
        return _problem_without_arm(case, claim)
    kind = CLAIMS[claim.name]
    if malformed := _malformed(claim, kind):
        return malformed
    arm, other = case.arm_of(claim), _against(case, claim, kind)
    if arm is None:
        return f"there is no arm {shown(claim.arm)}" if claim.arm else "no single arm is under test"
    # A missing oracle is CONTROL_MISSING; one of another role cannot be compared with.
    needed = kind.against == "baseline" or (kind.against == "oracle" and claim.baseline is not None)
    if needed and (other is None or other.role != kind.against):
        return f"{shown(claim.baseline)} is no {kind.against}" if claim.baseline else "there is no baseline"
    if problem := _identity_problem(case, claim, arm, other) or _left_out(case, claim, arm):
        return problem
    if claim.name == "natural_stops" and (problem := _no_stop(case, arm)):
        return problem
    if kind.bound is None:
        return None
    figure, bound = kind.figure(case, arm, other), getattr(claim, kind.bound)
    if figure is None:
        return "the rows give no such figure"
    reached = figure >= bound if kind.bound == "at_least" else figure <= bound
    return None if reached else f"claimed {kind.bound} {bound:g}, but the rows give {figure:.6g}"


def _problem_without_arm(case: Case, claim: ReportClaim) -> str | None:
    allowed = ("name",) if claim.name == MACHINE else ("name", "at_most")
    if extra := [name for name, value in claim if name not in allowed and value is not None]:
        return f"takes no {extra[0]}"
    if claim.name == MACHINE:
        return None
    if claim.at_most is None:
        return "lacks at_most"
    figure = _parity_difference(case)
    if figure is None:
        return "the rows give no such figure"
    return None if figure <= claim.at_most else f"the rows give {figure:.6g}, not {claim.at_most:g}"


def _malformed(claim: ReportClaim, kind: ClaimKind) -> str | None:
    for bound in ("at_least", "at_most"):
        value = getattr(claim, bound)
        if (value is not None) != (bound == kind.bound):
            return f"lacks {bound}" if bound == kind.bound else f"takes no {bound}"
        if value is not None and not kind.lowest <= value <= kind.highest:
            return f"{bound} {value:g} is outside {kind.lowest:g} to {kind.highest:g}"
    return "takes no baseline" if kind.against is None and claim.baseline is not None else None


def _identity_problem(case: Case, claim: ReportClaim, arm: Arm, baseline: Arm | None) -> str | None:
    """Sameness needs plain decoding of the same prompts; identity but for ties, the rounding error too."""
    if claim.name not in SAMENESS:
        return None
    if claim.name == "identical_output" and case.report.rounding is None:
        return "the rounding error of this model was not measured"
    if baseline is None or not arm.samples or arm.prompts != baseline.prompts:
        return "the arm and the baseline did not run the same prompts"
    # The baseline of a kv report is the system itself with native caches; KIND_MISMATCH judges it.
    if case.report.kind != "kv" and not is_plain(baseline.system):
        return f"the baseline {baseline.label} is no plain decoding"
    return None


def _left_out(case: Case, claim: ReportClaim, arm: Arm) -> str | None:
    """A share over fewer prompts than its references ran: the others may be those that failed."""
    if claim.name not in SHARES:
        return None
    of_all = claim.name in ("acceptance_length", "natural_stops")
    for reference in case.baselines if of_all else case.references:
        ours, theirs = (
            arm.prompts if of_all else frozenset(s.prompt_id for s in arm.samples if s.needle is not None)
            for arm in (arm, reference)
        )
        if theirs and ours != theirs:
            return f"{arm.label} and {reference.label} did not run the same prompts"
    return None


def _no_stop(case: Case, arm: Arm) -> str | None:
    """A text that goes on past the token that ends another one by `stop`, or None: that is no stop token.

    So a text that was cut at `max_tokens` cannot call that a stop.
    """
    ends: dict[int, Sample] = {}
    for sample in arm.samples:
        if sample.finish_reason == "stop" and sample.tokens:
            ends.setdefault(sample.tokens[-1], sample)
    for other, sample, where in case.rows():
        inside = sample.tokens if sample.finish_reason == "length" else sample.tokens[:-1]
        token = next((token for token in inside if token in ends), None)
        if token is not None and other.control != IGNORE_STOPS:
            return f"token {token} ends {shown(ends[token].prompt_id)}, but {where} continues after it"
    return None
