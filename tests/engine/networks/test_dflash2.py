"""What DFlash 2 adds, piece by piece against plain loops."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.networks.dflash import DFlash, DFlashConfig
from engine.networks.dflash2 import CandidateSelector, Convolution, DFlash2, build_network
from engine.networks.dflash_config import Second
from tests.engine import tiny

SECOND = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5}


def second(**changes: object) -> DFlashConfig:
    nested = tiny.drafter_config()["dflash_config"] | SECOND | changes
    return DFlashConfig.from_dict(
        tiny.drafter_config(architectures=["DFlash2DraftModel"], dflash_config=nested)
    )


def test_the_configuration_decides_which_network_is_built():
    assert type(build_network(second())) is DFlash2
    assert type(build_network(DFlashConfig.from_dict(tiny.drafter_config()))) is DFlash


@pytest.mark.parametrize(("size", "width", "length"), [(3, 4, 6), (1, 12, 4), (7, 1, 3), (2, 6, 1)])
def test_a_convolution_mixes_a_row_with_those_before_it(size: int, width: int, length: int):
    hidden, rng = 12, np.random.default_rng(0)
    convolution = Convolution(hidden, Second(size, width, 1, 1))
    base, projection = (
        rng.normal(size=(2, size, hidden)),
        rng.normal(size=(2 * size * hidden // width, hidden)),
    )
    convolution.base_kernel = mx.array(base.astype(np.float32))
    convolution.kernel_projection.weight = mx.array(projection.astype(np.float32))
    rows, mixed = rng.normal(size=(length, hidden)), rng.normal(size=(length, hidden))
    front, behind = convolution.kernels(mx.array(rows.astype(np.float32))[None])
    for side, kernel, values in ((0, front, rows), (1, behind, mixed)):
        found = convolution(mx.array(values.astype(np.float32))[None], kernel)
        expected = np.zeros((length, hidden))
        for t in range(length):
            dynamic = (projection @ rows[t]).reshape(2, size, hidden // width)[side]
            for j in range(min(size, t + 1)):
                expected[t] += (base[side, j] + np.repeat(dynamic[j], width)) * values[t - j]
        assert np.abs(np.array(found)[0] - expected).max() < 1e-4


def test_scores_are_the_logit_and_the_pair_with_the_token_before():
    config = second()
    assert config.second is not None
    mx.random.seed(1)
    selector = CandidateSelector(config, config.second)
    hidden, logits = mx.random.normal((6, 32)), mx.random.normal((6, tiny.VOCAB))
    tokens, scores = (np.array(part) for part in selector(hidden, logits, mx.array([17])))
    before, after, projected = (
        np.array(part)
        for part in (
            selector.predecessor_codebook.weight,
            selector.successor_codebook.weight,
            selector.hidden_projection(hidden),
        )
    )
    for i in range(6):
        assert set(tokens[i].tolist()) == set(np.array(logits)[i].argsort()[-5:].tolist())
        for j in range(5):
            previous = 17 if i == 0 else tokens[i - 1, j]
            expected = np.array(logits)[i, tokens[i]] + after[tokens[i]] @ (before[previous] * projected[i])
            assert np.abs(scores[i, j] - expected).max() < 1e-4


def test_codebooks_are_found_under_both_names_they_are_stored_by():
    names = {"candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook", "fc.weight"}
    full = {f"{name}.weight" if "codebook" in name else name for name in names}
    for stored in (names, full):
        assert DFlash2.sanitize(dict.fromkeys(stored, mx.zeros(1))).keys() == full
