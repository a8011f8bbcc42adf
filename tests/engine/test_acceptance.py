"""Acceptance against its definition: greedy exactly, sampling in distribution."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.acceptance import pack_greedy, pack_sampled, unpack
from engine.drafters.base import NOTHING, Draft
from engine.sampling import Sampler, Sampling
from engine.stops import Stops
from tests.engine.statistics import assert_drawn_from

TOKENS = st.integers(0, 4)


def logits_for(tokens: list[int]) -> mx.array:
    """[B, 5] logits whose argmax is the given tokens."""
    return mx.array([[float(column == token) for column in range(5)] for token in tokens])


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=8), TOKENS, st.sets(TOKENS, max_size=2))
def test_the_longest_agreeing_prefix_and_one_more_token_are_emitted(pairs, last, stops):
    drafts, targets = [a for a, _ in pairs], [b for _, b in pairs] + [last]
    packed = pack_greedy(mx.array(drafts, mx.int32), logits_for(targets)).tolist()
    verdict = unpack(packed, Stops(stops))
    accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    emitted = [*drafts[:accepted], targets[accepted]]
    stop = next((i for i, token in enumerate(emitted) if token in stops), None)
    assert verdict.accepted == accepted
    assert verdict.stopped == (stop is not None)
    assert list(verdict.tokens) == (emitted if stop is None else emitted[: stop + 1])
    assert verdict.kept == len(verdict.tokens)


P = [[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.4, 0.1]]
Q = [[0.1, 0.3, 0.2, 0.4], [0.4, 0.3, 0.2, 0.1]]


def sampled_rounds(draws: int, q: list[list[float]] | None) -> list[list[int]]:
    """Packed rounds of three rows whose target distributions are P, independent of the drafts."""
    sampler = Sampler(Sampling(temperature=1.0, seed=11))
    logits = mx.log(mx.array(P))
    rounds = []
    for _ in range(draws):
        if q is None:
            draft = Draft(mx.array([1, 3], mx.int32))
        else:
            rows = mx.array(q)
            draft = Draft(sampler.draw(rows), rows)
        rounds.append(pack_sampled(draft, logits, sampler))
    return [[int(value) for value in row] for row in mx.stack(rounds).tolist()]


@pytest.mark.sampled(4, 2)
@pytest.mark.parametrize("q", [None, Q, P[:2]], ids=["chosen", "drawn", "equal"])
def test_emitted_tokens_are_the_targets_whatever_was_drafted(q):
    rounds = sampled_rounds(1000, q)
    assert_drawn_from([row[1] for row in rounds], P[0])
    second = [row[2] for row in rounds if row[0] >= 1]
    assert_drawn_from(second, P[1])
    assert_drawn_from([row[3] for row in rounds if row[0] == 2], P[2])


@pytest.mark.slow
def test_drafts_are_confirmed_as_often_as_the_distributions_overlap():
    overlap = sum(min(a, b) for a, b in zip(P[0], Q[0], strict=True))
    confirmed = np.mean([row[0] >= 1 for row in sampled_rounds(2000, Q)])
    assert confirmed == pytest.approx(overlap, abs=0.04)
    assert {row[0] for row in sampled_rounds(500, P[:2])} == {2}  # equal distributions never reject


def test_a_draft_the_target_would_never_choose_is_never_confirmed():
    sampler = Sampler(Sampling(temperature=1.0, seed=3))
    logits = mx.log(mx.array([[1.0, 0.0], [0.5, 0.5]]))
    for _ in range(50):
        packed = pack_sampled(Draft(mx.array([1], mx.int32)), logits, sampler).tolist()
        assert packed[:2] == [0, 0]


@pytest.mark.slow
def test_without_drafts_the_token_is_drawn_from_the_only_row():
    sampler = Sampler(Sampling(temperature=1.0, seed=4))
    logits = mx.log(mx.array([P[1]]))
    rounds = [pack_sampled(NOTHING, logits, sampler) for _ in range(1500)]
    values = mx.stack(rounds).tolist()
    assert {row[0] for row in values} == {0}
    assert_drawn_from([row[1] for row in values], P[1])
