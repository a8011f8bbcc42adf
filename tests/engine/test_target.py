"""Tapping a target: exact rows, no class patched, nobody disturbed, everything restored."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from engine.errors import ModelError
from engine.target import Target
from tests.engine import tiny

TOKENS = mx.array([[7, 8, 9, 10]])


def outputs_by_hand(model, count: int) -> list[mx.array]:
    """Layer outputs of gemma3_text, computed outside its loop."""
    from mlx_lm.models.base import create_attention_mask

    core = model.model
    h = core.embed_tokens(TOKENS)
    h = h * mx.array(core.args.hidden_size**0.5, mx.bfloat16).astype(h.dtype)
    outputs = []
    for index, layer in enumerate(core.layers[:count]):
        sliding = (index + 1) % core.sliding_window_pattern != 0
        mask = create_attention_mask(h, None, window_size=core.window_size if sliding else None)
        h = layer(h, mask, None)
        outputs.append(h)
    return outputs


def forward(target: Target, taps) -> mx.array | None:
    return target.forward(TOKENS, [None] * target.layer_count, taps)[1]


def test_taps_are_the_layers_outputs_in_the_order_asked_for(gemma):
    target = Target(gemma)
    expected = outputs_by_hand(gemma, 6)
    taps = target.tap((4, 0, 5))
    rows = forward(target, taps)
    taps.close()
    assert rows is not None
    assert rows.shape == (1, 4, 3 * 32)
    assert mx.allclose(rows, mx.concatenate([expected[4], expected[0], expected[5]], axis=-1), atol=1e-5)


def test_two_drafters_on_one_target_do_not_disturb_each_other(gemma):
    target = Target(gemma)
    one, other = target.tap((0, 2)), target.tap((2, 5))
    first = forward(target, one)
    second = forward(target, other)
    again = forward(target, one)
    assert mx.array_equal(first, again).item()
    assert mx.array_equal(first[..., 32:], second[..., :32]).item()
    one.close()
    assert mx.array_equal(forward(target, other), second).item()
    other.close()


def test_closing_restores_the_model(gemma):
    kinds = [type(layer) for layer in gemma.layers]
    names = [name for name, _ in tree_flatten(gemma.parameters())]
    target = Target(gemma)
    logits, _ = target.forward(TOKENS, [None] * 6, None)
    one, other = target.tap((1, 3)), target.tap((1,))
    assert [name for name, _ in tree_flatten(gemma.parameters())] == names
    assert type(gemma.layers[1]) is not kinds[1]
    assert isinstance(gemma.layers[1], kinds[1])
    one.close()
    one.close()
    assert type(gemma.layers[1]) is not kinds[1]  # somebody still listens
    other.close()
    assert [type(layer) for layer in gemma.layers] == kinds
    assert mx.array_equal(target.forward(TOKENS, [None] * 6, None)[0], logits).item()


def test_a_layer_that_returns_a_tuple_is_tapped_by_its_first_element():
    class Layer(nn.Module):
        def __call__(self, x, mask, cache):
            return x + 1, "something else"

    class Core(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(10, 4)
            self.layers = [Layer(), Layer()]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Core()
            self.args = tiny.FAMILIES["llama"][0].ModelArgs.from_dict(
                tiny.FAMILIES["llama"][1] | {"hidden_size": 4, "vocab_size": 10}
            )

        @property
        def layers(self):
            return self.model.layers

        def __call__(self, tokens, cache=None):
            h = self.model.embed_tokens(tokens)
            for layer in self.layers:
                h = layer(h, None, None)[0]
            return self.model.embed_tokens.as_linear(h)

    model = Model()
    target = Target(model)
    taps = target.tap((0, 1))
    rows = target.forward(mx.array([[1, 2]]), [None, None], taps)[1]
    taps.close()
    base = model.model.embed_tokens(mx.array([[1, 2]]))
    assert mx.allclose(rows, mx.concatenate([base + 1, base + 2], axis=-1))


@pytest.mark.parametrize("family", ["gemma3_text", "llama", "qwen3"])
def test_the_head_is_the_one_the_model_uses(family: str):
    model = tiny.build(family)
    target = Target(model)
    hidden = mx.random.normal((1, 3, 32))
    owner = model.lm_head if "lm_head" in model else model.model.embed_tokens.as_linear
    assert mx.array_equal(target.head(hidden), owner(hidden)).item()
    assert mx.array_equal(target.embed(TOKENS), model.model.embed_tokens(TOKENS)).item()


def test_a_module_without_layers_is_refused():
    with pytest.raises(ModelError, match="does not look"):
        Target(nn.Linear(2, 2))
