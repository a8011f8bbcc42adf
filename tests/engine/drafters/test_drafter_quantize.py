"""--drafter-quantize packs the weights of every drafter that has some, and the text stays the target's."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.drafters.registry import KINDS, open_drafter
from engine.errors import ConfigurationError
from engine.memory import open_unloaded, open_unloaded_drafter
from engine.networks.dflash2 import build_network
from engine.networks.dflash_config import DFlashConfig
from engine.target.loading import LoadedTarget, load_target
from tests.engine import tiny
from tests.engine.batches import prompt_of
from tests.engine.drafters.test_mtp import saved_head
from tests.engine.drafters.test_registry import save_diffusion
from tests.engine.memory.test_drafters import weights_of
from tests.engine.random_drafters import SECOND

PACKED = "4,32"


def save_second(folder: Path) -> Path:
    """A DFlash 2 drafter, whose selector has matrices too narrow for a group."""
    nested = {"mask_token_id": tiny.MASK, "target_layer_ids": [0, 2, 5], **SECOND}
    config = tiny.drafter_config(architectures=["DFlash2DraftModel"], dflash_config=nested)
    network = build_network(DFlashConfig.from_dict(config))
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(network.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


PLACES = {
    "dflash": lambda folder: tiny.save_drafter(folder, intermediate_size=64),
    "dflash2": save_second,
    "autoregressive": lambda folder: tiny.save_target(folder, "qwen3"),
    "masked-diffusion": save_diffusion,
    "mtp": lambda folder: saved_head(folder, tiny.GEMMA),
}


@pytest.fixture(scope="module")
def target(folders: tuple[Path, Path]) -> LoadedTarget:
    return load_target(folders[0])


def test_every_network_is_tried():
    assert set(PLACES) == set(KINDS) - {"prompt-lookup"}


@pytest.mark.parametrize("kind", list(PLACES))
def test_packed_drafter_drafts(kind: str, folders: tuple[Path, Path], target: LoadedTarget, tmp_path: Path):
    spec = f"{kind}:{PLACES[kind](tmp_path / kind)}"
    whole, packed = open_drafter(spec, target), open_drafter(spec, target, quantize=PACKED)
    assert packed.card is not None
    assert packed.card.quantization == "affine 4-bit group 32"
    assert (packed.settings or "").endswith(f"quantize={PACKED}")
    assert weights_of(packed.drafter) < 0.6 * weights_of(whole.drafter)
    said = f"{spec}?quantize={PACKED}"
    assert open_unloaded_drafter(said, open_unloaded(folders[0])).weights == weights_of(packed.drafter)
    prompt = prompt_of(9)
    drafter = open_drafter(said, target).drafter
    steps = decode(target.target, drafter, prompt, max_tokens=16, draft_length=FixedDraftLength(4))
    found = [token for step in steps for token in step.tokens]
    assert found == tiny.plain_tokens(target.target.model, prompt, 16)


def test_refusals_name_the_option(folders: tuple[Path, Path], target: LoadedTarget):
    with pytest.raises(ConfigurationError, match="--drafter-quantize 9,32: bits 9 is not one of"):
        open_drafter(str(folders[1]), target, quantize="9,32")
    with pytest.raises(ConfigurationError, match="--drafter-quantize 4: prompt-lookup has no weights"):
        open_drafter("prompt-lookup", target, quantize="4")
    with pytest.raises(ConfigurationError, match="name two packings; give one"):
        open_drafter(f"{folders[1]}?quantize=8,32", target, quantize="4,32")
