"""Tapping a target: exact rows, no class patched, nothing disturbed, everything restored."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from engine.errors import ModelError
from engine.target.model import Target
from tests.engine import tiny
from tests.engine.families import layers_by_hand

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


def forward(target: Target, hidden_states) -> mx.array | None:
    return target.forward(TOKENS, [None] * target.layer_count, hidden_states)[1]


def test_taps_are_the_layers_outputs_in_the_order_asked_for(gemma):
    target = Target(gemma)
    expected = outputs_by_hand(gemma, 6)
    hidden_states = target.hook_layers((4, 0, 5))
    rows = forward(target, hidden_states)
    hidden_states.close()
    assert rows is not None
    assert rows.shape == (1, 4, 3 * 32)
    assert mx.allclose(rows, mx.concatenate([expected[4], expected[0], expected[5]], axis=-1), atol=1e-5)


def test_two_drafters_on_one_target_do_not_disturb_each_other(gemma):
    target = Target(gemma)
    one, other = target.hook_layers((0, 2)), target.hook_layers((2, 5))
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
    one, other = target.hook_layers((1, 3)), target.hook_layers((1,))
    assert [name for name, _ in tree_flatten(gemma.parameters())] == names
    assert type(gemma.layers[1]) is not kinds[1]
    assert isinstance(gemma.layers[1], kinds[1])
    one.close()
    one.close()
    assert type(gemma.layers[1]) is not kinds[1]  # another hook is still open
    other.close()
    assert [type(layer) for layer in gemma.layers] == kinds
    assert mx.array_equal(target.forward(TOKENS, [None] * 6, None)[0], logits).item()


def test_an_exception_in_the_middle_of_a_forward_leaves_no_rows_behind():
    model = tiny.build("llama")
    target = Target(model)
    hidden_states = target.hook_layers((0, 2))
    expected = forward(target, hidden_states)
    broken = type("Broken", (nn.Module,), {"__call__": lambda self, *_, **__: 1 / 0})()
    layers, model.model.layers[1] = list(model.model.layers), broken
    broken.use_sliding = False
    with pytest.raises(ZeroDivisionError):
        forward(target, hidden_states)
    with pytest.raises(ModelError, match=r"hooked \w+ 0 did not run"):
        hidden_states.take()
    model.model.layers = layers
    assert mx.array_equal(forward(target, hidden_states), expected).item()
    hidden_states.close()


def test_a_layer_instance_used_twice_is_hooked_at_each_of_its_places():
    model = tiny.build("llama")
    first, second, _ = model.model.layers
    model.model.layers = [first, second, first, second]
    outputs, _ = layers_by_hand(model, TOKENS)
    kinds = type(first), type(second)
    target = Target(model)
    hidden_states = target.hook_layers((3, 0, 2, 0))
    rows = forward(target, hidden_states)
    hidden_states.close()
    assert mx.array_equal(rows, mx.concatenate([outputs[i] for i in (3, 0, 2, 0)], axis=-1)).item()
    assert (type(first), type(second)) == kinds


def test_a_layer_that_does_not_run_or_does_not_exist_is_named():
    model = tiny.build("llama")
    target = Target(model)
    for index in (3, -1):
        with pytest.raises(ModelError, match=f"layer {index} cannot be read: the target has layers 0 to 2"):
            target.hook_layers((0, index))
    skipped = model.model.layers[1]
    hidden_states = target.hook_layers((0, 1))
    model.model.layers = [model.model.layers[0], model.model.layers[2]]
    with pytest.raises(ModelError, match=r"hooked \w+ 1 did not run"):
        forward(target, hidden_states)
    hidden_states.close()
    assert "hidden_state_hooks" not in type(skipped).__dict__


def test_a_hooked_model_can_be_compiled():
    model = tiny.build("llama")
    target = Target(model)
    hidden_states = target.hook_layers((0, 2))
    rows, (logits, _) = forward(target, hidden_states), target.forward(TOKENS, [None] * 3, None)
    both = mx.compile(lambda tokens: target.forward(tokens, [None] * 3, hidden_states))
    alone = mx.compile(lambda tokens: target.forward(tokens, [None] * 3, None)[0])
    for _ in range(2):  # traced, then from the compiler's store
        seen, heard = both(TOKENS)
        assert mx.allclose(seen, logits, atol=1e-5).item()
        assert mx.allclose(heard, rows, atol=1e-5).item()
        assert mx.allclose(alone(TOKENS), logits, atol=1e-5).item()
    hidden_states.close()
    assert mx.allclose(alone(TOKENS), logits, atol=1e-5).item()


def test_a_model_quantized_while_hooked_is_seen_as_it_is_then():
    model = tiny.build("llama")
    target = Target(model)
    hidden_states = target.hook_layers((0, 2))
    nn.quantize(model, 32, 4)
    outputs, logits = layers_by_hand(model, TOKENS)
    assert mx.array_equal(
        forward(target, hidden_states), mx.concatenate([outputs[0], outputs[2]], axis=-1)
    ).item()
    assert mx.array_equal(target.head(model.model.norm(outputs[-1])), logits).item()
    assert mx.array_equal(target.embed(TOKENS), model.model.embed_tokens(TOKENS)).item()
    assert (target.hidden_size, target.vocab_size) == (Target(model).hidden_size, Target(model).vocab_size)
    hidden_states.close()


def test_another_wrapper_around_a_hooked_layer_does_not_keep_its_listener():
    model = tiny.build("llama")
    layer, plain = model.model.layers[0], type(model.model.layers[0])
    target = Target(model)
    hidden_states = target.hook_layers((0,))
    object.__setattr__(layer, "__class__", type("Above", (type(layer),), {}))
    rows = forward(target, hidden_states)
    assert rows.shape == (1, 4, 32)
    hidden_states.close()
    assert all(not kind.__dict__.get("hidden_state_hooks") for kind in type(layer).__mro__)
    object.__setattr__(layer, "__class__", plain)


def test_closing_leaves_every_object_of_the_model_where_it_was(gemma):
    def picture() -> list[tuple[str, int, type, list[str]]]:
        return [(name, id(m), type(m), sorted(vars(m))) for name, m in gemma.named_modules()]

    arrays = {name: id(value) for name, value in tree_flatten(gemma.parameters())}
    before = picture()
    target = Target(gemma)
    hidden_states = target.hook_layers(range(6))
    forward(target, hidden_states)
    hidden_states.close()
    assert picture() == before
    assert {name: id(value) for name, value in tree_flatten(gemma.parameters())} == arrays


def test_a_module_without_layers_is_refused():
    with pytest.raises(ModelError, match="does not look"):
        Target(nn.Linear(2, 2))
