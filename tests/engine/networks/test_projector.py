"""A projector's configuration is read back as written and refused otherwise; features are the drafter's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from engine.errors import ModelError
from engine.networks.projector import DrafterFeatures, LayerShape, Projector, ProjectorConfig
from engine.target.model import Target
from tests.engine import random_drafters, tiny

CONFIG = ProjectorConfig("a" * 64, "b" * 64, (0, 2), 12, (LayerShape(2, 16, 16), LayerShape(5, 8, 4)))


def test_a_configuration_is_read_back_as_written() -> None:
    assert ProjectorConfig.from_dict(CONFIG.document() | {"training": {"seed": 3}}) == CONFIG


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "not a projector: its config.json says format 'other'"),
        ({"target_sha256": "abc"}, "target_sha256 must match .*, not 'abc'"),
        ({"drafter_sha256": None}, "drafter_sha256 must be of type string, not None"),
        ({"target_layer_ids": []}, "target_layer_ids is empty"),
        ({"target_layer_ids": [-1]}, r"target_layer_ids\[0\] must be at least 0, not -1"),
        ({"feature_size": 0}, "feature_size must be positive, not 0"),
        ({"feature_size": True}, "feature_size must be a whole number, not True"),
        ({"feature_size": 2**31}, "feature_size must be less than 2147483648"),
        ({"layers": {}}, "layers must be a list"),
        ({"layers": [{"layer": 1, "keys": 0, "values": 4}]}, "keys must be positive, not 0"),
        ({"layers": [vars(CONFIG.layers[1]), vars(CONFIG.layers[0])]}, "ascending order"),
        ({"layers": [vars(CONFIG.layers[0])] * 2}, "ascending order"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ProjectorConfig.from_dict(CONFIG.document() | changes)


def test_each_layer_has_its_own_widths_and_others_are_refused() -> None:
    projector = Projector(CONFIG)
    keys, values = projector.of(5)(mx.ones((3, 12)))
    assert (keys.shape, values.shape) == ((3, 8), (3, 4))
    with pytest.raises(ModelError, match="does not restore layer 3; it was trained for 2, 5"):
        projector.of(3)


@pytest.mark.parametrize("second", [False, True])
def test_features_are_what_the_network_makes_of_its_context(second: bool) -> None:
    network = random_drafters.block_drafter(Target(tiny.build()), second).network
    features = DrafterFeatures(network)
    hidden_states = mx.random.normal((1, 4, 3 * 32), key=mx.random.key(2))
    rows = features(hidden_states)
    assert rows.shape == (1, 4, features.size)
    context = network.hidden_norm(network.fc(hidden_states))
    attention = network.layers[1].self_attn
    own = mx.concatenate([attention.k_proj(context), attention.v_proj(context)], axis=-1)
    assert mx.allclose(rows[..., features.size // 2 :], own, atol=1e-6)
