"""Greedy acceptance against its definition."""

from __future__ import annotations

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st

from engine.accept import pack_greedy, unpack_greedy

TOKENS = st.integers(0, 4)


def logits_for(tokens: list[int]) -> mx.array:
    """[1, B, 5] logits whose argmax is the given tokens."""
    return mx.array([[[float(column == token) for column in range(5)] for token in tokens]])


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=8), TOKENS, st.sets(TOKENS, max_size=2))
def test_the_longest_agreeing_prefix_and_one_more_token_are_emitted(pairs, last, stops):
    drafts, targets = [a for a, _ in pairs], [b for _, b in pairs] + [last]
    packed = pack_greedy(mx.array(drafts, mx.int32), logits_for(targets)).tolist()
    verdict = unpack_greedy(packed, stops)
    accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    emitted = [*drafts[:accepted], targets[accepted]]
    stop = next((i for i, token in enumerate(emitted) if token in stops), None)
    assert verdict.accepted == accepted
    assert verdict.stopped == (stop is not None)
    assert list(verdict.tokens) == (emitted if stop is None else emitted[: stop + 1])
    assert verdict.kept == len(verdict.tokens)
