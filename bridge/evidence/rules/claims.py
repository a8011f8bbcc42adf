"""What each claim needs, which figure decides it, and whether the rows reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from bridge.evidence.case import SPEED_CLAIMS, Case
from bridge.evidence.figures import compare, parity_difference, quotient
from bridge.evidence.report import Arm, Claim
from bridge.evidence.rules.paths import is_plain, references
from bridge.evidence.rules.stops import natural_stops, stops_problem
from bridge.evidence.shown import shown

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
    """A claim beside the figure the rows give; `figure` is None where they give none."""

    name: str
    arm: str | None
    against: str | None
    bound: float | None
    figure: float | None
    met: bool


def _identity(_case: Case, arm: Arm, baseline: Arm | None) -> float | None:
    if baseline is None:
        return None
    pair = compare(arm, baseline)
    return quotient(pair.identical_samples, pair.compared_samples)


CLAIMS: dict[str, ClaimKind] = {
    "identical_output": ClaimKind(_identity, None, "baseline"),
    "exact_match": ClaimKind(_identity, "at_least", "baseline", lowest=0.5, highest=1.0),
    "speedup": ClaimKind(
        lambda _, arm, base: compare(arm, base).decode_ratio if base else None,
        "at_least",
        "baseline",
        lowest=1.0,
    ),
    "no_slowdown": ClaimKind(
        lambda _, arm, base: compare(arm, base).decode_ratio if base else None,
        "at_least",
        "baseline",
        lowest=0.8,
        highest=1.0,
    ),
    "acceptance_length": ClaimKind(
        lambda case, arm, _: case.figures.arms[arm.name].acceptance_length,
        "at_least",
        lowest=1.0,
        highest=1024,
    ),
    "recall": ClaimKind(
        lambda case, arm, _: case.figures.arms[arm.name].recall, "at_least", lowest=0.01, highest=1.0
    ),
    "recall_parity": ClaimKind(lambda case, arm, _: case.figures.arms[arm.name].recall, None, "oracle"),
    "resident_bytes": ClaimKind(
        lambda case, arm, _: case.figures.arms[arm.name].max_resident_bytes, "at_most", lowest=1
    ),
    "restoration": ClaimKind(lambda case, arm, _: case.figures.arms[arm.name].recall, None),
    "natural_stops": ClaimKind(lambda _, arm, __: natural_stops(arm), "at_least", lowest=0.5, highest=1.0),
}
# Claims of the same tokens, and of a figure over the arm's own prompts.
SAMENESS = frozenset({"identical_output", "exact_match"})
SHARES = frozenset({"acceptance_length", "natural_stops", "recall", "recall_parity", "restoration"})
# The claims about no arm: the environment block describes the machine (ENVIRONMENT_INCOMPLETE judges it), and
# outputs agree with a reference's (PARITY_TOLERANCE judges every round, too).
MACHINE, PARITY = "machine", "parity"


def claim_not_met(case: Case) -> Iterator[str]:
    """A claim is malformed, speaks of an arm that is not there, or its figure is not reached."""
    for claim in case.report.claims:
        problem = _problem(case, claim) or _not_configured(claim, case.report.configuration)
        if problem:
            yield f"{claim.name}: {problem}"


def _not_configured(claim: Claim, configuration: Mapping[str, object]) -> str | None:
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


def _claim_figure(case: Case, claim: Claim) -> ClaimFigure:
    met = _problem(case, claim) is None
    if claim.name == MACHINE:
        return ClaimFigure(claim.name, None, None, None, None, met)
    if claim.name == PARITY:
        return ClaimFigure(claim.name, None, None, claim.at_most, _difference(case), met)
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


def _against(case: Case, claim: Claim, kind: ClaimKind) -> Arm | None:
    if kind.against == "oracle":
        return case.oracle_of(claim)
    return case.baseline_of(claim) if kind.against == "baseline" else None


def _problem(case: Case, claim: Claim) -> str | None:
    """What is wrong with a claim, or None when it holds."""
    if claim.name == MACHINE:
        extra = [name for name, value in claim if name != "name" and value is not None]
        return f"a claim about the machine takes no {extra[0]}" if extra else None
    if claim.name == PARITY:
        return _parity_problem(case, claim)
    kind = CLAIMS.get(claim.name)
    if kind is None:
        return "the gate knows no such claim"
    malformed = _malformed(claim, kind)
    if malformed:
        return malformed
    arm = case.arm_of(claim)
    if arm is None:
        return f"there is no arm {shown(claim.arm)}" if claim.arm else "no single arm is under test"
    other = _against(case, claim, kind)
    if kind.against == "baseline" and (other is None or other.role != "baseline"):
        return f"{shown(claim.baseline)} is no baseline" if claim.baseline else "there is no baseline"
    # A missing oracle is CONTROL_MISSING; one of another role cannot be compared with.
    if kind.against == "oracle" and claim.baseline is not None and (other is None or other.role != "oracle"):
        return f"{shown(claim.baseline)} is no oracle"
    problem = _identity_problem(case, claim, arm, other) or _left_out(case, claim, arm)
    if problem is None and claim.name == "natural_stops":
        problem = stops_problem(case, arm)
    if problem:
        return problem
    if kind.bound is None:
        return None  # decided by RECALL_BELOW_ORACLE and the restoration rules
    figure, bound = kind.figure(case, arm, other), getattr(claim, kind.bound)
    if figure is None:
        return "the rows give no such figure"
    reached = figure >= bound if kind.bound == "at_least" else figure <= bound
    return None if reached else f"claimed {kind.bound} {bound:g}, but the rows give {figure:.6g}"


def _malformed(claim: Claim, kind: ClaimKind) -> str | None:
    for bound in ("at_least", "at_most"):
        value = getattr(claim, bound)
        if (value is not None) != (bound == kind.bound):
            return f"lacks {bound}" if bound == kind.bound else f"takes no {bound}"
        if value is not None and not kind.lowest <= value <= kind.highest:
            return f"{bound} {value:g} is outside {kind.lowest:g} to {kind.highest:g}"
    if kind.against is None and claim.baseline is not None:
        return "takes no baseline"
    return None


def _identity_problem(case: Case, claim: Claim, arm: Arm, baseline: Arm | None) -> str | None:
    """Sameness needs plain decoding of the same prompts; identity but for ties, the rounding error too."""
    if claim.name not in SAMENESS:
        return None
    if claim.name == "identical_output" and case.report.rounding is None:
        return "the rounding error of this model was not measured"
    if baseline is None or not arm.samples or _prompts(arm) != _prompts(baseline):
        return "the arm and the baseline did not run the same prompts"
    # The baseline of a kv report is the system itself with native caches; KIND_MISMATCH judges it.
    if case.report.kind != "kv" and not is_plain(baseline.system):
        return f"the baseline {shown(baseline.name)} is no plain decoding"
    return None


def _left_out(case: Case, claim: Claim, arm: Arm) -> str | None:
    """A share over fewer prompts than the arms beside it ran: the others may be those that failed."""
    if claim.name not in SHARES:
        return None
    for reference in references(case):
        if claim.name in ("acceptance_length", "natural_stops"):
            ours, theirs = _prompts(arm), _prompts(reference) if reference.role == "baseline" else frozenset()
        else:
            ours, theirs = _needle_prompts(arm), _needle_prompts(reference)
        if theirs and ours != theirs:
            return f"{shown(arm.name)} and {shown(reference.name)} did not run the same prompts"
    return None


def _prompts(arm: Arm) -> frozenset[str]:
    return frozenset(sample.prompt_id for sample in arm.samples)


def _needle_prompts(arm: Arm) -> frozenset[str]:
    return frozenset(sample.prompt_id for sample in arm.samples if sample.needle is not None)


def _difference(case: Case) -> float | None:
    return None if case.report.parity is None else parity_difference(case.report.parity)


def _parity_problem(case: Case, claim: Claim) -> str | None:
    extra = [name for name in ("arm", "baseline", "at_least") if getattr(claim, name) is not None]
    if extra or claim.at_most is None:
        return f"takes no {extra[0]}" if extra else "lacks at_most"
    figure = _difference(case)
    if figure is None:
        return "the rows give no such figure"
    return None if figure <= claim.at_most else f"the rows give {figure:.6g}, not {claim.at_most:g}"
