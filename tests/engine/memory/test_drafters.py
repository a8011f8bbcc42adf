"""What drafters add: predicted weights and states are those of drafters at work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from engine.cache.policy import NATIVE
from engine.drafters.base import Drafter
from engine.drafters.block import BlockDrafter
from engine.drafters.registry import KINDS, drafter_policy, open_drafter, read_spec
from engine.drafters.with_lookup import WithLookup
from engine.errors import InputError, MachineError
from engine.memory import (
    RunLengths,
    Unloaded,
    chunks_of,
    fit,
    open_unloaded,
    open_unloaded_drafter,
    predict,
    require_memory,
)
from engine.networks.dflash import DFlash
from engine.networks.dflash_config import DFlashConfig
from engine.target.loading import LoadedTarget, load_target
from tests.engine import tiny
from tests.engine.drafters.test_mtp import saved_head
from tests.engine.drafters.test_registry import save_diffusion

BLOCK = 8
CONTEXTS = (1, 64, 255, 511, 513, 1000)


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short prompts have rows that are taken in without a draft."""
    monkeypatch.setattr(BlockDrafter, "absorb_at", 512)
    monkeypatch.setattr("engine.drafters.mtp.ABSORB_AT", 512)


@pytest.fixture(scope="module")
def places(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A ``--drafter`` text of every kind."""
    root = tmp_path_factory.mktemp("drafters")
    return {
        "dflash": str(folders[1]),
        "prompt-lookup": "prompt-lookup:2",
        "autoregressive": f"autoregressive:{tiny.save_target(root / 'small', 'qwen3')}",
        "masked-diffusion": str(save_diffusion(root / "diffusion")),
        "packed": str(save_diffusion(root / "packed", quantized=True)),
        "both": f"prompt-lookup+{folders[1]}",
        "mtp": f"mtp:{saved_head(root / 'head', tiny.GEMMA)}",
    }


@pytest.fixture(scope="module")
def loaded(folders: tuple[Path, Path]) -> LoadedTarget:
    return load_target(folders[0])


@pytest.fixture(scope="module")
def unloaded(folders: tuple[Path, Path]) -> Unloaded:
    return open_unloaded(folders[0])


def at_work(drafter: Drafter, target: LoadedTarget, observed: list[int]) -> int:
    """Bytes a drafter remembers after it was told of a prompt and has drafted a block."""
    drafter.start()
    width = target.target.hidden_size * len(drafter.target_layers)
    for count in observed:
        hidden_states = mx.zeros((1, count, width)) if drafter.target_layers else None
        drafter.observe(list(range(5, 5 + count)) if count < 200 else [7] * count, hidden_states)
    drafter.propose(9, BLOCK - 1)
    if isinstance(drafter, WithLookup):
        drafter.other.propose(9, BLOCK - 1)  # whichever of them spoke
    return drafter.nbytes


def weights_of(drafter: Any) -> int:
    """Bytes of a loaded drafter's weights."""
    inner = getattr(drafter, "other", drafter)
    network = inner.network if hasattr(inner, "network") else getattr(inner, "_model", None)
    if network is None:
        return 0
    model = getattr(network, "model", network) if hasattr(network, "vocab_size") else network
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


def test_every_kind_of_drafter_can_be_predicted(places):
    assert set(KINDS) - {"dflash2"} < set(places)


@pytest.mark.sampled(5, 1)
@pytest.mark.parametrize(
    "kind", ["dflash", "prompt-lookup", "autoregressive", "masked-diffusion", "both", "mtp"]
)
@pytest.mark.parametrize("chunk", [2048, 300, 40])
def test_states_are_those_of_a_drafter_at_work(places, loaded, unloaded, kind, chunk):
    drafter = open_drafter(places[kind], loaded).drafter
    predicted = open_unloaded_drafter(places[kind], unloaded)
    assert predicted.block_size == drafter.block_size
    for context in CONTEXTS:
        observed = [*chunks_of(NATIVE, RunLengths(context, prefill_chunk=chunk)), 1]
        assert predicted.state(observed, BLOCK) == at_work(drafter, loaded, observed), context


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("policy", ["sink-window:3,40", "sink-window:0,100", "affine:4,32", "rotated:8,64"])
@pytest.mark.parametrize("kind", ["dflash", "autoregressive"])
def test_states_under_a_policy_are_those_of_a_drafter_at_work(loaded, unloaded, tmp_path, kind, policy):
    if kind == "dflash":
        folder = tiny.save_drafter(tmp_path / "wide", head_dim=32)
    else:
        folder = tiny.save_target(tmp_path / "small", "llama", head_dim=32)
    spec = f"{kind}:{folder}?kv={policy}"
    drafter, predicted = open_drafter(spec, loaded).drafter, open_unloaded_drafter(spec, unloaded)
    for chunk in (2048, 40):
        for context in CONTEXTS:
            observed = [*chunks_of(NATIVE, RunLengths(context, prefill_chunk=chunk)), 1]
            assert predicted.state(observed, BLOCK) == at_work(drafter, loaded, observed), (chunk, context)


@pytest.mark.parametrize(
    "spec", ["prompt-lookup:2?kv=affine", "prompt-lookup:2?kv=window", "dflash:x?kv=full-kv"]
)
def test_a_policy_that_cannot_be_is_refused(unloaded, spec):
    with pytest.raises(InputError, match="--drafter-kv"):
        open_unloaded_drafter(spec, unloaded)


def test_sliding_layers_of_a_drafter_are_predicted_too(loaded, unloaded, tmp_path):
    changes = {
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
    }
    folder = tiny.save_drafter(tmp_path / "sliding", **changes)
    drafter = open_drafter(str(folder), loaded).drafter
    assert isinstance(drafter, BlockDrafter)
    assert isinstance(drafter.network, DFlash)
    assert DFlashConfig.window(drafter.network.config, 0) == 40
    predicted = open_unloaded_drafter(str(folder), unloaded)
    for chunk in (2048, 300, 40):
        for context in CONTEXTS:
            observed = [*chunks_of(NATIVE, RunLengths(context, prefill_chunk=chunk)), 1]
            assert predicted.state(observed, BLOCK) == at_work(drafter, loaded, observed), (chunk, context)


@pytest.mark.parametrize(
    "kind", ["dflash", "prompt-lookup", "autoregressive", "masked-diffusion", "packed", "both", "mtp"]
)
def test_weights_are_those_of_a_loaded_drafter(places, loaded, unloaded, kind):
    drafter = open_drafter(places[kind], loaded).drafter
    assert open_unloaded_drafter(places[kind], unloaded).weights == weights_of(drafter)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("oracle", "neither a model here"),
        ("./nowhere", "is not a folder"),
        ("dflash:", "lacks its folder"),
        ("prompt-lookup+", "lacks the drafter"),
        ("prompt-lookup:two", "must be a number"),
        ("prompt-lookup:0", "must be 1"),
    ],
)
def test_what_is_no_drafter_is_refused(unloaded, spec, says):
    with pytest.raises(InputError, match=says):
        open_unloaded_drafter(spec, unloaded)


def test_a_drafter_of_another_target_or_kind_is_refused(unloaded, folders, tmp_path):
    folder = tiny.save_drafter(tmp_path / "narrow", hidden_size=64)
    with pytest.raises(InputError, match="another target"):
        open_unloaded_drafter(str(folder), unloaded)
    with pytest.raises(InputError, match="of the kind dflash"):
        open_unloaded_drafter(f"autoregressive:{folders[1]}", unloaded)


@pytest.mark.parametrize("kind", ["dflash", "autoregressive", "mtp"])
def test_memory_check_counts_what_a_drafter_keeps_of_a_sequence(folders, places, kind: str):
    def of_drafter(context: int, kv: str = "native") -> int:
        return fit(folders[0], context=context, drafter=read_spec(places[kind], drafter_policy(kv))).drafter

    [row] = (predicted := predict(open_unloaded(folders[0]), ("native",), (500,), drafter=places[kind]))[
        "rows"
    ]
    assert row["drafter_state_bytes"] > 0
    assert of_drafter(500) == predicted["drafter"]["weights_bytes"] + row["drafter_state_bytes"]
    assert of_drafter(500) > of_drafter(20)
    if kind == "autoregressive":  # --drafter-kv is a way out, so it has to count
        assert of_drafter(500, "sink-window:4,16") < of_drafter(500)
    just_too_little = fit(folders[0], context=500, drafter=places[kind], free=0).needed - 1
    with pytest.raises(MachineError, match=r"does not fit in memory.*drafter"):
        require_memory(folders[0], context=500, drafter=places[kind], free=just_too_little)
