"""What the sampler draws from is what mlx-lm's `make_sampler` draws from, and bad switches are refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler

from engine.errors import ConfigurationError
from engine.sampling import Sampler, Sampling
from tests.engine.statistics import assert_drawn_from, mlx_lm_distribution

VOCAB = 40
EXACT = [
    Sampling(temperature, top_p, min_p, top_k, seed=0)
    for temperature, top_p, min_p, top_k in product(
        (0.1, 0.7, 1.0, 2.5), (1.0, 0.9, 0.5, 0.01), (0.0, 0.05, 0.4, 1.0), (0, 1, 5, VOCAB - 1)
    )
]
DRAWN = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.5, min_p=0.1),
    Sampling(temperature=1.2, top_k=5),
    Sampling(temperature=2.0, top_p=0.95, min_p=0.02, top_k=9),
]


def rows_of(spread: float, seed: int) -> mx.array:
    """Random logits [5, V]; the last row is full of ties."""
    rows = spread * mx.random.normal((4, VOCAB), key=mx.random.key(seed))
    return mx.concatenate([rows, mx.round(rows[:1])])


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
def test_the_distribution_is_that_of_mlx_lms_filters_in_its_order(spread: float):
    logits = rows_of(spread, seed=int(10 * spread))
    for sampling in EXACT:
        ours = np.array(Sampler(sampling).distribution(logits))
        for row in range(logits.shape[0]):  # mlx-lm's loop samples one row at a time
            theirs = np.array(mlx_lm_distribution(logits[row : row + 1], sampling))[0]
            assert np.array_equal(ours[row] > 0, theirs > 0), sampling
            assert np.allclose(ours[row], theirs, atol=2e-6), sampling
        assert np.allclose(ours.sum(axis=-1), 1, atol=1e-5), sampling


@pytest.mark.parametrize("sampling", DRAWN, ids=str)
def test_tokens_of_mlx_lms_sampler_come_from_our_distribution_and_ours_from_theirs(sampling: Sampling):
    logits = rows_of(2.0, seed=7)[:1]
    theirs = make_sampler(sampling.temperature, sampling.top_p, sampling.min_p, top_k=sampling.top_k)
    mx.random.seed(5)
    many = mx.broadcast_to(logits - mx.logsumexp(logits, keepdims=True), (6000, VOCAB))
    sampler = Sampler(Sampling(**{**vars(sampling), "seed": 3}))
    probabilities = sampler.distribution(logits)
    assert_drawn_from(theirs(many).tolist(), probabilities[0].tolist())
    ours = sampler.draw(mx.broadcast_to(probabilities, (6000, VOCAB)))
    assert_drawn_from(ours.tolist(), mlx_lm_distribution(logits, sampling)[0].tolist())


@pytest.mark.parametrize("top_k", [VOCAB, VOCAB + 7])
def test_a_top_k_of_the_whole_vocabulary_or_more_filters_nothing(top_k: int):
    logits = rows_of(2.0, seed=1)
    all_of_them = Sampler(Sampling(temperature=0.8)).distribution(logits)
    assert mx.array_equal(Sampler(Sampling(temperature=0.8, top_k=top_k)).distribution(logits), all_of_them)


def test_forbidden_tokens_stay_forbidden_under_every_filter():
    logits = mx.where(mx.arange(VOCAB) % 3 == 0, rows_of(2.0, seed=2), -mx.inf)
    for sampling in EXACT:
        sampler = Sampler(sampling)
        probabilities = sampler.distribution(logits)
        shares = np.array(probabilities)
        assert not shares[:, np.arange(VOCAB) % 3 != 0].any(), sampling
        assert np.allclose(shares.sum(axis=-1), 1, atol=1e-5), sampling
        drawn = sampler.draw(probabilities).tolist()
        assert all(shares[row, token] > 0 for row, token in enumerate(drawn)), sampling


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits_give_a_float32_distribution(dtype: mx.Dtype):
    logits = rows_of(8.0, seed=3).astype(dtype)
    sampling = Sampling(temperature=0.7, top_p=0.9)
    shares = Sampler(sampling).distribution(logits)
    assert shares.dtype == mx.float32
    assert mx.array_equal(shares, Sampler(sampling).distribution(logits.astype(mx.float32)))


def test_a_seed_repeats_the_draws_and_none_takes_new_ones():
    shares = mx.full((200, VOCAB), 1 / VOCAB)

    def draws(seed: int | None) -> tuple[int, ...]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return tuple(sampler.draw(shares[:100]).tolist() + sampler.draw(shares[100:]).tolist())

    assert draws(1) == draws(1)
    assert len({draws(seed) for seed in (0, 1, 2, 2**32, 2**62, 2**63 - 1, None, None)}) == 8


def test_a_samplers_numbers_are_its_own():
    """Neither mlx's global numbers nor another sampler disturb it."""
    shares = mx.full((50, VOCAB), 1 / VOCAB)
    alone = Sampler(Sampling(temperature=1.0, seed=4))
    undisturbed = [alone.draw(shares).tolist() for _ in range(2)]
    first, other = (Sampler(Sampling(temperature=1.0, seed=4)) for _ in range(2))
    before = first.draw(shares).tolist()
    mx.random.seed(99)
    mx.random.uniform()
    other.draw(shares)
    assert [before, first.draw(shares).tolist()] == undisturbed


@pytest.mark.parametrize(
    ("switch", "value", "message"),
    [
        *[
            ("temperature", value, "temperature must be 0 or lie in 0.000001 to 100")
            for value in (-0.1, 1e-9, 101, float("nan"))
        ],
        *[("top_p", value, r"top-p must lie in \(0, 1\]") for value in (0, -1, 1.1, float("nan"))],
        *[("min_p", value, r"min-p must lie in \[0, 1\]") for value in (-0.1, 1.5, float("nan"))],
        ("top_k", -1, "top-k must be at least 0"),
        *[("seed", value, "the seed must lie in") for value in (-1, 2**63)],
    ],
)
def test_a_switch_out_of_its_range_is_one_error_that_names_it(switch: str, value: Any, message: str):
    sampling = Sampling(**{"temperature": 1.0, switch: value})
    with pytest.raises(ConfigurationError, match=rf"{message}.*not {value}"):
        sampling.check()
    with pytest.raises(ConfigurationError, match=message):
        Sampler(sampling)


def test_there_is_nothing_to_draw_at_temperature_0():
    assert Sampling().greedy
    with pytest.raises(ConfigurationError, match="nothing is drawn"):
        Sampler(Sampling())
