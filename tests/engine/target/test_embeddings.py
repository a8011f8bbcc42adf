"""What a drafter is given for a token is what the target's own first layer receives for it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

from engine.drafters.block import BlockDrafter
from engine.errors import ModelError
from engine.networks.dflash import DFlash, DFlashConfig
from engine.target.model import Target
from tests.engine import families, tiny
from tests.engine.families import FAMILIES, FULL, QUANTIZED, SLIDING

TOKENS = mx.array([[7, 8, 9, 250, 0, 299]])
HEADS = tiny.PLAIN | {"head_dim": 8}
GRANITE = tiny.PLAIN | {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 12.3,
    "residual_multiplier": 0.7,
    "attention_bias": False,
    "mlp_bias": False,
}
MINICPM = tiny.PLAIN | {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 11.7}
LATENT = {
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "kv_lora_rank": 16,
    "rope_scaling": {},
}
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
BLOCKSPARSE = {"dense_attention_every_n_layers": 2, "ff_intermediate_size": 64, "gegelu_limit": 20.0}
# The other families of mlx-lm that scale their embeddings, and the number they scale by in single precision.
SCALED: dict[str, tuple[dict[str, Any], float]] = {
    "gemma": (HEADS, 32**0.5),
    "gemma2": (HEADS, 32**0.5),
    "recurrent_gemma": (
        tiny.PLAIN
        | {"attention_bias": False, "conv1d_width": 3, "logits_soft_cap": 30.0, "attention_window_size": 8}
        | {"block_types": ["recurrent", "recurrent", "attention"]},
        32**0.5,
    ),
    "gear": (HEADS | {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 8}, 32**0.5),
    "afmoe": (
        HEADS
        | {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 8, "num_dense_layers": 1}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        32**0.5,
    ),
    "granite": (GRANITE, 12.3),
    "granitemoe": (GRANITE | ROUTED, 12.3),
    "granitemoehybrid": (
        {key: value for key, value in GRANITE.items() if key != "mlp_bias"}
        | {"layer_types": ["attention"] * 3, "shared_intermediate_size": 32},
        12.3,
    ),
    "minicpm": (MINICPM, 11.7),
    "minicpm3": (MINICPM | LATENT, 11.7),
    "phi3small": (
        tiny.PLAIN | BLOCKSPARSE | {"layer_norm_epsilon": 1e-5, "mup_embedding_multiplier": 9.9},
        9.9,
    ),
}
DTYPES = (mx.float32, mx.bfloat16, mx.float16)


def scaled(family: str) -> Any:
    code = import_module(f"mlx_lm.models.{family}")
    mx.random.seed(3)
    return code.Model(code.ModelArgs.from_dict(SCALED[family][0] | {"model_type": family}))


def received(model: Any, tokens: mx.array) -> mx.array:
    """What the first layer is called with in a forward, seen by an object in its place in the list."""
    core = getattr(model, "language_model", model).model
    plain, seen = core.layers, []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(plain[0], name)

        def __call__(self, rows: mx.array, *args: Any, **kwargs: Any) -> Any:
            seen.append(rows)
            return plain[0](rows, *args, **kwargs)

    core.layers = [Recorder(), *plain[1:]]
    try:
        model(tokens)
    finally:
        core.layers = plain
    return seen[0]


def cast(model: Any, dtype: mx.Dtype) -> Any:
    model.update(tree_map(lambda w: w.astype(dtype), model.parameters()))
    return model


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, *SCALED])
def test_embeddings_are_the_input_of_the_first_layer(family: str, dtype: mx.Dtype):
    model = cast(families.build(family) if family in FAMILIES else scaled(family), dtype)
    embeddings = Target(model).embed(TOKENS)
    assert embeddings.dtype == dtype
    # mlx multiplies experts in float32 alone on a CPU; the first layer's input does not depend on them
    assert mx.array_equal(embeddings, received(model, TOKENS)).item()


@pytest.mark.parametrize("family", QUANTIZED)
def test_embeddings_of_a_packed_table_are_the_input_of_the_first_layer(family: str):
    model = families.build(family, quantized=True)
    assert mx.array_equal(Target(model).embed(TOKENS), received(model, TOKENS)).item()


@pytest.mark.parametrize("family", SCALED)
def test_the_scale_is_the_number_the_family_scales_by(family: str):
    assert Target(scaled(family)).embedding_scale == pytest.approx(SCALED[family][1], rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_gemma_scales_among_the_families_with_decoding_tests(family: str):
    bfloat16 = 5.65625  # sqrt(32) as Gemma 3 rounds it
    expected = {"gemma3": bfloat16, "gemma3_text": bfloat16, "gemma4": 32**0.5, "gemma4_text": 32**0.5}
    assert Target(families.build(family)).embedding_scale == pytest.approx(
        expected.get(family, 1.0), rel=1e-7
    )


def test_a_model_cast_after_it_was_measured_is_measured_again():
    target = Target(families.build("gemma4_text"))
    single = target.embedding_scale
    cast(target.model, mx.bfloat16)
    assert mx.array_equal(target.embed(TOKENS), received(target.model, TOKENS)).item()
    assert target.embedding_scale != single


def test_measuring_leaves_the_model_as_it_was():
    model = families.build("gemma4_text")
    picture = [(name, id(module), type(module)) for name, module in model.named_modules()]
    weights = [(name, id(value)) for name, value in tree_flatten(model.parameters())]
    target = Target(model)
    hidden_states = target.hook_layers((0, 1))
    target.embed(TOKENS)
    hidden_states.close()
    assert [(name, id(module), type(module)) for name, module in model.named_modules()] == picture
    assert [(name, id(value)) for name, value in tree_flatten(model.parameters())] == weights


def remade(change: Any) -> Any:
    """A llama of an unknown family: ``change`` is done to its embeddings."""
    model = tiny.build("llama")
    core = type(model.model)

    def call(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
        return core.__call__(self, inputs, cache, change(self.embed_tokens(inputs)))

    model.model.__class__ = type("Core", (core,), {"__call__": call})
    return model


def bound(model: Any) -> BlockDrafter:
    hidden_states = {"mask_token_id": tiny.MASK, "target_layer_ids": [0, 2]}
    config = tiny.drafter_config(num_target_layers=3, dflash_config=hidden_states)
    drafter = BlockDrafter(DFlash(DFlashConfig.from_dict(config)))
    drafter.bind(Target(model))
    return drafter


def test_the_scale_of_an_unknown_family_is_found():
    model = remade(lambda rows: rows * 3.7)
    bound(model)
    assert mx.array_equal(Target(model).embed(TOKENS), 3.7 * model.model.embed_tokens(TOKENS)).item()


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: mx.fast.rms_norm(rows, mx.arange(1.0, 1 + rows.shape[-1]), 1e-6),
        lambda rows: rows + 1,
        lambda rows: rows + 0.1 * mx.arange(rows.shape[1])[None, :, None],
        lambda rows: 2 * mx.tanh(rows),
    ],
)
def test_embeddings_that_are_more_than_scaled_are_refused_by_the_drafter(change: Any):
    with pytest.raises(ModelError, match="rows of embed_tokens times one number, or their norm"):
        bound(remade(change))


def test_a_drafter_reads_the_rows_of_a_family_that_normalises_them():
    code = import_module("mlx_lm.models.muse_glimmer")
    model = code.Model(code.ModelArgs.from_dict(HEADS | {"layer_types": [FULL] * 3}))
    bound(model)
    assert mx.array_equal(Target(model).embed(TOKENS), model.model.embed_tokens(TOKENS)).item()
    assert not mx.allclose(received(model, TOKENS), model.model.embed_tokens(TOKENS), atol=0.1).item()


def test_a_drafters_own_scale_comes_on_top():
    target = Target(families.build("gemma4_text"))
    seen: list[mx.array] = []

    class Watched(DFlash):
        def __call__(self, embeddings: mx.array, hidden_states: mx.array, context: Any) -> mx.array:
            seen.append(embeddings)
            return super().__call__(embeddings, hidden_states, context)

    config = tiny.drafter_config(num_target_layers=8, input_embedding_scale=0.3)
    drafter = BlockDrafter(Watched(DFlashConfig.from_dict(config)))
    drafter.bind(target)
    drafter.propose(11, 3)
    block = mx.array([[11, tiny.MASK, tiny.MASK, tiny.MASK]])
    assert mx.array_equal(seen[0], 0.3 * received(target.model, block)).item()


def test_a_model_without_a_call_of_its_first_layer_is_refused():
    model = tiny.build("llama")
    skips = {"__call__": lambda self, tokens, *_: self.embed_tokens(tokens)}
    model.model.__class__ = type("Skips", (type(model.model),), skips)
    with pytest.raises(ModelError, match="does not call its first layer"):
        Target(model).embed(TOKENS)
