"""What we rely on in mlx and mlx-lm beyond their documentation. A new version must pass here first."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import TextStateMachine, generate_step, make_text_state_machine
from mlx_lm.models import base, cache
from mlx_lm.models.gemma3_text import Model as Gemma3
from mlx_lm.server import process_message_content
from mlx_lm.utils import load_tokenizer

from engine.device import wait_for
from engine.target.loading import SHIPPED_TARGET
from tests.engine import tiny


def test_the_versions_are_the_pinned_ones():
    assert (version("mlx"), version("mlx-lm")) == ("0.32.4", "0.32.2")


def test_generate_step_is_greedy_by_default_and_takes_what_we_pass(gemma):
    parameters = inspect.signature(generate_step).parameters
    assert {"max_tokens", "prompt_cache", "prefill_step_size"} <= set(parameters)
    prompt = [5, 6, 7, 8]
    token, scores = next(generate_step(mx.array(prompt), gemma, max_tokens=1))
    assert int(token) == int(mx.argmax(scores).item())
    logits = gemma(mx.array([prompt]))[0, -1]
    gap = mx.sort(logits)[-1] - mx.sort(logits)[-2]
    assert (mx.sort(scores)[-1] - mx.sort(scores)[-2]).item() == pytest.approx(gap.item(), abs=1e-4)


def test_plain_caches_trim_exactly_and_count_positions():
    plain = cache.KVCache()
    keys = mx.arange(10, dtype=mx.float32).reshape(1, 1, 10, 1)
    plain.update_and_fetch(keys, keys)
    assert plain.trim(4) == 4
    assert plain.offset == 6
    shown, _ = plain.update_and_fetch(keys[:, :, :1] + 100, keys[:, :, :1])
    assert shown[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 100]


def test_a_wrapped_rotating_cache_cannot_be_trimmed_which_is_why_we_have_rings():
    rotating = cache.RotatingKVCache(max_size=4)
    keys = mx.zeros((1, 1, 1, 2))
    for _ in range(6):
        rotating.update_and_fetch(keys, keys)
    assert not rotating.is_trimmable()
    assert cache.trim_prompt_cache([rotating], 1) == 0
    assert (rotating.max_size, rotating.keep) == (4, 0)


def test_models_ask_their_caches_for_masks_with_these_arguments(gemma):
    assert list(inspect.signature(cache.RotatingKVCache.make_mask).parameters) == [
        "self",
        "N",
        "window_size",
        "return_array",
    ]
    asked = []

    class Asked(cache.KVCache):
        def make_mask(self, *args, **kwargs):
            asked.append((args, kwargs))
            return super().make_mask(*args, **kwargs)

    gemma(mx.array([[5, 6, 7]]), cache=[Asked() for _ in gemma.layers])
    assert asked == [
        ((3,), {"return_array": False, "window_size": None}),
        ((3,), {"return_array": False, "window_size": tiny.WINDOW}),
    ]


def test_the_causal_string_aligns_queries_with_the_newest_keys():
    queries, keys = mx.random.normal((1, 2, 3, 8)), mx.random.normal((1, 2, 7, 8))
    named = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.3, mask="causal")
    drawn = base.create_causal_mask(3, 4)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.3, mask=drawn)
    assert mx.allclose(named, expected, atol=1e-6)


def test_attention_takes_a_cache_for_a_quantized_one_by_the_attribute_bits():
    from engine.cache.ring import SlidingRing

    assert hasattr(cache.QuantizedKVCache(), "bits")
    assert not hasattr(SlidingRing(8, 4), "bits")


def test_layers_are_called_as_modules_from_a_list_the_model_exposes(gemma):
    assert isinstance(gemma, Gemma3)
    assert gemma.layers is gemma.model.layers
    assert "__call__" in type(gemma.layers[0]).__dict__


def test_a_launched_array_can_be_waited_for_alone():
    small = mx.random.normal((64, 64)) @ mx.random.normal((64, 64))
    mx.async_eval(small)
    wait_for(small)
    with memoryview(small) as view:
        assert view.shape == (64, 64)


def test_writing_into_an_array_changes_it_in_place_so_a_reference_is_no_snapshot():
    array = mx.zeros((3,))
    alias = array
    array[1] = 5
    assert alias.tolist() == [0, 5, 0]


def test_an_array_made_from_another_is_a_handle_of_its_own():
    array = mx.zeros((3,))
    handle = mx.array(array)
    array[1] = 5
    assert handle.tolist() == [0, 0, 0]
    array -= 1
    assert handle.tolist() == [0, 0, 0]


def test_recurrent_states_are_a_list_of_arrays_with_room_for_lengths():
    state = cache.ArraysCache(2)
    assert (state.cache, state.left_padding, state.lengths) == ([None, None], None, None)
    assert set(vars(state)) == {"cache", "left_padding", "lengths"}
    assert state.make_mask(4) is None  # so a replay needs none either
    state.lengths = mx.array([2, 3])
    state.advance(1)
    assert state.lengths.tolist() == [1, 2]
    other = cache.ArraysCache(2)
    other[0], other[1] = mx.ones((1, 2)), mx.ones((1, 3))
    batch = cache.ArraysCache.merge([other, other, other])
    assert [array.shape for array in batch.cache] == [(3, 2), (3, 3)]
    batch.filter([0, 2])
    assert batch.extract(1)[1].shape == (1, 3)


def test_lists_of_caches_keep_their_members_in_an_attribute():
    pair = cache.CacheList(cache.KVCache(), cache.ArraysCache(1))
    assert [type(member) for member in pair.caches] == [cache.KVCache, cache.ArraysCache]


def test_a_chunked_cache_trims_exactly_also_after_it_has_dropped_a_chunk():
    chunked = cache.ChunkedKVCache(4)
    rows = mx.arange(10, dtype=mx.float32).reshape(1, 1, 10, 1)
    chunked.update_and_fetch(rows, rows)
    chunked.maybe_trim_front()
    assert (chunked.offset, chunked.start_position, chunked.chunk_size) == (10, 6, 4)
    chunked.update_and_fetch(rows[:, :, :3] + 100, rows[:, :, :3])
    assert chunked.trim(2) == 2
    assert chunked.keys_and_values()[0][0, 0, :, 0].tolist() == [6, 7, 8, 9, 100]


def test_a_concatenating_cache_brings_trimmed_rows_back_which_is_why_it_is_carried():
    joined = cache.ConcatenateKVCache()
    rows = mx.arange(4, dtype=mx.float32).reshape(1, 1, 4, 1)
    joined.update_and_fetch(rows, rows)
    joined.trim(2)
    shown, _ = joined.update_and_fetch(rows[:, :, :1] + 100, rows[:, :, :1])
    assert shown[0, 0, :, 0].tolist() == [0, 1, 2, 3, 100]


@pytest.mark.parametrize("module", ["qwen3_5", "qwen3_next", "mamba2", "falcon_h1", "lfm2", "kimi_linear"])
def test_recurrent_layers_take_a_cache_and_a_mask_by_these_names(module: str):
    from importlib import import_module

    from mlx import nn

    code = import_module(f"mlx_lm.models.{module}")
    mixers = {
        name
        for name, member in vars(code).items()
        if isinstance(member, type)
        and issubclass(member, nn.Module)
        and {"cache", "mask"} <= set(inspect.signature(member.__call__).parameters)
        and ".lengths" in inspect.getsource(member)
    }
    assert len(mixers) == 1, mixers


def test_no_other_recurrent_layer_compiles_itself_than_those_we_know():
    from pathlib import Path

    from engine.cache.rollback import SELF_COMPILING

    folder = Path(inspect.getfile(base)).parent
    found = {path.stem for path in folder.glob("*.py") if "mx.compile(self" in path.read_text()}
    assert {f"mlx_lm.models.{name}" for name in found} == set(SELF_COMPILING)


def test_the_text_machine_tells_states_apart_and_holds_marks_back():
    made = TextStateMachine({"normal": [("<t>", "tool")], "tool": [("</t>", "normal")]})
    state = made.make_state("normal")
    state, segments = TextStateMachine.split(state, "ab<")
    assert segments == [("normal", "ab")]
    state, segments = TextStateMachine.split(state, "t>cd</t>e<")
    assert segments == [("normal", ""), ("tool", "cd"), ("normal", "e")]
    state, rest, part = TextStateMachine.flush(state)
    assert (rest, part) == ("<", "normal")
    plain = TextStateMachine()
    assert TextStateMachine.split(plain.make_state("normal"), "<t>")[1] == [("normal", "<t>")]


def test_the_tokenizer_knows_a_familys_marks_and_its_parser_of_calls():
    tokenizer: Any = load_tokenizer(SHIPPED_TARGET)
    assert (tokenizer.has_tool_calling, tokenizer.has_thinking) == (True, False)
    assert (tokenizer.tool_call_start, tokenizer.tool_call_end) == ("<tool_call>", "</tool_call>")
    assert tokenizer.tool_parser.__module__ == "mlx_lm.tool_parsers.json_tools"
    assert tokenizer.tool_parser('{"name": "f", "arguments": {}}', []) == {"name": "f", "arguments": {}}
    assert tokenizer.response_initial_state is None
    machine = make_text_state_machine(tokenizer)
    _, segments = TextStateMachine.split(machine.make_state("normal"), "a<tool_call>b</tool_call>")
    assert [part for part in segments if part[1]] == [("normal", "a"), ("tool", "b")]


def test_messages_are_brought_into_the_form_of_templates_in_place():
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        },
    ]
    process_message_content(turns)
    assert turns[0]["content"] == "ab"
    assert turns[1]["content"] == ""
    assert turns[1]["tool_calls"][0]["function"]["arguments"] == {}
