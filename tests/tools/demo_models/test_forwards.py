"""The training forwards compute what the inference models compute."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.networks.dflash import Context
from engine.target.model import Target
from tools.demo_models import drafter, selfplay, target_forward, tokenizer


def test_target_forward_equals_stock_mlx_lm(tiny_target: Any) -> None:
    tokens = mx.random.randint(8, 1280, (2, 96), key=mx.random.key(5))
    ours, _ = target_forward.forward(tiny_target, tokens)
    assert mx.abs(ours - tiny_target(tokens)).max().item() < 1e-3


def test_taps_equal_the_layer_outputs_the_engine_sees(tiny_target: Any) -> None:
    tokens = mx.random.randint(8, 1280, (1, 64), key=mx.random.key(6))
    _, tapped = target_forward.forward(tiny_target, tokens, taps=(0, 2))
    target = Target(tiny_target)
    taps = target.hook_layers((0, 2))
    _, rows = target.forward(tokens, tiny_target.make_cache(), taps)
    taps.close()
    assert rows is not None
    assert mx.abs(mx.concatenate(tapped, axis=-1) - rows).max().item() < 1e-3


def test_a_length_that_does_not_fit_the_window_is_refused(tiny_target: Any) -> None:
    with pytest.raises(ValueError, match="33 is not a multiple of the sliding window 32"):
        target_forward.forward(tiny_target, mx.zeros((1, 33), mx.int32))


def test_folded_anchors_equal_one_block_at_a_time(tiny_target: Any) -> None:
    config = drafter.configuration({**vars(tiny_target.args), "num_hidden_layers": 9})
    network = drafter.build(config, seed=2)
    taps = mx.random.normal((2, 40, 4 * 128), key=mx.random.key(7))
    anchors = mx.array([[3, 17, 31], [1, 8, 39]])
    block = 5
    embeddings = mx.random.normal((2, 3 * block, 128), key=mx.random.key(8))
    folded = drafter.forward(network, embeddings, taps, anchors).reshape(2, 3, block, 128)
    for row in range(2):
        for index, anchor in enumerate(np.array(anchors)[row].tolist()):
            own = embeddings[row : row + 1, index * block : (index + 1) * block]
            alone = network(own, taps[row : row + 1, :anchor], Context(network.config))
            assert mx.abs(folded[row, index] - alone[0]).max().item() < 5e-3


@pytest.mark.slow
def test_selfplay_continues_as_the_stock_model_would(
    tiny_target: Any, demo_tokenizer: tokenizer.DemoTokenizer
) -> None:
    made = selfplay.continue_greedily(tiny_target, demo_tokenizer, seed=0, rows=6, length=160, taps=(0, 2))
    tokens = mx.array(made.tokens.astype(np.int32))
    logits = tiny_target(tokens)
    generated = made.kinds[:, 1:] > 0
    assert generated.any()
    chosen = mx.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    gap = np.array(logits[:, :-1].max(axis=-1) - chosen)
    assert gap[generated].max() < 1e-2  # the best token, or one within the polynomial's error
    _, tapped = target_forward.forward(tiny_target, tokens, taps=(0, 2))
    assert np.abs(np.array(mx.concatenate(tapped, axis=-1)) - made.taps).max() < 2e-2  # float16
