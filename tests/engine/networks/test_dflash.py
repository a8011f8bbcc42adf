"""The DFlash network over a sequence; that it equals the published one is tested with `parity`."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.evaluation.parity import GoldenCase
from engine.networks.dflash import SPARE, Context, DFlash, DFlashConfig, _window_mask
from engine.networks.dflash2 import build_network
from tests.engine import tiny

DATA = Path(__file__).parents[2] / "data" / "dflash"
CASES = sorted(path.name for path in DATA.iterdir() if path.is_dir())
SLIDING = {"layer_types": ["sliding_attention"] * 2}


def network(**changes: Any) -> DFlash:
    mx.random.seed(0)
    return build_network(DFlashConfig.from_dict(tiny.drafter_config(**changes)))


def largest(a: mx.array, b: Any) -> float:
    return float(np.abs(np.array(a) - np.array(b)).max())


@pytest.mark.parametrize("name", [case for case in CASES if case not in ("dynamic", "sliding_longrope")])
def test_context_taken_in_without_a_draft_is_the_same_context(name: str):
    case = GoldenCase.read(DATA / name)
    golden, drafter = case.arrays, case.network
    context, end = Context(drafter.config), int(golden["spans"][-1, 1])
    for first in range(0, end, 7):
        drafter.absorb(mx.array(golden["target_hidden"][:, first : min(first + 7, end)]), context)
    embeddings = mx.array(golden["target_embedding"][golden["blocks"][1]])[None]
    width = golden["target_hidden"].shape[-1]
    hidden = drafter(embeddings * drafter.config.input_embedding_scale, mx.zeros((1, 0, width)), context)
    assert largest(hidden, golden["round2_hidden"]) < 1e-4


def test_a_long_context_in_one_go_equals_the_same_in_pieces():
    drafter = network()
    hidden_states, embeddings = mx.random.normal((1, 700, 96)), mx.random.normal((1, 5, 32))
    whole, pieces = Context(drafter.config), Context(drafter.config)
    expected = drafter(embeddings, hidden_states, whole)
    for first in range(0, 690, 30):
        drafter(embeddings, hidden_states[:, first : first + 30], pieces)
    found = drafter(embeddings, hidden_states[:, 690:], pieces)
    assert largest(found, expected) < 1e-4
    assert whole.offset == pieces.offset == 700


def test_a_sliding_layer_keeps_a_bounded_context():
    drafter = network(**SLIDING)
    context = Context(drafter.config)
    for _ in range(40):
        mx.eval(drafter(mx.zeros((1, 8, 32)), mx.zeros((1, 30, 96)), context))
    a_row = 2 * 2 * 8 * 4
    assert context.nbytes == 2 * 256 * a_row


@pytest.mark.parametrize("types", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("count", [1, 17, SPARE])
def test_a_rewound_context_equals_one_that_never_saw_the_rows(types: str, count: int):
    drafter = network(layer_types=[types] * 2)
    hidden_states, embeddings = mx.random.normal((1, 400, 96)), mx.random.normal((1, 5, 32))
    rewound, straight = Context(drafter.config), Context(drafter.config)
    for first in range(0, 390, 30):
        drafter(embeddings, hidden_states[:, first : first + 30], rewound)
        drafter(embeddings, hidden_states[:, first : min(first + 30, 390 - count)], straight)
    assert rewound.rewindable(count)
    rewound.rewind(count)
    assert rewound.offset == straight.offset == 390 - count
    none = hidden_states[:, :0]
    assert largest(drafter(embeddings, none, rewound), drafter(embeddings, none, straight)) < 1e-5


def test_a_context_says_that_it_cannot_be_rewound_past_what_is_held():
    drafter = network()
    context = Context(drafter.config)
    drafter.absorb(mx.random.normal((1, 300, 96)), context)
    assert context.rewindable(SPARE // 2)
    assert not context.rewindable(SPARE + 12)  # the sliding layer has dropped what would be uncovered
    assert not context.rewindable(301)


def test_a_mask_that_was_not_used_outlives_the_thread_that_asked_for_it():
    """As where a server ends and another goes on with its model."""

    def ask_and_leave() -> None:
        _window_mask(3, 61, 50, causal=True)
        mx.clear_streams()

    thread = Thread(target=ask_and_leave)
    thread.start()
    thread.join()
    assert np.array(_window_mask(3, 61, 50, causal=True)).sum() == 3 * 50
