"""Replaying recurrent layers: nothing of the model is changed for others, and no weight is read twice."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from engine.cache.transaction import Transaction, new_caches
from engine.target.model import Target
from tests.engine import families
from tests.engine.cache import models
from tests.engine.cache.invariants import Sequence

RECURRENT = [
    "mamba2",
    "falcon_h1",
    "lfm2",
    "kimi_linear",
    "rwkv7",
    "recurrent_gemma",
    "nemotron_h",
    "qwen3_5",
]


def classes(model) -> list[type]:
    return [type(module) for _, module in model.named_modules()]


@pytest.mark.parametrize("family", RECURRENT)
def test_closing_restores_the_model_whatever_the_order(family: str):
    model = models.model(family)
    before, names = classes(model), [name for name, _ in tree_flatten(model.parameters())]
    one, other = Transaction(model, new_caches(model, 4)), Transaction(model, new_caches(model, 4))
    assert classes(model) != before
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    one.close()
    one.close()
    assert classes(model) != before  # the other one still listens
    other.close()
    assert classes(model) == before


def test_taps_and_transactions_can_be_closed_in_any_order():
    model = models.model("qwen3_5")
    before = classes(model)
    for tap_first in (True, False):
        target = Target(model)
        hidden_states, transaction = target.hook_layers((0, 1)), Transaction(model, new_caches(model, 4))
        for closable in (hidden_states, transaction) if tap_first else (transaction, hidden_states):
            closable.close()
        assert classes(model) == before


def test_a_model_without_recurrent_layers_is_left_alone(gemma):
    before = classes(gemma)
    transaction = Transaction(gemma, new_caches(gemma, 4))
    assert classes(gemma) == before
    transaction.close()


@pytest.mark.parametrize("kind", ["gated-delta", "recurrent", "list"])
def test_two_sequences_on_one_model_do_not_disturb_each_other(kind: str):
    one, other = Sequence(kind, 4), Sequence(kind, 4)
    text = one.reference.text
    one.prefill(9)
    other.prefill(5)
    # Both are open at once, and the other's forwards come between the first one's and its commit.
    one.transaction.begin(4)
    one.feed([text[9], text[10], 7, 7])
    other.transaction.begin(3)
    other.feed([text[5], 7, 7])
    one.commit(2)
    other.commit(1)
    one.check()
    other.check()
    one.close()
    other.round([7, 7])
    other.check()
    other.close()


def test_a_model_that_is_called_without_caches_is_not_recorded():
    sequence = Sequence("gated-delta", 4)
    text = sequence.reference.text
    sequence.prefill(9)
    sequence.transaction.begin(4)
    sequence.feed([text[9], 7, 7, 7])
    mx.eval(sequence.model(mx.array([[1, 2, 3, 4]])))
    sequence.commit(1)
    sequence.check()
    assert sequence.uncached == 0
    sequence.close()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "mamba2", "falcon_h1", "nemotron_h", "lfm2"])
def test_a_replay_reads_no_projection_again(family: str):
    """The state after a partial commit does not depend on the projections' weights any more."""
    model = models.model(family)
    states = []
    for spoilt in (False, True):
        caches = new_caches(model, 4)
        transaction = Transaction(model, caches)
        mx.eval(model(mx.array([[5, 6, 7, 8, 9]]), cache=caches))
        transaction.begin(4)
        mx.eval(model(mx.array([[10, 11, 12, 13]]), cache=caches))
        weights = [
            (module, module.weight)
            for name, module in model.named_modules()
            if "in_proj" in name or "out_proj" in name
        ]
        if spoilt:
            for module, weight in weights:
                module.weight = mx.full(weight.shape, mx.nan)
        try:
            transaction.commit(2)
            assert transaction.uncached == 0
            states.append([np.array(array) for _, array in tree_flatten([c.state for c in caches])
                           if isinstance(array, mx.array)])  # fmt: skip
        finally:
            for module, weight in weights:
                module.weight = weight
            transaction.close()
    assert weights
    for clean, spoilt_state in zip(*states, strict=True):
        assert np.array_equal(clean, spoilt_state)


def test_quantized_projections_are_answered_from_the_record_too():
    model = families.build("qwen3_next", quantized=True)
    caches, straight = new_caches(model, 4), new_caches(model, 4)
    transaction = Transaction(model, caches)
    for cache in (caches, straight):
        mx.eval(model(mx.array([[5, 6, 7]]), cache=cache))
    transaction.begin(4)
    mx.eval(model(mx.array([[8, 9, 10, 11]]), cache=caches))
    transaction.commit(2)
    transaction.close()
    mx.eval(model(mx.array([[8, 9]]), cache=straight))
    assert mx.allclose(caches[0][1], straight[0][1], atol=1e-4)
    assert mx.allclose(caches[0][0], straight[0][0], atol=1e-4)


def test_a_whole_block_is_kept_without_a_replay():
    sequence = Sequence("gated-delta", 4)
    sequence.prefill(6)
    text = sequence.reference.text
    sequence.transaction.begin(3)
    sequence.feed(text[6:9])
    states = [cache[1] for cache in sequence.caches[::2]]
    sequence.commit(3)
    assert all(cache[1] is state for cache, state in zip(sequence.caches[::2], states, strict=True))
    sequence.check()
    sequence.close()


def test_a_layer_that_compiles_its_single_step_is_not_answered_from_the_record(
    monkeypatch: pytest.MonkeyPatch,
):
    """An answer inside a trace would stay in the graph, and with it one block's numbers."""
    from engine.cache import rollback

    monkeypatch.setattr(rollback, "SELF_COMPILING", ("mlx_lm.models.mamba2",))
    for kept, spared in ((1, False), (2, True)):
        sequence = Sequence("recurrent", 4)
        sequence.prefill(9)
        sequence.transaction.begin(4)
        sequence.feed([*sequence.reference.text[9:11], 7, 7])
        projection = sequence.model.layers[0].mixer.in_proj
        weight = projection.weight
        projection.weight = mx.full(weight.shape, mx.nan)
        try:
            sequence.commit(kept)
            mx.eval(sequence.caches[0].state)
        finally:
            projection.weight = weight
        assert bool(mx.isnan(sequence.caches[0][1]).any().item()) is not spared
        sequence.close()
