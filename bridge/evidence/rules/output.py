"""Is the output what it should be: the plain decoder's tokens or a reference's values, from clean prompts?"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator

from bridge.evidence.figures import SPEED_CLAIMS, Case, first_divergence, paired
from bridge.evidence.model import Arm, Divergence, Parity, ParityRound, Report, ReportClaim, Sample
from bridge.evidence.policies import parse_policy
from bridge.evidence.rules.machine import PLACEHOLDERS
from bridge.evidence.text import degeneration, several, shown

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
    found: set[tuple[str, str]] = set()
    for arm in case.tested:
        for baseline in case.baselines:
            pairs = paired(arm, baseline)
            different = [(ours, plain) for ours, plain in pairs if ours.tokens != plain.tokens]
            found.update((arm.name, ours.prompt_id) for ours, _ in different)
            if any(claim.name == "identical_output" for claim in case.claims_of(arm)):
                yield from _other_endings(arm, baseline)
            if not _keeps_output(arm, baseline, case):
                continue
            for ours, plain in different:
                entry = recorded.get((arm.name, ours.prompt_id))
                if (problem := _excuse(entry, ours, plain, report)) is not None:
                    yield f"{arm.label}/{shown(ours.prompt_id)} {problem}"
            if _judges_output(case) and len(different) > MOST_TIES * len(pairs):
                share = (
                    f"{len(different)} of {len(pairs)} prompts; at most {MOST_TIES:.0%} may be rounding ties"
                )
                yield f"{arm.label} differs from {baseline.label} at {share}"
    for name, prompt in recorded.keys() - found:
        yield f"a divergence of {shown(name)}/{shown(prompt)} is recorded, but the rows show none"


def _keeps_output(arm: Arm, baseline: Arm, case: Case) -> bool:
    """Whether the arm has to give the baseline's tokens.

    It has to where that is claimed and where the two differ in nothing that may change the output. Where they
    do, its decoding still counts for nothing unless its output is held to something: recall, or the baseline.
    """
    claims = case.claims_of(arm)
    names = {claim.name for claim in claims}
    if "identical_output" in names or parse_policy(arm.system.kv) == parse_policy(baseline.system.kv):
        return True
    return not names.isdisjoint(OF_DECODING) and not any(map(_holds_answers, claims))


def _holds_answers(claim: ReportClaim) -> bool:
    return claim.name == "recall_parity" or (claim.name == "recall" and (claim.at_least or 0) >= HELD_RECALL)


def _other_endings(arm: Arm, baseline: Arm) -> Iterator[str]:
    """Equal tokens that one arm says ended for another reason."""
    for ours, plain in paired(arm, baseline):
        if ours.tokens == plain.tokens and ours.finish_reason != plain.finish_reason:
            ends = (
                f"ends by {ours.finish_reason}, but equal tokens of {baseline.label} by {plain.finish_reason}"
            )
            yield f"{arm.label}/{shown(ours.prompt_id)} {ends}"


def _excuse(entry: Divergence | None, ours: Sample, plain: Sample, report: Report) -> str | None:
    """Why a divergence is not excused by a tie of the plain logits, or None where it is."""
    at = first_divergence(ours.tokens, plain.tokens) or 0
    if at >= min(len(ours.tokens), len(plain.tokens)):
        problem = "one output ends where the other goes on"
    elif entry is None:
        problem = "no divergence is recorded for it"
    elif (entry.position, entry.speculative_token, entry.plain_token) != (
        at,
        ours.tokens[at],
        plain.tokens[at],
    ):
        problem = "the recorded divergence has another position or other tokens"
    elif report.rounding is None:
        problem = "the rounding error of this model was not measured"
    elif not entry.plain_gap < (error := report.rounding.max_abs_logit_error):
        problem = f"the plain logits' gap {entry.plain_gap:.4g} is not below the rounding error {error:.4g}"
    else:
        return None
    return f"differs at position {at}: {problem}"


def rounding_implausible(case: Case) -> Iterator[str]:
    """Block and single forwards differ by more than the dtype's rounding explains."""
    rounding, target = case.report.rounding, case.report.environment.models.get("target")
    if rounding is None or target is None:
        return
    limit = ROUNDING_LIMITS.get(target.dtype)
    if limit is None:
        yield f"the target's dtype {shown(target.dtype)} is none of {sorted(ROUNDING_LIMITS)}"
    elif (error := rounding.max_abs_logit_error) > limit:
        yield f"block and single logits differ by {error:.4g}, more than {target.dtype} explains ({limit})"


def output_degenerate(case: Case) -> Iterator[str]:
    """An output that a claim depends on runs away in repetition (controls excepted)."""
    claims = [claim for claim in case.report.claims if claim.name not in OF_NO_OUTPUT]
    arms = [arm for claim in claims for arm in (case.arm_of(claim), case.baseline_of(claim))]
    arms += [case.oracle_of(claim) for claim in claims if claim.name == "recall_parity"]
    names = {arm.name for arm in arms if arm is not None and arm.role != "control"}
    for arm, sample, where in case.rows():
        if arm.name in names and (loop := degeneration(sample.tokens)) is not None:
            yield f"{where}: {loop}"


def _judges_output(case: Case) -> bool:
    """Whether any claim depends on what was generated; a run that claims nothing is a record."""
    return any(claim.name not in OF_NO_OUTPUT for claim in case.report.claims)


def prompt_contaminated(case: Case) -> Iterator[str]:
    """Arms ran different prompts or seek different needles under one id, one prompt has several ids, or a set
    carries mixed or foreign instructions.
    """
    prompts: dict[str, set[tuple[str, int]]] = defaultdict(set)
    needles: dict[str, set[tuple[str, str, float]]] = defaultdict(set)
    instructions: dict[str, set[str]] = defaultdict(set)
    ids: dict[tuple[str, str], set[str]] = defaultdict(set)
    for arm, sample, _ in case.rows():
        instructions[prompt_set(sample.prompt_id)].add(sample.instruction_sha256)
        if (sought := sample.needle) is not None:
            needles[sample.prompt_id].add((sought.needle, sought.answer, sought.depth))
        if arm.control != "no_needle":  # its prompts differ on purpose, and two may become the same
            prompts[sample.prompt_id].add((sample.prompt_sha256, sample.prompt_tokens))
            ids[arm.name, sample.prompt_sha256].add(sample.prompt_id)
    if different := [prompt for prompt, variants in prompts.items() if len(variants) > 1]:
        yield f"arms ran different prompts under one id: {several(different)}"
    if different := [prompt for prompt, variants in needles.items() if len(variants) > 1]:
        yield f"arms seek different needles under one id: {several(different)}"
    for (name, _), same in ids.items():
        if len(same) > 1:
            yield f"arm {shown(name)} ran one prompt under several ids: {several(sorted(same))}"
    for name, digests in instructions.items():
        if len(digests) > 1:
            yield f"the prompts of set {shown(name)} carry {len(digests)} different instructions"
        elif name in ("code", "chat") and digests != {NO_INSTRUCTION}:
            yield f"the prompts of set {shown(name)} carry a foreign instruction"


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
    claimed = {claim.at_most for claim in case.claims("parity") if claim.at_most is not None}
    for tolerance in claimed | {parity.tolerance}:
        if tolerance > limit:
            yield f"a tolerance of {tolerance:g} says nothing in {parity.dtype}, at most {limit:g} does"
    logits_alone = case.report.configuration.get("command") == OF_LOGITS and not parity.compares_hidden
    for turn in parity.rounds:
        hidden = turn.tokens_equal is None and not logits_alone
        if (problem := _round_problem(turn, parity, hidden=hidden)) is not None:
            yield f"{shown(turn.case)} round {turn.round}: {problem}"


def _round_problem(turn: ParityRound, parity: Parity, *, hidden: bool) -> str | None:
    """What is wrong with a round, or None when it agrees."""
    differences = {"logits": turn.logits_max_abs}
    if hidden:
        differences["hidden states"] = turn.hidden_max_abs
    for what, figure in differences.items():
        if figure is None:
            return f"the {what} are not finite"
        if figure > parity.tolerance:
            return f"the {what} differ by {figure:.4g}, more than {parity.tolerance:g}"
    if turn.path_equal is False:
        return "the paths through the candidates differ"
    if turn.tokens_equal is False:
        return "the tokens differ"
    fewest = FEWEST_EQUAL[parity.dtype]
    if turn.argmax_agreement < fewest:
        return f"{turn.argmax_agreement:.4g} of the rows choose alike, {fewest:g} is needed"
    return None


def parity_too_few(case: Case) -> Iterator[str]:
    """Parity is claimed over fewer than 16 rows."""
    parity = case.report.parity
    rows = sum(turn.rows for turn in parity.rounds) if parity is not None else 0
    if any(case.claims("parity")) and 0 < rows < FEWEST_ROWS:  # without any row it is PARITY_SELF
        yield f"{rows} rows were compared, a claim of parity needs {FEWEST_ROWS}"


def parity_self(case: Case) -> Iterator[str]:
    """Reference and subject have one name or digest, the reference is named by a placeholder, no row was
    compared, or nothing differs in any round (blocks of the target alone may equal single steps).
    """
    parity = case.report.parity
    if parity is None:
        return
    reference, subject = parity.reference, parity.subject
    name = _letters(reference.implementation)
    if name == _letters(subject.implementation):
        yield f"reference and subject are both {shown(subject.implementation)}"
    if name in {"", *map(_letters, PLACEHOLDERS)}:
        yield f"the reference is called {shown(reference.implementation)}, which names no implementation"
    if reference.sha256 in (subject.sha256, case.report.environment.git.source_sha256):
        yield "the reference's digest is the subject's"
    differ = any(turn.hidden_max_abs or turn.logits_max_abs for turn in parity.rounds)
    if not parity.rounds:
        yield "no row was compared"
    elif case.report.configuration.get("command") != OF_LOGITS and not differ:
        yield f"nothing differs at all in {len(parity.rounds)} rounds, as only one's own output does"


def _letters(implementation: str) -> str:
    """An implementation's name without what only looks different."""
    return "".join(character for character in implementation.casefold() if character.isalnum())
