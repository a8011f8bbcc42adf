"""A masked diffusion model fills its block as a plain, slow reference does, and the network is Qwen3's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.qwen3 import ModelArgs

from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.drafters.masked_diffusion import MaskedDiffusion
from engine.errors import ConfigurationError, DrafterMismatchError, ModelError
from engine.networks.mdlm import MaskedDiffusionModel, build_model
from engine.sampling import Sampler, Sampling
from engine.target.model import Target
from tests.engine import tiny

CONFIG = tiny.FAMILIES["qwen3"][1]


def network(seed: int = 1, kind: type[MaskedDiffusionModel] = MaskedDiffusionModel, **changes: Any) -> Any:
    mx.random.seed(seed)
    model = kind(ModelArgs.from_dict(CONFIG | changes))
    model.eval()
    model.update(tree_map(lambda w: 3 * w if w.ndim > 1 else w + 0.1, model.parameters()))
    return model


def prompt_of(length: int, seed: int = 0) -> list[int]:
    random = tiny.seeded(seed + 1000 * length)
    return [random.randrange(5, tiny.VOCAB) for _ in range(length)]


def drafted(
    drafter: MaskedDiffusion, text: list[int], count: int, sampler: Sampler | None = None
) -> list[int]:
    drafter.start()
    drafter.observe(text[:-1], None)
    tokens: list[int] = drafter.propose(text[-1], count, sampler).tokens.tolist()
    return tokens


def all_logits(model: Any, tokens: list[int]) -> np.ndarray:
    """Logits of every position [N, V], computed in float64 by numpy, from the published parameter names."""
    w = {name: np.array(value, np.float64) for name, value in tree_flatten(model.parameters())}
    args, count = model.args, len(tokens)
    heads, groups, dim = args.num_attention_heads, args.num_key_value_heads, args.head_dim

    def norm(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + args.rms_norm_eps) * weight

    def rotated(rows: np.ndarray) -> np.ndarray:  # [N, heads, dim]
        angles = np.arange(count)[:, None] * args.rope_theta ** (-np.arange(0, dim, 2) / dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        low, high = rows[..., : dim // 2], rows[..., dim // 2 :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    rows = w["model.embed_tokens.weight"][tokens]
    for layer in range(args.num_hidden_layers):
        of = lambda name, at=f"model.layers.{layer}.": w[f"{at}{name}.weight"]  # noqa: E731
        x = norm(rows, of("input_layernorm"))
        q, k, v = ((x @ of(f"self_attn.{part}_proj").T).reshape(count, -1, dim) for part in ("q", "k", "v"))
        q, k = rotated(norm(q, of("self_attn.q_norm"))), rotated(norm(k, of("self_attn.k_norm")))
        k, v = (np.repeat(part, heads // groups, axis=1) for part in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(dim)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        seen = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v)
        rows = rows + seen.reshape(count, -1) @ of("self_attn.o_proj").T
        x = norm(rows, of("post_attention_layernorm"))
        gate, up = x @ of("mlp.gate_proj").T, x @ of("mlp.up_proj").T
        rows = rows + (gate / (1 + np.exp(-gate)) * up) @ of("mlp.down_proj").T
    head = w["model.embed_tokens.weight"] if args.tie_word_embeddings else w["lm_head.weight"]
    return norm(rows, w["model.norm.weight"]) @ head.T


def filled(model: Any, text: list[int], count: int, steps: int) -> list[int]:
    """The block, filled on the host: all logits of every forward, the surest masks first, one by one."""
    block: list[int | None] = [None] * count
    sizes = [len(part) for part in np.array_split(range(count), min(steps, count))]
    for size in sizes:
        logits = all_logits(model, text + [tiny.MASK if token is None else token for token in block])
        logits[:, tiny.MASK] = -np.inf
        sure = {}
        for place in (place for place in range(count) if block[place] is None):
            row = logits[len(text) + place]
            sure[place] = 1 / np.exp(row - row.max()).sum()  # probability of the likeliest token
        for place in sorted(sure, key=lambda place: -sure[place])[:size]:
            block[place] = int(logits[len(text) + place].argmax())
    return [token for token in block if token is not None]


@pytest.mark.parametrize("tied", [True, False])
def test_the_network_is_qwen3_without_its_causal_mask(tied: bool):
    model, tokens = network(tie_word_embeddings=tied), prompt_of(17)
    expected = all_logits(model, tokens)
    logits = np.array(model(mx.array([tokens]), mx.arange(17)))
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_logits_of_some_rows_are_the_same_as_among_all():
    model, tokens = network(), mx.array([prompt_of(30)])
    rows = mx.array([29, 3, 17])
    some, among_all = model(tokens, rows), model(tokens, mx.arange(30))[rows]
    assert some.shape == (3, tiny.VOCAB)
    assert mx.allclose(some, among_all, rtol=1e-5, atol=1e-5).item()
    assert mx.array_equal(mx.argmax(some, -1), mx.argmax(among_all, -1)).item()


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_a_block_is_filled_as_by_hand(steps: int, count: int):
    model, text = network(), prompt_of(11, seed=steps)
    drafter = MaskedDiffusion(model, tiny.MASK, steps=steps)
    assert drafted(drafter, text, count) == filled(model, text, count, steps)


class Recording(MaskedDiffusionModel):
    """Notes the text and the rows of every forward."""

    def __call__(self, tokens: mx.array, rows: mx.array) -> mx.array:
        self.seen = [*getattr(self, "seen", []), (tokens[0].tolist(), rows.tolist())]
        return super().__call__(tokens, rows)


def test_each_forward_guesses_the_masked_rows_alone_and_what_is_filled_stays():
    model, text = network(kind=Recording), prompt_of(9)
    drafts = drafted(MaskedDiffusion(model, tiny.MASK, steps=3), text, 8)
    assert [len(rows) for _, rows in model.seen] == [8, 5, 2]
    for tokens, rows in model.seen:
        assert tokens[:9] == text
        assert rows == [place for place in range(9, 17) if tokens[place] == tiny.MASK]
        known = [place for place in range(9, 17) if place not in rows]
        assert [tokens[place] for place in known] == [drafts[place - 9] for place in known]


class Everywhere(MaskedDiffusionModel):
    """Computes norm and head for every row, and only then looks at the masked ones."""

    def __call__(self, tokens: mx.array, rows: mx.array) -> mx.array:
        return super().__call__(tokens, mx.arange(tokens.shape[1]))[rows]


KINDS = (MaskedDiffusionModel, Everywhere)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_drafts_are_those_of_a_head_over_all_rows(steps: int):
    for seed in range(8):
        text = prompt_of(6 + 9 * seed, seed)
        some, all_rows = (MaskedDiffusion(network(kind=kind), tiny.MASK, steps=steps) for kind in KINDS)
        assert drafted(some, text, 7) == drafted(all_rows, text, 7)


def test_the_head_is_computed_for_masked_rows_alone(monkeypatch: pytest.MonkeyPatch):
    rows: list[int] = []
    head = nn.Embedding.as_linear

    def counting(table: nn.Embedding, hidden: mx.array) -> mx.array:
        rows.append(hidden.size // hidden.shape[-1])
        return head(table, hidden)

    monkeypatch.setattr(nn.Embedding, "as_linear", counting)
    for kind in KINDS:
        drafted(MaskedDiffusion(network(kind=kind), tiny.MASK, steps=3), prompt_of(40), 7)
    assert rows == [7, 4, 2, 47, 47, 47]


def test_the_mask_itself_is_never_drafted():
    model = network()
    table = model.model.embed_tokens
    rows = mx.arange(tiny.VOCAB)[:, None] == tiny.MASK
    table.weight = mx.where(rows, 50 * table.weight, table.weight)  # the likeliest or the least likely token
    likeliest: list[int] = []
    for seed in range(6):
        text = prompt_of(8, seed)
        likeliest += all_logits(model, text + [tiny.MASK] * 8)[8:].argmax(-1).tolist()
        assert tiny.MASK not in drafted(MaskedDiffusion(model, tiny.MASK), text, 8)
    assert tiny.MASK in likeliest  # or there was nothing to leave out


def test_only_the_last_tokens_are_seen():
    model, text = network(kind=Recording), prompt_of(30)
    drafter = MaskedDiffusion(model, tiny.MASK, context=10, steps=2)
    assert drafted(drafter, text, 4) == drafted(drafter, [*prompt_of(50, seed=3), *text[-10:]], 4)
    assert {len(tokens) for tokens, _ in model.seen} == {14}
    assert drafted(MaskedDiffusion(model, tiny.MASK, context=1), text, 4)


def test_drafts_are_certain_and_the_same_also_when_sampling():
    drafter, text = MaskedDiffusion(network(), tiny.MASK), prompt_of(12)
    greedy = drafted(drafter, text, 6)
    sampler = Sampler(Sampling(temperature=1.0, seed=1))
    assert drafted(drafter, text, 6, sampler=sampler) == greedy
    assert drafter.propose(5, 3, sampler).q is None


def test_rewinding_leaves_no_trace():
    drafter, text = MaskedDiffusion(network(), tiny.MASK), prompt_of(12)
    expected = drafted(drafter, text, 5)
    drafter.observe([7, 8, 9], None)
    assert not drafter.rewind(len(text) + 3)
    assert drafter.rewind(3)
    assert drafter.propose(text[-1], 5).tokens.tolist() == expected
    drafter.observe(text[-1:], None)
    twin = drafter.twin()
    twin.observe(text[:-1], None)
    assert twin.propose(text[-1], 5).tokens.tolist() == expected


def test_another_vocabulary_is_refused_naming_both_sides():
    target = Target(tiny.build("qwen3"))
    with pytest.raises(DrafterMismatchError, match="vocabulary 200 in the drafter, 300 in the target"):
        MaskedDiffusion(network(vocab_size=200), tiny.MASK).bind(target)
    with pytest.raises(DrafterMismatchError, match="its mask is token 300, its vocabulary 300"):
        MaskedDiffusion(network(), 300).bind(target)


@pytest.mark.parametrize("wrong", [{"block_size": 1}, {"steps": 0}, {"context": 0}])
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, int]):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ConfigurationError, match=f"{name} {value}"):
        MaskedDiffusion(network(), tiny.MASK, **wrong)


def test_biases_are_refused():
    with pytest.raises(ModelError, match="attention_bias is not supported"):
        build_model(CONFIG | {"attention_bias": True})


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_decoding_gives_the_plain_tokens(family: str):
    model, prompt = tiny.build(family), prompt_of(19)
    truth = tiny.plain_tokens(model, prompt, 40)
    target, drafter = Target(model), MaskedDiffusion(network(), tiny.MASK, steps=2)
    for block in (2, 7):
        steps = list(decode(target, drafter, prompt, max_tokens=40, draft_length=FixedDraftLength(block)))
        assert [token for step in steps for token in step.tokens] == truth
