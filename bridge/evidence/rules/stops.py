"""Do texts end where the model ends them, and does the arm that ignores that go on past it?"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.evidence.case import Case
from bridge.evidence.figures import paired, quotient
from bridge.evidence.report import Arm, Sample
from bridge.evidence.shown import shown

IGNORE_STOPS = "ignore_stops"


def natural_stops(arm: Arm) -> float | None:
    """Share of the rows that end at a stop token."""
    return quotient(sum(sample.finish_reason == "stop" for sample in arm.samples), len(arm.samples))


def stops_problem(case: Case, arm: Arm) -> str | None:
    """A text that goes on past the token that ends another one by `stop`, or None: that is no stop token.

    So a text that was cut at `max_tokens` cannot call that a stop.
    """
    ends: dict[int, Sample] = {}
    for sample in arm.samples:
        if sample.finish_reason == "stop" and sample.tokens:
            ends.setdefault(sample.tokens[-1], sample)
    for other in case.report.arms:
        if other.control == IGNORE_STOPS:
            continue
        for sample in other.samples:
            inside = sample.tokens if sample.finish_reason == "length" else sample.tokens[:-1]
            token = next((token for token in inside if token in ends), None)
            if token is not None:
                return (
                    f"token {token} ends {shown(ends[token].prompt_id)}, but {shown(sample.prompt_id)} of "
                    f"{shown(other.name)} continues after it"
                )
    return None


def stops_honoured(case: Case) -> Iterator[str]:
    """An arm that ignores stop tokens, and stopped; or went no further than the arm it is compared with."""
    for arm in case.report.arms:
        if arm.control != IGNORE_STOPS:
            continue
        stopped = sum(sample.finish_reason != "length" for sample in arm.samples)
        if stopped:
            yield f"control {shown(arm.name)} ignores stop tokens, but {stopped} rows end by one"
        for tested in case.report.with_role("sut"):
            for ours, theirs in paired(arm, tested):
                if len(ours.tokens) < len(theirs.tokens):
                    yield (
                        f"control {shown(arm.name)} ignores stop tokens, but ends {shown(ours.prompt_id)} "
                        f"before {shown(tested.name)} does"
                    )
