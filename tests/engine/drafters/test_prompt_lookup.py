"""Prompt lookup finds what a search of the whole text finds, at a cost that does not grow with the text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.drafters.base import NOTHING
from engine.drafters.prompt_lookup import GRAMS, LONGEST, REACH, PromptLookup, TokenIndex
from engine.errors import ConfigurationError
from engine.sampling import Sampler, Sampling
from engine.target.model import Target
from tests.engine import tiny

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def searched(text: list[int], shortest: int) -> tuple[int, int]:
    """Place and length of the longest suffix seen before, the most recent of them, by trying all."""
    best, longest = 0, 0
    for place in range(len(text) - 1, 0, -1):
        length = 0
        while length < min(place, LONGEST) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        if length > longest:
            best, longest = place, length
    return (best, longest) if longest >= shortest else (0, 0)


def index_of(text: list[int], shortest: int = 1) -> TokenIndex:
    index = TokenIndex(shortest)
    for token in text:
        index.append(token)
    return index


def tables(index: TokenIndex) -> Any:
    return index._tokens, index._latest, index._before


def drafted(text: list[int], bonus: int, count: int = 8, **more: Any) -> list[int]:
    drafter = PromptLookup(**more)
    drafter.observe(text, None)
    return drafter.propose(bonus, count).tokens.tolist()


@given(TEXTS, st.integers(1, 6))
def test_the_longest_and_most_recent_match_is_found(text: list[int], shortest: int):
    assert index_of(text[:-1], shortest).find(text[-1]) == searched(text, shortest)


@given(TEXTS, TEXTS, st.integers(1, 20))
def test_rewinding_leaves_no_trace(text: list[int], more: list[int], shortest: int):
    index = index_of(text + more, shortest)
    for _ in more:
        index.pop()
    assert tables(index) == tables(index_of(text, shortest))


def test_what_followed_is_proposed():
    text = [*range(100, 140), 7, 8, 9, 10, 11, 12, 13, 14, *range(200, 220), 7, 8]
    assert drafted(text, 9, count=4) == [10, 11, 12, 13]


def test_the_most_recent_of_equal_matches_wins():
    assert drafted([5, 6, 1, 5, 6, 2, 5], 6, count=1) == [2]


def test_a_longer_match_wins_over_a_more_recent_one():
    assert drafted([4, 5, 6, 1, 9, 6, 2, 4, 5], 6, count=1) == [1]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_period_is_followed_beyond_the_end_of_the_text(period: int):
    text = [10 + i % period for i in range(30)]
    assert drafted(text[:-1], text[-1], count=20) == [10 + i % period for i in range(30, 50)]


@pytest.mark.parametrize(("matched", "trusted"), [(1, REACH - 1), (2, 2 * REACH - 1), (4, 15)])
def test_a_short_match_earns_a_short_draft(matched: int, trusted: int):
    known = list(range(50, 50 + matched))
    text = [1, *known, *range(100, 130), 2, *known[:-1]]
    assert drafted(text, known[-1], count=15) == list(range(100, 100 + trusted))


def test_new_text_gives_nothing():
    assert drafted([1, 2, 3], 4) == []
    assert PromptLookup().propose(1, 4) is NOTHING


def test_matches_shorter_than_asked_for_give_nothing():
    text = [1, 2, 3, 9, 8, 7, 2]
    assert drafted(text, 3, shortest=2) == [9, 8, 7, 2, 3, 9, 8]
    assert drafted(text, 3, shortest=3) == []


def test_drafts_are_certain_also_when_sampling():
    drafter = PromptLookup()
    drafter.observe([1, 2, 3, 1], None)
    draft = drafter.propose(2, 3, Sampler(Sampling(temperature=1.0, seed=1)))
    assert (draft.tokens.tolist(), draft.q) == ([3, 1, 2], None)


def test_a_new_sequence_and_a_twin_know_nothing():
    drafter = PromptLookup(shortest=2)
    drafter.observe([1, 2, 3, 1], None)
    assert len(drafter.propose(2, 4))
    twin = drafter.twin()
    assert twin.shortest == 2
    assert twin.propose(2, 4) is NOTHING
    drafter.start()
    assert drafter.propose(2, 4) is NOTHING


def test_rewinding_more_than_was_seen_is_refused_and_changes_nothing():
    drafter = PromptLookup()
    drafter.observe([1, 2, 3, 1, 2], None)
    assert not drafter.rewind(6)
    assert drafter.propose(3, 1).tokens.tolist() == [1]
    assert drafter.rewind(4)
    assert drafter.propose(1, 2).tokens.tolist() == [1, 1]


@pytest.mark.parametrize("shortest", [0, LONGEST + 1])
def test_a_shortest_match_out_of_range_is_refused(shortest: int):
    with pytest.raises(ConfigurationError, match=f"1 to {LONGEST}, not {shortest}"):
        PromptLookup(shortest)


def lines_of(work: Callable[[], Any]) -> int:
    """Lines of Python that a call runs: its cost, whatever else the machine is doing."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "kind", ["one token", "a period", "random", "a period of more than is compared", "few tokens"]
)
def test_the_cost_of_a_token_does_not_grow_with_the_text(kind: str):
    random = tiny.seeded(1)
    text = {
        "one token": [7] * 10_000,
        "a period": [10 + i % 5 for i in range(10_000)],
        "a period of more than is compared": [10 + i % 50 for i in range(10_000)],
        "few tokens": [random.randrange(2) for _ in range(10_000)],
        "random": [random.randrange(50_000) for _ in range(10_000)],
    }[kind]
    index = TokenIndex(1)

    def cost(tokens: list[int]) -> int:
        return lines_of(lambda: [(index.find(token), index.append(token)) for token in tokens])

    cost(text[:1000])
    early = cost(text[1000:1100])
    for token in text[1100:9900]:
        index.append(token)
    late = cost(text[9900:])
    assert late <= 1.2 * early + 100
    assert late / 100 < 3000  # lines a token, where every place of every gram is compared


def test_memory_is_linear_in_the_tokens():
    index = index_of([7] * 10_000)
    before = index.nbytes
    for token in range(10_000):
        index.append(token)
    assert index.nbytes - before <= 10_000 * 4 * (len(GRAMS) + 2) * 1.2  # arrays grow by an eighth at most
    assert index.nbytes < 1.2e6


@pytest.mark.sampled(0, 4)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_decoding_gives_the_plain_tokens(family: str):
    model = tiny.build(family)
    random = tiny.seeded(4)
    prompt = [random.randrange(5, 25) for _ in range(60)]  # few kinds of tokens: matches abound
    truth = tiny.plain_tokens(model, prompt, 96)
    target, drafter = Target(model), PromptLookup()
    for block in (2, 8, 16):
        steps = list(decode(target, drafter, prompt, max_tokens=96, draft_length=FixedDraftLength(block)))
        assert [token for step in steps for token in step.tokens] == truth
        assert any(step.round and step.round.block > 1 for step in steps)
