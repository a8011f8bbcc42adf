"""Every target family: sizes, hidden_states, table, head, loading, and the tokens of speculative decoding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.stops import Stops
from engine.target.loading import load_target
from engine.target.model import Target
from tests.engine import families, tiny
from tests.engine.families import FAMILIES, QUANTIZED

TOKENS = mx.array([[7, 8, 9, 50, 60, 70, 80, 90, 100, 110, 120, 130]])  # longer than the window
CASES = [pytest.param(name, False, id=name) for name in FAMILIES]
CASES += [pytest.param(name, True, id=f"{name}-quantized") for name in QUANTIZED]

every_family = pytest.mark.parametrize(("family", "quantized"), CASES)


@cache
def built(family: str, quantized: bool = False) -> Any:
    """A model of the table, made once; tests leave it as it was."""
    return families.build(family, quantized)


@cache
def plain(family: str, quantized: bool = False) -> list[int]:
    """mlx-lm's greedy continuation of TOKENS."""
    return tiny.plain_tokens(built(family, quantized), TOKENS[0].tolist(), 128)


def text_of(model: Any) -> Any:
    return getattr(model, "language_model", model)


@pytest.mark.sampled(0, 5)
@every_family
def test_the_random_text_wanders_so_that_wrong_caches_show(family: str, quantized: bool):
    assert len(set(plain(family, quantized))) > 32


@every_family
def test_sizes_are_those_of_the_modules(family: str, quantized: bool):
    target = Target(built(family, quantized))
    config = FAMILIES[family].config
    text = config.get("text_config", config)
    assert target.layer_count == text["num_hidden_layers"]
    assert (target.hidden_size, target.vocab_size) == (text["hidden_size"], tiny.VOCAB)


@every_family
def test_taps_and_logits_are_those_of_an_untapped_forward(family: str, quantized: bool):
    model = built(family, quantized)
    outputs, logits = families.layers_by_hand(model, TOKENS)
    target = Target(model)
    hidden_states = target.hook_layers((len(outputs) - 1, 0, 2))
    seen, rows = target.forward(TOKENS, [None] * len(outputs), hidden_states)
    hidden_states.close()
    assert rows is not None
    assert mx.array_equal(rows, mx.concatenate([outputs[-1], outputs[0], outputs[2]], axis=-1)).item()
    assert mx.array_equal(seen, logits).item()


@every_family
def test_the_head_of_the_last_normed_tap_gives_the_models_logits_before_the_soft_cap(
    family: str, quantized: bool
):
    model = built(family, quantized)
    outputs, logits = families.layers_by_hand(model, TOKENS)
    raw = Target(model).head(text_of(model).model.norm(outputs[-1]))
    cap = FAMILIES[family].softcap
    capped = raw if cap is None else cap * mx.tanh(raw / cap)
    assert mx.allclose(capped, logits, atol=1e-5).item()
    if cap is not None:
        assert not mx.allclose(raw, logits, atol=1e-5).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_and_untied_heads_are_as_the_table_says(family: str):
    model, hidden = built(family), mx.random.normal((1, 3, 32), key=mx.random.key(0))
    text = text_of(model)
    assert ("lm_head" in text) != FAMILIES[family].tied
    weight = text.model.embed_tokens.weight if FAMILIES[family].tied else text.lm_head.weight
    assert mx.allclose(Target(model).head(hidden), hidden @ weight.T, atol=1e-5).item()


@pytest.mark.sampled(3, 1)
@every_family
def test_a_family_is_loaded_from_its_folder_with_the_same_logits_and_described(
    family: str, quantized: bool, tmp_path: Path
):
    loaded = load_target(families.save(tmp_path / family, family, quantized))
    assert mx.array_equal(loaded.target.model(TOKENS), built(family, quantized)(TOKENS)).item()
    assert loaded.context == 512
    assert loaded.card.dtype == "float32"
    assert loaded.card.quantization == ("affine 4-bit group 32" if quantized else None)
    unpacked = tree_flatten(built(family).parameters())
    assert loaded.card.parameters == sum(value.size for _, value in unpacked)


def decoded(model: Any, drafter: Any, prompt: list[int], count: int, block: int, **more: Any) -> list[Any]:
    """The steps of the engine's loop."""
    return list(
        decode(Target(model), drafter, prompt, max_tokens=count, draft_length=FixedDraftLength(block), **more)
    )


def tokens_of(steps: list[Any]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.mark.sampled(24, 6)
@every_family
def test_a_noisy_drafter_gives_the_plain_tokens_far_past_the_window(family: str, quantized: bool):
    model, prompt, truth = built(family, quantized), TOKENS[0].tolist(), plain(family, quantized)
    steps = decoded(model, tiny.ScriptedDrafter(prompt + truth, 0.2), prompt, 128, 8, prefill_chunk=5)
    assert tokens_of(steps) == truth
    assert any(0 < step.round.accepted < step.round.block - 1 for step in steps if step.round)


@pytest.mark.sampled(14, 6)
@pytest.mark.parametrize("family", FAMILIES)
def test_stop_tokens_and_the_limit_cut_inside_a_block(family: str):
    model, prompt, truth = built(family), TOKENS[0].tolist(), plain(family)
    drafter = tiny.ScriptedDrafter(prompt + truth)
    for count in (1, 2, 7, 23):
        steps = decoded(model, drafter, prompt, count, 5)
        assert (tokens_of(steps), steps[-1].finish) == (truth[:count], "length")
    end = truth.index(truth[12])
    steps = decoded(model, drafter, prompt, 24, 5, stops=Stops({truth[12]}))
    assert (tokens_of(steps), steps[-1].finish) == (truth[: end + 1], "stop")
