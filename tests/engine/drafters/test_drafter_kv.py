"""A policy for a drafter's own keys and values: what it still sees, how it goes back, and what it costs."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_map
from mlx_lm.models import base, llama

from engine.cache.policy import NATIVE, KVPolicy
from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.drafters.autoregressive import Autoregressive
from engine.drafters.base import Drafter
from engine.drafters.block import BlockDrafter
from engine.drafters.registry import drafter_policy, open_drafter
from engine.errors import ConfigurationError
from engine.networks.dflash import SPARE, LayerContext
from engine.networks.dflash2 import build_network
from engine.networks.dflash_config import DFlashConfig
from engine.target.loading import LoadedTarget, load_target
from engine.target.model import Target
from tests.engine import families, tiny
from tests.engine.identity import tokens_of
from tests.engine.random_drafters import Helped

POLICIES = (
    "sink-window:0,20",
    "sink-window:3,20",
    "affine:8,32",
    "affine:4,64",
    "rotated:4,32",
    "rotated:8/4,32",
)
ROWS = mx.random.normal((1, 900, 96), key=mx.random.key(3))


def block_drafter(policy: KVPolicy, target: Any, **changes: Any) -> BlockDrafter:
    mx.random.seed(7)
    config = tiny.drafter_config(head_dim=32, **changes)
    network = build_network(DFlashConfig.from_dict(config))
    network.update(tree_map(lambda w: 2 * w if w.ndim > 1 else w, network.parameters()))
    drafter = BlockDrafter(network, policy)
    drafter.bind(Target(target))
    return drafter


def observe(drafter: BlockDrafter, first: int, last: int) -> None:
    drafter.observe(range(first, last), ROWS[:, first:last])


def drafts(drafter: BlockDrafter) -> list[int]:
    return drafter.propose(11, 7).tokens.tolist()


def rows(start: int, count: int) -> mx.array:
    """Keys [1, 2, count, 3] that carry their position."""
    positions = mx.arange(start, start + count, dtype=mx.float32)[None, None, :, None]
    return mx.broadcast_to(positions, (1, 2, count, 3))


@given(
    keep=st.integers(1, 90),
    sink=st.integers(0, 9),
    steps=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 8), st.integers(0, SPARE)), max_size=14),
)
def test_a_block_sees_the_pinned_and_the_newest_positions(keep: int, sink: int, steps: Any):
    layer, length = LayerContext(keep, sink), 0
    for new, block, back in steps:
        keys = rows(length, new + block)
        seen_k, seen_v, context = layer.extend(keys, -keys, new)
        length += new
        pinned = min(sink, length)
        expected = [*range(pinned), *range(max(length - keep, pinned), length + block)]
        assert seen_k[0, 0, :, 0].astype(mx.int32).tolist() == expected
        assert mx.array_equal(seen_v, -seen_k).item()
        assert context == len(expected) - block
        if back <= length and layer.can_forget(back, length - back):
            layer.length -= back
            length -= back
        else:
            assert back > length or layer.length < length  # some rows are gone


def test_rows_that_no_query_can_see_are_not_computed():
    layer = LayerContext(20, 3)
    assert layer.wanted(50) == [(0, 50)]
    assert layer.wanted(500) == [(0, 3), (500 - 20 - SPARE, 500)]
    layer.extend(rows(0, 40), rows(0, 40), 40)
    assert layer.wanted(500) == [(500 - 20 - SPARE, 500)]
    assert layer.length == 3
    assert LayerContext(None).wanted(500) == [(0, 500)]


@pytest.mark.parametrize("spec", POLICIES)
def test_drafts_do_not_depend_on_how_the_positions_came(spec: str, gemma: Any):
    whole, pieces = (block_drafter(drafter_policy(spec), gemma) for _ in range(2))
    observe(whole, 0, 700)
    for first in range(0, 700, 50):
        observe(pieces, first, first + 50)
        pieces.propose(3, 4)
    assert drafts(whole) == drafts(pieces)


@pytest.mark.parametrize("spec", POLICIES)
@pytest.mark.parametrize("count", [1, 30])
def test_going_back_is_as_if_the_rows_had_never_been_seen(spec: str, count: int, gemma: Any):
    policy = drafter_policy(spec)
    straight, rewound = (block_drafter(policy, gemma) for _ in range(2))
    for each in (straight, rewound):
        for first in range(0, 300 - count, 15):
            observe(each, first, min(first + 15, 300 - count))
            each.propose(3, 7)
    fork = rewound.fork()
    observe(rewound, 300 - count, 300)
    rewound.propose(5, 7)
    assert rewound.rewind(count)
    expected = drafts(straight)
    assert drafts(rewound) == drafts(fork) == expected
    twin = straight.twin()
    observe(twin, 0, 40)
    other = block_drafter(policy, gemma)
    observe(other, 0, 40)
    assert drafts(twin) == drafts(other)


def test_a_window_that_covers_the_text_changes_nothing(gemma: Any):
    native, wide = block_drafter(NATIVE, gemma), block_drafter(drafter_policy("sink-window:4,400"), gemma)
    for each in (native, wide):
        observe(each, 0, 300)
    assert drafts(native) == drafts(wide)


def test_bytes_are_those_of_the_rows_or_codes_that_are_held(gemma: Any):
    full = ["full_attention"] * 2
    sizes = {}
    for spec in ("native", *POLICIES):
        drafter = block_drafter(drafter_policy(spec), gemma, layer_types=full)
        for first in range(0, 900, 30):
            observe(drafter, first, first + 30)
            drafter.propose(3, 7)
        sizes[spec] = drafter.nbytes
    a_row = 2 * 2 * 2 * 32  # values of two layers, keys and values, two heads of 32
    assert sizes["native"] == 1024 * a_row * 4
    assert sizes["sink-window:0,20"] == sizes["sink-window:3,20"] == 256 * a_row * 4
    # 8 bits and, for 32 values, a scale and a bias of 16 bits each; codes hold no scratch rows.
    assert sizes["affine:8,32"] == 1024 * a_row * 9 // 8
    assert sizes["affine:4,64"] == sizes["rotated:4,32"] == 1024 * a_row * 5 // 8


def test_codes_of_eight_bits_hardly_change_what_the_network_computes(gemma: Any):
    native, coded = (block_drafter(drafter_policy(spec), gemma) for spec in ("native", "affine:8,32"))
    hidden = []
    for each in (native, coded):
        observe(each, 0, 200)
        hidden.append(np.array(each._block_rows(11, 7)[0]))
    assert np.abs(hidden[0] - hidden[1]).max() < 0.05 * np.abs(hidden[0]).max()
    assert np.abs(hidden[0] - hidden[1]).max() > 0


def made(kind: str, spec: str, model: Any) -> Drafter:
    if kind == "dflash":
        return block_drafter(drafter_policy(spec), model)
    small = tiny.build("llama", seed=8, num_hidden_layers=2, head_dim=32)
    return Autoregressive(Target(small), policy=drafter_policy(spec))


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("kind", ["dflash", "autoregressive"])
@pytest.mark.parametrize("spec", POLICIES)
def test_the_text_is_that_of_plain_decoding(spec: str, kind: str, gemma: Any):
    prompt = list(range(5, 60))
    truth = tiny.plain_tokens(gemma, prompt, 40)
    target = Target(gemma)
    drafter = made(kind, spec, gemma)
    drafter.bind(target)
    helped = Helped(drafter, [*prompt, *truth], 0.6)
    steps = decode(target, helped, prompt, max_tokens=40, draft_length=FixedDraftLength(6))
    assert tokens_of(list(steps)) == truth
    assert drafter.nbytes > 0


@pytest.mark.parametrize("spec", ["sink-window:3,20", "affine:4,32"])
def test_a_drafting_model_keeps_less_and_stays_in_step_with_the_text(spec: str):
    model = Target(families.build("llama", head_dim=32))
    policy = drafter_policy(spec)
    text = [5 + at % 200 for at in range(600)]
    native, bounded = Autoregressive(model), Autoregressive(model, policy=policy)
    for each in (native, bounded):
        each.observe(text, None)
        each.propose(7, 5)
    assert bounded.nbytes < native.nbytes / 2
    bounded.observe([7, 8, 9], None)
    bounded.propose(10, 5)
    assert bounded.rewind(30)
    again = bounded.twin()
    again.observe([*text, 7, 8, 9][:-30], None)
    assert bounded.propose(6, 5).tokens.tolist() == again.propose(6, 5).tokens.tolist()


def test_attention_on_codes_is_undone_with_the_last_drafting_model():
    plain = base.scaled_dot_product_attention
    gc.collect()
    assert llama.scaled_dot_product_attention is plain
    drafter = Autoregressive(Target(families.build("llama", head_dim=32)), policy=drafter_policy("affine"))
    twin = drafter.twin()
    assert llama.scaled_dot_product_attention is not plain
    del drafter
    gc.collect()
    assert llama.scaled_dot_product_attention is not plain
    del twin
    gc.collect()
    assert llama.scaled_dot_product_attention is plain


@pytest.fixture(scope="module")
def target(folders: tuple[Path, Path]) -> LoadedTarget:
    return load_target(folders[0])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("window:4", "--drafter-kv 'window:4': 'window' is none of"),
        ("sink-window:4", "takes two values"),
        ("sink-window:4,0", "not 0"),
        ("affine:7,64", "not 7"),
        ("lattice:e8,38", "a drafter takes native, sink-window, affine, rotated, for all of its layers"),
        ("full-kv", "a drafter takes"),
        ("restored:exact", "a drafter takes"),
        ("affine:4,64@full", "for all of its layers"),
    ],
)
def test_what_is_no_policy_for_a_drafter_is_refused(text: str, says: str):
    with pytest.raises(ConfigurationError, match=r"^--drafter-kv ") as refusal:
        drafter_policy(text)
    assert says in str(refusal.value)


def test_drafters_open_with_a_policy_and_say_so(target: LoadedTarget, tmp_path: Path):
    folder = tiny.save_drafter(tmp_path / "wide", head_dim=32)
    small = tiny.save_target(tmp_path / "small", "llama", head_dim=32)
    policy = drafter_policy("affine:8,32")
    for spec in (str(folder), f"dflash:{folder}", f"prompt-lookup+{folder}", str(small)):
        loaded = open_drafter(spec, target, None, policy)
        assert loaded.settings == "kv=affine:8,32@all"
        assert open_drafter(spec, target).settings is None


def test_drafters_that_cannot_follow_a_policy_say_why(
    folders: tuple[Path, Path], target: LoadedTarget, tmp_path: Path
):
    policy = drafter_policy("affine:8,32")
    with pytest.raises(ConfigurationError, match=r"affine:8,32@all: prompt-lookup keeps no keys and values"):
        open_drafter("prompt-lookup:3", target, None, policy)
    with pytest.raises(ConfigurationError, match=r"--drafter-kv affine.*head dimension of 8 cannot be"):
        open_drafter(str(folders[1]), target, None, policy)
    small = tiny.save_target(tmp_path / "small", "llama")
    with pytest.raises(ConfigurationError, match=r"--drafter-kv affine.*head dimension of 8 cannot be"):
        open_drafter(str(small), target, None, policy)
