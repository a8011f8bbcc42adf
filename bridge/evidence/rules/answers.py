"""Is the answer of a row really what its text leaves without reasoning, and is that the same for all rows?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from bridge.evidence.reasoning import opened_variants, without_reasoning
from bridge.evidence.report import Report, Sample
from bridge.evidence.rules.output import prompt_set
from bridge.evidence.shown import several


def answer_problems(sample: Sample) -> Iterator[str]:
    """An answer_text that the text does not leave, or one that is missing where a needle is sought."""
    if sample.answer_text is None:
        if sample.needle is not None and without_reasoning(sample.text) != sample.text:
            yield "the text holds reasoning, but no answer_text says what it leaves"
    elif sample.answer_text == sample.text:
        yield "answer_text is the text itself"
    elif sample.answer_text not in {without_reasoning(sample.text), *opened_variants(sample.text)}:
        yield "answer_text is not what the text leaves without its reasoning"


def answers_differ(report: Report) -> Iterator[str]:
    """Rows of one set of prompts of which some begin inside reasoning and others do not.

    The chat template begins it for all of them or for none. Were it open to choose, what a row answered could
    be called reasoning to make a reference look deaf.
    """
    begun: dict[str, set[bool]] = defaultdict(set)
    for arm in report.arms:
        for sample in arm.samples:
            inside = _begins_inside(sample)
            if inside is not None:
                begun[prompt_set(sample.prompt_id)].add(inside)
    mixed = [name for name, found in begun.items() if len(found) > 1]
    if mixed:
        yield f"some rows begin inside reasoning and some do not in the sets {several(mixed)}"


def _begins_inside(sample: Sample) -> bool | None:
    """Whether the row takes its text to begin inside reasoning; None where that makes no difference."""
    if sample.needle is None:
        return None
    outside, inside = without_reasoning(sample.text), opened_variants(sample.text)
    if sample.answer in inside:
        return None if sample.answer == outside else True
    return False
