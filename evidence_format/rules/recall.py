"""Do recall figures mean that something was found, and do controls show what restoration did?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from evidence_format.figures import Case, faults, hit, pair_samples, recall
from evidence_format.model import Arm, Sample, System, quotient
from evidence_format.policies import MEANINGFUL, RESTORED
from evidence_format.text import several, shown

RECALL_CLAIMS = ("recall", "recall_parity")
PARITY_POINTS = 0.05
FEWEST_PROMPTS, FEWEST_DEPTHS = 5, 2
SHORTEST_ANSWER = 2  # one character turns up in any text
COMMON_ANSWER = 0.5  # a constant output must not pass for retrieval
# Of other prompts' answers, the share that makes a text a list which was not read from its prompt; so many
# of them are looked for, evenly spread, as a report of thousands of rows has to be judged in seconds.
RECITED = 0.3
SOUGHT = 64
CONTROL_RECALL = 0.1  # a control that must not answer may answer by chance this often
EXACT_RECALL = 0.5  # a control that must answer, and answers less, shows a target that answers nothing


def recall_vacuous(case: Case) -> Iterator[str]:
    """An empty, one-character or prompt-contained answer counts as a hit; a needle is sought that its prompt
    does not hold; recall is claimed without needles, with one answer for most prompts, of texts that recite
    the answers of many prompts, or against an oracle that answers nothing or was cut short.
    """
    for arm, sample, where in case.rows:
        if (needle := sample.needle) is None:
            continue
        if not needle.prompt_contains_needle and arm.control != "no_needle":
            yield f"{where}: the needle is sought, but is not in the prompt"
        is_found = needle.prompt_contains_needle and needle.answer in needle.needle
        is_elsewhere = needle.prompt_contains_answer_outside_needle or _is_short(needle.answer)
        if arm.role != "control" and (needle.hit or hit(sample)) and (is_elsewhere or not is_found):
            yield f"{where} is counted as a hit, but the answer {shown(needle.answer)} proves nothing"
    for claim, arm in case.claims_of(*RECALL_CLAIMS):
        yield from (f"{claim.name} of {arm.label}: {problem}" for problem in _vacuous_claim(arm))
    for claim in case.claims:
        if claim.name == "recall_parity" and (oracle := case.other_of(claim, "oracle")) is not None:
            if recall(oracle) == 0:
                yield f"recall_parity: the oracle {oracle.label} answers nothing"
            if (claimed := case.arm_of(claim)) is not None:
                yield from _cut_short(oracle, claimed)


def _is_short(answer: str) -> bool:
    return len(answer.strip()) < SHORTEST_ANSWER


def _vacuous_claim(arm: Arm) -> Iterator[str]:
    total, held = len(arm.samples), sum(needle.prompt_contains_needle for needle in arm.needles)
    answers = Counter(needle.answer for needle in arm.needles)
    common, times = answers.most_common(1)[0] if answers else ("", 0)
    sought = sorted(answer for answer in answers if not _is_short(answer))
    sought = sought[:: -(-len(sought) // SOUGHT) or 1]
    recited = [sample.prompt_id for sample in arm.samples if _recites(sample, sought)]
    constant = total > 2 and times > COMMON_ANSWER * total
    return faults(
        (held < total or not total, f"{total - held} of {total} prompts hold no needle"),
        (constant, f"{shown(common)} answers more than half of the prompts"),
        (recited, f"the text holds the answers of many other prompts, too, at {several(recited)}"),
    )


def _recites(sample: Sample, answers: list[str]) -> bool:
    """Whether a hit's text also holds two or more, and a good share, of other prompts' answers."""
    if sample.needle is None or not hit(sample):
        return False
    others = [each for each in answers if each not in sample.needle.answer]
    found = sum(each in sample.answer for each in others)
    return found >= 2 and found >= RECITED * len(others)


def recall_too_few(case: Case) -> Iterator[str]:
    """Recall is claimed of fewer than 5 prompts, or of needles at one depth."""
    for claim, arm in case.claims_of(*RECALL_CLAIMS):
        prompts = {sample.prompt_sha256 for sample in arm.samples if sample.needle is not None}
        depths = {round(needle.depth, 2) for needle in arm.needles}
        if prompts and (len(prompts) < FEWEST_PROMPTS or len(depths) < FEWEST_DEPTHS):
            few = f"{len(prompts)} prompts (of {FEWEST_PROMPTS}), {len(depths)} depths (of {FEWEST_DEPTHS})"
            yield f"{claim.name} of {arm.label} is of too few: {few}"


def recall_below_oracle(case: Case) -> Iterator[str]:
    """An arm that claims recall parity lies more than 5 points under the oracle."""
    for claim, arm in case.claims_of("recall_parity"):
        if (oracle := case.other_of(claim, "oracle")) is not None and _lies_below(arm, oracle):
            yield f"{arm.label} recalls {recall(arm):.3f}, the oracle {oracle.label} {recall(oracle):.3f}"


def _lies_below(arm: Arm, oracle: Arm) -> bool:
    ours, reference = recall(arm), recall(oracle)
    return ours is not None and reference is not None and ours < reference - PARITY_POINTS - 1e-9


def _cut_short(silent: Arm, other: Arm) -> Iterator[str]:
    """Prompts at which an arm that may be silent was stopped before the other had said as much."""
    pairs = [pair for pair in pair_samples(silent, other) if pair[0].finish_reason == "length"]
    if early := [ours.prompt_id for ours, theirs in pairs if len(ours.tokens) < len(theirs.tokens)]:
        yield f"{silent.label} was cut short of {other.label} at {several(early)}"


def restoration_claim(case: Case) -> Iterator[str]:
    """Restoration is claimed or declared where a row restored nothing, or not what its prompt evicts, or from
    another source than its KV policy says; or it is claimed of zeros or noise, which are controls; or
    liveness does not count what the rows hold; or no arm under test declares it, or not from the source
    that a preset promises.
    """
    arms, stated, counted = case.report.arms, case.report.liveness.restored_positions, 0
    for _, arm in case.claims_of("restoration"):
        if (source := arm.system.restoration) not in MEANINGFUL:
            yield f"restoration is claimed of {arm.label}, which restores {source or 'nothing'}"
    for arm, sample, where in case.rows:
        restored, (fewest, most) = sample.restored_positions or 0, _restorable(arm.system, sample)
        counted += restored
        if not fewest <= restored <= most:
            source = shown(arm.system.restoration)
            yield f"{where}: restoration {source} of {restored} positions, not {fewest} to {most}"
    for arm in arms:
        policy, declared = arm.system.policy, arm.system.restoration
        if policy is not None and policy.source != declared:
            yield f"arm {arm.label} declares restoration {shown(declared)}, but kv {shown(arm.system.kv)}"
    declaring = {arm.role for arm in arms if arm.system.restoration is not None}
    lost = counted and declaring and "sut" not in declaring
    yield from faults(
        (stated != counted, f"liveness counts {stated} restored positions, the rows {counted}"),
        (lost, f"{counted} positions were restored, but no arm under test declares restoration"),
    )


def _restorable(system: System, sample: Sample) -> tuple[int, float]:
    """The fewest and most positions a row can have restored: what its prompt pushes out, in every layer."""
    if system.restoration is None:
        return 0, 0
    if system.policy is None or system.policy.source is None:
        return 1, math.inf
    evicted, classes = sample.prompt_tokens - system.policy.span, sample.cache.classes
    if RESTORED not in classes:  # in a batch they have another class
        return 1, sum(classes.values()) * evicted
    # The prompt's last token may still be to come.
    return max(classes[RESTORED] * (evicted - 1), 1), classes[RESTORED] * evicted


def control_missing(case: Case) -> Iterator[str]:
    """Controls over the same prompts are missing: exact and noise of the same policy for an arm that
    restores, claimed or not; no_needle for a claim of recall; a plain oracle for parity; ignore_stops
    where the configuration says so.
    """
    by_role = case.report.with_role("control")
    controls = {arm.control: arm for arm in reversed(by_role)}
    needed: list[tuple[Arm, str, Arm | None]] = []
    for arm in case.tested:
        declared = arm.system.restoration
        for source in ("exact", "noise") if declared is not None else ():
            same = [other for other in by_role if other.control == other.system.restoration == source]
            alike = (other for other in same if _but_source(other.system) == _but_source(arm.system))
            if source != declared:
                needed.append((arm, source, next(alike, None)))
        if "ignore_stops" in controls or case.configuration.get("ignore_stops") is True:
            needed.append((arm, "ignore_stops", controls.get("ignore_stops")))
    for claim, arm in case.claims_of(*RECALL_CLAIMS):
        needed.append((arm, "no_needle", controls.get("no_needle")))
        if claim.name == "recall_parity":
            oracle = case.other_of(claim, "oracle")
            needed.append((arm, "oracle", oracle))
            if oracle is not None and not oracle.system.is_plain:
                yield f"the oracle {oracle.label} is not mlx-lm's plain decoding with its own caches"
    for arm, name, other in needed:
        if other is None or arm.prompts != other.prompts:
            yield f"the prompts of {arm.label} were not run with the control {name!r}"


def _but_source(system: System) -> tuple[object, ...]:
    policy = system.policy
    return system.loop, system.drafter, system.block, policy and (policy.kind, policy.values, policy.layers)


def control_failed(case: Case) -> Iterator[str]:
    """A noise or no_needle control still answers, reasoning included, or was cut short, an exact control
    answers less than half of its prompts, or an ignore_stops control ends at a stop token.
    """
    for arm in case.report.arms:
        if arm.control == "ignore_stops":
            stopped = [sample.prompt_id for sample in arm.samples if sample.finish_reason != "length"]
            pairs = (pair for tested in case.tested for pair in pair_samples(arm, tested))
            stopped += [ours.prompt_id for ours, theirs in pairs if len(ours.tokens) < len(theirs.tokens)]
            if stopped:
                yield f"control {arm.label} ignores stop tokens, but ends early at {several(stopped)}"
        elif arm.role == "control" and arm.control != "block_1":
            yield from _recall_failed(case, arm)


def _recall_failed(case: Case, arm: Arm) -> Iterator[str]:
    # A control may not hide its answers in what it calls reasoning.
    answered = [s.needle.answer in s.text for s in arm.samples if s.needle and s.needle.answer]
    share, loud = recall(arm) or 0.0, quotient(sum(answered), len(answered)) or 0.0
    control, is_silent = f"control {arm.label} ({arm.control})", arm.control in ("noise", "no_needle")
    held = arm.control == "no_needle" and any(needle.prompt_contains_needle for needle in arm.needles)
    below = share < EXACT_RECALL or any(_lies_below(arm, each) for each in case.report.with_role("oracle"))
    deaf = arm.control == "exact" and bool(arm.needles) and below
    yield from faults(
        (not answered, f"{control} has no row with a needle to score"),
        (is_silent and loud > CONTROL_RECALL, f"{control} still answers {loud:.3f} of its prompts"),
        (held, f"{control} has the needle in its prompts"),
        (deaf, f"{control} answers only {share:.3f} of its prompts, under {EXACT_RECALL:g} or the oracle"),
    )
    for tested in case.tested if is_silent else ():
        yield from _cut_short(arm, tested)
