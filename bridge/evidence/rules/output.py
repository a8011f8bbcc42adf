"""Is the output what it should be: the plain decoder's tokens, free of loops, from clean prompts?"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator

from bridge.evidence.case import SPEED_CLAIMS, Case
from bridge.evidence.figures import first_divergence, paired
from bridge.evidence.policies import parse_policy
from bridge.evidence.report import Arm, Claim, Divergence, Report, Sample
from bridge.evidence.runaway import degeneration
from bridge.evidence.shown import several, shown

NO_INSTRUCTION = hashlib.sha256(b"").hexdigest()

# Of the prompts compared with plain decoding, at most this share may differ and be excused as ties: models in
# 4 or 16 bits flip at a near tie now and then, but hardly at most prompts of a set; a broken path does.
MOST_TIES = 0.5

# Claims about how an arm decodes, and the recall that holds its answers to something.
OF_DECODING = SPEED_CLAIMS | {"acceptance_length"}
HELD_RECALL = 0.5
# Claims of a share of the prompts, each of which must be another.
OF_PROMPTS = frozenset({"identical_output", "exact_match", "natural_stops", "recall", "recall_parity"})
# Claims that no generated token bears on.
OF_NO_OUTPUT = frozenset({"machine", "resident_bytes", "parity"})

# The largest believable difference between the logits of a block forward and of single forwards. Above it the
# block forward is wrong, and a wrong forward must not excuse the divergences it causes.
ROUNDING_LIMITS = {"float32": 0.05, "float16": 2.0, "bfloat16": 2.0}


def output_diverged(case: Case) -> Iterator[str]:
    """Greedy tokens differ from the plain ones where no rounding tie explains it, or too often for ties."""
    report = case.report
    recorded = {(item.arm, item.prompt_id): item for item in report.divergences}
    if len(recorded) != len(report.divergences):
        yield "a divergence is recorded twice"
    found: set[tuple[str, str]] = set()
    for arm in report.with_role("sut"):
        for baseline in report.with_role("baseline"):
            different = _divergent(arm, baseline)
            found.update((arm.name, ours.prompt_id) for ours, _, _ in different)
            if any(claim.name == "identical_output" for claim in _claimed(arm, case)):
                yield from _other_endings(arm, baseline)
            if _keeps_output(arm, baseline, case):
                yield from _not_excused(arm, different, recorded, report)
                yield from _too_many_ties(arm, baseline, len(different), case)
    for key in recorded.keys() - found:
        yield f"a divergence of {shown(key[0])}/{shown(key[1])} is recorded, but the rows show none"


def _claimed(arm: Arm, case: Case) -> list[Claim]:
    """The claims about an arm."""
    return [claim for claim in case.report.claims if case.arm_of(claim) is arm]


def _keeps_output(arm: Arm, baseline: Arm, case: Case) -> bool:
    """Whether the arm has to give the baseline's tokens.

    It has to where that is claimed and where the two differ in nothing that may change the output. Where they
    do, its decoding still counts for nothing unless its output is held to something: recall, or the baseline.
    """
    ours, plain = arm.system, baseline.system
    claimed = {claim.name for claim in _claimed(arm, case)}
    if "identical_output" in claimed or parse_policy(ours.kv) == parse_policy(plain.kv):
        return True
    return not claimed.isdisjoint(OF_DECODING) and not any(_holds(claim) for claim in _claimed(arm, case))


def _holds(claim: Claim) -> bool:
    """Whether a claim holds an arm's output to its answers."""
    return claim.name == "recall_parity" or (claim.name == "recall" and (claim.at_least or 0) >= HELD_RECALL)


def _other_endings(arm: Arm, baseline: Arm) -> Iterator[str]:
    """Equal tokens that one arm says ended for another reason."""
    for ours, plain in paired(arm, baseline):
        if ours.tokens == plain.tokens and ours.finish_reason != plain.finish_reason:
            yield (
                f"{shown(arm.name)}/{shown(ours.prompt_id)} ends by {ours.finish_reason}, "
                f"but equal tokens of {shown(baseline.name)} by {plain.finish_reason}"
            )


def _divergent(arm: Arm, baseline: Arm) -> list[tuple[Sample, Sample, int]]:
    """The rows of both arms whose tokens differ, and where they first do."""
    return [
        (ours, plain, at)
        for ours, plain in paired(arm, baseline)
        if (at := first_divergence(ours.tokens, plain.tokens)) is not None
    ]


def _not_excused(
    arm: Arm,
    different: list[tuple[Sample, Sample, int]],
    recorded: dict[tuple[str, str], Divergence],
    report: Report,
) -> Iterator[str]:
    """Divergences that are not recorded, or that no tie of the plain logits explains."""
    for ours, plain, at in different:
        if at >= len(ours.tokens) or at >= len(plain.tokens):
            problem: str | None = "one output ends where the other goes on"
        else:
            entry = recorded.get((arm.name, ours.prompt_id))
            problem = _excuse(entry, at, ours.tokens[at], plain.tokens[at], report)
        if problem:
            yield f"{shown(arm.name)}/{shown(ours.prompt_id)} differs at position {at}: {problem}"


def _too_many_ties(arm: Arm, baseline: Arm, different: int, case: Case) -> Iterator[str]:
    """More prompts differ than rounding ties explain, however close the logits are said to have been."""
    compared = len(paired(arm, baseline))
    if _judges_output(case) and different > MOST_TIES * compared:
        yield (
            f"{shown(arm.name)} differs from {shown(baseline.name)} at {different} of {compared} prompts; "
            f"at most {MOST_TIES:.0%} may be rounding ties"
        )


def _excuse(entry: Divergence | None, at: int, ours: int, plain: int, report: Report) -> str | None:
    """What is wrong with the excuse for a divergence, or None when it holds."""
    if entry is None:
        return "no divergence is recorded for it"
    if (entry.position, entry.speculative_token, entry.plain_token) != (at, ours, plain):
        return "the recorded divergence has another position or other tokens"
    if report.rounding is None:
        return "the rounding error of this model was not measured"
    error = report.rounding.max_abs_logit_error
    if not entry.plain_gap < error:
        return f"the plain logits' gap {entry.plain_gap:.4g} is not below the rounding error {error:.4g}"
    return None


def rounding_implausible(case: Case) -> Iterator[str]:
    """The measured rounding error is so large that the block forward must be wrong."""
    rounding, target = case.report.rounding, case.report.environment.models.get("target")
    if rounding is None or target is None:
        return
    limit = ROUNDING_LIMITS.get(target.dtype)
    if limit is None:
        yield f"the target's dtype {shown(target.dtype)} is none of {sorted(ROUNDING_LIMITS)}"
    elif rounding.max_abs_logit_error > limit:
        yield (
            f"block and single logits differ by {rounding.max_abs_logit_error:.4g}, "
            f"more than {target.dtype} explains ({limit})"
        )


def output_degenerate(case: Case) -> Iterator[str]:
    """A text that a claim depends on runs away in repetition: its speed and its answers say nothing."""
    for arm in _depended_on(case):
        for sample in arm.samples:
            loop = degeneration(sample.tokens)
            if loop:
                yield f"{shown(arm.name)}/{shown(sample.prompt_id)}: {loop}"


def _judges_output(case: Case) -> bool:
    """Whether any claim depends on what was generated; a run that claims nothing is a record."""
    return any(claim.name not in OF_NO_OUTPUT for claim in case.report.claims)


def _depended_on(case: Case) -> Iterator[Arm]:
    """The arms whose output a claim is about or compares with, once each; controls may break the model."""
    claims = [claim for claim in case.report.claims if claim.name not in OF_NO_OUTPUT]
    arms = [arm for claim in claims for arm in (case.arm_of(claim), case.baseline_of(claim))]
    arms += [case.oracle_of(claim) for claim in claims if claim.name == "recall_parity"]
    names = {arm.name for arm in arms if arm is not None and arm.role != "control"}
    return (arm for arm in case.report.arms if arm.name in names)


def prompt_contaminated(case: Case) -> Iterator[str]:
    """Ids that do not name one prompt each, or a set that carries several instructions or a foreign one."""
    prompts: dict[str, set[tuple[str, int]]] = defaultdict(set)
    needles: dict[str, set[tuple[str, str, float]]] = defaultdict(set)
    instructions: dict[str, set[str]] = defaultdict(set)
    for arm in case.report.arms:
        for sample in arm.samples:
            instructions[prompt_set(sample.prompt_id)].add(sample.instruction_sha256)
            if sample.needle is not None:
                sought = sample.needle
                needles[sample.prompt_id].add((sought.needle, sought.answer, sought.depth))
            if arm.control != "no_needle":  # its prompts differ on purpose
                prompts[sample.prompt_id].add((sample.prompt_sha256, sample.prompt_tokens))
    for what, found in (("ran different prompts", prompts), ("seek different needles", needles)):
        different = [prompt for prompt, variants in found.items() if len(variants) > 1]
        if different:
            yield f"arms {what} under one id: {several(different)}"
    yield from _prompts_repeated(case)
    for name, digests in instructions.items():
        if len(digests) > 1:
            yield f"the prompts of set {shown(name)} carry {len(digests)} different instructions"
        elif name in ("code", "chat") and digests != {NO_INSTRUCTION}:
            yield f"the prompts of set {shown(name)} carry a foreign instruction"


def _prompts_repeated(case: Case) -> Iterator[str]:
    """One prompt under several ids, in an arm of which a share of its prompts is claimed."""
    of_prompts = [claim for claim in case.report.claims if claim.name in OF_PROMPTS]
    for arm in case.report.arms:
        if not any(case.arm_of(claim) is arm for claim in of_prompts):
            continue
        ids: dict[str, list[str]] = defaultdict(list)
        for sample in arm.samples:
            ids[sample.prompt_sha256].append(sample.prompt_id)
        repeated = [prompt for same in ids.values() if len(same) > 1 for prompt in same]
        if repeated:
            yield f"arm {shown(arm.name)} ran one prompt under several ids: {several(repeated)}"


def prompt_set(prompt_id: str) -> str:
    """The set a prompt belongs to: its id without the number at the end."""
    return re.sub(r"[-_.:/]?[0-9]+\Z", "", prompt_id)
