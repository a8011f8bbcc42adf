"""Do recall figures mean that something was found, and restoration figures that something was restored?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bridge.evidence.case import Case
from bridge.evidence.figures import hit, recall
from bridge.evidence.report import Arm, Sample
from bridge.evidence.rules.paths import is_plain
from bridge.evidence.shown import shown

PARITY_POINTS = 0.05
CONTROL_RECALL = 0.1  # a control that must not answer may answer by chance this often
SHORTEST_ANSWER = 2  # one character turns up in any text
COMMON_ANSWER = 0.5  # a constant output must not pass for retrieval


def recall_vacuous(case: Case) -> Iterator[str]:
    """A hit that shows no retrieval, or recall claimed where there was nothing to retrieve."""
    for arm in case.report.arms:
        for sample in arm.samples if arm.role != "control" else ():
            problem = _vacuous_hit(sample)
            if problem:
                yield f"{shown(arm.name)}/{shown(sample.prompt_id)} is counted as a hit, but {problem}"
    for claim in case.report.claims:
        if claim.name not in ("recall", "recall_parity"):
            continue
        arm_of = case.arm_of(claim)
        if arm_of is not None:
            yield from (f"{claim.name} of {shown(arm_of.name)}: {text}" for text in _vacuous_claim(arm_of))
        oracle = case.oracle_of(claim) if claim.name == "recall_parity" else None
        if oracle is not None and recall(oracle) == 0:
            yield f"recall_parity: the oracle {shown(oracle.name)} answers nothing"


def _vacuous_hit(sample: Sample) -> str | None:
    needle = sample.needle
    if needle is None or not (needle.hit or hit(sample)):
        return None
    if len(needle.answer.strip()) < SHORTEST_ANSWER:
        return f"the answer {shown(needle.answer)} would turn up in any text"
    if needle.prompt_contains_answer_outside_needle:
        return "the prompt gives the answer outside its needle"
    if not needle.prompt_contains_needle or needle.answer not in needle.needle:
        return "its prompt holds no needle with the answer"
    return None


def _vacuous_claim(arm: Arm) -> Iterator[str]:
    without = [s for s in arm.samples if s.needle is None or not s.needle.prompt_contains_needle]
    if without or not arm.samples:
        yield f"{len(without)} of {len(arm.samples)} prompts hold no needle"
    answers = Counter(s.needle.answer for s in arm.samples if s.needle is not None)
    if len(arm.samples) > 2 and answers and max(answers.values()) > COMMON_ANSWER * len(arm.samples):
        yield f"one answer, {shown(answers.most_common(1)[0][0])}, fits more than half of the prompts"


def recall_below_oracle(case: Case) -> Iterator[str]:
    """An arm that claims recall parity lies more than 5 points under the oracle."""
    for claim in case.report.claims:
        arm, oracle = case.arm_of(claim), case.oracle_of(claim)
        if claim.name != "recall_parity" or arm is None or oracle is None:
            continue
        ours, reference = recall(arm), recall(oracle)
        if ours is not None and reference is not None and ours < reference - PARITY_POINTS - 1e-9:
            yield f"{shown(arm.name)} recalls {ours:.3f}, the oracle {shown(oracle.name)} {reference:.3f}"


def restoration_claim(case: Case) -> Iterator[str]:
    """Restoration is claimed or declared, but nothing was restored; or something was, and not under test."""
    declared = [arm for arm in case.report.arms if arm.system.restoration is not None]
    restored = case.report.liveness.restored_positions
    for claim in case.report.claims:
        arm = case.arm_of(claim)
        if claim.name == "restoration" and arm is not None and arm.system.restoration is None:
            yield f"restoration is claimed of {shown(arm.name)}, which declares none"
    if declared and restored == 0:
        yield f"arm {shown(declared[0].name)} declares restoration, but no position was restored"
    if restored and not any(arm.role == "sut" for arm in declared):
        yield f"{restored} positions were restored, but no arm under test declares restoration"


def control_missing(case: Case) -> Iterator[str]:
    """An arm that restores, or a claim, lacks the control or reference arms that give it a meaning.

    Restoration needs its controls whatever is claimed: what a restoring arm does is known by them alone.
    """
    for arm in case.report.with_role("sut"):
        for control in ("exact", "noise") if arm.system.restoration is not None else ():
            complaint = f"restoration in {shown(arm.name)} lacks the control {control!r}"
            yield from _covers(arm, _control(case, control), complaint)
    for claim in case.report.claims:
        of = case.arm_of(claim)
        if of is None:
            continue
        if claim.name in ("recall", "recall_parity"):
            yield from _covers(of, _control(case, "no_needle"), f"{claim.name} lacks the control 'no_needle'")
        if claim.name == "recall_parity":
            oracle = case.oracle_of(claim)
            yield from _covers(of, oracle, "recall_parity lacks an oracle")
            if oracle is not None and not is_plain(oracle.system):
                yield f"the oracle {shown(oracle.name)} is not mlx-lm's plain decoding with its own caches"


def _control(case: Case, control: str) -> Arm | None:
    arms = (arm for arm in case.report.with_role("control") if arm.control == control)
    return next(arms, None)


def _covers(arm: Arm, other: Arm | None, complaint: str) -> Iterator[str]:
    if other is None:
        yield complaint
    elif {s.prompt_id for s in arm.samples} != {s.prompt_id for s in other.samples}:
        yield f"{complaint} over the same prompts: {shown(other.name)} ran others than {shown(arm.name)}"


def control_failed(case: Case) -> Iterator[str]:
    """A control that must not answer does, or one that must answer does not."""
    for arm in case.report.with_role("control"):
        share = recall(arm)
        if share is None:
            yield f"control {shown(arm.name)} has no row with a needle to score"
        elif arm.control in ("noise", "no_needle") and share > CONTROL_RECALL:
            yield f"control {shown(arm.name)} ({arm.control}) still answers {share:.3f} of its prompts"
        if arm.control == "no_needle" and any(
            s.needle is not None and s.needle.prompt_contains_needle for s in arm.samples
        ):
            yield f"control {shown(arm.name)} has the needle in its prompts"
        if arm.control == "exact" and share is not None:
            for oracle in case.report.with_role("oracle"):
                reference = recall(oracle)
                if reference is not None and share < reference - PARITY_POINTS - 1e-9:
                    yield f"control {shown(arm.name)} (exact) recalls {share:.3f}, the oracle {reference:.3f}"
