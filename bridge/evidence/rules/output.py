"""Is the output what it should be: the plain decoder's tokens, free of loops, from clean prompts?"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator

from bridge.evidence.case import SPEED_CLAIMS, Case
from bridge.evidence.figures import first_divergence, paired
from bridge.evidence.report import Arm, Divergence, Report, Sample
from bridge.evidence.shown import several, shown

NO_INSTRUCTION = hashlib.sha256(b"").hexdigest()

# A tail of at least LOOP_TOKENS tokens that repeats a cycle of up to SHORT_CYCLE tokens three times, or one
# of up to LONG_CYCLE tokens four times, is a loop. So is an output of at least WINDOWED_TOKENS tokens in
# which fewer than DISTINCT_SHARE of the WINDOW-token windows differ: code from templates repeats lines, but
# hardly ever sixteen tokens in a row, while a loop of c tokens leaves only c different windows.
LOOP_TOKENS, SHORT_CYCLE, LONG_CYCLE = 48, 16, 64
WINDOWED_TOKENS, WINDOW, DISTINCT_SHARE = 96, 16, 0.3

# Of the prompts compared with plain decoding, at most this share may differ and be excused as ties: models in
# 4 or 16 bits flip at a near tie now and then, but hardly at most prompts of a set; a broken path does.
MOST_TIES = 0.5

# Claims about how an arm decodes, and claims that hold its answers to something.
OF_DECODING = SPEED_CLAIMS | {"acceptance_length"}
OF_ANSWERS = frozenset({"recall", "recall_parity"})

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
            if "identical_output" in _claimed(arm, case):
                yield from _other_endings(arm, baseline)
            if _keeps_output(arm, baseline, case):
                yield from _not_excused(arm, different, recorded, report)
                yield from _too_many_ties(arm, baseline, len(different), case)
    for key in recorded.keys() - found:
        yield f"a divergence of {shown(key[0])}/{shown(key[1])} is recorded, but the rows show none"


def _claimed(arm: Arm, case: Case) -> set[str]:
    """The names of the claims about an arm."""
    return {claim.name for claim in case.report.claims if case.arm_of(claim) is arm}


def _keeps_output(arm: Arm, baseline: Arm, case: Case) -> bool:
    """Whether the arm has to give the baseline's tokens.

    It has to where that is claimed and where the two differ in nothing that may change the output. Where they
    do, its decoding still counts for nothing unless its output is held to something: recall, or the baseline.
    """
    ours, plain, claimed = arm.system, baseline.system, _claimed(arm, case)
    if "identical_output" in claimed or (ours.kv, ours.restoration) == (plain.kv, plain.restoration):
        return True
    return not claimed.isdisjoint(OF_DECODING) and claimed.isdisjoint(OF_ANSWERS)


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
    """A generated text runs away in repetition, so that its speed or its answers say nothing."""
    if not _judges_output(case):
        return
    for arm in case.report.arms:
        if arm.role == "control":  # a control may be meant to break the model
            continue
        for sample in arm.samples:
            loop = degeneration(sample.tokens)
            if loop:
                yield f"{shown(arm.name)}/{shown(sample.prompt_id)}: {loop}"


def _judges_output(case: Case) -> bool:
    """Whether any claim depends on what was generated; a run that claims nothing is a record."""
    return any(claim.name not in ("machine", "resident_bytes") for claim in case.report.claims)


def degeneration(tokens: tuple[int, ...]) -> str | None:
    """How an output degenerates into repetition, or None when it does not."""
    for cycle in range(1, LONG_CYCLE + 1):
        tail = _periodic_tail(tokens, cycle)
        repeats = 3 if cycle <= SHORT_CYCLE else 4
        if tail >= max(LOOP_TOKENS, repeats * cycle):
            return f"the last {tail} of {len(tokens)} tokens repeat a cycle of {cycle}"
    if len(tokens) >= WINDOWED_TOKENS:
        windows = [tokens[i : i + WINDOW] for i in range(len(tokens) - WINDOW + 1)]
        share = len(set(windows)) / len(windows)
        if share < DISTINCT_SHARE:
            return f"only {share:.0%} of the {WINDOW}-token windows in {len(tokens)} tokens differ"
    return None


def _periodic_tail(tokens: tuple[int, ...], cycle: int) -> int:
    """Length of the longest tail that repeats its first `cycle` tokens, those included; 0 without repeat."""
    start = len(tokens) - 1
    while start >= cycle and tokens[start] == tokens[start - cycle]:
        start -= 1
    matched = len(tokens) - 1 - start
    return matched + cycle if matched else 0


def prompt_contaminated(case: Case) -> Iterator[str]:
    """Arms ran different prompts under one id, or a set carries several instructions or a foreign one."""
    prompts: dict[str, set[str]] = defaultdict(set)
    instructions: dict[str, set[str]] = defaultdict(set)
    for arm in case.report.arms:
        for sample in arm.samples:
            instructions[prompt_set(sample.prompt_id)].add(sample.instruction_sha256)
            if arm.control != "no_needle":  # its prompts differ on purpose
                prompts[sample.prompt_id].add(sample.prompt_sha256)
    different = [prompt for prompt, digests in prompts.items() if len(digests) > 1]
    if different:
        yield f"arms ran different prompts under one id: {several(different)}"
    for name, digests in instructions.items():
        if len(digests) > 1:
            yield f"the prompts of set {shown(name)} carry {len(digests)} different instructions"
        elif name in ("code", "chat") and digests != {NO_INSTRUCTION}:
            yield f"the prompts of set {shown(name)} carry a foreign instruction"


def prompt_set(prompt_id: str) -> str:
    """The set a prompt belongs to: its id without the number at the end."""
    return re.sub(r"[-_.:/]?[0-9]+\Z", "", prompt_id)
