"""Was something restored where that is declared, and do the controls show that this made the answers?"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.evidence.case import Case
from bridge.evidence.figures import recall
from bridge.evidence.policies import Policy, parse_policy
from bridge.evidence.report import Arm, Sample
from bridge.evidence.rules.paths import is_plain
from bridge.evidence.rules.retrieval import PARITY_POINTS, cut_short
from bridge.evidence.rules.speed import BLOCK_1
from bridge.evidence.rules.stops import IGNORE_STOPS, stops_honoured
from bridge.evidence.shown import shown

CONTROL_RECALL = 0.1  # a control that must not answer may answer by chance this often
MEANINGLESS = ("zeros", "noise")  # sources that can only be controls
EXACT_RECALL = 0.5  # a control that must answer, and answers less, shows a target that answers nothing


def restoration_claim(case: Case) -> Iterator[str]:
    """Restoration is claimed or declared, but nothing was restored; or something was, and not under test."""
    report = case.report
    for claim in report.claims:
        arm = case.arm_of(claim)
        if claim.name == "restoration" and arm is not None and arm.system.restoration is None:
            yield f"restoration is claimed of {shown(arm.name)}, which declares none"
        if claim.name == "restoration" and arm is not None and arm.system.restoration in MEANINGLESS:
            yield f"restoration is claimed of {shown(arm.name)}, which restores {arm.system.restoration}"
    counted = 0
    for arm in report.arms:
        yield from (f"arm {shown(arm.name)} {problem}" for problem in _arm_problems(arm))
        counted += sum(sample.restored_positions or 0 for sample in arm.samples)
    stated = report.liveness.restored_positions
    if stated != counted:
        yield f"liveness counts {stated} restored positions, the rows {counted}"
    declared = [arm for arm in report.arms if arm.system.restoration is not None]
    if counted and declared and not any(arm.role == "sut" for arm in declared):
        yield f"{counted} positions were restored, but no arm under test declares restoration"


def _arm_problems(arm: Arm) -> Iterator[str]:
    """What an arm declares about restoration against its policy and its rows."""
    policy, source = parse_policy(arm.system.kv), arm.system.restoration
    if policy is not None and policy.source != source:
        yield f"declares restoration {shown(source)}, but kv {shown(arm.system.kv)}"
    for sample in arm.samples:
        problem = _row_problem(sample, policy, source)
        if problem:
            yield f"{problem} for {shown(sample.prompt_id)}"


def _row_problem(sample: Sample, policy: Policy | None, source: str | None) -> str | None:
    """What a row says it restored against what its prompt pushes out of the window, in every layer."""
    restored = sample.restored_positions or 0
    if source is None:
        return f"declares no restoration, but restored {restored} positions" if restored else None
    if restored == 0:
        return "declares restoration, but restored nothing"
    if policy is None or policy.source is None:
        return None
    evicted = sample.prompt_tokens - sum(map(int, policy.values))
    layers = sample.cache.classes.get("RestoredKV")
    if layers is None:  # in a batch they have another class
        layers, fewest = sum(sample.cache.classes.values()), 1
    else:
        fewest = layers * (evicted - 1)  # the prompt's last token may still be to come
    if fewest <= restored <= layers * evicted:
        return None
    return f"restored {restored} positions where {max(evicted, 0)} leave the window of each layer,"


def control_missing(case: Case) -> Iterator[str]:
    """An arm that restores, or a claim, lacks the control or reference arms that give it a meaning.

    Restoration needs its controls whatever is claimed: what a restoring arm does is known by them alone.
    """
    for arm in case.report.with_role("sut"):
        for control in ("exact", "noise") if arm.system.restoration is not None else ():
            if arm.system.restoration != control:
                complaint = f"restoration in {shown(arm.name)} lacks the control {control!r}"
                yield from _covers(arm, _restoring_control(case, arm, control), complaint)
    going_on = next((arm for arm in case.report.arms if arm.control == IGNORE_STOPS), None)
    if going_on is not None or case.report.configuration.get(IGNORE_STOPS) is True:
        for arm in case.report.with_role("sut"):
            yield from _covers(arm, going_on, f"{shown(arm.name)} lacks the control {IGNORE_STOPS!r}")
    for claim in case.report.claims:
        of = case.arm_of(claim)
        if of is None:
            continue
        if claim.name in ("recall", "recall_parity"):
            yield from _covers(of, _without_needle(case), f"{claim.name} lacks the control 'no_needle'")
        if claim.name == "recall_parity":
            oracle = case.oracle_of(claim)
            yield from _covers(of, oracle, "recall_parity lacks an oracle")
            if oracle is not None and not is_plain(oracle.system):
                yield f"the oracle {shown(oracle.name)} is not mlx-lm's plain decoding with its own caches"


def _without_needle(case: Case) -> Arm | None:
    return next((arm for arm in case.report.with_role("control") if arm.control == "no_needle"), None)


def _restoring_control(case: Case, tested: Arm, control: str) -> Arm | None:
    """The control that is the arm under test but for the source it restores from."""
    for arm in case.report.with_role("control"):
        if arm.control == control and _system_but(arm, control) == _system_but(tested, control):
            return arm if arm.system.restoration == control else None
    return None


def _system_but(arm: Arm, source: str) -> tuple[str, str | None, str | None, Policy | None]:
    """An arm's system as it would be if it restored from `source`."""
    system, policy = arm.system, parse_policy(arm.system.kv)
    restoring = policy.with_source(source) if policy is not None and policy.source else policy
    return system.loop, system.drafter, system.block, restoring


def _covers(arm: Arm, other: Arm | None, complaint: str) -> Iterator[str]:
    if other is None:
        yield complaint
    elif {s.prompt_id for s in arm.samples} != {s.prompt_id for s in other.samples}:
        yield f"{complaint} over the same prompts: {shown(other.name)} ran others than {shown(arm.name)}"


def control_failed(case: Case) -> Iterator[str]:
    """A control that must not answer does, or one that must answer does not, or one ends at a stop token."""
    yield from stops_honoured(case)
    for arm in case.report.with_role("control"):
        if arm.control in (BLOCK_1, IGNORE_STOPS):  # controls of speed and of stops, without needles
            continue
        share, heard = recall(arm), answers_anywhere(arm)
        if share is None or heard is None:
            yield f"control {shown(arm.name)} has no row with a needle to score"
        elif arm.control in ("noise", "no_needle") and heard > CONTROL_RECALL:
            yield f"control {shown(arm.name)} ({arm.control}) still answers {heard:.3f} of its prompts"
        if arm.control == "no_needle" and any(
            s.needle is not None and s.needle.prompt_contains_needle for s in arm.samples
        ):
            yield f"control {shown(arm.name)} has the needle in its prompts"
        if arm.control in ("noise", "no_needle"):
            for tested in case.report.with_role("sut"):
                yield from cut_short(arm, tested)
        if arm.control == "exact" and share is not None:
            if share < EXACT_RECALL:
                yield f"control {shown(arm.name)} (exact) answers only {share:.3f} of its prompts"
            for oracle in case.report.with_role("oracle"):
                reference = recall(oracle)
                if reference is not None and share < reference - PARITY_POINTS - 1e-9:
                    yield f"control {shown(arm.name)} (exact) recalls {share:.3f}, the oracle {reference:.3f}"


def answers_anywhere(arm: Arm) -> float | None:
    """Share of the samples with a needle whose answer stands anywhere in the text, reasoning included.

    A control that must not answer may not hide its answers in what it calls reasoning.
    """
    found = [s.needle.answer in s.text for s in arm.samples if s.needle is not None and s.needle.answer]
    return sum(found) / len(found) if found else None
