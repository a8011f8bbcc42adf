"""Do outputs agree with a reference's, as closely as their dtype allows, and is it another's reference?"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.evidence.case import Case
from bridge.evidence.report import Parity, ParityRound
from bridge.evidence.rules.machine import PLACEHOLDERS
from bridge.evidence.shown import several, shown

# The loosest tolerance that still says something, by dtype: outputs of one network differ by the order of its
# additions, and half precision rounds every value on the way.
LIMITS = {"float32": 1e-3, "float16": 0.5, "bfloat16": 1.0}
OF_LOGITS = "parity --target"  # the command whose comparisons have no hidden states
# Half precision cannot tell near ties apart; single precision has to choose alike in every row.
FEWEST_ROWS = 16
FEWEST_EQUAL = {"float32": 1.0, "float16": 0.9, "bfloat16": 0.9}


def parity_tolerance(case: Case) -> Iterator[str]:
    """A difference is above the tolerance or not finite, a choice differs, or the tolerance says nothing."""
    parity = case.report.parity
    if parity is None:
        return
    limit = LIMITS.get(parity.dtype)
    if limit is None:
        yield f"the dtype {shown(parity.dtype)} is none of {sorted(LIMITS)}"
        return
    claimed = [claim.at_most for claim in case.report.claims if claim.name == "parity"]
    for tolerance in {parity.tolerance, *(bound for bound in claimed if bound is not None)}:
        if tolerance > limit:
            yield f"a tolerance of {tolerance:g} says nothing in {parity.dtype}, at most {limit:g} does"
    logits_alone = case.report.configuration.get("command") == OF_LOGITS
    for turn in parity.rounds:
        of_pair = turn.tokens_equal is not None
        hidden = not of_pair and (parity.compares_hidden or not logits_alone)
        problem = _problem(turn, parity, hidden=hidden)
        if problem:
            yield f"{shown(turn.case)} round {turn.round}: {problem}"


def _problem(turn: ParityRound, parity: Parity, *, hidden: bool) -> str | None:
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


def parity_self(case: Case) -> Iterator[str]:
    """The reference is the subject, or nothing was compared."""
    parity = case.report.parity
    if parity is None:
        return
    reference, subject = parity.reference, parity.subject
    if _name(reference.implementation) == _name(subject.implementation):
        yield f"reference and subject are both {shown(subject.implementation)}"
    if _name(reference.implementation) in {"", *map(_name, PLACEHOLDERS)}:
        yield f"the reference is called {shown(reference.implementation)}, which names no implementation"
    if reference.sha256 in (subject.sha256, case.report.environment.git.source_sha256):
        yield "the reference's digest is the subject's"
    if not parity.rounds:
        yield "no row was compared"
    elif case.report.configuration.get("command") != OF_LOGITS and not any(_differences(parity)):
        yield f"nothing differs at all in {len(parity.rounds)} rounds, as only one's own output does"


def _name(implementation: str) -> str:
    """An implementation's name without what only looks different."""
    return "".join(character for character in implementation.casefold() if character.isalnum())


def _differences(parity: Parity) -> Iterator[float | None]:
    for turn in parity.rounds:
        yield from (turn.hidden_max_abs, turn.logits_max_abs)


def round_problems(parity: Parity) -> Iterator[str]:
    """Rounds that contradict themselves or are not those of a case, one after the other from the first."""
    for turn in parity.rounds:
        same = turn.argmax_agreement * turn.rows
        if abs(same - round(same)) > 1e-4:
            share = f"{turn.argmax_agreement:.6g} of {turn.rows} rows"
            yield f"{shown(turn.case)} round {turn.round}: argmax_agreement of {share} is no count"
    found: dict[str, list[int]] = {}
    for turn in parity.rounds:
        found.setdefault(turn.case, []).append(turn.round)
    odd = [case for case, numbers in found.items() if numbers != list(range(1, len(numbers) + 1))]
    if odd:
        yield f"the rounds are not numbered from 1 on in {several(odd)}"


def parity_too_few(case: Case) -> Iterator[str]:
    """Parity is claimed of fewer rows than tell one implementation from another."""
    parity = case.report.parity
    if parity is None or not case.claimed("parity"):
        return
    rows = sum(turn.rows for turn in parity.rounds)
    if 0 < rows < FEWEST_ROWS:  # without any row it is PARITY_SELF
        yield f"{rows} rows were compared, a claim of parity needs {FEWEST_ROWS}"
