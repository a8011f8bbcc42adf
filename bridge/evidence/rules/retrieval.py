"""Do recall figures mean that something was found?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bridge.evidence.case import Case
from bridge.evidence.figures import hit, paired, recall
from bridge.evidence.report import Arm, Sample
from bridge.evidence.shown import several, shown

PARITY_POINTS = 0.05
FEWEST_PROMPTS, FEWEST_DEPTHS = 5, 2
SHORTEST_ANSWER = 2  # one character turns up in any text
COMMON_ANSWER = 0.5  # a constant output must not pass for retrieval
# Of other prompts' answers, the share that makes a text a list which was not read from its prompt; so many
# of them are looked for, evenly spread, as a report of thousands of rows has to be judged in seconds.
RECITED = 0.3
SOUGHT = 64


def recall_vacuous(case: Case) -> Iterator[str]:
    """A hit that shows no retrieval, or recall claimed where there was nothing to retrieve."""
    for arm in case.report.arms:
        outside = [sample.prompt_id for sample in arm.samples if _outside(arm, sample)]
        if outside:
            yield f"arm {shown(arm.name)} sought needles that are not in the prompts {several(outside)}"
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
        if oracle is not None and arm_of is not None:
            yield from cut_short(oracle, arm_of)


def _outside(arm: Arm, sample: Sample) -> bool:
    """Whether a row seeks a needle that its prompt does not hold; the control without needles may."""
    return (
        sample.needle is not None and arm.control != "no_needle" and not sample.needle.prompt_contains_needle
    )


def recall_too_few(case: Case) -> Iterator[str]:
    """Recall is claimed of too few prompts, or of needles that all lie at one depth."""
    for claim in case.report.claims:
        arm = case.arm_of(claim)
        if claim.name not in ("recall", "recall_parity") or arm is None:
            continue
        needles = [sample.needle for sample in arm.samples if sample.needle is not None]
        prompts = {sample.prompt_sha256 for sample in arm.samples if sample.needle is not None}
        if 0 < len(prompts) < FEWEST_PROMPTS:
            yield f"{claim.name} of {shown(arm.name)}: {len(prompts)} prompts, of {FEWEST_PROMPTS} required"
        depths = {round(needle.depth, 2) for needle in needles}
        if 0 < len(depths) < FEWEST_DEPTHS:
            yield f"{claim.name} of {shown(arm.name)}: all needles lie at depth {min(depths):g}"


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
    sought = sorted(answer for answer in answers if len(answer.strip()) >= SHORTEST_ANSWER)
    sought = sought[:: -(-len(sought) // SOUGHT) or 1]
    recited = [sample.prompt_id for sample in arm.samples if _recites(sample, sought)]
    if recited:
        yield f"the text holds the answers of many other prompts, too, at {several(recited)}"


def _recites(sample: Sample, answers: list[str]) -> bool:
    """Whether a hit's text also holds two or more, and a good share, of other prompts' answers."""
    if sample.needle is None or not hit(sample):
        return False
    others = [each for each in answers if each not in sample.needle.answer]
    found = sum(each in sample.answer for each in others)
    return found >= 2 and found >= RECITED * len(others)


def recall_below_oracle(case: Case) -> Iterator[str]:
    """An arm that claims recall parity lies more than 5 points under the oracle."""
    for claim in case.report.claims:
        arm, oracle = case.arm_of(claim), case.oracle_of(claim)
        if claim.name != "recall_parity" or arm is None or oracle is None:
            continue
        ours, reference = recall(arm), recall(oracle)
        if ours is not None and reference is not None and ours < reference - PARITY_POINTS - 1e-9:
            yield f"{shown(arm.name)} recalls {ours:.3f}, the oracle {shown(oracle.name)} {reference:.3f}"


def cut_short(silent: Arm, other: Arm) -> Iterator[str]:
    """Prompts at which an arm that is to be heard was stopped before the other had said as much."""
    early = [
        ours.prompt_id
        for ours, theirs in paired(silent, other)
        if ours.finish_reason == "length" and len(ours.tokens) < len(theirs.tokens)
    ]
    if early:
        yield f"{shown(silent.name)} was cut short of {shown(other.name)} at {several(early)}"
