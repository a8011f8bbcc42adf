"""Records of log-probabilities: the arithmetic, without any decoding."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from engine.errors import ConfigurationError
from engine.logprobs import MOST, Logprobs, TokenLogprob


def records(count: int, tokens: list[int], logits: mx.array) -> tuple[TokenLogprob, ...]:
    """There and back."""
    kept = Logprobs(count, logits.shape[-1])
    return kept.unpack(tokens, kept.pack(mx.array(tokens, mx.int32), logits).tolist())


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 5, MOST])
def test_they_are_the_float32_log_softmax_in_falling_order(count: int, dtype: mx.Dtype):
    mx.random.seed(1)
    logits = (6 * mx.random.normal((7, 500))).astype(dtype)
    tokens = [0, 499, 3, 77, 250, 1, 9]
    wide = logits.astype(mx.float32)
    exact = (wide - mx.logsumexp(wide, axis=-1, keepdims=True)).tolist()
    for token, record, row in zip(tokens, records(count, tokens, logits), exact, strict=True):
        assert record.token == token
        assert record.logprob == pytest.approx(row[token], abs=1e-5)
        best = sorted(range(500), key=lambda index: (-row[index], index))[:count]
        assert [index for index, _ in record.top] == best
        assert [value for _, value in record.top] == pytest.approx([row[index] for index in best], abs=1e-5)


def test_of_equally_likely_tokens_the_lower_id_comes_first():
    logits = mx.zeros((2, 300))
    logits[1, 200:203] = 5.0
    level, raised = records(6, [7, 201], logits)
    assert [index for index, _ in level.top] == [0, 1, 2, 3, 4, 5]
    assert [index for index, _ in raised.top] == [200, 201, 202, 0, 1, 2]


def test_what_is_masked_has_no_probability_and_is_never_not_a_number():
    logits = mx.full((3, 8), -mx.inf)
    logits[0, 3] = 2.0
    logits[1, 2], logits[1, 5] = 1.0, 1.0
    sure, two, none = records(4, [3, 2, 0], logits)
    assert sure == TokenLogprob(3, 0.0, ((3, 0.0),))
    assert two.top == ((2, pytest.approx(-math.log(2))), (5, pytest.approx(-math.log(2))))
    assert none == TokenLogprob(0, -math.inf, ())


def test_a_certain_token_stays_before_the_others_where_zero_has_a_sign():
    [record] = records(2, [1], mx.array([[-200.0, 0.0, -300.0]]))
    assert record.top == ((1, 0.0), (0, -200.0))


def test_no_more_are_recorded_than_there_are():
    [record] = records(MOST, [1], mx.array([[0.0, 1.0, 2.0]]))
    assert [index for index, _ in record.top] == [2, 1, 0]


@pytest.mark.parametrize("count", [-1, MOST + 1])
def test_another_number_of_them_is_refused(count: int):
    with pytest.raises(ConfigurationError, match=rf"logprobs must be from 0 to 20, not {count}"):
        Logprobs(count, 300)
