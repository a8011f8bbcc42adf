"""Do the rows agree with themselves, their order and the summary, and did what the arms declare run?"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations, product
from statistics import median

from evidence_format.figures import Case, faults, hit, pair_samples
from evidence_format.model import OUR_LOOP, PLAIN_LOOP, Sample, System
from evidence_format.policies import policy_of
from evidence_format.rules.claims import own_steps
from evidence_format.text import (
    final_number,
    opened_variants,
    prompt_set,
    several,
    shown,
    tokens_digest,
    without_reasoning,
)

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
    """A row contradicts itself (token digest, rounds that cannot give its tokens, hit, task, text, an answer
    that is not the text without its reasoning), holds more tokens than configuration.max_tokens or tokens
    outside the target's vocabulary, decoded tokens without a forward, or ran a block longer than the
    drafter takes.
    """
    for arm, sample, where in case.rows:
        yield from (f"{where}: {problem}" for problem in _row_problems(case, arm.system, sample))
    for arm, other in combinations(case.report.arms, 2):
        for ours, theirs in pair_samples(arm, other):
            if ours.tokens == theirs.tokens and ours.text != theirs.text:
                yield f"{arm.label} and {other.label} differ in text alone at {shown(ours.prompt_id)}"
    # Of one set of prompts the chat template opens reasoning for all rows or for none. Were it open to
    # choose, an answer could be called reasoning to make a reference look deaf.
    opened: dict[str, set[bool]] = defaultdict(set)
    for _, sample, _ in case.rows:
        inside = sample.answer in opened_variants(sample.text)
        # Where both readings leave the same it makes no difference.
        if sample.needle is not None and not (inside and sample.answer == without_reasoning(sample.text)):
            opened[prompt_set(sample.prompt_id)].add(inside)
    if mixed := [name for name, found in opened.items() if len(found) > 1]:
        yield f"some rows start inside reasoning and some do not in the sets {several(mixed)}"
    numbers: dict[str, list[int]] = defaultdict(list)
    for turn in case.report.parity.rounds if case.report.parity else ():
        numbers[turn.case].append(turn.round)
        same = turn.argmax_agreement * turn.rows
        if abs(same - round(same)) > 1e-4:
            yield f"{shown(turn.case)} round {turn.round}: {same:.6g} of {turn.rows} rows agree, no count"
    if odd := [name for name, found in numbers.items() if found != list(range(1, len(found) + 1))]:
        yield f"the rounds are not numbered from 1 on in {several(odd)}"


def _row_problems(case: Case, system: System, sample: Sample) -> Iterator[str]:
    tokens, rounds, decoded, drafter = sample.tokens, sample.rounds, sample.decoded, case.drafter
    most, text = case.configuration.get("max_tokens"), sample.text
    fits = most is None or (isinstance(most, int | float) and len(tokens) <= most)
    known = (case.target and case.target.vocab_size) or math.inf
    longest = (system.drafter is not None and drafter and drafter.largest_block) or math.inf
    highest, block = max(tokens, default=0), max((turn.block for turn in rounds), default=0)
    confirmed = sum(turn.accepted + 1 for turn in rounds)
    before = confirmed - (rounds[-1].accepted + 1 if rounds else 0)
    explained = before < decoded <= confirmed and all(turn.accepted < turn.block for turn in rounds)
    told = sample.needle is not None and sample.needle.hit
    if sample.answer_text is None:
        answers = sample.needle is None or without_reasoning(text) == text
    else:
        answers = sample.answer_text in {without_reasoning(text), *opened_variants(text)} - {text}
    yield from faults(
        (not tokens, "no token was generated, but the prefill always gives one"),
        (tokens_digest(tokens) != sample.tokens_sha256, "tokens_sha256 is not the digest of the tokens"),
        (told != hit(sample), f"needle.hit is {told}, but the text says {not told}"),
        (not _is_scored(sample), "its task is solved otherwise than its text or its syntax says"),
        (not answers, "answer_text is not just what the text leaves without its reasoning"),
        (rounds and not explained, f"rounds that confirmed {confirmed} tokens cannot give {decoded}"),
        (not rounds and decoded and system.loop == OUR_LOOP, f"{decoded} tokens were decoded in no round"),
        (highest >= known, f"token {highest} is outside the vocabulary of {known}"),
        (block > longest, f"a block of {block}, but the drafter takes {longest} at most"),
        (not fits, f"{len(tokens)} tokens, but configuration.max_tokens is {shown(most)}"),
    )


def _is_scored(sample: Sample) -> bool:
    """Whether what a row says of its task can be true; whether a program passes its tests no text tells."""
    task = sample.task
    if task is None or task.name == "humaneval":
        return task is None or not (task.solved and not task.compiles)
    return task.expected is not None and task.solved == (final_number(sample.answer) == task.expected)


def order_mismatch(case: Case) -> Iterator[str]:
    """`order` and the rows do not name the same runs, each once."""
    rows, runs = Counter((arm.name, row.prompt_id) for arm, row, _ in case.rows), Counter(case.report.order)
    if odd := ["/".join(run) for run in rows | runs if not rows[run] == runs[run] == 1]:
        yield f"`order` and the rows do not both hold each of these once: {several(odd)}"


def missing_stage_timings(case: Case) -> Iterator[str]:
    """A row lacks its prefill or decode time."""
    for _, sample, where in case.rows:
        if not sample.prefill_s or sample.decode_s is None or (sample.decode_s == 0 and sample.decoded):
            yield f"{where}: prefill_s is {sample.prefill_s}, decode_s {sample.decode_s}"


def timings_impossible(case: Case) -> Iterator[str]:
    """Rounds take longer than their row, rows longer than the report, or a forward no time; or, where a speed
    is claimed, verifications less than half of a plain step in the median, a single one less than a quarter,
    plain steps within the loop less than two fifths on average, or verifications less than nine tenths of a
    step of the same loop at block 1.
    """
    for _, sample, where in case.rows:
        rounds_s = sum(turn.draft_s + turn.verify_s for turn in sample.rounds)
        if sample.decode_s and rounds_s > sample.decode_s * ROUNDS_SLACK + ROUNDS_SLACK_S:
            yield f"{where}: rounds of {rounds_s:.4f} s inside a decode time of {sample.decode_s:.4f} s"
        if any(turn.verify_s == 0 or (turn.block > 1 and turn.draft_s == 0) for turn in sample.rounds):
            yield f"{where}: a forward has zero seconds"
    total = sum(sample.seconds for _, sample, _ in case.rows)
    lasted = (case.report.finished_at - case.report.started_at).total_seconds()
    if total > lasted + REPORT_SLACK_S and lasted >= 0:
        yield f"the rows took {total:.3f} s, but the whole report {lasted:.3f} s"
    for arm, baseline in case.speed_pairs:
        verified = [turn.verify_s for turn in arm.rounds if turn.block >= 2] or [math.inf]
        alone = [turn.verify_s for turn in arm.rounds if turn.block == 1]
        plain = sum(alone) / len(alone) if len(alone) >= FEWEST_STEPS else math.inf
        own = own_steps(case, arm)
        step, own_step = (median(of.steps_s) if of and of.steps_s else 0.0 for of in (baseline, own))
        for what, seconds, share, of_s in (
            ("blocks in the median", median(verified), LEAST_VERIFY, step),
            ("a block", min(verified), LEAST_VERIFY_ROUND, step),
            ("plain steps on average", plain, LEAST_STEP, step),
            ("blocks in the median", median(verified), LEAST_VERIFY_OWN, own_step),
        ):
            if seconds < share * of_s:
                took = f"{1e3 * seconds:.4f} ms, less than {share:g} of a step of {1e3 * of_s:.4f} ms"
                yield f"{arm.label} verified {what} in {took}"


def summary_mismatch(case: Case) -> Iterator[str]:
    """A summary figure is not what its rows give (relative 1e-9)."""
    pairs = [(pair.arm, pair.baseline) for pair in case.report.summary.comparisons]
    if len(set(pairs)) != len(pairs):
        yield f"summary.comparisons holds a pair twice: {several([str(pair) for pair in pairs])}"
    stated, computed = case.report.summary.model_dump(), case.figures.model_dump()
    for summary in (stated, computed):  # comparisons by what they compare, in any order
        summary["comparisons"] = {(pair["arm"], pair["baseline"]): pair for pair in summary["comparisons"]}
    for arm in case.report.arms:
        # A figure made of unmeasured bytes is MEMORY_ANALYTIC_AS_MEASURED.
        if not all(sample.cache.measured for sample in arm.samples) and arm.name in stated["arms"]:
            stated["arms"][arm.name]["max_resident_bytes"] = computed["arms"][arm.name]["max_resident_bytes"]
    yield from _differences("summary", stated, computed)


def _differences(where: str, stated: object, computed: object) -> Iterator[str]:
    equal = stated == computed
    if isinstance(stated, dict) and isinstance(computed, dict):
        for key in sorted(stated.keys() | computed.keys(), key=str):
            yield from _differences(f"{where}.{key}", stated.get(key), computed.get(key))
        return
    if isinstance(stated, tuple) and isinstance(computed, tuple) and len(stated) == len(computed):
        equal = all(not list(_differences(where, *pair)) for pair in zip(stated, computed, strict=True))
    elif isinstance(stated, int | float) and isinstance(computed, int | float):
        equal = math.isclose(stated, computed, rel_tol=RELATIVE)
    if not equal:
        yield f"{shown(where)} is {shown(stated)}, but the rows give {shown(computed)}"


def engine_never_ran(case: Case) -> Iterator[str]:
    """A speculative arm has no rounds, none of two tokens or more, or its drafter's network ran less often
    than its blocks need; or a preset promises a drafter that an arm under test does not declare. Under `auto`
    an arm may decode plainly where drafting would not pay, unless it claims a speed-up.
    """
    # Rounds of one token are plain steps.
    speculative = [arm for arm in case.report.arms if arm.system.drafter is not None and arm.samples]
    faster = {claim.arm for claim in case.claims if claim.name == "speedup"}
    for arm in speculative:
        may_be_plain = arm.role != "sut" or (arm.system.block == "auto" and arm.name not in faster)
        if not (arm.rounds if may_be_plain else arm.drafted_blocks):
            yield f"none of the {len(arm.rounds)} rounds of arm {arm.label} drafted, which declares a drafter"
    live, rounds = case.report.liveness, sum(len(arm.rounds) for arm in case.report.arms)
    networks = [arm for arm in speculative if arm.system.has_network]
    needed = sum(arm.drafted_blocks for arm in networks if not arm.system.looks_up)
    never = live.drafter_forwards + live.warm_up_forwards == 0
    yield from faults(
        (
            speculative and live.rounds != rounds,
            f"liveness counts {live.rounds} rounds, but the rows hold {rounds}",
        ),
        (
            networks and live.drafter_forwards < needed,
            f"the drafter ran {live.drafter_forwards} times, but the rows hold {needed} drafted blocks",
        ),
        (networks and not needed and never, "the drafter never ran, not even before the rows"),
    )


def silent_fallback(case: Case) -> Iterator[str]:
    """A declared loop, drafter, block or other component was not what ran, or the configuration names another
    drafter, block, KV policy or dtype; or a preset promises a KV policy or a switch that no arm declares.
    """
    for arm in case.report.arms:
        system, paths = arm.system, {sample.path for sample in arm.samples}
        speculative = {OUR_LOOP: {f"speculative:{system.drafter}"}}
        expected = (PLAIN_PATHS if system.drafter is None else speculative).get(system.loop, set())
        if len(paths) == 1 and not paths <= expected:  # several are MIXED_PATHS
            declared = f"loop {shown(system.loop)}, drafter {shown(system.drafter)}"
            yield f"arm {arm.label} declares {declared}, but {several([*paths])} ran"
        if not system.looks_up and any(turn.looked_up for turn in arm.rounds):
            yield f"arm {arm.label} declares drafter {shown(system.drafter)}, but looked drafts up"
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
        if turn.block > block or (turn.block < min(block, left) and not system.looks_up):
            return False
        left -= turn.accepted + 1
    return True


def _contradicted_switches(case: Case) -> Iterator[str]:
    stated, parity = case.configuration, case.report.parity
    # 8 and "8" are the same block; no policy is the native one.
    texts = {name: str(value) for name, value in stated.items() if value is not None}
    for arm in case.tested:
        system = arm.system
        blocks = {system.block} if system.drafter is not None else {system.block, *PLAIN_BLOCKS}
        for switch, agrees in (
            ("drafter", texts.get("drafter") == system.drafter),
            ("block", texts.get("block") in blocks),
            ("kv", case.kind == "kv" or policy_of(texts.get("kv", "native")) == system.policy),
        ):
            if switch in stated and not agrees:
                yield f"configuration.{switch} is {shown(stated[switch])}, which {arm.label} does not declare"
    ran: list[tuple[str, object]] = [("dtype", case.target.dtype)] if case.target else []
    if parity is not None:
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
    for claim in case.claims:
        if (arm := case.arm_of(claim)) is not None and arm.role != "sut":
            yield f"{claim.name} is claimed of {arm.label}, whose role is {arm.role}"
    for arm in case.tested if case.references else ():
        if arm.system.is_plain:
            yield f"arm {arm.label} is under test, but is plain mlx-lm decoding"


def self_comparison(case: Case) -> Iterator[str]:
    """Both arms of a comparison are the same system or the same measurements."""
    for claim in case.claims:
        if claim.arm is not None and claim.arm == claim.baseline:
            yield f"{claim.name} compares arm {shown(claim.arm)} with itself"
    for arm, reference in product(case.tested, case.references):
        ours, theirs = (  # by what a system is, however its policy is spelt
            (system.loop, system.drafter, system.block, system.policy or system.kv)
            for system in (arm.system, reference.system)
        )
        clocks = [{s.prompt_id: (s.prefill_s, s.decode_s) for s in each.samples} for each in (arm, reference)]
        pair, same = f"{arm.label} and {reference.label}", len(arm.samples) >= 2 and clocks[0] == clocks[1]
        yield from faults(
            (ours == theirs and not arm.system.is_plain, f"{pair} declare the same system"),
            (same, f"{pair} hold the same measurements"),
        )
