"""Is the output what it should be: the plain decoder's tokens or a reference's values, from clean prompts?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product

from evidence_format.claims import FEWEST_EQUAL, PARITY_LIMITS, SAMENESS, SPEED_CLAIMS
from evidence_format.figures import Case, faults, pair_samples
from evidence_format.model import Arm, Divergence, Report, Sample
from evidence_format.rules.identity import PLACEHOLDERS
from evidence_format.text import BARE_SETS, degeneration, prompt_set, several, shown, text_digest

NO_INSTRUCTION = text_digest("")
# Of the prompts compared with plain decoding, at most this share may differ and be excused as ties: models in
# 4 or 16 bits flip at a near tie now and then, but hardly at most prompts of a set; a broken path does.
MOST_TIES = 0.5
# Claims about how an arm decodes, and the recall that holds its answers to something.
OF_DECODING = SPEED_CLAIMS | {"acceptance_length"}
HELD_RECALL = 0.5
# Claims that no generated token bears on.
OF_NO_OUTPUT = frozenset({"machine", "resident_bytes", "parity"})
# The largest believable difference between the logits of a block forward and of single forwards. Above it the
# block forward is wrong, and a wrong forward must not excuse the divergences it causes.
ROUNDING_LIMITS = {"float32": 0.05, "float16": 2.0, "bfloat16": 2.0}
OF_LOGITS = "parity --target"  # the command whose comparisons have no hidden states
FEWEST_ROWS = 16


def output_diverged(case: Case) -> Iterator[str]:
    """Greedy tokens differ from the plain ones where the plain logits' gap is not below the rounding error
    measured in the same run, or at more than half of the prompts, or end for another reason.
    """
    report = case.report
    recorded = {(item.arm, item.prompt_id): item for item in report.divergences}
    if len(recorded) != len(report.divergences):
        yield "a divergence is recorded twice"
    # A run that claims nothing of what was generated is a record.
    is_judged = any(claim.name not in OF_NO_OUTPUT for claim in case.claims)
    found: set[tuple[str, str]] = set()
    for arm, baseline in product(case.tested, case.baselines):
        pairs = pair_samples(arm, baseline)
        different = [(ours, plain) for ours, plain in pairs if ours.tokens != plain.tokens]
        found.update((arm.name, ours.prompt_id) for ours, _ in different)
        ends = [o.prompt_id for o, p in pairs if o.tokens == p.tokens and o.finish_reason != p.finish_reason]
        if ends and "identical_output" in case.claimed(arm):
            yield f"{arm.label} says that equal tokens of {baseline.label} ended otherwise: {several(ends)}"
        if not _keeps_output(arm, baseline, case):
            continue
        for ours, plain in different:
            entry = recorded.get((arm.name, ours.prompt_id))
            if (problem := _excuse(entry, ours, plain, report)) is not None:
                yield f"{arm.label}/{shown(ours.prompt_id)} {problem}"
        if is_judged and len(different) > MOST_TIES * len(pairs):
            share = f"{len(different)} of {len(pairs)} prompts; at most {MOST_TIES:.0%} may be rounding ties"
            yield f"{arm.label} differs from {baseline.label} at {share}"
    for name, prompt in recorded.keys() - found:
        yield f"a divergence of {shown(name)}/{shown(prompt)} is recorded, but the rows show none"


def _keeps_output(arm: Arm, baseline: Arm, case: Case) -> bool:
    """Whether the arm has to give the baseline's tokens.

    It has to where that is claimed and where the two differ in nothing that may change the output. Where they
    do, its decoding still counts for nothing unless its output is held to something: recall, or the baseline.
    """
    claimed = case.claimed(arm)
    if "identical_output" in claimed or arm.system.policy == baseline.system.policy:
        return True
    recalls = [claim for claim, of in case.claims_of("recall", "recall_parity") if of is arm]
    held = any(each.name == "recall_parity" or (each.at_least or 0) >= HELD_RECALL for each in recalls)
    return bool(claimed & OF_DECODING) and not held


def _excuse(entry: Divergence | None, ours: Sample, plain: Sample, report: Report) -> str | None:
    """Why a divergence is not excused by a tie of the plain logits, or None where it is."""
    both = list(zip(ours.tokens, plain.tokens, strict=False))
    at = next((at for at, (our, their) in enumerate(both) if our != their), len(both))
    if at == len(both):
        return f"ends at position {at}, where the other output goes on"
    if entry is None or (entry.position, entry.speculative_token, entry.plain_token) != (at, *both[at]):
        return f"differs at position {at}, which no recorded divergence has with these tokens"
    error = report.rounding.max_abs_logit_error if report.rounding else 0.0
    if entry.plain_gap < error:
        return None
    gap = f"the plain logits' gap {entry.plain_gap:.4g} is not below the rounding error {error:.4g}"
    return f"differs at position {at}: {gap}"


def rounding_implausible(case: Case) -> Iterator[str]:
    """Block and single forwards differ by more than the dtype's rounding explains."""
    if case.report.rounding is None or case.target is None:
        return
    error, dtype = case.report.rounding.max_abs_logit_error, case.target.dtype
    if error > ROUNDING_LIMITS.get(dtype, -1.0):
        yield f"block and single logits differ by {error:.4g}, too much for {shown(dtype)}: {ROUNDING_LIMITS}"


def output_degenerate(case: Case) -> Iterator[str]:
    """An output that a claim depends on runs away in repetition (controls excepted). Sameness does not depend
    on that; speed and acceptance do not where configuration.loops says that loops are cut.
    """
    names = set()
    unaffected = OF_NO_OUTPUT | SAMENESS | (OF_DECODING if case.report.cuts_loops else set())
    for claim in case.claims:
        oracle = case.other_of(claim, "oracle") if claim.name == "recall_parity" else None
        arms = (case.arm_of(claim), case.other_of(claim), oracle)
        if claim.name not in unaffected:
            names |= {arm.name for arm in arms if arm is not None and arm.role != "control"}
    for arm, sample, where in case.rows:
        if arm.name in names and (loop := degeneration(sample.tokens)) is not None:
            yield f"{where}: {loop}"


def prompt_contaminated(case: Case) -> Iterator[str]:
    """Arms ran different prompts or seek different needles under one id, one prompt has several ids, or a set
    carries mixed or foreign instructions.
    """
    # What must be one, by what it is about; a control without needles differs on purpose, and two of its
    # prompts may become the same.
    found: dict[tuple[str, ...], set[object]] = defaultdict(set)
    for arm, sample, _ in case.rows:
        prompt, of_set, sought = sample.prompt_id, prompt_set(sample.prompt_id), sample.needle
        found["instructions of set", of_set].add(sample.instruction_sha256)
        if of_set in BARE_SETS:
            found["instructions of set", of_set].add(NO_INSTRUCTION)
        if sought is not None:
            found["needles of", prompt].add((sought.needle, sought.answer, sought.depth))
        if arm.control != "no_needle":
            found["prompts called", prompt].add((sample.prompt_sha256, sample.prompt_tokens))
            found["names of a prompt in arm", arm.name, sample.prompt_sha256].add(prompt)
    for (what, name, *_), variants in found.items():
        if len(variants) > 1:
            yield f"{len(variants)} different {what} {shown(name)}"


def parity_tolerance(case: Case) -> Iterator[str]:
    """Outputs differ from the reference's by more than the tolerance, are not finite or lead to other
    choices; or the tolerance is looser than the dtype's rounding (1e-3 in float32, 0.5 in float16, 1 in
    bfloat16); or hidden states are left out where not the target alone was compared; or a preset promises
    another dtype, a closer tolerance or hidden states.
    """
    parity = case.report.parity
    if parity is None:
        return
    limit = PARITY_LIMITS.get(parity.dtype)
    if limit is None:
        yield f"the dtype {shown(parity.dtype)} is none of {sorted(PARITY_LIMITS)}"
        return
    claimed = [claim.at_most for claim in case.claims if claim.name == "parity"]
    loosest = max([parity.tolerance, *(tolerance or 0.0 for tolerance in claimed)])
    if loosest > limit:
        yield f"a tolerance of {loosest:g} says nothing in {parity.dtype}, at most {limit:g} does"
    logits_alone = case.configuration.get("command") == OF_LOGITS and not parity.compares_hidden
    fewest, tolerance = FEWEST_EQUAL[parity.dtype], parity.tolerance
    for turn in parity.rounds:
        figures = [turn.logits_max_abs]
        if turn.tokens_equal is None and not logits_alone:
            figures.append(turn.hidden_max_abs)
        apart = [figure for figure in figures if figure is None or figure > tolerance]
        few, bound = turn.argmax_agreement < fewest, f"(tolerance {tolerance:g}, None: not finite)"
        for problem in faults(
            (apart, f"logits or hidden states differ by {apart} {bound}"),
            (turn.path_equal is False, "the paths through the candidates differ"),
            (turn.tokens_equal is False, "the tokens differ"),
            (few, f"{turn.argmax_agreement:.4g} of the rows choose alike, {fewest:g} is needed"),
        ):
            yield f"{shown(turn.case)} round {turn.round}: {problem}"


def parity_too_few(case: Case) -> Iterator[str]:
    """Parity is claimed over fewer than 16 rows."""
    rows = case.figures.parity.rows if case.figures.parity else 0
    # Without any row it is PARITY_SELF.
    if 0 < rows < FEWEST_ROWS and any(claim.name == "parity" for claim in case.claims):
        yield f"{rows} rows were compared, a claim of parity needs {FEWEST_ROWS}"


def parity_self(case: Case) -> Iterator[str]:
    """Reference and subject have one name or digest, the reference is named by a placeholder, no row was
    compared, or nothing differs in any round (blocks of the target alone may equal single steps).
    """
    parity = case.report.parity
    if parity is None:
        return
    reference, subject, rounds = parity.reference, parity.subject, parity.rounds
    name, *others = (
        "".join(filter(str.isalnum, each.casefold()))
        for each in (reference.implementation, subject.implementation, "", *PLACEHOLDERS)
    )
    digests = (subject.sha256, case.report.environment.git.source_sha256)
    may_equal = bool(rounds) and case.configuration.get("command") == OF_LOGITS
    differ = any(turn.hidden_max_abs or turn.logits_max_abs for turn in rounds)
    called = f"the reference is called {shown(reference.implementation)}, which is no other's name"
    yield from faults(
        (name in others, called),
        (reference.sha256 in digests, "the reference's digest is the subject's"),
        (not differ and not may_equal, f"nothing differs at all in {len(rounds)} rounds"),
    )
