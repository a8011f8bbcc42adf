"""The lattice code against stored round trips of the codec it was published as.

A file is an ``.npz`` of rows x_<D> [N, D] and of <lattice>_q<Q>_<D> [N, D], what the published codec makes
of them. A block of 4 (D4) or 8 (E8) coordinates is *identical* when both round trips hold the same lattice
point: turned back into its coordinates, none differ by a quarter of a step, nor by 2^-9 of the row's largest,
as much as a last place of its two float16 numbers moves. The relative MSE, |x̂ - x|² / |x|², is averaged over
rows, but for those the published codec loses: zeros, or off by more than `LOST` and twice the median.
"""

import re
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


def codec_document(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON line of a comparison."""
    worst = max((each["mse_ratio"] for each in entries), key=lambda ratio: abs(ratio - 1))
    return {
        "kind": "codec",
        "passed": all(entry["passed"] for entry in entries),
        "worst": {
            "blocks_identical": min(entry["blocks_identical"] for entry in entries),
            "mse_ratio": finite(worst),
            "max_abs_difference": max(entry["max_abs_difference"] for entry in entries),
        },
        "entries": [entry | {"mse_ratio": finite(entry["mse_ratio"])} for entry in entries],
    }


def compare_codec(file: Path) -> list[dict[str, Any]]:
    """Compare every entry of a file, in its order. All is read and checked before anything is computed."""
    if not file.is_file():
        raise InputError(f"{file} is {'no file' if file.exists() else 'missing'}")
    arrays = StoredArrays(file, LARGEST_FILE)
    entries: list[tuple[str, LatticeCompat, Array, Array]] = []
    used: set[str] = set()
    for name in arrays:
        if ROWS.fullmatch(name):
            continue
        if (found := NAME.fullmatch(name)) is None:
            raise InputError(f"{file}: {name} is neither x_<D> nor d4_q<Q>_<D> nor e8_q<Q>_<D>")
        dim, of_rows = int(found[3]), f"x_{found[3]}"
        if of_rows not in arrays:
            raise InputError(f"{file} lacks {of_rows}, the rows of {name}")
        rows, stored = (arrays.take(each, REALS, None, dim) for each in (of_rows, name))
        if stored.shape != rows.shape:
            raise InputError(f"{file}: {name} is {stored.shape}, {of_rows} is {rows.shape}")
        try:
            codec = LatticeCompat(found[1], int(found[2]), dim)
        except ConfigurationError as error:
            raise InputError(f"{file}: {name}: {error}") from None
        entries.append((name, codec, rows, stored))
        used |= {name, of_rows}
    if idle := sorted(arrays.keys() - used):
        raise InputError(f"{file}: nothing is stored for {idle[0]}")
    if not entries:
        raise InputError(f"{file} holds no entry d4_q<Q>_<D> or e8_q<Q>_<D>")
    return [_compare(*entry) for entry in entries]


def _compare(name: str, codec: LatticeCompat, rows: Array, reference: Array) -> dict[str, Any]:
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
        whole = x.astype(np.float64)
        size = np.square(whole).sum(-1)
        for found, side in zip((ours, stored), errors, strict=True):
            error = np.square(found - whole).sum(-1)
            side.append(np.divide(error, size, out=np.full(len(x), inf), where=size > 0))  # inf for zeros
    of_ours, of_stored = (np.concatenate(side) for side in errors)
    kept = np.isfinite(of_stored) & reference.any(-1)
    if kept.any():
        # with Q = 1 most are off by more
        kept &= of_stored <= max(LOST, 2 * float(np.median(of_stored[kept])))
    ours_mse, stored_mse = (float(each[kept].mean()) if kept.any() else 0.0 for each in (of_ours, of_stored))
    same_blocks = identical / (rows.size // codec.block)
    ratio = ours_mse / stored_mse if stored_mse else (inf if ours_mse else 1.0)
    return {
        "name": name,
        "lattice": codec.lattice,
        "q": codec.q,
        "dim": codec.dim,
        "vectors": len(rows),
        "vectors_left_out": len(rows) - int(kept.sum()),  # of the means, because the reference loses them
        "blocks_identical": same_blocks,
        "relative_mse": ours_mse,
        "reference_relative_mse": stored_mse,
        "mse_ratio": ratio,
        "max_abs_difference": apart,
        "passed": same_blocks >= LEAST_IDENTICAL and abs(ratio - 1) <= MOST_APART,
    }
