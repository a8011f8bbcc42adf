"""What restored keys and values change: a layer's attention output, with and without them.

A query sees the first S positions and the last W as they are, and restored ones between, exactly as in
`engine.restoration.session`. The loss compares what comes out for each head with what the exact keys and
values give: direction (1 - cosine) and norm (log of the ratio of lengths, squared). Queries are weighted by
how much of their exact attention falls on positions that are restored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.networks.projector import DrafterFeatures
from engine.restoration.session import RestorationPlan
from engine.restoration.sites import Site
from engine.target.attention import softmax_with_sinks
from engine.target.model import HiddenStateHooks, Target

HIDDEN = -1e9  # score of a position that is not seen
LEAST = 0.02  # weight of a query that looks at nothing restored
TINY = 1e-6


@dataclass(frozen=True)
class LayerRows:
    """One layer's part of some texts, S of T tokens."""

    key_rows: mx.array  # as the projection gives them, [S, T, KV heads · head dim]
    value_rows: mx.array
    queries: mx.array  # normalised, rotated and scaled, [S, heads, T, head dim]
    keys: mx.array  # as attention reads them, [S, KV heads, T, head dim]
    values: mx.array
    sinks: mx.array | None  # scores next to those of positions, [heads]


@dataclass(frozen=True)
class RecordedTexts:
    """What a forward over some texts has shown."""

    features: mx.array  # [S, T, F]
    layers: list[LayerRows]


class AttentionRecorder:
    """Runs a target and records what attention does in chosen layers; close it to restore the model."""

    def __init__(self, target: Target, sites: Sequence[Site], features: DrafterFeatures) -> None:
        self._target, self.sites, self._features = target, list(sites), features
        modules = [(*site.projections, site.attention.rope, site.attention.rope) for site in sites]
        self._counts = [len(each) for each in modules]
        flat = [module for each in modules for module in each]  # one that runs twice is named as often
        self._capture = HiddenStateHooks(flat, range(len(flat)))
        self._hidden_states = target.tap(features.taps)

    def record(self, tokens: mx.array) -> RecordedTexts:
        """Run texts [S, T] from their beginning."""
        with self._capture.collecting(), self._hidden_states.collecting():
            self._target.model(tokens)
        outputs = iter(self._capture.outputs())
        layers = []
        for site, count in zip(self.sites, self._counts, strict=True):
            *rows, first, second = (next(outputs) for _ in range(count))
            queries, rotated = (second, first) if site.kind.keys_first else (first, second)
            keys, values = site.placed(rows[0], rows[-1], 0, rotated.shape[1])
            queries = queries * getattr(site.attention, site.kind.scale)
            sinks = site.attention.sinks if site.kind.sinks else None
            layers.append(LayerRows(rows[0], rows[-1], queries, keys, values, sinks))
        return RecordedTexts(self._features(self._hidden_states.take()), layers)

    def close(self) -> None:
        """Restore the model."""
        self._capture.close()
        self._hidden_states.close()


@dataclass(frozen=True)
class Visibility:
    """Which positions some queries see, and which of those are restored."""

    queries: mx.array  # their positions, [Q]
    seen: mx.array  # [Q, T]
    restored: mx.array

    @classmethod
    def of(cls, plan: RestorationPlan, length: int, queries: Sequence[int]) -> "Visibility":
        """For queries at given positions of texts of ``length`` tokens."""
        at = mx.array(list(queries), mx.int32)[:, None]
        position = mx.arange(length)[None]
        edge = at - at % plan.chunk - plan.window
        restored = (position >= plan.sink) & (position < edge)
        return cls(at[:, 0], position <= at, restored)


def first_restored(plan: RestorationPlan) -> int:
    """The first position whose query sees something restored."""
    behind = plan.sink + plan.window
    return behind + plan.chunk - behind % plan.chunk


def losses(site: Site, rows: LayerRows, restored: tuple[mx.array, mx.array], visible: Visibility) -> mx.array:
    """Direction and norm term [2] of a layer with ``restored`` key and value rows in place of its own."""
    keys, values = site.placed(*restored, 0, rows.keys.shape[1])
    queries = rows.queries[:, :, visible.queries]
    scores = _scores(queries, rows.keys)
    weights = softmax_with_sinks(mx.where(visible.seen, scores, HIDDEN), rows.sinks)
    exact = weights @ rows.values[:, :, None]
    share = mx.stop_gradient(mx.where(visible.restored, weights, 0).sum(axis=-1)) + LEAST  # [S, G, H/G, Q]
    mixed = mx.where(visible.restored, _scores(queries, keys), scores)
    weights = softmax_with_sinks(mx.where(visible.seen, mixed, HIDDEN), rows.sinks)
    far, near = mx.where(visible.restored, weights, 0), mx.where(visible.restored, 0, weights)
    output = far @ values[:, :, None] + near @ rows.values[:, :, None]
    length, wanted = _length(output), _length(exact)
    direction = 1 - (output * exact).sum(axis=-1) / (length * wanted)
    norm = mx.square(mx.log(length / wanted))
    total = share.sum()
    return mx.stack([(share * direction).sum() / total, (share * norm).sum() / total])


def _scores(queries: mx.array, keys: mx.array) -> mx.array:
    """[S, G, heads / G, Q, T] from queries [S, heads, Q, D] and keys [S, G, T, D]."""
    texts, heads, count, dim = queries.shape
    grouped = queries.reshape(texts, keys.shape[1], heads // keys.shape[1], count, dim)
    return grouped @ keys[:, :, None].swapaxes(-1, -2)


def _length(rows: mx.array) -> mx.array:
    return mx.sqrt((rows * rows).sum(axis=-1) + TINY)


def relative_error(found: mx.array, wanted: mx.array) -> mx.array:
    """Squared difference over the squared deviation from the mean; 1: no better than the mean."""
    axes: Any = tuple(range(wanted.ndim - 1))
    spread = wanted - wanted.mean(axis=axes, keepdims=True)
    return mx.square(found - wanted).sum() / mx.maximum(mx.square(spread).sum(), TINY)
