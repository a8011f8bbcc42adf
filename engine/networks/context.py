"""What a drafter network remembers of a sequence: keys and values of its committed positions, a layer each.

Rows of the block being drafted are written behind the committed ones as scratch and overwritten by the next
call, so nothing a draft does has to be undone.
"""

from collections.abc import Callable

import mlx.core as mx

from engine.networks.dflash_config import DFlashConfig

SPARE = 64  # rows a sliding layer keeps beyond its window when it makes room, so that rows can be taken back


class LayerContext:
    """Keys and values of one layer's committed context rows, oldest first.

    The buffer grows by steps; a sliding layer uses only the newest ``keep`` rows and drops older ones,
    but for `SPARE`, when the buffer is full.
    """

    step = 256

    def __init__(self, keep: int | None) -> None:
        self.keep = keep
        self.length = 0  # committed rows in the buffer
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def extend(self, keys: mx.array, values: mx.array, new: int) -> tuple[mx.array, mx.array, int]:
        """Append rows, the first ``new`` of which are committed.

        Args:
            keys: [1, KV heads, new + block, head dim]; values alike.
            values: see keys.
            new: number of context rows among them.

        Returns:
            Keys and values to attend to, and how many of their rows are context.
        """
        total = self.length + keys.shape[2]
        if self.keys is None or self.values is None or total > self.keys.shape[2]:
            self._make_room(keys, values)
            total = self.length + keys.shape[2]
        assert self.keys is not None  # noqa: S101 - _make_room has just set them
        assert self.values is not None  # noqa: S101 - likewise
        self.keys[..., self.length : total, :] = keys
        self.values[..., self.length : total, :] = values
        self.length += new
        first = 0 if self.keep is None else max(0, self.length - self.keep)
        return self.keys[..., first:total, :], self.values[..., first:total, :], self.length - first

    def surplus(self, new: int) -> int:
        """How many of ``new`` rows to come no later query can see; those need not be computed."""
        return 0 if self.keep is None else max(0, new - self.keep - SPARE)

    def can_forget(self, count: int, positions: int) -> bool:
        """Whether, without its newest ``count`` rows, it holds all a query after ``positions`` may see."""
        needed = positions if self.keep is None else min(positions, self.keep)
        return self.length - count >= needed

    def mark(self) -> Callable[[], None]:
        """Note the rows held; what is returned brings them back. Of all rows, none but the newest ever go."""
        length = self.length
        rows = None if self.keep is None else (_handle(self.keys), _handle(self.values))

        def back() -> None:
            self.length = length
            if rows is not None:
                self.keys, self.values = map(_handle, rows)

        return back

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        held = self.length if self.keep is None else min(self.length, self.keep + SPARE)
        capacity = -(-(held + keys.shape[2]) // self.step) * self.step
        buffers = []
        for old, like in ((self.keys, keys), (self.values, values)):
            room = mx.zeros((*like.shape[:2], capacity - held, like.shape[3]), like.dtype)
            kept = [] if old is None or held == 0 else [old[..., self.length - held : self.length, :]]
            buffers.append(mx.concatenate([*kept, room], axis=2))
        self.keys, self.values = buffers
        self.length = held

    @property
    def nbytes(self) -> int:
        """Resident bytes of the buffers."""
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes


def _handle(rows: mx.array | None) -> mx.array | None:
    """Rows under a name of their own: writing into an array changes what all others see."""
    return None if rows is None else mx.array(rows)


class Context:
    """One sequence's memory: a `LayerContext` for each layer, all at the same position."""

    def __init__(self, config: DFlashConfig) -> None:
        """Start empty, for a network of this configuration."""
        windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        self.layers = [LayerContext(None if window is None else window - 1) for window in windows]
        self.offset = 0  # committed positions seen so far = absolute position of the next context row

    def rewind(self, count: int) -> bool:
        """Forget the last ``count`` positions; False, and no change, where rows they uncover are gone."""
        left = self.offset - count
        if left < 0 or not all(layer.can_forget(count, left) for layer in self.layers):
            return False
        for layer in self.layers:
            layer.length -= count
        self.offset = left
        return True

    def mark(self) -> Callable[[], None]:
        """Note the positions seen; what is returned goes back to them."""
        offset, layers = self.offset, [layer.mark() for layer in self.layers]

        def back() -> None:
            self.offset = offset
            for layer in layers:
                layer()

        return back

    @property
    def nbytes(self) -> int:
        """Resident bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)
