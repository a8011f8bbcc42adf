"""Do recall figures mean that something was found, and do controls show what restoration did?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bridge.evidence.figures import Case, hit, paired, recall
from bridge.evidence.model import Arm, Needle, Sample, quotient
from bridge.evidence.policies import KVPolicy, parse_policy
from bridge.evidence.rules.paths import is_plain
from bridge.evidence.rules.speed import BLOCK_1
from bridge.evidence.text import several, shown

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
MEANINGLESS = ("zeros", "noise")  # sources that can only be controls
IGNORE_STOPS = "ignore_stops"


def recall_vacuous(case: Case) -> Iterator[str]:
    """An empty, one-character or prompt-contained answer counts as a hit; a needle is sought that its prompt
    does not hold; recall is claimed without needles, with one answer for most prompts, of texts that recite
    the answers of many prompts, or against an oracle that answers nothing or was cut short.
    """
    for arm in case.report.arms:
        outside = [s.prompt_id for s in arm.samples if s.needle and not s.needle.prompt_contains_needle]
        if outside and arm.control != "no_needle":
            yield f"arm {arm.label} sought needles that are not in the prompts {several(outside)}"
    for arm, sample, where in case.rows():
        if arm.role != "control" and (problem := _vacuous_hit(sample)) is not None:
            yield f"{where} is counted as a hit, but {problem}"
    for claim in case.claims(*RECALL_CLAIMS):
        claimed = case.arm_of(claim)
        if claimed is not None:
            yield from (f"{claim.name} of {claimed.label}: {problem}" for problem in _vacuous_claim(claimed))
        oracle = case.oracle_of(claim) if claim.name == "recall_parity" else None
        if oracle is not None and recall(oracle) == 0:
            yield f"recall_parity: the oracle {oracle.label} answers nothing"
        if oracle is not None and claimed is not None:
            yield from _cut_short(oracle, claimed)


def recall_too_few(case: Case) -> Iterator[str]:
    """Recall is claimed of fewer than 5 prompts, or of needles at one depth."""
    for claim in case.claims(*RECALL_CLAIMS):
        arm = case.arm_of(claim)
        if arm is None:
            continue
        prompts = {sample.prompt_sha256 for sample in arm.samples if sample.needle is not None}
        depths = {round(needle.depth, 2) for needle in _needles(arm)}
        if 0 < len(prompts) < FEWEST_PROMPTS:
            yield f"{claim.name} of {arm.label}: {len(prompts)} prompts, of {FEWEST_PROMPTS} required"
        if 0 < len(depths) < FEWEST_DEPTHS:
            yield f"{claim.name} of {arm.label}: all needles lie at depth {min(depths):g}"


def _needles(arm: Arm) -> list[Needle]:
    return [sample.needle for sample in arm.samples if sample.needle is not None]


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
    held = sum(needle.prompt_contains_needle for needle in _needles(arm))
    if held < len(arm.samples) or not arm.samples:
        yield f"{len(arm.samples) - held} of {len(arm.samples)} prompts hold no needle"
    answers = Counter(needle.answer for needle in _needles(arm))
    if len(arm.samples) > 2 and answers and max(answers.values()) > COMMON_ANSWER * len(arm.samples):
        yield f"one answer, {shown(answers.most_common(1)[0][0])}, fits more than half of the prompts"
    sought = sorted(answer for answer in answers if len(answer.strip()) >= SHORTEST_ANSWER)
    sought = sought[:: -(-len(sought) // SOUGHT) or 1]
    if recited := [sample.prompt_id for sample in arm.samples if _recites(sample, sought)]:
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
    for claim in case.claims("recall_parity"):
        arm, oracle = case.arm_of(claim), case.oracle_of(claim)
        if arm is not None and oracle is not None and _lies_below(arm, oracle):
            yield f"{arm.label} recalls {recall(arm):.3f}, the oracle {oracle.label} {recall(oracle):.3f}"


def _lies_below(arm: Arm, oracle: Arm) -> bool:
    ours, reference = recall(arm), recall(oracle)
    return ours is not None and reference is not None and ours < reference - PARITY_POINTS - 1e-9


def _cut_short(silent: Arm, other: Arm) -> Iterator[str]:
    """Prompts at which an arm that may be silent was stopped before the other had said as much."""
    early = [
        ours.prompt_id
        for ours, theirs in paired(silent, other)
        if ours.finish_reason == "length" and len(ours.tokens) < len(theirs.tokens)
    ]
    if early:
        yield f"{silent.label} was cut short of {other.label} at {several(early)}"


def restoration_claim(case: Case) -> Iterator[str]:
    """Restoration is claimed or declared where a row restored nothing, or not what its prompt evicts, or from
    another source than its KV policy says; or it is claimed of zeros or noise, which are controls; or
    liveness does not count what the rows hold; or no arm under test declares it, or not from the source
    that a preset promises.
    """
    for claim in case.claims("restoration"):
        claimed = case.arm_of(claim)
        if claimed is not None and claimed.system.restoration in (None, *MEANINGLESS):
            source = claimed.system.restoration or "nothing"
            yield f"restoration is claimed of {claimed.label}, which restores {source}"
    arms = case.report.arms
    for arm in arms:
        policy, declared = parse_policy(arm.system.kv), arm.system.restoration
        if policy is not None and policy.source != declared:
            yield f"arm {arm.label} declares restoration {shown(declared)}, but kv {shown(arm.system.kv)}"
        for sample in arm.samples:
            if (problem := _restored_problem(sample, policy, declared)) is not None:
                yield f"arm {arm.label} {problem} for {shown(sample.prompt_id)}"
    stated = case.report.liveness.restored_positions
    counted = sum(sample.restored_positions or 0 for arm in arms for sample in arm.samples)
    if stated != counted:
        yield f"liveness counts {stated} restored positions, the rows {counted}"
    declaring = {arm.role for arm in arms if arm.system.restoration is not None}
    if counted and declaring and "sut" not in declaring:
        yield f"{counted} positions were restored, but no arm under test declares restoration"


def _restored_problem(sample: Sample, policy: KVPolicy | None, source: str | None) -> str | None:
    """What a row says it restored against what its prompt pushes out of the window, in every layer."""
    restored = sample.restored_positions or 0
    if source is None:
        return f"declares no restoration, but restored {restored} positions" if restored else None
    if restored == 0:
        return "declares restoration, but restored nothing"
    if policy is None or policy.source is None:
        return None
    evicted = sample.prompt_tokens - policy.span
    layers = sample.cache.classes.get("RestoredKV")
    if layers is None:  # in a batch they have another class
        layers, fewest = sum(sample.cache.classes.values()), 1
    else:
        fewest = layers * (evicted - 1)  # the prompt's last token may still be to come
    if fewest <= restored <= layers * evicted:
        return None
    return f"restored {restored} positions where {max(evicted, 0)} leave the window of each layer,"


def control_missing(case: Case) -> Iterator[str]:
    """Controls over the same prompts are missing: exact and noise of the same policy for an arm that
    restores, claimed or not; no_needle for a claim of recall; a plain oracle for parity; ignore_stops
    where the configuration says so.
    """
    controls = case.report.with_role("control")
    ignoring = next((arm for arm in case.report.arms if arm.control == IGNORE_STOPS), None)
    for arm in case.tested:
        for source in ("exact", "noise") if arm.system.restoration is not None else ():
            if arm.system.restoration != source:
                lacks = f"restoration in {arm.label} lacks the control {source!r}"
                yield from _covers(arm, _restoring_control(controls, arm, source), lacks)
        if ignoring is not None or case.report.configuration.get(IGNORE_STOPS) is True:
            yield from _covers(arm, ignoring, f"{arm.label} lacks the control {IGNORE_STOPS!r}")
    without_needle = next((arm for arm in controls if arm.control == "no_needle"), None)
    for claim in case.claims(*RECALL_CLAIMS):
        claimed = case.arm_of(claim)
        if claimed is None:
            continue
        yield from _covers(claimed, without_needle, f"{claim.name} lacks the control 'no_needle'")
        if claim.name == "recall_parity":
            oracle = case.oracle_of(claim)
            yield from _covers(claimed, oracle, "recall_parity lacks an oracle")
            if oracle is not None and not is_plain(oracle.system):
                yield f"the oracle {oracle.label} is not mlx-lm's plain decoding with its own caches"


def _restoring_control(controls: tuple[Arm, ...], tested: Arm, source: str) -> Arm | None:
    """The control that is the arm under test but for the source it restores from."""
    for arm in controls:
        if arm.control == source and _system_but(arm, source) == _system_but(tested, source):
            return arm if arm.system.restoration == source else None
    return None


def _system_but(arm: Arm, source: str) -> tuple[str, str | None, str | None, KVPolicy | None]:
    """An arm's system as it would be if it restored from `source`."""
    system, policy = arm.system, parse_policy(arm.system.kv)
    restoring = policy.with_source(source) if policy is not None and policy.source else policy
    return system.loop, system.drafter, system.block, restoring


def _covers(arm: Arm, other: Arm | None, complaint: str) -> Iterator[str]:
    if other is None:
        yield complaint
    elif arm.prompts != other.prompts:
        yield f"{complaint} over the same prompts: {other.label} ran others than {arm.label}"


def control_failed(case: Case) -> Iterator[str]:
    """A noise or no_needle control still answers, reasoning included, or was cut short, an exact control
    answers less than half of its prompts, or an ignore_stops control ends at a stop token.
    """
    for arm in case.report.arms:
        if arm.control == IGNORE_STOPS:
            yield from _stopped(case, arm)
    for arm in case.report.with_role("control"):
        if arm.control in (BLOCK_1, IGNORE_STOPS):  # controls of speed and of stops, without needles
            continue
        # A control may not hide its answers in what it calls reasoning.
        answered = [s.needle.answer in s.text for s in arm.samples if s.needle and s.needle.answer]
        share, heard = recall(arm), quotient(sum(answered), len(answered))
        if share is None or heard is None:
            yield f"control {arm.label} has no row with a needle to score"
        elif arm.control in ("noise", "no_needle") and heard > CONTROL_RECALL:
            yield f"control {arm.label} ({arm.control}) still answers {heard:.3f} of its prompts"
        if arm.control == "no_needle" and any(needle.prompt_contains_needle for needle in _needles(arm)):
            yield f"control {arm.label} has the needle in its prompts"
        for tested in case.tested if arm.control in ("noise", "no_needle") else ():
            yield from _cut_short(arm, tested)
        if arm.control == "exact" and share is not None:
            yield from _exact_fails(case, arm, share)


def _exact_fails(case: Case, arm: Arm, share: float) -> Iterator[str]:
    """A control that restores the very values, and does not answer."""
    if share < EXACT_RECALL:
        yield f"control {arm.label} (exact) answers only {share:.3f} of its prompts"
    for oracle in case.report.with_role("oracle"):
        if _lies_below(arm, oracle):
            yield f"control {arm.label} (exact) recalls {share:.3f}, the oracle {recall(oracle):.3f}"


def _stopped(case: Case, arm: Arm) -> Iterator[str]:
    """A control that ignores stop tokens, and stopped; or went no further than an arm under test."""
    says = f"control {arm.label} ignores stop tokens, but"
    if stopped := sum(sample.finish_reason != "length" for sample in arm.samples):
        yield f"{says} {stopped} rows end by one"
    for tested in case.tested:
        for ours, theirs in paired(arm, tested):
            if len(ours.tokens) < len(theirs.tokens):
                yield f"{says} ends {shown(ours.prompt_id)} before {tested.label} does"
