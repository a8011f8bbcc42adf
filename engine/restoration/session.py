"""Restoration of one sequence: which positions are evicted by now, and rows put in their places.

A prompt is computed in short chunks. After each, the positions older than the last W, and not among the first
S, get their restored rows, so that every later chunk, and the continuation, sees

    [first S as they are | restored | last W as they are]

Only prompt positions are restored: tokens the model has generated stay as they are, also in later turns.
What is restored stays restored; a sequence that would have to go back behind it starts over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.cache.policy import RestoredKV
from engine.restoration.sites import sites_of
from engine.restoration.sources import CONTROLS, LEARNED, Exact, FromDrafter, Learned, Rows
from engine.target.model import HiddenStateHooks, Target

SHORTEST = 8  # positions of a chunk, at least
PER_WINDOW = 4  # chunks a window holds otherwise


@dataclass(frozen=True)
class RestorationPlan:
    """How evicted positions are restored; `engine.restoration.loading` makes it."""

    source: str  # exact, learned, zeros or noise
    sink: int  # positions at the beginning that stay
    window: int  # newest positions that stay
    learned: Learned | None = None  # what the source `learned` needs
    seed: int = 0  # of the source `noise`

    @property
    def chunk(self) -> int:
        """Prompt positions of a forward, at most."""
        return max(SHORTEST, self.window // PER_WINDOW)


def restoration_for(
    plan: RestorationPlan | None, target: Target, caches: Sequence[Any]
) -> "Restoration | None":
    """The restoration of a new sequence; None where nothing is to be restored."""
    layers = [index for index, cache in enumerate(caches) if type(cache) is RestoredKV]
    if (plan is None) == bool(layers):
        raise ValueError("a restored policy and a plan how to restore go together")
    return None if plan is None else Restoration(plan, target, layers)


class Restoration:
    """Records the prefill of one sequence and overwrites its caches. Close it to restore the model."""

    def __init__(self, plan: RestorationPlan, target: Target, layers: Sequence[int]) -> None:
        """Hook the target; ``layers`` have caches of the kind `RestoredKV`."""
        self._target, self._sites = target, sites_of(target.model, layers)
        self._sink, self._window, self.chunk = plan.sink, plan.window, plan.chunk
        self._source: Exact
        if plan.source == LEARNED and plan.learned is not None:
            self._source = FromDrafter(target, self._sites, plan.learned)
        elif plan.source in CONTROLS:
            self._source = CONTROLS[plan.source](self._sites, plan.seed)
        else:
            raise ValueError(f"nothing restores from {plan.source!r}")
        self.start()

    def start(self) -> None:
        """Forget the sequence."""
        # positions in a row that are still within the window: the first, and what the source keeps of them
        self._pending: list[tuple[int, Rows]] = []
        self._end = 0  # behind the newest position that is restored
        self._source.start()

    def forward(
        self, tokens: mx.array, caches: list[Any], hooks: HiddenStateHooks | None, new: int, position: int
    ) -> mx.array | None:
        """Compute a chunk of a prompt, then restore what it pushes out of the window.

        The last ``new`` of the ``tokens`` [1, N] are the prompt's, the first of them at ``position``. Returns
        the rows [1, N, K·hidden] of the drafter's ``hooks``, or None without those.
        """
        with self._source.recording():
            _, hidden = self._target.forward(tokens, caches, hooks)
        self._pending.append((position, self._source.recorded(new)))
        limit = position + new - self._window  # positions before it are evicted
        while self._pending and self._pending[0][0] < limit:
            start, rows = self._pending.pop(0)
            evicted, kept = min(limit - start, rows[0].shape[0]), max(self._sink - start, 0)
            if evicted < rows[0].shape[0]:
                self._pending.insert(0, (limit, [row[evicted:] for row in rows]))
            if kept < evicted:
                self._overwrite(caches, start + kept, [row[kept:evicted] for row in rows])
        return hidden

    def _overwrite(self, caches: list[Any], start: int, rows: Rows) -> None:
        for site, (keys, values) in zip(self._sites, self._source.rows(rows), strict=True):
            cache = caches[site.layer]
            cache.overwrite(start, *site.placed(keys[None], values[None], start, cache.keys.shape[1]))
        self._end = start + rows[0].shape[0]

    @property
    def waiting(self) -> list[Rows]:
        """What is kept of positions within the window."""
        return [rows for _, rows in self._pending]

    def rewind(self, length: int) -> bool:
        """Go back to the first ``length`` positions; False where some of their window are restored."""
        if self._end > max(length - self._window, 0):
            return False
        self._pending = [
            (start, [row[: length - start] for row in rows])
            for start, rows in self._pending
            if start < length
        ]
        return True

    def close(self) -> None:
        """Restore the target's modules. Closing twice does nothing."""
        self._source.close()
