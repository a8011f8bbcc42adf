"""Thresholds on the figures of a judged report: ``ratio>=1.5``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from bridge.errors import ParameterError
from bridge.evidence.gate import Judgement
from evidence_format.model import ArmSummary, Comparison, ParitySummary, PerplexitySummary
from evidence_format.paired import PairedSummary

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_TEXT = re.compile(r"\s*([a-z][a-z0-9_]{0,63})\s*(>=|<=|>|<)\s*([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*", re.ASCII)
# In a report with a baseline; a paired run has a figure of that name.
_ALIASES = {"ratio": "decode_ratio"}


@dataclass(frozen=True)
class Threshold:
    """What a figure must reach."""

    name: str
    operator: str
    value: float

    def holds(self, value: float) -> bool:
        """Whether a figure reaches it; NaN reaches none."""
        return OPERATORS[self.operator](value, self.value)

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{self.value:g}"


def parse_threshold(text: str) -> Threshold:
    """Read ``NAME OP NUMBER``, where OP is >=, <=, > or <; `ParameterError` where it is not that."""
    match = _TEXT.fullmatch(text)
    try:
        value = math.nan if match is None else float(match[3])
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise ParameterError(f"no threshold: {ascii(text)[:100]}", "write NAME OP NUMBER, like 'ratio>=1.5'")
    return Threshold(match[1], match[2], value)


def figures_of(judgement: Judgement) -> dict[str, list[float]]:
    """The figures that a threshold can name, as the gate computed them: one value for each arm under test.

    Of a comparison with a baseline, ``ratio`` is ``decode_ratio``; of a paired run it is the time ratio.
    """
    found: dict[str, list[float]] = {}
    parts: list[ArmSummary | Comparison | ParitySummary | PerplexitySummary | PairedSummary] = []
    if judgement.paired is not None:
        parts.append(judgement.paired.summary)
    elif judgement.report is not None and judgement.figures is not None:
        tested = {arm.name for arm in judgement.report.with_role("sut")}
        parts += [each for name, each in judgement.figures.arms.items() if name in tested]
        parts += judgement.figures.comparisons
        parts += [
            each for each in (judgement.figures.parity, judgement.figures.perplexity) if each is not None
        ]
    for part in parts:
        for name, value in part.model_dump().items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(name, []).append(float(value))
    for alias, name in _ALIASES.items():
        if alias not in found and name in found:
            found[alias] = found[name]
    return found
