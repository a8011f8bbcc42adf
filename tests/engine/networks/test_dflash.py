"""Our DFlash network equals the published torch implementation."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from engine.networks.dflash import Context, DFlash, DFlashConfig
from tests.engine import tiny

DATA = Path(__file__).parents[2] / "data" / "dflash"
CASES = ("full", "sliding", "sliding_bidirectional", "sliding_causal", "scaled_softcapped")


def load(case: str) -> tuple[DFlash, dict[str, np.ndarray]]:
    config = DFlashConfig.from_dict(json.loads((DATA / case / "config.json").read_text()))
    network = DFlash(config)
    network.load_weights(str(DATA / case / "model.safetensors"))
    with np.load(DATA / case / "golden.npz") as golden:
        return network, dict(golden)


def draft(network: DFlash, golden: dict[str, np.ndarray], turn: int, context: Context):
    """Hidden states and logits of the block of a round (0 or 1)."""
    block = mx.array(golden["blocks"][turn])
    embeddings = mx.array(golden["target_embedding"])[block][None] * network.config.input_embedding_scale
    first, last = golden["spans"][turn]
    hidden = network(embeddings, mx.array(golden["target_hidden"][:, first:last]), context)
    return hidden, network.shape_logits(hidden @ mx.array(golden["target_lm_head"]).T)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_logits_equal_the_published_ones_in_both_rounds(case: str):
    network, golden = load(case)
    context = Context(network.config)
    for turn in (0, 1):
        hidden, logits = draft(network, golden, turn, context)
        assert np.abs(np.array(hidden) - golden[f"round{turn + 1}_hidden"]).max() < 1e-4
        assert np.abs(np.array(logits) - golden[f"round{turn + 1}_logits"]).max() < 1e-4
        expected = golden[f"round{turn + 1}_logits"].argmax(-1)
        assert np.array_equal(np.array(logits).argmax(-1), expected)
        assert context.offset == golden["spans"][turn][1]


@pytest.mark.parametrize("case", CASES)
def test_context_taken_in_without_a_draft_is_the_same_context(case: str):
    network, golden = load(case)
    context = Context(network.config)
    for first in range(0, 29, 7):
        network.absorb(mx.array(golden["target_hidden"][:, first : min(first + 7, 29)]), context)
    block = mx.array(golden["blocks"][1])
    embeddings = mx.array(golden["target_embedding"])[block][None] * network.config.input_embedding_scale
    width = golden["target_hidden"].shape[-1]
    hidden = network(embeddings, mx.zeros((1, 0, width)), context)
    assert np.abs(np.array(hidden) - golden["round2_hidden"]).max() < 1e-4


def test_a_long_context_in_one_go_equals_the_same_in_pieces():
    config = DFlashConfig.from_dict(tiny.drafter_config())
    mx.random.seed(0)
    network = DFlash(config)
    taps, embeddings = mx.random.normal((1, 700, 96)), mx.random.normal((1, 5, 32))
    whole, pieces = Context(config), Context(config)
    expected = network(embeddings, taps, whole)
    for first in range(0, 690, 30):
        network(embeddings, taps[:, first : first + 30], pieces)
    found = network(embeddings, taps[:, 690:], pieces)
    assert mx.abs(found - expected).max().item() < 1e-4
    assert whole.offset == pieces.offset == 700


def test_a_sliding_layer_keeps_a_bounded_context():
    config = DFlashConfig.from_dict(tiny.drafter_config(layer_types=["sliding_attention"] * 2))
    network, context = DFlash(config), Context(config)
    for _ in range(40):
        mx.eval(network(mx.zeros((1, 8, 32)), mx.zeros((1, 30, 96)), context))
    a_row = 2 * 2 * 8 * 4
    assert context.nbytes == 2 * 256 * a_row
