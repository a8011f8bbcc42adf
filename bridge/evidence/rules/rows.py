"""Do the rows agree with themselves, their order and the summary, and did what the arms declare run?"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations, product
from statistics import median
from typing import Any

from bridge.evidence.figures import Case, hit, paired
from bridge.evidence.model import PLAIN_LOOP, Arm, Parity, Report, Sample, Summary, System
from bridge.evidence.policies import parse_policy
from bridge.evidence.rules.claims import own_steps
from bridge.evidence.rules.identity import WEIGHTLESS_DRAFTERS
from bridge.evidence.rules.output import prompt_set
from bridge.evidence.text import faults, opened_variants, several, shown, without_reasoning

OUR_LOOP = "kakeya.decode"
RELATIVE = 1e-9
ROUNDS_SLACK, ROUNDS_SLACK_S = 1.005, 0.0005  # clocks are read at slightly different moments
# A block's verification is a forward of the target, too. mlx-lm's plain step, against which it is held, takes
# up to twice as long as one of our loop (see `claims.MOST_LOOP_GAIN`), and a clock may read short.
LEAST_VERIFY = 0.5  # of a plain step, in the median
LEAST_VERIFY_ROUND = 0.25  # … and in every single round
LEAST_STEP = 0.4  # … of a spell of plain steps, which overlap with each other
LEAST_VERIFY_OWN = 0.9  # of a step of the same loop at block 1, in the median
FEWEST_STEPS = 8
REPORT_SLACK_S = 1.0  # the report's own times may be whole seconds
# What `path` must say for a loop without a drafter.
PLAIN_PATHS = {
    PLAIN_LOOP: {"plain:mlx_lm.generate_step", f"plain:{PLAIN_LOOP}"},
    OUR_LOOP: {f"plain:{OUR_LOOP}"},
}
# What `configuration` may say of the block where nothing drafts: the switch then means nothing.
PLAIN_BLOCKS = frozenset({"1", "auto", None})
# Fallbacks that change how fast something runs, not what ran. Every other one is a declared component lost.
HARMLESS_FALLBACKS = frozenset({"compile", "blas"})


def row_inconsistent(case: Case) -> Iterator[str]:
    """A row contradicts itself (token digest, rounds that cannot give its tokens, hit, text, an answer that
    is not the text without its reasoning), holds more tokens than configuration.max_tokens or tokens
    outside the target's vocabulary, decoded tokens without a forward, or ran a block longer than the
    drafter takes.
    """
    report = case.report
    for arm, sample, where in case.rows():
        yield from (f"{where}: {problem}" for problem in _row_problems(case, arm.system, sample))
    for arm, other in combinations(report.arms, 2):
        for ours, theirs in paired(arm, other):
            if ours.tokens == theirs.tokens and ours.text != theirs.text:
                pair = f"{arm.label} and {other.label}"
                yield f"{pair} have equal tokens but different texts for {shown(ours.prompt_id)}"
    yield from _answers_differ(report)
    if report.parity is not None:
        yield from _parity_problems(report.parity)


def _row_problems(case: Case, system: System, sample: Sample) -> Iterator[str]:
    tokens, rounds, decoded, drafter = sample.tokens, sample.rounds, sample.decoded, case.drafter
    digest = hashlib.sha256(" ".join(map(str, tokens)).encode("ascii")).hexdigest()
    most = case.report.configuration.get("max_tokens")
    fits = most is None or (isinstance(most, int | float) and len(tokens) <= most)
    known = (case.target and case.target.vocab_size) or math.inf
    longest = (system.drafter is not None and drafter and drafter.largest_block) or math.inf
    highest, block = max(tokens, default=0), max((turn.block for turn in rounds), default=0)
    before = sum(turn.accepted + 1 for turn in rounds[:-1])
    confirmed = sum(turn.accepted + 1 for turn in rounds)
    explained = before < decoded <= confirmed and all(turn.accepted < turn.block for turn in rounds)
    told = sample.needle is not None and sample.needle.hit
    yield from faults(
        (not tokens, "no token was generated, but the prefill always gives one"),
        (digest != sample.tokens_sha256, "tokens_sha256 is not the digest of the tokens"),
        (told != hit(sample), f"needle.hit is {told}, but the text says {not told}"),
        (not _answer_fits(sample), "answer_text is not just what the text leaves without its reasoning"),
        (rounds and not explained, f"rounds that confirmed {confirmed} tokens cannot give {decoded}"),
        (not rounds and decoded and system.loop == OUR_LOOP, f"{decoded} tokens were decoded in no round"),
        (highest >= known, f"token {highest} is outside the vocabulary of {known}"),
        (block > longest, f"a block of {block}, but the drafter takes {longest} at most"),
        (not fits, f"{len(tokens)} tokens, but configuration.max_tokens is {shown(most)}"),
    )


def _answer_fits(sample: Sample) -> bool:
    if sample.answer_text is None:
        return sample.needle is None or without_reasoning(sample.text) == sample.text
    left = {without_reasoning(sample.text), *opened_variants(sample.text)}
    return sample.answer_text in left - {sample.text}


def _answers_differ(report: Report) -> Iterator[str]:
    """Rows of one set of prompts: the chat template opens reasoning for all of them or for none.

    Were it open to choose, an answer could be called reasoning to make a reference look deaf.
    """
    opened: dict[str, set[bool]] = defaultdict(set)
    for sample in (sample for arm in report.arms for sample in arm.samples if sample.needle is not None):
        inside = sample.answer in opened_variants(sample.text)
        if not inside or sample.answer != without_reasoning(sample.text):  # else it makes no difference
            opened[prompt_set(sample.prompt_id)].add(inside)
    if mixed := [name for name, found in opened.items() if len(found) > 1]:
        yield f"some rows start inside reasoning and some do not in the sets {several(mixed)}"


def _parity_problems(parity: Parity) -> Iterator[str]:
    numbers: dict[str, list[int]] = defaultdict(list)
    for turn in parity.rounds:
        numbers[turn.case].append(turn.round)
        same = turn.argmax_agreement * turn.rows
        if abs(same - round(same)) > 1e-4:
            yield f"{shown(turn.case)} round {turn.round}: {same:.6g} of {turn.rows} rows agree, no count"
    if odd := [case for case, found in numbers.items() if found != list(range(1, len(found) + 1))]:
        yield f"the rounds are not numbered from 1 on in {several(odd)}"


def order_mismatch(case: Case) -> Iterator[str]:
    """`order` and the rows do not name the same runs, each once."""
    rows = Counter((arm.name, sample.prompt_id) for arm, sample, _ in case.rows())
    runs = Counter(case.report.order)
    if odd := ["/".join(run) for run in rows | runs if not rows[run] == runs[run] == 1]:
        yield f"`order` and the rows do not both hold each of these once: {several(odd)}"


def missing_stage_timings(case: Case) -> Iterator[str]:
    """A row lacks its prefill or decode time."""
    for _, sample, where in case.rows():
        if not sample.prefill_s or sample.decode_s is None or (sample.decode_s == 0 and sample.decoded):
            yield f"{where}: prefill_s is {sample.prefill_s}, decode_s {sample.decode_s}"


def timings_impossible(case: Case) -> Iterator[str]:
    """Rounds take longer than their row, rows longer than the report, or a forward no time; or, where a speed
    is claimed, verifications less than half of a plain step in the median, a single one less than a quarter,
    plain steps within the loop less than two fifths on average, or verifications less than nine tenths of a
    step of the same loop at block 1.
    """
    for _, sample, where in case.rows():
        rounds_s = sum(turn.draft_s + turn.verify_s for turn in sample.rounds)
        if sample.decode_s and rounds_s > sample.decode_s * ROUNDS_SLACK + ROUNDS_SLACK_S:
            yield f"{where}: rounds of {rounds_s:.4f} s inside a decode time of {sample.decode_s:.4f} s"
        if any(turn.verify_s == 0 or (turn.block > 1 and turn.draft_s == 0) for turn in sample.rounds):
            yield f"{where}: a forward has zero seconds"
    total = sum(sample.seconds for _, sample, _ in case.rows())
    lasted = (case.report.finished_at - case.report.started_at).total_seconds()
    if total > lasted + REPORT_SLACK_S and lasted >= 0:
        yield f"the rows took {total:.3f} s, but the whole report {lasted:.3f} s"
    for arm, baseline in case.speed_pairs():
        yield from _too_fast(arm, baseline, own_steps(case, arm))


def _too_fast(arm: Arm, baseline: Arm, own: Arm | None) -> Iterator[str]:
    """Forwards that took a fraction of what a step takes, plain or of the same loop at block 1."""
    verified = [turn.verify_s for turn in arm.rounds if turn.block >= 2] or [math.inf]
    alone = [turn.verify_s for turn in arm.rounds if turn.block == 1]
    plain = sum(alone) / len(alone) if len(alone) >= FEWEST_STEPS else math.inf
    step, own_step = (median(of.steps_s) if of and of.steps_s else 0.0 for of in (baseline, own))
    for what, seconds, share, of in (
        ("blocks in the median", median(verified), LEAST_VERIFY, step),
        ("a block", min(verified), LEAST_VERIFY_ROUND, step),
        ("plain steps on average", plain, LEAST_STEP, step),
        ("blocks in the median", median(verified), LEAST_VERIFY_OWN, own_step),
    ):
        if seconds < share * of:
            took = f"{1e3 * seconds:.4f} ms, less than {share:g} of a step of {1e3 * of:.4f} ms"
            yield f"{arm.label} verified {what} in {took}"


def summary_mismatch(case: Case) -> Iterator[str]:
    """A summary figure is not what its rows give (relative 1e-9)."""
    pairs = [(pair.arm, pair.baseline) for pair in case.report.summary.comparisons]
    if len(set(pairs)) != len(pairs):
        yield f"summary.comparisons holds a pair twice: {several([str(pair) for pair in pairs])}"
    stated, computed = _by_name(case.report.summary), _by_name(case.figures)
    for arm in case.report.arms:
        # A figure made of unmeasured bytes is MEMORY_ANALYTIC_AS_MEASURED.
        if not all(sample.cache.measured for sample in arm.samples) and arm.name in stated["arms"]:
            stated["arms"][arm.name]["max_resident_bytes"] = computed["arms"][arm.name]["max_resident_bytes"]
    yield from _differences("summary", stated, computed)


def _by_name(summary: Summary) -> dict[str, Any]:
    """The figures of a summary; comparisons by what they compare, in any order."""
    document = summary.model_dump()
    document["comparisons"] = {(pair["arm"], pair["baseline"]): pair for pair in document["comparisons"]}
    return document


def _differences(where: str, stated: object, computed: object) -> Iterator[str]:
    if isinstance(stated, dict) and isinstance(computed, dict):
        for key in sorted(stated.keys() | computed.keys(), key=str):
            yield from _differences(f"{where}.{key}", stated.get(key), computed.get(key))
    elif isinstance(stated, tuple) and isinstance(computed, tuple) and len(stated) == len(computed):
        for ours, theirs in zip(stated, computed, strict=True):
            yield from _differences(where, ours, theirs)
    elif isinstance(stated, int | float) and isinstance(computed, int | float):
        if not math.isclose(stated, computed, rel_tol=RELATIVE):
            yield f"{shown(where)} is {stated}, but the rows give {computed}"
    elif stated != computed:
        yield f"{shown(where)} is {shown(stated)}, but the rows give {shown(computed)}"


def engine_never_ran(case: Case) -> Iterator[str]:
    """A speculative arm has no rounds, none of two tokens or more, or its drafter's network ran less often
    than its blocks need; or a preset promises a drafter that an arm under test does not declare.
    """
    # Rounds of one token are plain steps: block lengths may adapt to them, but now and then try a longer one.
    speculative = [arm for arm in case.report.arms if arm.system.drafter is not None and arm.samples]
    for arm in speculative:
        drafted = _drafted_blocks(arm) if arm.role == "sut" else len(arm.rounds)
        if not drafted:
            declared = f"arm {arm.label} declares drafter {shown(arm.system.drafter)}"
            yield f"{declared}, but none of its {len(arm.rounds)} rounds has two tokens or more"
    if not speculative:
        return
    live, rounds = case.report.liveness, sum(len(arm.rounds) for arm in case.report.arms)
    networks = [arm for arm in speculative if arm.system.drafter not in WEIGHTLESS_DRAFTERS]
    needed = sum(_drafted_blocks(arm) for arm in networks if not _looks_up(arm.system))
    if live.rounds != rounds:
        yield f"liveness counts {live.rounds} rounds, but the rows hold {rounds}"
    if live.drafter_forwards < max(needed, 1) and networks:
        yield f"the drafter ran {live.drafter_forwards} times, but the rows hold {needed} drafted blocks"


def _drafted_blocks(arm: Arm) -> int:
    return sum(turn.block >= 2 for turn in arm.rounds)


def _looks_up(system: System) -> bool:
    """Whether the system drafts by look-ups, at least first; each drafts as many tokens as it finds."""
    return (system.drafter or "").partition("+")[0] in WEIGHTLESS_DRAFTERS


def silent_fallback(case: Case) -> Iterator[str]:
    """A declared loop, drafter, block or other component was not what ran, or the configuration names another
    drafter, block, KV policy or dtype; or a preset promises a KV policy or a switch that no arm declares.
    """
    for arm in case.report.arms:
        system, paths = arm.system, {sample.path for sample in arm.samples}
        expected = PLAIN_PATHS.get(system.loop, set())
        if system.drafter is not None:
            expected = {f"speculative:{system.drafter}"} if system.loop == OUR_LOOP else set()
        if len(paths) == 1 and not paths <= expected:  # several are MIXED_PATHS
            declared = f"loop {shown(system.loop)}, drafter {shown(system.drafter)}"
            yield f"arm {arm.label} declares {declared}, but {several([*paths])} ran"
        if odd := [sample.prompt_id for sample in arm.samples if not _blocks_fit(system, sample)]:
            yield f"arm {arm.label} declares block {shown(system.block)}, but not so ran {several(odd)}"
    yield from _contradicted_switches(case)
    for fallback in case.report.liveness.fallbacks:
        if fallback.component not in HARMLESS_FALLBACKS:
            yield f"{shown(fallback.component)} fell back {fallback.count} times: {shown(fallback.reason)}"


def _blocks_fit(system: System, sample: Sample) -> bool:
    """Whether a fixed block explains the rounds; it may shrink to what a look-up found or what is left."""
    if system.drafter is None:
        return all(turn.block == 1 for turn in sample.rounds)
    if system.block is None or system.block == "auto":
        return True
    block, left = int(system.block), sample.decoded
    for turn in sample.rounds:
        if turn.block > block or (turn.block < min(block, left) and not _looks_up(system)):
            return False
        left -= turn.accepted + 1
    return True


def _contradicted_switches(case: Case) -> Iterator[str]:
    """Switches that `configuration` names otherwise than arms under test, target or comparison do."""
    stated = case.report.configuration
    # 8 and "8" are the same block; no policy is the native one.
    texts = {name: str(value) for name, value in stated.items() if value is not None}
    for arm in case.tested:
        system = arm.system
        blocks = {system.block} if system.drafter is not None else {system.block, *PLAIN_BLOCKS}
        for switch, agrees in (
            ("drafter", texts.get("drafter") == system.drafter),
            ("block", texts.get("block") in blocks),
            ("kv", case.report.kind == "kv" or parse_policy(texts.get("kv", "native")) == system.policy),
        ):
            if switch in stated and not agrees:
                declared = shown(getattr(system, switch))
                yield f"configuration.{switch} is {shown(stated[switch])}, {arm.label} declares {declared}"
    ran: list[tuple[str, object]] = [("dtype", case.target.dtype)] if case.target else []
    if (parity := case.report.parity) is not None:
        ran += [("dtype", parity.dtype), ("tolerance", parity.tolerance)]
        if parity.subject.sha256 != case.report.environment.git.source_sha256:
            yield "parity.subject.sha256 is not the digest of the engine that ran"
    for switch, value in ran:
        if stated.get(switch) not in (None, value):
            yield f"configuration.{switch} is {shown(stated[switch])}, but {shown(value)} ran"


def mixed_paths(case: Case) -> Iterator[str]:
    """Samples of one arm ran on different paths or caches."""
    for arm in case.report.arms:
        ran = {", ".join([sample.path, *sorted(sample.cache.classes)]) for sample in arm.samples}
        if len(ran) > 1:
            yield f"arm {arm.label} ran on several paths or caches: {several(sorted(ran))}"


def baseline_as_sut(case: Case) -> Iterator[str]:
    """A claim is about an arm that is not under test, or the arm under test is plain decoding."""
    for claim in case.report.claims:
        arm = case.arm_of(claim)
        if arm is not None and arm.role != "sut":
            yield f"{claim.name} is claimed of {arm.label}, whose role is {arm.role}"
    for arm in case.tested if case.references else ():
        if arm.system.is_plain:
            yield f"arm {arm.label} is under test, but is plain mlx-lm decoding"


def self_comparison(case: Case) -> Iterator[str]:
    """Both arms of a comparison are the same system or the same measurements."""
    for claim in case.report.claims:
        if claim.arm is not None and claim.arm == claim.baseline:
            yield f"{claim.name} compares arm {shown(claim.arm)} with itself"
    for arm, reference in product(case.tested, case.references):
        pair = f"{arm.label} and {reference.label}"
        ours, theirs = (  # by what a system is, however its policy is spelt
            (system.loop, system.drafter, system.block, system.policy or system.kv)
            for system in (arm.system, reference.system)
        )
        if ours == theirs and not arm.system.is_plain:  # that is BASELINE_AS_SUT
            yield f"{pair} declare the same system"
        clocks = [{s.prompt_id: (s.prefill_s, s.decode_s) for s in each.samples} for each in (arm, reference)]
        if len(arm.samples) >= 2 and clocks[0] == clocks[1]:
            yield f"{pair} hold the same measurements"
