"""Keys and values kept in a code, each of its arrays by a plain store, which has windows, rollback and masks.

New rows are encoded before they are attended to, also those of the block itself: what a query sees of a
position does not depend on how many came with it.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache

from engine.cache.codecs.base import Codec, CodedRows, Parts
from engine.cache.ring import Mask

MakeCodec = Callable[[int], Codec]  # from a head dimension; ConfigurationError where it has no code


class CodedKV(_BaseCache):
    """Cache of one attention layer whose rows are stored in a code."""

    def __init__(
        self, code: str, make: Sequence[MakeCodec], stores: Sequence[Any], *, attended: bool
    ) -> None:
        self.code = code  # codes of one name are the same
        self.stores = list(stores)  # plain caches of one kind, one for each array of the code
        self.attended = attended  # attention reads the codes, not a decoded copy
        self._make = make  # the codes of keys and of values
        self._codecs: tuple[Codec, Codec] | None = None  # of keys and of values, once their widths are known
        self._dtype = mx.float32

    def over(self, stores: Sequence[Any]) -> "CodedKV":
        other = CodedKV(self.code, self._make, stores, attended=self.attended)
        other._codecs, other._dtype = self._codecs, self._dtype
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> "CodedKV":
        """Copy the stores alone: codes never change, and mlx's types cannot be copied."""
        return self.over(deepcopy(self.stores, memo))

    @property
    def offset(self) -> Any:
        return self.stores[0].offset

    @property
    def is_even(self) -> bool:
        """Whether a key has as many values as a value, by what was stored."""
        return len({codec.dim for codec in self._codecs or ()}) < 2

    @property
    def dims(self) -> int:
        """Values of a position and head, keys and values together; 0 while nothing is stored."""
        return sum(codec.dim for codec in self._codecs or ())

    @property
    def widths(self) -> tuple[int, int, str] | None:
        """Values of a key and of a value, and their type; None while nothing is stored. May be set."""
        if self._codecs is None:
            return None
        codec_k, codec_v = self._codecs
        return codec_k.dim, codec_v.dim, str(self._dtype).removeprefix("mlx.core.")

    @widths.setter
    def widths(self, known: tuple[int, int, str] | None) -> None:
        if known is not None:
            make_k, make_v = self._make
            self._codecs = make_k(known[0]), make_v(known[1])
            self._dtype = getattr(mx, known[2])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append rows [B, KV heads, N, D], values with a D of their own; return arrays, or `CodedRows`."""
        if self._codecs is None:
            make_k, make_v = self._make
            self._codecs = make_k(keys.shape[-1]), make_v(values.shape[-1])
        codec_k, codec_v = self._codecs
        self._dtype = keys.dtype
        pairs = zip(self.stores, codec_k.encode(keys), codec_v.encode(values), strict=True)
        seen = [store.update_and_fetch(key, value) for store, key, value in pairs]
        seen_k, seen_v = zip(*seen, strict=True)
        return self._read(codec_k, seen_k), self._read(codec_v, seen_v)

    def _read(self, codec: Codec, parts: Parts) -> Any:
        return CodedRows(codec, parts) if self.attended else codec.decode(parts, self._dtype)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:  # noqa: N803
        given = {"window_size": window_size, "return_array": return_array}
        mask: Mask = self.stores[0].make_mask(N, **given)
        return mask

    def extract(self, row: int) -> "CodedKV":
        return self.over([store.extract(row) for store in self.stores])

    def filter(self, rows: Sequence[int]) -> None:
        for store in self.stores:
            store.filter(rows)

    def is_trimmable(self) -> bool:
        return all(store.is_trimmable() for store in self.stores)

    def trim(self, n: int) -> int:
        return min(int(store.trim(n)) for store in self.stores)

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        if self.empty() or self._codecs is None:
            return None, None
        parts = zip(*(store.keys_and_values() for store in self.stores), strict=True)
        pairs = zip(self._codecs, parts, strict=True)
        keys, values = (codec.decode(part, self._dtype) for codec, part in pairs)
        return keys, values

    @property  # type: ignore[misc]  # mlx-lm's can be set; coded caches are not saved
    def state(self) -> Any:
        return [store.state for store in self.stores]

    def size(self) -> int:
        return int(self.stores[0].size())

    def empty(self) -> bool:
        return bool(self.stores[0].empty())

    @property
    def nbytes(self) -> int:
        return sum(int(store.nbytes) for store in self.stores)
