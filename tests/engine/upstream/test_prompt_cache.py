"""mlx-lm's own tests of prompt caches, with our rings and coded caches in the places of its classes."""

from __future__ import annotations

import io
import unittest
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load

from engine.cache.coded import CodedKV
from engine.cache.policy import CODES, parse_policy
from engine.cache.ring import SlidingRing
from engine.target.attention import CodedAttention
from engine.target.loading import SHIPPED_TARGET
from tests.engine.upstream import mlx_lm_tests

pytestmark = [pytest.mark.slow, pytest.mark.unsandboxed]

HEADROOM = 8


class Ring(SlidingRing):
    """Our ring, asked in mlx-lm's words."""

    step = 256
    keep = property(lambda self: self.sink)
    max_size = property(lambda self: self.window + self.sink)


def ring(max_size: int, keep: int = 0) -> Ring:
    return Ring(max_size - keep, HEADROOM, keep)


def coded(spec: str) -> Callable[..., CodedKV]:
    """A factory of coded caches, whatever mlx-lm's class is told."""
    policy = parse_policy(spec)
    code = CODES[policy.kind]

    def make(*_: Any, **__: Any) -> CodedKV:
        stores = [KVCache() for _ in range(code.parts)]
        return CodedKV(spec, policy.codecs, stores, attended=code.attended)

    return make


MERGED = "mlx-lm's batch classes merge mlx-lm's own caches; engine.cache.batch merges ours"
LATER = "quantizes plain caches in the midst of a text; --kv makes coded ones from the beginning"
NOT_SAVED = "coded caches are not saved to files"
# What does not apply to our caches, and why; everything else must pass.
BATCHES = dict.fromkeys(
    ["extend_with_empty_and_nonempty_batch_caches", "extend_with_empty_batch_cache_preserves_dtype"], MERGED
)
CODES_OF_QUANTIZED = {"cache_to_quantized": LATER, "save_load_quantized_cache": NOT_SAVED}
NOT_APPLICABLE: dict[str, dict[str, str]] = {
    "rings": {
        **BATCHES,
        "cache_to_quantized": LATER,
        "rotating_cache_mask": "expects the order of mlx-lm's rows; our mask follows those of the ring",
        "rotating_cache_updates": "expects rows out of the window to be gone; the ring masks its spare ones",
        "trim_cache": "expects that nothing can be taken back after a wrap; the ring takes back its headroom",
    },
    "affine": CODES_OF_QUANTIZED,
    "rotated": CODES_OF_QUANTIZED,
    "lattice-packed": CODES_OF_QUANTIZED,
    "lattice": {
        **BATCHES,
        **dict.fromkeys(["cache_list", "merge_with_empty_caches"], MERGED),
        **dict.fromkeys(["save_load", "save_load_cache_list", "save_load_mixed_cache"], NOT_SAVED),
        "cache_to_quantized": LATER,
        "cache_copying": "reads the array of plain keys",
    },
}
# Which of mlx-lm's classes are replaced by what, and the policy of `make_prompt_cache`.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "rings": ("native", {"RotatingKVCache": ring}),
    "affine": ("affine:8,32", {"QuantizedKVCache": coded("affine:8,32")}),
    "rotated": ("rotated:8,32", {"QuantizedKVCache": coded("rotated:8,32")}),
    "lattice": ("lattice:d4,127", {"KVCache": coded("lattice:d4,127")}),
    "lattice-packed": ("lattice-packed:e8,8", {"QuantizedKVCache": coded("lattice-packed:e8,8")}),
}


def failures(variant: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """mlx-lm's tests that fail with our caches, and their traces."""
    spec, classes = VARIANTS[variant]

    def make_prompt_cache(model: Any, *_: Any, **__: Any) -> list[Any]:
        return parse_policy(spec).new_caches(model, HEADROOM)

    model, tokenizer = load(str(SHIPPED_TARGET))
    attention = CodedAttention(model)
    module = mlx_lm_tests.load("test_prompt_cache")
    names = {"load": lambda _: (model, tokenizer), "make_prompt_cache": make_prompt_cache, **classes}
    for name, ours in names.items():
        monkeypatch.setattr(module, name, ours)
    monkeypatch.setattr(import_module("mlx_lm.generate"), "make_prompt_cache", make_prompt_cache)
    monkeypatch.setattr(mlx_lm_cache, "Ring", Ring, raising=False)  # where `load_prompt_cache` looks
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(module.TestPromptCache)
    assert suite.countTestCases() == 25
    try:
        result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    finally:
        attention.close()
    assert result.testsRun == 25
    return {test.id().rpartition(".test_")[2]: trace for test, trace in result.failures + result.errors}


@pytest.mark.parametrize("variant", VARIANTS)
def test_mlx_lms_tests_pass_with_our_caches(variant: str, monkeypatch: pytest.MonkeyPatch):
    failed = failures(variant, monkeypatch)
    assert not {name: trace for name, trace in failed.items() if name not in NOT_APPLICABLE[variant]}
    assert not NOT_APPLICABLE[variant].keys() - failed.keys(), "these apply after all"
