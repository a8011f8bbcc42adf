"""A deep copy of a cache is a cache of its own: both go on, each as if the other were not there."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.batch import merge
from engine.cache.policy import parse_policy
from engine.cache.transaction import new_caches
from engine.target.attention import CodedAttention
from evidence_format.policies import KINDS
from tests.engine import families, tiny

FAMILIES = ("gemma3_text", "qwen3_5")  # full and sliding attention; full attention and recurrent states
POLICIES = [f"{kind}:exact" if kind == "restored" else kind for kind in KINDS]
CASES = [
    (family, policy)
    for family in FAMILIES
    for policy in POLICIES
    if (family, policy) not in {("qwen3_5", "sliding-bounded"), ("qwen3_5", "full-kv")}
]
TEXT = [5 + 7 * at % (tiny.VOCAB - 5) for at in range(20)]
TEXTS = (tuple(TEXT[:10]), tuple(TEXT[10:]))  # two ways to go on


@cache
def model(family: str) -> Any:
    return families.build(family, head_dim=32)


def logits(built: Any, caches: list[Any], tokens: Sequence[Sequence[int]]) -> mx.array:
    """Of the last tokens, after all of them were appended."""
    found = built(mx.array([list(row) for row in tokens]), cache=caches)[:, -1]
    mx.eval(found)
    return found


def started(built: Any, policy: str, together: bool) -> list[Any]:
    """Caches behind a beginning of the text; of two sequences with different ones if ``together``."""
    sequences = []
    for length in (20, 13)[: 1 + together]:
        caches = new_caches(built, 4, parse_policy(policy))
        logits(built, caches, [TEXT[:length]])
        sequences.append(caches)
    return merge(built, sequences) if together else sequences[0]


def gone_on(built: Any, caches: list[Any], tokens: Sequence[int], together: bool) -> list[mx.array]:
    """Logits of blocks and single tokens behind what is held."""
    parts = [tokens[:4], tokens[4:5], tokens[5:9], tokens[9:10]]
    return [logits(built, caches, [part] * (1 + together)) for part in parts]


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "batch"])
@pytest.mark.parametrize(("family", "policy"), CASES)
def test_a_copy_and_its_original_go_on_without_each_other(family: str, policy: str, together: bool):
    built = model(family)
    reading = CodedAttention(built) if parse_policy(policy).attended else None
    try:
        expected = {text: gone_on(built, started(built, policy, together), text, together) for text in TEXTS}
        original = started(built, policy, together)
        copied = deepcopy(original)
        assert {id(cache) for cache in copied}.isdisjoint({id(cache) for cache in original})
        found = {
            text: gone_on(built, caches, text, together)
            for text, caches in zip(TEXTS, (original, copied), strict=True)
        }
    finally:
        if reading is not None:
            reading.close()
    for text in TEXTS:
        for ours, plain in zip(found[text], expected[text], strict=True):
            assert mx.array_equal(ours, plain).item()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_cache_is_copied_as_well(policy: str):
    built = model("gemma3_text")
    caches = new_caches(built, 4, parse_policy(policy))
    assert [type(cache) for cache in deepcopy(caches)] == [type(cache) for cache in caches]
    assert all(cache.empty() for cache in deepcopy(caches))
