"""Is the output what it should be: the plain decoder's tokens or a reference's values, from clean prompts?"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import product

from bridge.evidence.figures import SPEED_CLAIMS, Case, paired
from bridge.evidence.model import Arm, Divergence, Parity, ParityRound, Report, Sample
from bridge.evidence.rules.identity import PLACEHOLDERS
from bridge.evidence.text import degeneration, faults, several, shown

NO_INSTRUCTION = hashlib.sha256(b"").hexdigest()
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
# The loosest tolerance that still says something, by dtype: outputs of one network differ by the order of its
# additions, and half precision rounds every value on the way.
PARITY_LIMITS = {"float32": 1e-3, "float16": 0.5, "bfloat16": 1.0}
OF_LOGITS = "parity --target"  # the command whose comparisons have no hidden states
# Half precision cannot tell near ties apart; single precision has to choose alike in every row.
FEWEST_EQUAL = {"float32": 1.0, "float16": 0.9, "bfloat16": 0.9}
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
    is_judged = any(claim.name not in OF_NO_OUTPUT for claim in report.claims)
    found: set[tuple[str, str]] = set()
    for arm, baseline in product(case.tested, case.baselines):
        pairs = paired(arm, baseline)
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
    held = any(
        claim.name == "recall_parity" or (claim.at_least or 0) >= HELD_RECALL
        for claim, about in case.claims("recall", "recall_parity")
        if about is arm
    )
    return bool(claimed & OF_DECODING) and not held


def _excuse(entry: Divergence | None, ours: Sample, plain: Sample, report: Report) -> str | None:
    """Why a divergence is not excused by a tie of the plain logits, or None where it is."""
    both = list(zip(ours.tokens, plain.tokens, strict=False))
    at = next((at for at, (our, their) in enumerate(both) if our != their), len(both))
    if at == len(both):
        problem = "one output ends where the other goes on"
    elif entry is None or (entry.position, entry.speculative_token, entry.plain_token) != (at, *both[at]):
        problem = "no divergence with this position and these tokens is recorded"
    elif report.rounding is None:
        problem = "the rounding error of this model was not measured"
    elif not entry.plain_gap < (error := report.rounding.max_abs_logit_error):
        problem = f"the plain logits' gap {entry.plain_gap:.4g} is not below the rounding error {error:.4g}"
    else:
        return None
    return f"differs at position {at}: {problem}"


def rounding_implausible(case: Case) -> Iterator[str]:
    """Block and single forwards differ by more than the dtype's rounding explains."""
    if case.report.rounding is None or case.target is None:
        return
    error, dtype = case.report.rounding.max_abs_logit_error, case.target.dtype
    if error > ROUNDING_LIMITS.get(dtype, -1.0):
        yield f"block and single logits differ by {error:.4g}, too much for {shown(dtype)}: {ROUNDING_LIMITS}"


def output_degenerate(case: Case) -> Iterator[str]:
    """An output that a claim depends on runs away in repetition (controls excepted)."""
    names = set()
    for claim in case.report.claims:
        arms = [case.arm_of(claim), case.other_of(claim)]
        if claim.name == "recall_parity":
            arms.append(case.other_of(claim, "oracle"))
        if claim.name not in OF_NO_OUTPUT:
            names |= {arm.name for arm in arms if arm is not None and arm.role != "control"}
    for arm, sample, where in case.rows():
        if arm.name in names and (loop := degeneration(sample.tokens)) is not None:
            yield f"{where}: {loop}"


def prompt_contaminated(case: Case) -> Iterator[str]:
    """Arms ran different prompts or seek different needles under one id, one prompt has several ids, or a set
    carries mixed or foreign instructions.
    """
    # What must be one, by what it is about; a control without needles differs on purpose, and two of its
    # prompts may become the same.
    found: dict[tuple[str, ...], set[object]] = defaultdict(set)
    for arm, sample, _ in case.rows():
        prompt, of_set, sought = sample.prompt_id, prompt_set(sample.prompt_id), sample.needle
        found["instructions of set", of_set].add(sample.instruction_sha256)
        if of_set in ("code", "chat"):
            found["instructions of set", of_set].add(NO_INSTRUCTION)
        if sought is not None:
            found["needles of", prompt].add((sought.needle, sought.answer, sought.depth))
        if arm.control != "no_needle":
            found["prompts called", prompt].add((sample.prompt_sha256, sample.prompt_tokens))
            found["names of a prompt in arm", arm.name, sample.prompt_sha256].add(prompt)
    for (what, name, *_), variants in found.items():
        if len(variants) > 1:
            yield f"{len(variants)} different {what} {shown(name)}"


def prompt_set(prompt_id: str) -> str:
    """The set a prompt belongs to: its id without the number at the end."""
    return re.sub(r"[-_.:/]?[0-9]+\Z", "", prompt_id)


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
    claimed = [claim.at_most for claim in case.report.claims if claim.name == "parity"]
    loosest = max([parity.tolerance, *(tolerance or 0.0 for tolerance in claimed)])
    if loosest > limit:
        yield f"a tolerance of {loosest:g} says nothing in {parity.dtype}, at most {limit:g} does"
    logits_alone = case.report.configuration.get("command") == OF_LOGITS and not parity.compares_hidden
    for turn in parity.rounds:
        hidden = turn.tokens_equal is None and not logits_alone
        for problem in _round_problems(turn, parity, hidden=hidden):
            yield f"{shown(turn.case)} round {turn.round}: {problem}"


def _round_problems(turn: ParityRound, parity: Parity, *, hidden: bool) -> Iterator[str]:
    differences = [turn.logits_max_abs, turn.hidden_max_abs] if hidden else [turn.logits_max_abs]
    apart = [figure for figure in differences if figure is None or figure > parity.tolerance]
    fewest = FEWEST_EQUAL[parity.dtype]
    few = turn.argmax_agreement < fewest
    return faults(
        (
            apart,
            f"logits or hidden states differ by {apart} (tolerance {parity.tolerance:g}, None: not finite)",
        ),
        (turn.path_equal is False, "the paths through the candidates differ"),
        (turn.tokens_equal is False, "the tokens differ"),
        (few, f"{turn.argmax_agreement:.4g} of the rows choose alike, {fewest:g} is needed"),
    )


def parity_too_few(case: Case) -> Iterator[str]:
    """Parity is claimed over fewer than 16 rows."""
    parity = case.report.parity
    rows = sum(turn.rows for turn in parity.rounds) if parity is not None else 0
    is_claimed = any(claim.name == "parity" for claim in case.report.claims)
    if is_claimed and 0 < rows < FEWEST_ROWS:  # without any row it is PARITY_SELF
        yield f"{rows} rows were compared, a claim of parity needs {FEWEST_ROWS}"


def parity_self(case: Case) -> Iterator[str]:
    """Reference and subject have one name or digest, the reference is named by a placeholder, no row was
    compared, or nothing differs in any round (blocks of the target alone may equal single steps).
    """
    parity = case.report.parity
    if parity is None:
        return
    reference, subject = parity.reference, parity.subject
    taken = {"", *map(_letters, PLACEHOLDERS), _letters(subject.implementation)}
    is_named = _letters(reference.implementation) not in taken
    digests = (subject.sha256, case.report.environment.git.source_sha256)
    may_equal = bool(parity.rounds) and case.report.configuration.get("command") == OF_LOGITS
    differ = any(turn.hidden_max_abs or turn.logits_max_abs for turn in parity.rounds)
    yield from faults(
        (
            not is_named,
            f"the reference is called {shown(reference.implementation)}, which is no other's name",
        ),
        (reference.sha256 in digests, "the reference's digest is the subject's"),
        (not differ and not may_equal, f"nothing differs at all in {len(parity.rounds)} rounds"),
    )


def _letters(implementation: str) -> str:
    return "".join(character for character in implementation.casefold() if character.isalnum())
