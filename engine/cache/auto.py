"""`--kv auto:BITS`: how many bits the keys and the values of each layer get, by the errors of their codes.

A text is read with native caches. In every layer attention is computed again with its keys alone, and with
its values alone, in each number of bits:

    error = sum of |a - b|² / sum of |a|²      a the attention's output as it is, b with the codes

All begin with the fewest bits. The next ones go where a bit takes most off the sum of the errors, while the
mean stays within BITS; as errors fall ever more slowly with bits, no other choice has a smaller sum. Layers
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
from engine.device import read_float, wait
from engine.target.attention import replaced_attention
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
    caches, chosen = make_prompt_cache(model), policy.chosen_layers(model)
    layers = {id(caches[layer]): layer for layer in chosen}
    groups: dict[Any, Errors] = {}

    def measuring(queries: mx.array, keys: mx.array, values: mx.array, cache: Any, **rest: Any) -> mx.array:
        output = plain(queries, keys, values, cache=cache, **rest)
        if (layer := layers.get(id(cache))) is not None:
            norm = read_float(mx.square(output.astype(mx.float32)).sum()) or 1.0
            for side, rows in enumerate((keys, values)):
                alike = getattr(cache, "max_size", None), rows.shape[1], rows.shape[3]
                found = groups.setdefault(alike, {})[layer, side] = []
                for bits in AFFINE_BITS:
                    codec = Rotated(bits, AUTO_GROUP, rows.shape[3])
                    coded = codec.decode(codec.encode(rows), rows.dtype)
                    pair = (keys, coded) if side else (coded, values)
                    wrong = (plain(queries, *pair, cache=cache, **rest) - output).astype(mx.float32)
                    found.append(read_float(mx.square(wrong).sum()) / norm)
        return output

    with replaced_attention(model, measuring) as plain:
        wait(model(mx.array([list(tokens)]), cache=caches))
    given: dict[tuple[int, int], int] = {}
    for errors in groups.values():
        given |= allocate(errors, int(policy.values[0]))
    return tuple((layer, given[layer, 0], given[layer, 1]) for layer in chosen)


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
