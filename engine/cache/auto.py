"""`--kv auto:BITS`: how many bits the keys and the values of each layer get, by the errors of their codes.

A text is read with native caches. Each layer's keys, and its values, are then coded in every width:

    error = sum of |x - y|² / sum of |x|²      x as it is, y after the code

All begin with the fewest bits. The next ones go where a bit takes most off the sum of the errors, while the
mean stays within BITS; errors fall ever more slowly with bits, so no other choice has a smaller sum. Layers
that hold alike (window, KV heads, head dimension) share a budget: so a text of any length takes BITS a value.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engine.cache.codecs.affine import Rotated
from engine.cache.policy import KVPolicy
from engine.device import read_float
from evidence_format.policies import AFFINE_BITS, AUTO_GROUP

TEXT = Path(__file__).parent / "auto.txt"  # no text that an evaluation scores
TOKENS = 512  # of it, at most
Errors = dict[tuple[int, int], list[float]]  # of a layer's keys (0) or values (1): by `AFFINE_BITS`


def measured(policy: KVPolicy, model: Any, tokenizer: Any) -> KVPolicy:
    """An ``auto`` policy with each layer's bits, by what the model makes of `TEXT`; others as they are."""
    if policy.kind != "auto":
        return policy
    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:TOKENS]
    return replace(policy, layer_bits=layer_bits(policy, model, tokens))


def layer_bits(policy: KVPolicy, model: Any, tokens: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Layer, bits of its keys, bits of its values, by what the model makes of a text."""
    caches = make_prompt_cache(model)
    model(mx.array([list(tokens)]), cache=caches)
    groups: dict[Any, Errors] = {}
    for layer in policy.chosen_layers(model):
        cache = caches[layer]
        for side, rows in enumerate((cache.keys, cache.values)):  # free rows are zeros, which cost nothing
            alike = getattr(cache, "max_size", None), rows.shape[1], rows.shape[3]
            groups.setdefault(alike, {})[layer, side] = _errors(rows)
    bits: dict[tuple[int, int], int] = {}
    for errors in groups.values():
        bits |= allocate(errors, int(policy.values[0]))
    return tuple((layer, bits[layer, 0], bits[layer, 1]) for layer in policy.chosen_layers(model))


def _errors(rows: mx.array) -> list[float]:
    rows = rows.astype(mx.float32)
    norm = read_float(mx.square(rows).sum()) or 1.0
    codecs = [Rotated(bits, AUTO_GROUP, rows.shape[-1]) for bits in AFFINE_BITS]
    return [
        read_float(mx.square(rows - codec.decode(codec.encode(rows), mx.float32)).sum()) / norm
        for codec in codecs
    ]


def allocate(errors: Errors, bits: int) -> dict[tuple[int, int], int]:
    """Bits of each part by its errors, ``bits`` on average at most."""
    chosen, left = dict.fromkeys(errors, 0), (bits - AFFINE_BITS[0]) * len(errors)
    while True:
        steps = [
            ((errors[part][at] - errors[part][at + 1]) / cost, part, cost)
            for part, at in chosen.items()
            if at + 1 < len(AFFINE_BITS) and (cost := AFFINE_BITS[at + 1] - AFFINE_BITS[at]) <= left
        ]
        if not steps:
            return {part: AFFINE_BITS[at] for part, at in chosen.items()}
        _, part, cost = max(steps, key=lambda step: step[0])  # of equals the first: the same in every run
        chosen[part] += 1
        left -= cost
