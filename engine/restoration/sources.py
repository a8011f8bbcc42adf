"""Where the rows of evicted positions come from: what is heard during the prefill, and what is made of it.

    exact    the target's own projections, so that nothing changes if all the rest is right
    zeros    nothing
    noise    normal numbers, each channel with the spread of the target's own
    learned  a projector's, from the drafter's features

The first is to give what a full cache gives, and noise must destroy it; if it does not, nothing was injected.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from engine.networks.projector import DrafterFeatures, Projector
from engine.restoration.capture import Capture
from engine.restoration.sites import Site
from engine.target.model import Target
from evidence_format.model import Model

Pair = tuple[mx.array, mx.array]  # keys and values of one layer, [N, width] each
Rows = list[mx.array]  # what a source keeps of N positions, [N, any width] each


@dataclass(frozen=True)
class Learned:
    """A projector and the drafter's features it was trained on; its card for reports."""

    features: DrafterFeatures
    projector: Projector
    card: Model


class Source(Protocol):
    """Hears the prefill's forwards; rows are asked for when their positions are evicted."""

    def listening(self) -> AbstractContextManager[None]:
        """Hear the forward inside the block."""

    def heard(self, count: int) -> Rows:
        """What there is to keep of the last ``count`` positions of that forward."""

    def rows(self, kept: Rows) -> list[Pair]:
        """Keys and values of each layer from what was kept of some positions."""

    def start(self) -> None:
        """A new sequence begins."""

    def close(self) -> None:
        """Restore the target's modules."""


class Exact:
    """The target's own keys and values."""

    def __init__(self, sites: Sequence[Site], seed: int) -> None:  # noqa: ARG002 - for those that draw
        """Listen to the projections of some layers."""
        self._widths = [len(site.projections) for site in sites]
        self._capture = Capture([module for site in sites for module in site.projections])

    def listening(self) -> AbstractContextManager[None]:
        """See `Source`."""
        return self._capture.collecting()

    def heard(self, count: int) -> Rows:
        """See `Source`."""
        return [output[0, output.shape[1] - count :] for output in self._capture.outputs()]

    def rows(self, kept: Rows) -> list[Pair]:
        """See `Source`."""
        parts = iter(kept)
        pairs = []
        for width in self._widths:
            keys = next(parts)
            pairs.append((keys, next(parts) if width > 1 else keys))
        return pairs

    def start(self) -> None:
        """See `Source`."""

    def close(self) -> None:
        """See `Source`."""
        self._capture.close()


class Zeros(Exact):
    """Zeros of the right shapes."""

    def rows(self, kept: Rows) -> list[Pair]:
        """See `Source`."""
        return [(mx.zeros_like(keys), mx.zeros_like(values)) for keys, values in super().rows(kept)]


class Noise(Exact):
    """Numbers without meaning, as large as the true ones."""

    def __init__(self, sites: Sequence[Site], seed: int) -> None:
        """Listen likewise; ``seed`` makes the numbers repeatable."""
        super().__init__(sites, seed)
        self._seed = seed
        self.start()

    def start(self) -> None:
        """See `Source`: the same numbers again."""
        self._key = mx.random.key(self._seed)
        self._count = 0
        self._sums: Rows = []
        self._squares: Rows = []

    def heard(self, count: int) -> Rows:
        """See `Source`; also learns how far the channels spread."""
        rows = super().heard(count)
        exact = [row.astype(mx.float32) for row in rows]
        self._count += count
        self._sums = _added(self._sums, [row.sum(axis=0) for row in exact])
        self._squares = _added(self._squares, [mx.square(row).sum(axis=0) for row in exact])
        return rows

    def rows(self, kept: Rows) -> list[Pair]:
        """See `Source`."""
        moments = zip(self._sums, self._squares, strict=True)
        spreads = [
            mx.sqrt(mx.maximum(squares / self._count - mx.square(sums / self._count), 0))
            for sums, squares in moments
        ]
        keys = mx.random.split(self._key, len(kept) + 1)
        self._key = keys[0]
        return super().rows(
            [
                (mx.random.normal(row.shape, key=key) * spread).astype(row.dtype)
                for row, spread, key in zip(kept, spreads, keys[1:], strict=True)
            ]
        )


class FromDrafter:
    """A projector's keys and values."""

    def __init__(self, target: Target, sites: Sequence[Site], learned: Learned) -> None:
        """Listen to the target's layers that the drafter reads.

        Raises:
            ModelError: the projector was trained for other layers.
        """
        self._features = learned.features
        self._projections = [learned.projector.of(site.layer) for site in sites]
        self._taps = target.tap(self._features.taps)

    def listening(self) -> AbstractContextManager[None]:
        """See `Source`."""
        return self._taps.collecting()

    def heard(self, count: int) -> Rows:
        """See `Source`."""
        rows = self._taps.take()
        return [self._features(rows[0, rows.shape[1] - count :])]

    def rows(self, kept: Rows) -> list[Pair]:
        """See `Source`."""
        return [projection(kept[0]) for projection in self._projections]

    def start(self) -> None:
        """See `Source`."""

    def close(self) -> None:
        """See `Source`."""
        self._taps.close()


def _added(totals: Rows, new: Rows) -> Rows:
    return [total + part for total, part in zip(totals, new, strict=True)] if totals else new


HEARD: dict[str, type[Exact]] = {"exact": Exact, "zeros": Zeros, "noise": Noise}
LEARNED = "learned"
