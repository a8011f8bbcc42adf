"""Plain keys and values of which a part may be replaced afterwards.

Old positions of a prompt get keys and values from elsewhere, see `engine.restoration`. Everything is held at
its own position as in a plain cache, so nothing else is different: it takes back, saves and merges like one,
and needs as much memory as one.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache


class RestoredKV(KVCache):
    """The cache of one full attention layer whose old rows are supplied from another source.

    Attributes:
        replaced: positions whose keys and values were replaced so far.
    """

    replaced = 0

    def overwrite(self, start: int, keys: mx.array, values: mx.array) -> None:
        """Put rows in the place of those held.

        Args:
            start: position of the first row.
            keys: rotated, as attention reads them, [1, KV heads, N, head dim].
            values: likewise.

        Raises:
            ValueError: some of the positions are not held.
        """
        stop = start + keys.shape[2]
        if start < 0 or stop > self.offset:
            raise ValueError(f"positions {start} to {stop - 1} cannot be replaced: {self.offset} are held")
        buffers: tuple[Any, Any] = (self.keys, self.values)
        for buffer, rows in zip(buffers, (keys, values), strict=True):
            buffer[..., start:stop, :] = rows.astype(buffer.dtype)
        self.replaced += stop - start
