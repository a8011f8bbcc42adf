"""Where the rows of evicted positions come from: what is recorded during the prefill, and what is made of it.

    exact    the target's own projections, so that nothing changes if all the rest is right
    zeros    nothing
    noise    normal numbers, each channel with the spread of the target's own
    learned  a projector's, from the drafter's features

The first is to give what a full cache gives, and noise must destroy it; if it does not, nothing was injected.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import mlx.core as mx

from engine.networks.projector import DrafterFeatures, Projector
from engine.restoration.sites import Site
from engine.target.model import HiddenStateHooks, Target
from evidence_format.model import Model

LEARNED = "learned"
Pair = tuple[mx.array, mx.array]  # keys and values of one layer, [N, width] each
Rows = list[mx.array]  # what a source keeps of N positions, [N, any width] each


@dataclass(frozen=True)
class Learned:
    """A projector and the drafter's features it was trained on; its card for reports."""

    features: DrafterFeatures
    projector: Projector
    card: Model


class Exact:
    """The target's own keys and values; hears the prefill's forwards, gives rows as positions are evicted."""

    _hooks: HiddenStateHooks

    def __init__(self, sites: Sequence[Site], seed: int) -> None:  # noqa: ARG002 - for those that draw
        self._counts = [len(site.projections) for site in sites]
        modules = [module for site in sites for module in site.projections]
        self._hooks = HiddenStateHooks(modules, range(len(modules)))

    def start(self) -> None:
        """Begin a new sequence."""

    def recording(self) -> AbstractContextManager[None]:
        """Record the forward inside the block."""
        return self._hooks.collecting()

    def recorded(self, count: int) -> Rows:
        """What there is to keep of the last ``count`` positions of that forward."""
        return [output[0, output.shape[1] - count :] for output in self._hooks.outputs()]

    def rows(self, kept: Rows) -> list[Pair]:
        """Keys and values of each layer from what was kept of some positions."""
        parts = iter(kept)
        return [(keys := next(parts), next(parts) if count > 1 else keys) for count in self._counts]

    def close(self) -> None:
        self._hooks.close()


class Zeros(Exact):
    """Zeros of the right shapes."""

    def rows(self, kept: Rows) -> list[Pair]:
        return [(mx.zeros_like(keys), mx.zeros_like(values)) for keys, values in super().rows(kept)]


class Noise(Exact):
    """Numbers without meaning, as large as the true ones; the seed makes them repeatable."""

    def __init__(self, sites: Sequence[Site], seed: int) -> None:
        super().__init__(sites, seed)
        self._seed = seed

    def start(self) -> None:
        self._key = mx.random.key(self._seed)
        self._count = 0
        self._sums: Rows = []  # of each channel's values, and of their squares

    def recorded(self, count: int) -> Rows:
        """See `Exact`; also sums up how far the channels spread."""
        rows = super().recorded(count)
        exact = [row.astype(mx.float32) for row in rows]
        sums = [mx.stack([row.sum(axis=0), mx.square(row).sum(axis=0)]) for row in exact]
        self._count += count
        self._sums = [old + new for old, new in zip(self._sums, sums, strict=True)] if self._sums else sums
        return rows

    def rows(self, kept: Rows) -> list[Pair]:
        self._key, *keys = mx.random.split(self._key, len(kept) + 1)
        drawn = []
        for row, sums, key in zip(kept, self._sums, keys, strict=True):
            mean, squares = sums / self._count
            spread = mx.sqrt(mx.maximum(squares - mx.square(mean), 0))
            drawn.append((mx.random.normal(row.shape, key=key) * spread).astype(row.dtype))
        return super().rows(drawn)


class FromDrafter(Exact):
    """A projector's keys and values, from the target's layers that the drafter reads."""

    def __init__(self, target: Target, sites: Sequence[Site], learned: Learned) -> None:
        self._features = learned.features
        self._projections = [learned.projector.of(site.layer) for site in sites]
        self._hooks = target.hook_layers(self._features.target_layers)

    def recorded(self, count: int) -> Rows:
        rows = self._hooks.take()
        return [self._features(rows[0, rows.shape[1] - count :])]

    def rows(self, kept: Rows) -> list[Pair]:
        return [projection(kept[0]) for projection in self._projections]


CONTROLS: dict[str, type[Exact]] = {"exact": Exact, "zeros": Zeros, "noise": Noise}
