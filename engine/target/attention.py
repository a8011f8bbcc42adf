"""Attention over codes: what a model's attention calls when a cache hands it rows that are still in code.

mlx-lm's models call `scaled_dot_product_attention` by its name in their own module. While one of our caches
is in use that name is bound to a function of ours there, which leaves everything but `CodedRows` to mlx-lm's.
Modules without that name cannot read codes; nor can models that look into keys before.

    scores  = q · kᵀ · scale      on codes, all query heads of a KV head as rows of one product
    weights = softmax(scores)     with the layer's own sink logit, where it has one
    output  = weights · v         on codes
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from engine.cache.codecs.base import CodedRows
from engine.cache.policy import NATIVE, KVPolicy
from engine.errors import ConfigurationError, ModelError, wrap_errors

NAME = "scaled_dot_product_attention"
_USERS: dict[str, int] = {}  # open users of each module
_MLX_LM = base.scaled_dot_product_attention


class CodedAttention:
    """Lets the attention of a model read codes until the last user of its modules is closed."""

    def __init__(self, model: Any) -> None:
        self._modules = _attending(model)
        if not self._modules:
            raise ModelError(f"{type(model).__module__} has no attention that can read coded keys and values")
        for module in self._modules:
            _USERS[module.__name__] = _USERS.get(module.__name__, 0) + 1
            setattr(module, NAME, attention)

    def close(self) -> None:
        """Remove it where no other user is left. Closing twice does nothing."""
        for module in self._modules:
            _USERS[module.__name__] -= 1
            if not _USERS[module.__name__]:
                del _USERS[module.__name__]
                setattr(module, NAME, _MLX_LM)
        self._modules = []


@contextmanager
def replaced_attention(model: Any, function: Callable[..., mx.array]) -> Iterator[Callable[..., mx.array]]:
    """Let a model's attention call a function of `attention`'s arguments; yields what it called before."""
    modules = _attending(model)
    before = [getattr(module, NAME) for module in modules]
    try:
        for module in modules:
            setattr(module, NAME, function)
        yield _MLX_LM
    finally:
        for module, own in zip(modules, before, strict=True):
            setattr(module, NAME, own)


def attention(  # noqa: PLR0917 - the order is mlx-lm's
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's `scaled_dot_product_attention`, also for `CodedRows`; arguments are its own.

    Queries are [B, heads, L, D], keys and values [B, KV heads, S, D], sinks [heads]. The mask is "causal",
    None, or what may be broadcast to [B, heads, L, S]: bool (True: seen) or additive.
    """
    if not isinstance(keys, CodedRows):
        plain: Callable[..., mx.array] = _MLX_LM
        return plain(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    batch, heads, length, dim = queries.shape
    kv_heads, seen = keys.shape[1], keys.shape[2]
    grouped = (batch, kv_heads, heads // kv_heads, length)
    rows = (queries * scale).reshape(batch, kv_heads, -1, dim)  # all query heads of a KV head
    scores = keys.codec.score(rows, keys.parts).reshape(*grouped, seen)
    weights = softmax_with_sinks(_masked(scores, mask), sinks)
    mixed: mx.array = values.codec.mix(weights.reshape(batch, kv_heads, -1, seen), values.parts)
    return mixed.reshape(batch, heads, length, -1)


def _masked(scores: mx.array, mask: mx.array | str | None) -> mx.array:
    """Scores [B, KV heads, heads a KV head, L, S] with what is hidden at the lowest number."""
    if mask is None:
        return scores
    length, seen = scores.shape[-2:]
    if isinstance(mask, str):
        mask = mx.arange(seen - length, seen)[:, None] >= mx.arange(seen)[None]
    if mask.ndim == 4:  # [B, heads or 1, L, S]
        own = mask.shape[1] > 1
        mask = mask.reshape(mask.shape[0], *scores.shape[1:3], length, seen) if own else mask[:, :, None]
    if mask.dtype != mx.bool_:
        return scores + mask
    return mx.where(mask, scores, mx.finfo(scores.dtype).min)


def softmax_with_sinks(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Softmax of scores [B, KV heads, heads a KV head, L, S] next to the logits ``sinks`` [heads]."""
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    logits = sinks.astype(scores.dtype).reshape(1, *scores.shape[1:3], 1, 1)
    column = mx.broadcast_to(logits, (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1, precise=True)[..., :-1]


def _attending(model: Any) -> list[ModuleType]:
    """The Python modules of a model's parts that use mlx-lm's function by its name, or ours."""
    names = sorted({type(part).__module__ for part in model.modules()})
    known: tuple[Callable[..., Any], ...] = (_MLX_LM, attention)
    modules = [sys.modules[name] for name in names if name in sys.modules]
    return [module for module in modules if getattr(module, NAME, None) in known]


def refuse_policy(model: Any, policy: KVPolicy, option: str = "--kv") -> None:
    """Run a model's forward on a policy's caches without computing anything."""
    if policy.kind == NATIVE.kind:
        return
    caches = policy.new_caches(model, 1)
    family = type(model).__module__.rsplit(".", 1)[-1]
    does_not_work = f"{option} {policy.spec} does not work with {family}"
    try:
        with (
            closing(CodedAttention(model)) if policy.attended else nullcontext(),
            wrap_errors(lambda why: ModelError(f"{does_not_work}: {why}")),
        ):
            model(mx.zeros((1, 2), mx.int32), cache=caches)
            model(mx.zeros((1, 1), mx.int32), cache=caches)
    except ConfigurationError as error:
        raise ConfigurationError(f"{option} {policy.spec}: {error}") from None
    keys, values = policy.sides
    uneven = [layer for layer in policy.chosen_layers(model) if policy.coded and not caches[layer].is_even]
    if keys != values and uneven:  # no mean would say how many bits a value are stored
        raise ConfigurationError(
            f"{option} {policy.spec}: keys and values of layer {uneven[0]} differ in width; "
            "give one number for both"
        )
    if unused := [layer for layer in policy.chosen_layers(model) if caches[layer].empty()]:
        raise ModelError(f"{option} {policy.spec}: {family} does not use the cache of layer {unused[0]}")
