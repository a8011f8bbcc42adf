"""A result as Markdown, for the summary page of a continuous-integration job.

Everything that came over the bus is cleaned and shown as literal text: no link, image, HTML or mention that a
result carries takes effect. A table cell ends up on one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from bridge.bus.untrusted import clean_line
from bridge.render.figures import bytes_text, claim_text, number_text, ratio_text

if TYPE_CHECKING:
    from bridge.bus.results import Believed
    from bridge.evidence.gate import Judgement

_SPECIAL = re.compile(r"[\\`*_{}\[\]()<>#+!|~@&]")


def job_summary(believed: Believed, judgement: Judgement | None) -> str:
    """The page: status, who ran it, figures, claims, broken rules.

    Args:
        believed: The result, checked.
        judgement: What this machine's gate says of its evidence; None: the job promised none.
    """
    result, verdict = believed.result, believed.result.verdict
    lines = [f"## {verdict.status.upper()}: {literal(result.preset or 'no preset')}", ""]
    if verdict.message:
        lines += [literal(verdict.message), ""]
    lines += _table(
        ("request", "result", "runner", "authenticity"),
        [(result.nonce, believed.commit, result.runner.name, believed.sentence)],
    )
    if judgement is not None:
        lines += _figures(judgement)
        claims = [(claim.name, claim_text(claim)) for claim in judgement.claims]
        lines += _table(("claim", "figure"), claims)
    violations = [(violation.code, violation.message) for violation in verdict.violations]
    lines += _table(("rule broken", "how"), violations)
    return "\n".join(lines)


def literal(text: str) -> str:
    """`text` on one line, as Markdown that shows exactly it."""
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", clean_line(text))


def _figures(judgement: Judgement) -> list[str]:
    if judgement.figures is None:
        return []
    ratios = {pair.arm: pair.decode_ratio for pair in judgement.figures.comparisons}
    rows = [
        (
            name,
            number_text(arm.decode_tokens_per_s),
            ratio_text(ratios.get(name)),
            number_text(arm.acceptance_length),
            number_text(arm.recall),
            bytes_text(arm.max_resident_bytes),
        )
        for name, arm in judgement.figures.arms.items()
    ]
    return _table(("arm", "decode tok/s", "ratio", "acceptance length", "recall", "KV resident"), rows)


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A Markdown table and an empty line, or nothing without rows."""
    body = ["| " + " | ".join(literal(cell) for cell in row) + " |" for row in rows]
    if not body:
        return []
    return [f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}", *body, ""]
