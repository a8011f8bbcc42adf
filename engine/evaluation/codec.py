"""The lattice code against stored round trips of the codec it was published as.

A file is an ``.npz`` of float arrays, all of the same rows for one D:

    x_<D> [N, D]                     the rows
    <lattice>_q<Q>_<D> [N, D]        what the published codec makes of them; lattice d4 or e8

A block of 4 (D4) or 8 (E8) coordinates is *identical* when both round trips hold the same lattice point:
turned back into the coordinates of the lattice, none of the block's differ by a quarter of a step, nor by
2^-9 of the row's largest, which is as much as a last place of its two float16 numbers moves. The relative MSE
is |x̂ - x|² / |x|², averaged over rows, so that every row counts as much. Rows that the published codec loses
(zeros, what it makes zeros, what is off by more than `LOST` and twice the median) would drown the others:
they are left out of the mean, and their blocks compared like all.
"""

import re
import zipfile
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from engine.cache.codecs.base import Hadamard
from engine.cache.codecs.lattice import LatticeCompat
from engine.errors import ConfigurationError, InputError
from engine.evaluation.parity import REALS, Array, StoredArrays, finite

LEAST_IDENTICAL = 0.999
MOST_APART = 0.001  # of the reference's relative MSE
LOST = 0.5  # relative MSE
LARGEST_FILE = 2**30  # bytes of all its arrays
CHUNK = 2**20  # values coded at a time
NAME = re.compile(r"(d4|e8)_q([1-9][0-9]{0,5})_([1-9][0-9]{0,5})")
ROWS = re.compile(r"x_([1-9][0-9]{0,5})")


@dataclass(frozen=True)
class CodecEntry:
    name: str
    lattice: str
    q: int  # steps from zero to the largest coordinate
    dim: int
    vectors: int
    vectors_left_out: int  # of the means, because the reference loses them
    blocks_identical: float  # share of blocks with the same lattice point
    relative_mse: float  # of our round trip
    reference_relative_mse: float
    mse_ratio: float  # ours by the reference's; 1 where both are 0
    max_abs_difference: float

    @property
    def passed(self) -> bool:
        return self.blocks_identical >= LEAST_IDENTICAL and abs(self.mse_ratio - 1) <= MOST_APART

    def document(self) -> dict[str, Any]:
        """For the JSON line; a ratio that is not finite is null there."""
        return asdict(self) | {"mse_ratio": finite(self.mse_ratio), "passed": self.passed}


def codec_document(entries: list[CodecEntry]) -> dict[str, Any]:
    worst = max((entry.mse_ratio for entry in entries), key=lambda ratio: abs(ratio - 1))
    return {
        "kind": "codec",
        "passed": all(entry.passed for entry in entries),
        "worst": {
            "blocks_identical": min(entry.blocks_identical for entry in entries),
            "mse_ratio": finite(worst),
            "max_abs_difference": max(entry.max_abs_difference for entry in entries),
        },
        "entries": [entry.document() for entry in entries],
    }


def compare_codec(file: Path) -> list[CodecEntry]:
    """Compare every entry of a file, in its order. All is read and checked before anything is computed."""
    arrays = _read(file)
    names = {name: NAME.fullmatch(name) or ROWS.fullmatch(name) for name in arrays}
    if odd := [name for name, found in names.items() if found is None]:
        raise InputError(f"{file}: {odd[0]} is neither x_<D> nor d4_q<Q>_<D> nor e8_q<Q>_<D>")
    entries = []
    for name, found in names.items():
        if found is None or found.re is ROWS:
            continue
        lattice, q, dim = found[1], int(found[2]), int(found[3])
        if f"x_{dim}" not in arrays:
            raise InputError(f"{file} lacks x_{dim}, the rows of {name}")
        rows = arrays.take(f"x_{dim}", REALS, None, dim)
        try:
            codec = LatticeCompat(lattice, q, dim)
        except ConfigurationError as error:
            raise InputError(f"{file}: {name}: {error}") from None
        stored = arrays.take(name, REALS, None, dim)
        if stored.shape != rows.shape:
            raise InputError(f"{file}: {name} is {stored.shape}, x_{dim} is {rows.shape}")
        entries.append((name, codec, rows, stored))
    used = {each[0] for each in entries} | {f"x_{each[1].dim}" for each in entries}
    if idle := sorted(arrays.keys() - used):
        raise InputError(f"{file}: nothing is stored for {idle[0]}")
    if not entries:
        raise InputError(f"{file} holds no entry d4_q<Q>_<D> or e8_q<Q>_<D>")
    return [_compare(*entry) for entry in entries]


def _read(file: Path) -> StoredArrays:
    """The arrays of a file, if they are not too large."""
    if not file.is_file():
        raise InputError(f"{file} is {'no file' if file.exists() else 'missing'}")
    try:
        with zipfile.ZipFile(file) as packed:
            size = sum(item.file_size for item in packed.infolist())
    except zipfile.BadZipFile as error:
        raise InputError(f"{file} is corrupt: {error}") from None
    if size > LARGEST_FILE:
        raise InputError(f"{file} holds {size:,} bytes of arrays; at most {LARGEST_FILE:,} are compared")
    return StoredArrays(file)


def _compare(name: str, codec: LatticeCompat, rows: Array, reference: Array) -> CodecEntry:
    turn = Hadamard(codec.dim)
    identical, apart = 0, 0.0
    errors: tuple[list[Array], list[Array]] = ([], [])
    # Chunks of even size: a product of a few rows may sum in another order.
    chunks = -(-rows.size // CHUNK)
    for x, stored in zip(np.array_split(rows, chunks), np.array_split(reference, chunks), strict=True):
        parts = codec.encode(mx.array(x))
        decoded = codec.decode(parts, mx.float32)
        largest = mx.prod(parts[1].astype(mx.float32), -1, keepdims=True)  # of a row, as it is decoded
        difference = mx.abs(turn.rotate(decoded) - turn.rotate(mx.array(stored)))
        same = difference < largest * min(0.25 / codec.q, 2.0**-9)
        identical += int(np.array(same).reshape(-1, codec.block).all(-1).sum())
        ours = np.array(decoded)
        apart = max(apart, float(np.abs(ours.astype(np.float64) - stored).max()))
        for found, side in zip((ours, stored), errors, strict=True):
            side.append(_relative(found, x))
    of_ours, of_stored = (np.concatenate(side) for side in errors)
    kept = _not_lost(of_stored, reference)
    ours_mse, stored_mse = _mean(of_ours[kept]), _mean(of_stored[kept])
    return CodecEntry(
        name=name,
        lattice=codec.lattice,
        q=codec.q,
        dim=codec.dim,
        vectors=len(rows),
        vectors_left_out=len(rows) - int(kept.sum()),
        blocks_identical=identical / (rows.size // codec.block),
        relative_mse=ours_mse,
        reference_relative_mse=stored_mse,
        mse_ratio=ours_mse / stored_mse if stored_mse else (inf if ours_mse else 1.0),
        max_abs_difference=apart,
    )


def _relative(found: Array, rows: Array) -> Array:
    """Squared error of each row by its squared length; infinite for rows of zeros."""
    rows = rows.astype(np.float64)
    size, error = np.square(rows).sum(-1), np.square(found - rows).sum(-1)
    relative: Array = np.divide(error, size, out=np.full(len(rows), inf), where=size > 0)
    return relative


def _not_lost(errors: Array, reference: Array) -> Array:
    """Which rows count in a mean, [N] bool, by the reference's round trip and the errors of its rows."""
    kept: Array = np.isfinite(errors) & reference.any(-1)
    if kept.any():
        kept &= errors <= max(LOST, 2 * float(np.median(errors[kept])))  # with Q = 1 most are off by more
    return kept


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else 0.0
