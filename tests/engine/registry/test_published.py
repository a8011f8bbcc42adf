"""Every published model of the registry: its facts by configurations alone, and a tiny model that decodes."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.drafters.block import BlockDrafter
from engine.networks.dflash2 import build_network
from engine.networks.dflash_config import DFlashConfig
from engine.registry import Located, Registry, check_located, drafter_facts
from engine.target.model import Target
from tests.engine import tiny
from tests.engine.random_drafters import Helped, block_drafter
from tests.engine.registry.published import (
    DRAFTERS,
    TARGETS,
    full_drafter_config,
    save,
    tiny_drafter_config,
    tiny_target,
)

PROMPT = list(range(7, 19))  # longer than the window
COUNT = 32


def test_every_entry_has_a_published_configuration():
    assert {"demo", *TARGETS} == {entry.name for entry in Registry.load().entries}


def test_drafters_are_looked_for_where_pull_links_them():
    named = {entry.name: entry.drafter.folder for entry in Registry.load().entries if entry.drafter}
    folders = {name: folder for name, folder in named.items() if folder}  # neither shipped nor look-ups
    assert folders == {name: f"{name}-dflash" for name in folders}
    assert len(folders) > 10


@pytest.mark.sampled(11, 1)
@pytest.mark.parametrize("name", TARGETS)
def test_published_configurations_have_the_shapes_that_the_registry_says(name: str, tmp_path: Path):
    """From the config.json alone, packed or nested: nothing of their gigabytes is computed."""
    folder = save(tmp_path / "model", TARGETS[name])
    entry = Registry.load().entry(name)
    assert entry.facts.target is not None
    check_located(Located(entry, folder, None))


@pytest.mark.parametrize("name", DRAFTERS)
def test_published_drafters_say_of_their_targets_what_the_registry_says(name: str, tmp_path: Path):
    config = full_drafter_config(name)
    found = drafter_facts(str(save(tmp_path / "drafter", config)))
    entry = Registry.load().entry(name)
    assert entry.drafter is not None
    assert DFlashConfig.from_dict(config).kind == ("dflash2" if "DFlash2" in str(entry.drafter) else "dflash")
    said = entry.facts.drafter
    assert said is not None
    assert found is not None
    differing = {key: value for key, value in said if value is not None and value != getattr(found, key)}
    assert not differing


@pytest.mark.sampled(11, 1)
@pytest.mark.parametrize("name", TARGETS)
def test_a_tiny_model_of_the_configuration_decodes_with_its_kind_of_drafter(name: str):
    """Greedy tokens are mlx-lm's, with a drafter of the published layout whose drafts are right in part."""
    model = tiny_target(name)
    truth = tiny.plain_tokens(model, PROMPT, COUNT)
    assert len(set(truth)) > 8  # wrong caches would show
    target = Target(model)
    drafter = Helped(_drafter(name, target), PROMPT + truth, right=0.7)
    drafter.bind(target)
    steps = list(
        decode(target, drafter, PROMPT, max_tokens=COUNT, draft_length=FixedDraftLength(8), prefill_chunk=5)
    )
    assert [token for step in steps for token in step.tokens] == truth
    assert any(0 < step.round.accepted < step.round.block - 1 for step in steps if step.round)


def _drafter(name: str, target: Target) -> BlockDrafter:
    if name not in DRAFTERS:
        return block_drafter(target)
    mx.random.seed(7)
    network = build_network(DFlashConfig.from_dict(tiny_drafter_config(name)))
    network.update(tree_map(lambda w: 2 * w if w.ndim > 1 else w, network.parameters()))
    return BlockDrafter(network)
