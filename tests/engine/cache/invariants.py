"""After any rounds the caches are, layer by layer, those of decoding the same tokens one at a time.

Use `Reference` for what plain decoding holds after every position, `Sequence` to play rounds on our caches,
and `Sequence.check` after any of them. A failure names the layer, its kind, the first position that is
wrong, and what most likely went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, QuantizedKVCache, RotatingKVCache

from engine.cache.ring import SlidingRing, WindowedKV
from engine.cache.stats import held as visible
from engine.cache.transaction import Transaction
from tests.engine import tiny
from tests.engine.cache import models

LENGTH = 64  # tokens of the text every kind is tested on: eight windows

CAUSES = {
    "offset": "commit or abort left the wrong number of positions",
    "state": "the replay ran on other positions or from another state than the one at begin",
    "newest": "a dropped position is still held, or a kept one was lost: look at commit",
    "oldest": "a block overwrote what the window still shows: look at the headroom",
    "inside": "an earlier rollback left a wrong entry behind, or a mask hid or showed a wrong position",
}


def leaves(caches: list[Any]) -> Iterator[tuple[int, Any]]:
    """Caches with the number of their layer, members of lists one by one."""
    for layer, entry in enumerate(caches):
        for member in entry.caches if isinstance(entry, CacheList) else (entry,):
            yield layer, member


def held(member: Any) -> tuple[int | None, list[mx.array]]:
    """Positions counted, and what the next query can see: rows in the order of positions, or the state."""
    if isinstance(member, ArraysCache):
        return None, [array for array in member.cache if array is not None]
    offset = member.offset
    if offset == 0:
        return 0, []
    if isinstance(member, QuantizedKVCache):
        pairs = member.keys_and_values()
        return offset, [
            mx.dequantize(*pair, group_size=member.group_size, bits=member.bits) for pair in pairs
        ]
    if isinstance(member, SlidingRing | WindowedKV):
        rows = visible(member)
        return offset, [rows.keys, rows.values] if rows else []
    if isinstance(member, RotatingKVCache):
        return offset, [_rotated(member, array) for array in (member.keys, member.values)]
    if isinstance(member, ChunkedKVCache):
        seen = offset % member.chunk_size  # earlier chunks are hidden from the next query
        arrays = member.keys_and_values()
        return offset, [array[..., array.shape[2] - seen :, :] for array in arrays]
    return offset, list(member.keys_and_values())


def _rotated(member: RotatingKVCache, array: mx.array) -> mx.array:
    rows = member._temporal_order(array)[..., : member.offset, :]
    pinned = min(member.keep, member.offset)
    recent = min(member.offset - pinned, member.max_size - member.keep - 1)
    return mx.concatenate([rows[..., :pinned, :], rows[..., rows.shape[2] - recent :, :]], axis=2)


class Reference:
    """What plain decoding of one text holds after each of its positions, and the logits there."""

    def __init__(self, kind: str) -> None:
        self.kind = models.KINDS[kind]
        random = tiny.seeded(len(kind))
        self.text = [random.randrange(5, models.VOCAB) for _ in range(LENGTH)]
        model = models.model(self.kind.family)
        caches = self.kind.plain(model)
        self.at: list[list[tuple[int, str, int | None, list[np.ndarray]]]] = [_snapshot(caches)]
        self.logits: list[np.ndarray] = []
        for token in self.text:
            logits = model(mx.array([[token]]), cache=caches)
            self.at.append(_snapshot(caches))
            self.logits.append(np.array(logits[0, 0]))


def _snapshot(caches: list[Any]) -> list[tuple[int, str, int | None, list[np.ndarray]]]:
    found = []
    for layer, member in leaves(caches):
        offset, arrays = held(member)
        found.append((layer, type(member).__name__, offset, [np.array(array) for array in arrays]))
    return found


@cache
def reference(kind: str) -> Reference:
    """Plain decoding of a kind's text, run once."""
    return Reference(kind)


class Sequence:
    """Our caches of one kind, moved along the kind's text by transactions."""

    def __init__(self, kind: str, headroom: int) -> None:
        self.reference = reference(kind)
        self.model = models.model(self.reference.kind.family)
        self.caches = self.reference.kind.ours(self.model, headroom)
        self.transaction = Transaction(self.model, self.caches)
        self.done = 0  # tokens committed
        self.uncached = 0  # the last of them that no cache holds
        self.most_uncached = 0

    @property
    def left(self) -> int:
        """Tokens of the text still to come."""
        return LENGTH - self.done

    @property
    def free(self) -> int:
        """The most new positions a round can have."""
        most = self.transaction.open_positions
        return self.left if most is None else min(self.left, most - self.uncached)

    def feed(self, tokens: list[int]) -> np.ndarray:
        """One forward over the uncached tokens and new ones: logits of the new ones [N, V]."""
        text = self.reference.text
        block = [*text[self.done - self.uncached : self.done], *tokens]
        logits = self.model(mx.array([block]), cache=self.caches)
        mx.eval(logits)
        return np.array(logits[0, self.uncached :])

    def prefill(self, count: int) -> None:
        """The next tokens of the text in one forward outside of any transaction."""
        logits = self.feed(self.reference.text[self.done : self.done + count])
        self.done += count
        self.uncached = 0
        self.transaction.settle()
        self._compare_logits(logits, self.done - count)

    def round(self, drafts: list[int]) -> int:
        """Verify the next token of the text and drafts for those behind it; returns how many were right."""
        text = self.reference.text
        right = 0
        while right < len(drafts) and drafts[right] == text[self.done + 1 + right]:
            right += 1
        block = [text[self.done], *drafts]
        self.transaction.begin(self.uncached + len(block))
        logits = self.feed(block)
        self.commit(right + 1)
        self._compare_logits(logits[: right + 1], self.done - right - 1)
        return right

    def commit(self, kept: int) -> None:
        """Keep new positions of the open transaction, and follow what is uncached."""
        self.transaction.commit(self.uncached + kept)
        self.done += kept
        self.uncached = self.transaction.uncached
        self.most_uncached = max(self.most_uncached, self.uncached)

    def _compare_logits(self, logits: np.ndarray, first: int) -> None:
        for index, row in enumerate(logits):
            error = np.abs(row - self.reference.logits[first + index]).max()
            limit = self.reference.kind.logits
            assert error < limit, (
                f"position {first + index}: logits differ by {error:.2g}; a query of a block sees other "
                f"positions than in plain decoding: look at the mask"
            )

    def check(self) -> None:
        """The caches equal those of plain decoding."""
        plain = self.reference.at[self.done - self.uncached]
        ours = _snapshot(self.caches)
        assert len(ours) == len(plain), "another number of caches"
        for (layer, name, offset, arrays), (_, _, expected, wanted) in zip(ours, plain, strict=True):
            where = f"layer {layer} ({name}), {self.done} tokens committed, {self.uncached} of them uncached"
            assert offset == expected, f"{where}: {offset} positions, not {expected}: {CAUSES['offset']}"
            assert len(arrays) == len(wanted), f"{where}: {len(arrays)} arrays, not {len(wanted)}"
            for array, want in zip(arrays, wanted, strict=True):
                assert array.shape == want.shape, f"{where}: {array.shape}, not {want.shape}"
                if array.size and np.abs(array - want).max() >= self.reference.kind.tolerance:
                    raise AssertionError(f"{where}: {_explain(offset, array, want)}")

    def close(self) -> None:
        self.transaction.close()


def _explain(offset: int | None, array: np.ndarray, want: np.ndarray) -> str:
    """Which position is wrong first, by how much, and the likely cause."""
    error = np.abs(array - want)
    if offset is None:
        return f"the state differs by {error.max():.2g}: {CAUSES['state']}"
    by_row = error.max(axis=(0, 1, 3))
    first = int(np.argmax(by_row > 1e-3 * error.max()))
    place = "oldest" if first == 0 else "newest" if first >= len(by_row) - 2 else "inside"
    return (
        f"row {first} of {len(by_row)} (the last is position {offset - 1}) differs by "
        f"{by_row[first]:.2g}: {CAUSES[place]}"
    )


@contextmanager
def failing(module: Any) -> Iterator[None]:
    """Inside the block, calling this module raises, as an allocation might."""
    plain = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    object.__setattr__(module, "__class__", type(plain.__name__, (plain,), {"__call__": call}))
    try:
        yield
    finally:
        object.__setattr__(module, "__class__", plain)
