"""Whether a target, a drafter and the channels match is told from their configurations alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.drafters.block import BlockDrafter
from engine.errors import ConfigurationError, DrafterMismatchError, ModelError
from engine.networks.dflash2 import build_network
from engine.networks.dflash_config import DFlashConfig
from engine.registry import (
    CHANNELS,
    DrafterFacts,
    Facts,
    Located,
    ModelEntry,
    Places,
    Registry,
    TargetFacts,
    check_located,
    drafter_facts,
    locate,
)
from engine.target.folder import build_unloaded
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET
from engine.target.model import Target
from tests.engine.drafters.test_registry import save_diffusion
from tests.engine.registry.published import TARGETS, save
from tests.engine.registry.registries import at, model_of

GOLDEN = Path(__file__).parents[2] / "data" / "dflash"
DEMO = TargetFacts(hidden_size=128, layers=9, vocab_size=1280, head_dims=(32,))
PLAIN = {"model_type": "llama", "rms_norm_eps": 1e-5, "intermediate_size": 64}


def edited(source: Path, folder: Path, **changes: Any) -> Path:
    """The config.json of a folder with other values."""
    return save(folder, json.loads((source / "config.json").read_text()) | changes)


def nowhere(tmp_path: Path) -> Places:
    return Places({}, tmp_path / "home", tmp_path / "hub")


@pytest.mark.parametrize("entry", Registry.load().entries, ids=lambda entry: entry.name)
def test_the_shipped_registry_says_what_its_drafters_read(entry: ModelEntry):
    assert entry.drafter is not None
    if entry.drafter.folder is not None:
        facts = entry.facts.drafter
        assert facts is not None
        assert facts.hidden_size
        assert facts.target_layers
        assert facts.mask_token is not None or entry.name == "gpt-oss-120b"  # no public copy tells it


def test_the_demo_pair_matches(tmp_path: Path):
    entry = Registry.load().entry("demo")
    check_located(Located(model_of(at(""), facts=Facts(target=DEMO)), SHIPPED_TARGET, None))
    check_located(locate(entry, nowhere(tmp_path)))


def test_what_a_drafter_says_of_its_target_is_read_from_every_text_that_names_it():
    facts = DrafterFacts(
        hidden_size=128, layers=9, vocab_size=1280, target_layers=(1, 3, 5, 8), mask_token=3, block=8
    )
    for spec in ("", "dflash:", "prompt-lookup+", "prompt-lookup+dflash:"):
        assert drafter_facts(f"{spec}{SHIPPED_DRAFTER}") == facts
    assert drafter_facts("prompt-lookup:4") is None


def test_drafters_that_are_language_models_say_their_vocabulary(tmp_path: Path):
    diffusion = save_diffusion(tmp_path / "diffusion")
    vocabulary = json.loads((diffusion / "config.json").read_text())["vocab_size"]
    assert drafter_facts(f"masked-diffusion:{diffusion}?steps=2") == DrafterFacts(vocab_size=vocabulary)
    assert drafter_facts(str(SHIPPED_TARGET)) == DrafterFacts(vocab_size=1280)


@pytest.mark.parametrize("golden", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_a_drafter_for_another_target_is_refused(golden: str, tmp_path: Path):
    drafter = str(GOLDEN / golden)
    entry = model_of(at(SHIPPED_TARGET), at(drafter))
    with pytest.raises(DrafterMismatchError) as caught:
        check_located(locate(entry, nowhere(tmp_path)))
    message = str(caught.value)
    assert message.startswith(
        f"the drafter {drafter} was not made for the target {SHIPPED_TARGET}: hidden size"
    )
    assert message.endswith("number of target layers 6 in the drafter, 9 in the target")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 64}, "hidden size 64 in the drafter, 128 in the target"),
        ({"vocab_size": 1281}, "vocabulary 1281 in the drafter, 1280 in the target"),
        ({"num_target_layers": 10}, "number of target layers 10 in the drafter, 9 in the target"),
        (
            {"num_target_layers": None, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 9]}},
            "it reads layer 9 of a target with 9 layers",
        ),
        (
            {"vocab_size": 2000, "dflash_config": {"mask_token_id": 1280, "target_layer_ids": [1, 8]}},
            "vocabulary 2000 in the drafter, 1280 in the target; "
            "its mask is token 1280 of a vocabulary of 1280",
        ),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], said: str, tmp_path: Path):
    drafter = edited(SHIPPED_DRAFTER, tmp_path / "drafter", **changes)
    with pytest.raises(DrafterMismatchError) as caught:
        check_located(Located(model_of(at("")), SHIPPED_TARGET, str(drafter)))
    assert str(caught.value) == f"the drafter {drafter} was not made for the target {SHIPPED_TARGET}: {said}"
    config = DFlashConfig.from_dict(json.loads((drafter / "config.json").read_text()))
    target = Target(build_unloaded(json.loads((SHIPPED_TARGET / "config.json").read_text())))
    with pytest.raises(DrafterMismatchError) as bound:  # opening it would have refused it for the same
        BlockDrafter(build_network(config)).bind(target)
    assert said.partition(";")[0] in str(bound.value)


def test_a_folder_with_another_target_than_the_entry_says_is_refused():
    other = DEMO.model_copy(update={"layers": 12, "head_dims": (32, 64)})
    entry = model_of(at(""), facts=Facts(target=other))
    with pytest.raises(ModelError) as caught:
        check_located(Located(entry, SHIPPED_TARGET, None))
    assert str(caught.value) == (
        f"{SHIPPED_TARGET} does not hold the target of the model one: layers is 9, not 12; "
        "head_dims is (32,), not (32, 64); put the right one there, or correct the registry"
    )


def test_a_retrained_drafter_may_read_other_layers_than_the_entry_says():
    facts = DrafterFacts(hidden_size=128, target_layers=(2, 4), mask_token=5, block=16)
    entry = model_of(at(""), at(""), facts=Facts(target=DEMO, drafter=facts))
    check_located(Located(entry, SHIPPED_TARGET, str(SHIPPED_DRAFTER)))


@pytest.mark.parametrize("head_dim", [72, 120])
def test_an_offered_channel_must_fit_the_heads_of_the_configuration(head_dim: int, tmp_path: Path):
    folder = edited(SHIPPED_TARGET, tmp_path / "target", head_dim=head_dim)
    for name in ("lattice-e8", "rotated4", "lattice-packed"):
        entry = model_of(at(""), channels=["native", name])
        with pytest.raises(ConfigurationError, match=f"the model one: the KV channel {name} .* {head_dim} "):
            check_located(Located(entry, folder, None))
        assert name not in Registry.single(folder).entries[0].channels


def test_an_offered_channel_must_apply_to_a_layer_of_the_model(tmp_path: Path):
    folder = save(tmp_path / "model", TARGETS["qwen3-4b"])
    entry = model_of(at(""), channels=["native", "sliding-bounded-512"])
    with pytest.raises(ConfigurationError, match="sliding-bounded:0,512@sliding applies to no layer"):
        check_located(Located(entry, folder, None))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "no-such"}, "model_type 'no-such' is not supported"),
        (PLAIN | {"hidden_size": 64}, "num_attention_heads, .* are missing"),
        (
            PLAIN | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 0, "vocab_size": 100},
            "num_attention_heads must be a positive whole number, not 0",
        ),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused_by_file(
    config: dict[str, Any], said: str, tmp_path: Path
):
    folder = save(tmp_path / "model", config)
    with pytest.raises(ModelError, match=said) as caught:
        Registry.single(folder)
    assert str(folder) in str(caught.value)


def test_every_channel_of_the_shipped_target_is_usable():
    assert list(Registry.single(SHIPPED_TARGET).entries[0].channels) == list(CHANNELS)
