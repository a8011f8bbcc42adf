"""Caches as bytes and back: one safetensors document, whose metadata says how its arrays go together.

A tree is made of dicts, lists, tuples, arrays, numbers, texts and None. Of caches, each member's attributes
are saved, rows in the code that the policy keeps them in and without the free ones behind them; masks that
can be made again are left out. Reading makes nothing but arrays and plain values.
"""

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from engine.cache.coded import CodedKV
from engine.cache.policy import RestoredKV
from engine.cache.ring import SlidingRing, WindowedKV
from engine.cache.transaction import members_of
from engine.device import wait

TREE = "tree"  # the key of the metadata that describes the tree
LARGEST_HEADER = 2**27  # bytes; of a file of ours, tokens and descriptions of a few hundred arrays
DERIVED = {SlidingRing: ("_tables",)}  # attributes that are made again when they are needed


def pack(tree: Any, metadata: Mapping[str, str]) -> bytes:
    """A safetensors document of a tree; waits for its arrays. TypeError for a tree of anything else."""
    arrays: dict[str, mx.array] = {}
    described = json.dumps(_described(tree, arrays))
    stream = BytesIO()
    mx.save_safetensors(stream, arrays, {**metadata, TREE: described})
    return stream.getvalue()


def nbytes_of(tree: Any) -> int:
    """Bytes of a tree's arrays, nothing computed."""
    arrays: dict[str, mx.array] = {}
    _described(tree, arrays)
    return sum(array.nbytes for array in arrays.values())


def unpack(document: bytes) -> Any:
    """The tree of a document, its arrays computed."""
    loaded: Any = mx.load(BytesIO(document), format="safetensors", return_metadata=True)
    arrays, metadata = loaded
    wait(arrays)
    return _rebuilt(json.loads(metadata[TREE]), arrays)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a document, its arrays not read; ValueError or OSError where it is none."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= LARGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(file.read(length))
    if not isinstance(header, dict) or not isinstance(metadata := header.get("__metadata__"), dict):
        raise ValueError("no metadata")  # noqa: TRY004 - the file's fault, not the caller's
    return metadata


def _described(tree: Any, arrays: dict[str, mx.array]) -> Any:
    """What JSON can hold of a tree; its arrays are put into ``arrays``."""
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case mx.array() if not tree.size:  # which safetensors does not take
            return {"empty": [tree.shape, str(tree.dtype).removeprefix("mlx.core.")]}
        case mx.array():
            name = str(len(arrays))
            arrays[name] = tree
            return {"array": name}
        case list() | tuple():
            parts = [_described(each, arrays) for each in tree]
            return {"tuple": parts} if isinstance(tree, tuple) else parts
        case dict():
            return {"dict": [[key, _described(value, arrays)] for key, value in tree.items()]}
    raise TypeError(f"{type(tree).__name__} cannot be saved")


def _rebuilt(described: Any, arrays: Mapping[str, mx.array]) -> Any:
    if isinstance(described, list):
        return [_rebuilt(each, arrays) for each in described]
    if not isinstance(described, dict):
        return described
    ((kind, value),) = described.items()
    if kind == "array":
        return arrays[value]
    if kind == "empty":
        return mx.zeros(value[0], getattr(mx, value[1]))
    if kind == "tuple":
        return tuple(_rebuilt(each, arrays) for each in value)
    return {key: _rebuilt(each, arrays) for key, each in value}


def state_of(caches: Sequence[Any]) -> list[Any]:
    """What caches of one sequence hold, outside of a transaction, as a tree."""
    codes = [cache.widths for cache in caches if type(cache) is CodedKV]
    return [codes, [[type(member).__name__, _attributes(member)] for member in _members(caches)]]


def fill(caches: Sequence[Any], state: Sequence[Any]) -> None:
    """Give empty caches what others of the same kinds held; ValueError where these were of others."""
    codes, members = state
    coded = [cache for cache in caches if type(cache) is CodedKV]
    empty = _members(caches)
    if [type(member).__name__ for member in empty] != [kind for kind, _ in members]:
        raise ValueError("these are caches of other kinds")
    for cache, widths in zip(coded, codes, strict=True):
        cache.widths = widths
    for member, (_, attributes) in zip(empty, members, strict=True):
        vars(member).update(attributes)


def _members(caches: Sequence[Any]) -> list[Any]:
    return list({id(member): member for cache in caches for member in members_of(cache)}.values())


def _attributes(member: Any) -> dict[str, Any]:
    """A member's attributes, free rows cut off."""
    found = {name: value for name, value in vars(member).items() if name not in DERIVED.get(type(member), ())}
    rows = None
    if type(member) in (KVCache, RestoredKV, WindowedKV, QuantizedKVCache):
        rows = member.offset
    elif type(member) is SlidingRing:
        rows = min(member.offset, member.capacity)
    if rows is not None:
        found |= {name: _first(found[name], rows) for name in ("keys", "values")}
    return found


def _first(buffer: Any, rows: int) -> Any:
    """The first rows of a buffer, or of each array of a packed one."""
    if isinstance(buffer, mx.array):
        return buffer[..., :rows, :]
    return None if buffer is None else type(buffer)(_first(part, rows) for part in buffer)
