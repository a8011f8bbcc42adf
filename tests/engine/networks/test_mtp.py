"""Next-token heads give what published code gives, from weights stored as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.networks.mtp import MTPHead, build_head, head_weights, stored_head
from engine.networks.mtp_assistant import Assistant
from engine.target.loading import put_weights

REFERENCES = Path(__file__).parents[2] / "data" / "mtp"
HEADS = ("glm4_moe", "deepseek_v3", "qwen3_5_moe")


def load(folder: Path) -> MTPHead:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    network, model = build_head(config)
    put_weights(folder, head_weights(stored_head(folder), config, model), network, None)
    return network


@pytest.mark.parametrize("family", HEADS)
def test_head_gives_what_the_reference_gives(family: str):
    network = load(REFERENCES / family)
    golden = {name: mx.array(value) for name, value in np.load(REFERENCES / family / "golden.npz").items()}
    caches = network.new_caches()
    output = network(golden["embeddings"], golden["hidden"], caches)
    last = network(golden["next_embedding"], output[:, -1:], caches)
    assert mx.allclose(output, golden["output"], rtol=0, atol=1e-4).item()
    assert mx.allclose(last, golden["next_output"], rtol=0, atol=1e-4).item()


@pytest.mark.parametrize("family", HEADS)
def test_head_sees_the_positions_before(family: str):
    """A forward in two parts is that in one, and without the first part another."""
    network = load(REFERENCES / family)
    golden = {name: mx.array(value) for name, value in np.load(REFERENCES / family / "golden.npz").items()}
    embeddings, hidden = golden["embeddings"], golden["hidden"]
    caches = network.new_caches()
    network(embeddings[:, :4], hidden[:, :4], caches)
    parts = network(embeddings[:, 4:], hidden[:, 4:], caches)
    alone = network(embeddings[:, 4:], hidden[:, 4:], network.new_caches())
    assert mx.allclose(parts, golden["output"][:, 4:], rtol=0, atol=1e-4).item()
    assert not mx.allclose(alone, golden["output"][:, 4:], rtol=0, atol=1e-2).item()


@pytest.mark.parametrize("name", ["gemma4_assistant", "gemma4_assistant_ordered"])
def test_assistant_gives_what_the_reference_gives(name: str):
    folder = REFERENCES / name
    config = json.loads((folder / "config.json").read_text())
    network = Assistant(config)
    put_weights(folder, mx.load(str(folder / "model.safetensors")), network, None)
    golden = {key: mx.array(value) for key, value in np.load(folder / "golden.npz").items()}
    states = {kind: (golden[f"{kind}_keys"], golden[f"{kind}_values"]) for kind in network.kinds}
    length = states["full_attention"][0].shape[2]
    keys, values = states["sliding_attention"]
    states["sliding_attention"] = (keys[:, :, -network.seen :], values[:, :, -network.seen :])
    hidden = golden["hidden"]
    for step in range(2):
        hidden, logits = network(golden["embeddings"][:, step : step + 1], hidden, states, length)
        assert mx.allclose(hidden, golden[f"output_{step}"], rtol=0, atol=1e-4).item()
        wanted = golden[f"logits_{step}"]
        wanted = mx.where(mx.isfinite(logits), wanted, -mx.inf)
        assert mx.isfinite(logits).sum().item() == (24 if "ordered" in name else 64)
        assert mx.allclose(logits, wanted, rtol=0, atol=1e-4).item()
