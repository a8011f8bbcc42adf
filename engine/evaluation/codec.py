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
from math import inf, isfinite
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from engine.cache.codecs.base import Hadamard
from engine.cache.codecs.lattice import LatticeCompat
from engine.errors import ConfigurationError, InputError

LEAST_IDENTICAL = 0.999
MOST_APART = 0.001  # of the reference's relative MSE
LOST = 0.5  # relative MSE
LARGEST_FILE = 2**30  # bytes of all its arrays
CHUNK = 2**20  # values coded at a time
NAME = re.compile(r"(d4|e8)_q([1-9][0-9]{0,5})_([1-9][0-9]{0,5})")
ROWS = re.compile(r"x_([1-9][0-9]{0,5})")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Entry:
    """One array of a file, compared.

    Attributes:
        name: of the array.
        lattice: ``d4`` or ``e8``.
        q: steps from zero to the largest coordinate.
        dim: D.
        vectors: rows.
        vectors_left_out: rows that the means leave out, because the reference loses them.
        blocks_identical: share of blocks with the same lattice point.
        relative_mse: of our round trip.
        reference_relative_mse: of the stored one.
        mse_ratio: ours by the reference's; 1 where both are 0.
        max_abs_difference: largest difference of a value.
    """

    name: str
    lattice: str
    q: int
    dim: int
    vectors: int
    vectors_left_out: int
    blocks_identical: float
    relative_mse: float
    reference_relative_mse: float
    mse_ratio: float
    max_abs_difference: float

    @property
    def passed(self) -> bool:
        """Whether enough blocks are the same and the errors as large."""
        return self.blocks_identical >= LEAST_IDENTICAL and abs(self.mse_ratio - 1) <= MOST_APART


@dataclass(frozen=True)
class Comparison:
    """All entries of a file, in its order."""

    entries: tuple[Entry, ...]

    @property
    def passed(self) -> bool:
        """Whether every entry did."""
        return all(entry.passed for entry in self.entries)

    def document(self) -> dict[str, Any]:
        """For the JSON line; a ratio that is not finite is null there."""
        return {
            "kind": "codec",
            "passed": self.passed,
            "worst": {
                "blocks_identical": min(entry.blocks_identical for entry in self.entries),
                "mse_ratio": _ratio(
                    max((e.mse_ratio for e in self.entries), key=lambda ratio: abs(ratio - 1))
                ),
                "max_abs_difference": max(entry.max_abs_difference for entry in self.entries),
            },
            "entries": [
                asdict(entry) | {"mse_ratio": _ratio(entry.mse_ratio), "passed": entry.passed}
                for entry in self.entries
            ],
        }


def _ratio(value: float) -> float | None:
    return value if isfinite(value) else None


def compare_codec(file: Path) -> Comparison:
    """Compare every entry of a file. All is read and checked before anything is computed.

    Raises:
        InputError: the file cannot be used: it is missing, corrupt or too large, an array is missing,
            unknown, of another shape or type or not finite, or there is no code for its Q or dimension.
    """
    rows, entries = _checked(file, _read(file))
    return Comparison(tuple(_compare(name, codec, rows[codec.dim], out) for name, codec, out in entries))


def _compare(name: str, codec: LatticeCompat, rows: Array, reference: Array) -> Entry:
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
    return Entry(
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


def _read(file: Path) -> dict[str, Array]:
    """The arrays of a file; nothing pickled is ever loaded."""
    if not file.is_file():
        raise InputError(f"{file} is {'no file' if file.exists() else 'missing'}")
    try:
        with zipfile.ZipFile(file) as packed:
            size = sum(item.file_size for item in packed.infolist())
        if size <= LARGEST_FILE:
            with np.load(file, allow_pickle=False) as stored:
                return {name: np.asarray(value) for name, value in stored.items()}
    except Exception as error:  # zip, zlib and numpy raise many kinds; all of them are the file's fault
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{file} is corrupt: {reason}") from None
    raise InputError(f"{file} holds {size:,} bytes of arrays; at most {LARGEST_FILE:,} are compared")


def _checked(
    file: Path, arrays: dict[str, Array]
) -> tuple[dict[int, Array], list[tuple[str, LatticeCompat, Array]]]:
    """Rows by dimension, and each entry with its code."""
    rows: dict[int, Array] = {}
    named: list[tuple[str, str, int, int]] = []
    for name, value in arrays.items():
        if entry := NAME.fullmatch(name):
            named.append((name, entry[1], int(entry[2]), int(entry[3])))
        elif found := ROWS.fullmatch(name):
            rows[int(found[1])] = _floats(file, name, value, int(found[1]))
        else:
            raise InputError(f"{file}: {name} is neither x_<D> nor d4_q<Q>_<D> nor e8_q<Q>_<D>")
    if idle := sorted(set(rows) - {dim for _, _, _, dim in named}):
        raise InputError(f"{file}: nothing is stored for x_{idle[0]}")
    if not named:
        raise InputError(f"{file} holds no entry d4_q<Q>_<D> or e8_q<Q>_<D>")
    entries = []
    for name, lattice, q, dim in named:
        if dim not in rows:
            raise InputError(f"{file} lacks x_{dim}, the rows of {name}")
        value = _floats(file, name, arrays[name], dim)
        if value.shape != rows[dim].shape:
            raise InputError(f"{file}: {name} is {value.shape}, x_{dim} is {rows[dim].shape}")
        try:
            entries.append((name, LatticeCompat(lattice, q, dim), value))
        except ConfigurationError as error:
            raise InputError(f"{file}: {name}: {error}") from None
    return rows, entries


def _floats(file: Path, name: str, value: Array, dim: int) -> Array:
    """An array [N, D] in float32."""
    if value.dtype.kind != "f":
        raise InputError(f"{file}: {name} is of type {value.dtype}, not of floats")
    if value.ndim != 2 or value.shape[1] != dim or not len(value):
        raise InputError(f"{file}: {name} is {value.shape}, should be (rows, {dim})")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinity, caught below
        value = value.astype(np.float32)
    if not np.isfinite(value).all():
        raise InputError(f"{file}: {name} holds NaN or infinity")
    return value
