"""Every small model family of mlx-lm through our rollback: partly wrong blocks against one token at a time.

Models are those that mlx-lm's own `test_models.py` builds. Its checks of one model are replaced by ours.
"""

from __future__ import annotations

import inspect
import io
import unittest
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from engine.cache.policy import NATIVE
from engine.cache.transaction import Transaction
from tests.engine.upstream import mlx_lm_tests

pytestmark = [pytest.mark.slow, pytest.mark.unsandboxed, pytest.mark.timeout(900)]

LARGE = 100_000_000  # parameters
PREFILL, TEXT, BLOCK, KEPT = 4, 9, 4, 2  # tokens; of each block the first two are right
# Shares of the spread of the logits. On a CPU rounding stays below 1e-5, an extra position is 5e-2 or more.
EXACT, WRONG = 1e-4, 1e-2

TOO_LARGE = {
    *("bailing_moe_linear", "cohere", "cohere2", "dbrx", "falcon_h1", "gpt2", "gpt_neox", "gpt_oss", "gptj"),
    *("lfm2_moe", "nanochat", "openelm", "phi", "phi3", "qwen", "qwen2_moe", "qwen3_moe"),
}
# Its layers share keys in a way that our ring breaks; as a target the engine refuses it.
REFUSED = {"gemma3n"}
METAL = {"bitnet"}  # has no other kernels
ZEROS = {"prism_hadamard_qwen35"}  # its packed weights are zeros there, and so are its logits
NOT_CAUSAL = {"phi3small"}  # in mlx-lm's own code a token sees those behind it in its forward
# With the weights they have there their logits depend on the last token alone.
FORGETFUL = {"baichuan_m1", "rwkv7", "talkie"}


@dataclass
class Outcome:
    """Largest differences from plain decoding's logits, as shares of their spread; or why there are none."""

    difference: float = 0.0
    broken: float = 0.0  # where no draft is ever dropped
    whole: float = 0.0  # of a prefill with mlx-lm's caches, in which nothing is ours
    refusal: str = ""


class NeverDropping(Transaction):
    """Wrong: rejected drafts stay in the caches."""

    def begin(self, positions: int) -> None:
        self.announced = positions
        super().begin(positions)

    def commit(self, kept: int) -> None:
        super().commit(self.announced)


def one_at_a_time(model: Any, text: list[int]) -> np.ndarray:
    """Logits [T, V] of plain decoding, with mlx-lm's caches."""
    caches = make_prompt_cache(model)
    return np.stack([np.array(model(mx.array([[token]]), cache=caches)[0, 0]) for token in text])


def in_blocks(model: Any, text: list[int], transactions: type[Transaction]) -> np.ndarray:
    """The same logits from a prefill and blocks with wrong drafts at their ends, with our caches."""
    caches = NATIVE.new_caches(model, BLOCK)
    transaction = transactions(model, caches)
    try:
        rows = list(np.array(model(mx.array([text[:PREFILL]]), cache=caches)[0]))
        transaction.settle()
        while len(rows) < len(text):
            right = text[len(rows) : len(rows) + KEPT]
            uncached = text[len(rows) - transaction.uncached : len(rows)]
            wrong = [token + 1 for token in right[: BLOCK - len(uncached) - len(right)]]
            block = [*uncached, *right, *wrong]
            transaction.begin(len(block))
            logits = np.array(model(mx.array([block]), cache=caches)[0])
            known = len(uncached) + len(right)
            rows += list(logits[len(uncached) : known])
            transaction.commit(known)
    finally:
        transaction.close()
    return np.stack(rows)


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """Infinite unless all are numbers; phi3small sets some logits to minus infinity, always the same."""
    shown = wanted != -np.inf
    if not (np.isfinite(found[shown]).all() and np.isfinite(wanted[shown]).all()):
        return np.inf
    return float(np.abs(found[shown] - wanted[shown]).max() / max(np.ptp(wanted[shown]), 1e-9))


def play(model: Any) -> Outcome:
    if sum(array.size for _, array in tree_flatten(model.parameters())) > LARGE:
        return Outcome(refusal="too large")
    model.eval()
    model.update(
        tree_map(
            lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters()
        )
    )
    text = [int(token) for token in np.random.default_rng(0).integers(0, 30, TEXT)]
    try:
        wanted = one_at_a_time(model, text)
        ours, broken = (in_blocks(model, text, kind) for kind in (Transaction, NeverDropping))
    except RuntimeError as error:
        if mx.metal.is_available():
            raise
        return Outcome(refusal=str(error))
    except ValueError as error:
        return Outcome(refusal=str(error))
    whole = np.array(model(mx.array([text[:PREFILL]]), cache=make_prompt_cache(model))[0])
    return Outcome(
        difference(ours, wanted),
        difference(broken, wanted),
        difference(whole, wanted[:PREFILL]),
    )


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    """What came of each family's models."""
    theirs = mlx_lm_tests.load("test_models").TestModels
    found: dict[str, list[Outcome]] = {}

    class Families(theirs):  # type: ignore[misc, valid-type]
        def setUp(self) -> None:
            mx.random.seed(1)

        def model_test_runner(self, model: Any, model_type: str, *_: Any) -> None:
            found.setdefault(model_type, []).append(play(model))
            mx.clear_cache()

    names = [name for name in dir(theirs) if name.startswith("test_")]
    using = [name for name in names if "self.model_test_runner(" in inspect.getsource(getattr(theirs, name))]
    suite = unittest.TestSuite(map(Families, using))
    result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    assert not result.errors, result.errors[0][1]
    assert not result.failures, result.failures[0][1]
    return found


def test_families_are_many_and_those_left_out_are_listed(outcomes: dict[str, list[Outcome]]):
    large = {name for name, models in outcomes.items() if all(each.refusal == "too large" for each in models)}
    metal = {name for name, models in outcomes.items() if "Metal" in models[0].refusal}
    assert large == TOO_LARGE
    assert metal <= METAL
    refused = {name for name, models in outcomes.items() if "cannot be broadcast" in models[0].refusal}
    assert refused == REFUSED
    assert len(outcomes) - len(TOO_LARGE | METAL | REFUSED) > 95


def test_a_partly_wrong_block_leaves_what_plain_decoding_leaves(outcomes: dict[str, list[Outcome]]):
    models = [(name, each) for name, made in outcomes.items() for each in made]
    assert {name for name, each in models if not each.whole < EXACT} == NOT_CAUSAL
    wrong = {name: each.difference for name, each in models if not each.difference < EXACT}
    assert wrong.keys() == NOT_CAUSAL, wrong


def test_a_rollback_that_drops_nothing_fails_nearly_all_of_them(outcomes: dict[str, list[Outcome]]):
    played = {name: each.broken for name, models in outcomes.items() for each in models if not each.refusal}
    unseen = {name for name, broken in played.items() if not broken > WRONG}
    assert unseen == ZEROS | FORGETFUL
