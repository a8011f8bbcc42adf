"""--drafter-quantize packs the weights of every drafter that has some, and the text stays the target's."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.drafters.registry import KINDS, open_drafter
from engine.errors import ConfigurationError
from engine.memory import open_unloaded, open_unloaded_drafter
from engine.target.loading import LoadedTarget, load_target
from tests.engine import tiny
from tests.engine.batches import prompt_of
from tests.engine.drafters.test_mtp import saved_head
from tests.engine.drafters.test_registry import save_diffusion
from tests.engine.memory.test_drafters import weights_of

PACKED = "4,32"
PLACES = {
    "dflash": lambda folder: tiny.save_drafter(folder, intermediate_size=64),
    "dflash2": lambda folder: tiny.save_drafter(folder, intermediate_size=64),
    "autoregressive": lambda folder: tiny.save_target(folder, "qwen3"),
    "masked-diffusion": save_diffusion,
    "mtp": lambda folder: saved_head(folder, tiny.GEMMA),
}


@pytest.fixture(scope="module")
def target(folders: tuple[Path, Path]) -> LoadedTarget:
    return load_target(folders[0])


def test_every_network_is_tried():
    assert set(PLACES) == set(KINDS) - {"prompt-lookup"}


@pytest.mark.parametrize("kind", sorted(set(PLACES) - {"dflash2"}))
def test_packed_drafter_drafts(kind: str, folders: tuple[Path, Path], target: LoadedTarget, tmp_path: Path):
    spec = f"{kind}:{PLACES[kind](tmp_path / kind)}"
    whole, packed = open_drafter(spec, target), open_drafter(spec, target, quantize=PACKED)
    assert packed.card is not None
    assert packed.card.quantization == "affine 4-bit group 32"
    assert (packed.settings or "").endswith(f"quantize={PACKED}")
    assert weights_of(packed.drafter) < weights_of(whole.drafter) / 2
    said = f"{spec}?quantize={PACKED}"
    assert open_unloaded_drafter(said, open_unloaded(folders[0])).weights == weights_of(packed.drafter)
    prompt = prompt_of(9)
    texts = [
        [
            token
            for step in decode(
                target.target, drafter, prompt, max_tokens=16, draft_length=FixedDraftLength(block)
            )
            for token in step.tokens
        ]
        for drafter, block in ((None, 1), (open_drafter(said, target).drafter, 4))
    ]
    assert texts[0] == texts[1]


def test_refusals_name_the_option(folders: tuple[Path, Path], target: LoadedTarget):
    with pytest.raises(ConfigurationError, match="--drafter-quantize 9,32: bits 9 is not one of"):
        open_drafter(str(folders[1]), target, quantize="9,32")
    with pytest.raises(ConfigurationError, match="--drafter-quantize 4: prompt-lookup has no weights"):
        open_drafter("prompt-lookup", target, quantize="4")
    with pytest.raises(ConfigurationError, match="name two packings; give one"):
        open_drafter(f"{folders[1]}?quantize=8,32", target, quantize="4,32")
