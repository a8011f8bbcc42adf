"""Is the output what it should be: the plain decoder's tokens, free of loops, from clean prompts?"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator

from bridge.evidence.case import Case
from bridge.evidence.figures import first_divergence, paired
from bridge.evidence.report import Arm, Divergence, Report
from bridge.evidence.shown import several, shown

NO_INSTRUCTION = hashlib.sha256(b"").hexdigest()

# A tail of at least LOOP_TOKENS tokens that repeats a cycle of up to SHORT_CYCLE tokens three times, or one
# of up to LONG_CYCLE tokens four times, is a loop. So is an output of at least WINDOWED_TOKENS tokens in
# which fewer than DISTINCT_SHARE of the WINDOW-token windows differ: code from templates repeats lines, but
# hardly ever sixteen tokens in a row, while a loop of c tokens leaves only c different windows.
LOOP_TOKENS, SHORT_CYCLE, LONG_CYCLE = 48, 16, 64
WINDOWED_TOKENS, WINDOW, DISTINCT_SHARE = 96, 16, 0.3

# The largest believable difference between the logits of a block forward and of single forwards. Above it the
# block forward is wrong, and a wrong forward must not excuse the divergences it causes.
ROUNDING_LIMITS = {"float32": 0.05, "float16": 2.0, "bfloat16": 2.0}


def output_diverged(case: Case) -> Iterator[str]:
    """Greedy speculative tokens differ from the plain ones where no rounding tie explains it."""
    report = case.report
    recorded = {(item.arm, item.prompt_id): item for item in report.divergences}
    if len(recorded) != len(report.divergences):
        yield "a divergence is recorded twice"
    found: set[tuple[str, str]] = set()
    for arm in report.with_role("sut"):
        for baseline in report.with_role("baseline"):
            for sample, plain in paired(arm, baseline):
                at = first_divergence(sample.tokens, plain.tokens)
                if at is None:
                    continue
                key = (arm.name, sample.prompt_id)
                found.add(key)
                where = f"{shown(arm.name)}/{shown(sample.prompt_id)} differs at position {at}"
                if not _keeps_output(arm, baseline, case):
                    continue
                if at >= len(sample.tokens) or at >= len(plain.tokens):
                    yield f"{where}: one output ends where the other goes on"
                    continue
                problem = _excuse(recorded.get(key), at, sample.tokens[at], plain.tokens[at], report)
                if problem:
                    yield f"{where}: {problem}"
    for key in recorded.keys() - found:
        yield f"a divergence of {shown(key[0])}/{shown(key[1])} is recorded, but the rows show none"


def _keeps_output(arm: Arm, baseline: Arm, case: Case) -> bool:
    """Whether the arm is one that has to give the baseline's tokens."""
    if any(claim.name == "identical_output" and case.arm_of(claim) == arm for claim in case.report.claims):
        return True
    ours, plain = arm.system, baseline.system
    return ours.kv == plain.kv and ours.restoration == plain.restoration


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
    if all(claim.name in ("machine", "resident_bytes") for claim in case.report.claims):
        return
    for arm in case.report.arms:
        if arm.role == "control":  # a control may be meant to break the model
            continue
        for sample in arm.samples:
            loop = degeneration(sample.tokens)
            if loop:
                yield f"{shown(arm.name)}/{shown(sample.prompt_id)}: {loop}"


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
