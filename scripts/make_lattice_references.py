"""Round trips of the published lattice codec, for `kakeya_engine kv codec` and the tests.

Needs an environment of its own, with none of this project in it:

    python -m venv /tmp/reference
    /tmp/reference/bin/pip install torch==2.15.0 kakeyalattice==1.5.0 numpy==2.4.6
    /tmp/reference/bin/python scripts/make_lattice_references.py --out FILE.npz --seed 1

The files in tests/data/lattice are `seed_1.npz`, made like that, and `seed_2.npz`, made with `--seed 2
--dims 8 32 512 --q 1 3 19 76 300 --rows 24`.

For every D the rows `x_<D>`, and what `V14KakeyaZamirLatticeGPU` (D4) and `V15KakeyaZamirE8GPU` (E8) make of
them on the CPU in float32, `d4_q<Q>_<D>` and `e8_q<Q>_<D>`. The first rows are awkward ones: zero, tiny, near
the largest length float16 holds, a single value, all the same, heavy tails, a few large channels. Longer rows
are left out: the codec makes infinities of them. The SHA-256 of the file is printed.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np
import torch
from kakeyalattice import V14KakeyaZamirLatticeGPU, V15KakeyaZamirE8GPU

CODECS = {"d4": V14KakeyaZamirLatticeGPU, "e8": V15KakeyaZamirE8GPU}
LONGEST = 6e4  # of a row; float16 holds 65,504
LENGTHS = (1e-30, 1e-8, 1e-7, 3e-6, 1e-4, 1e-2, 300.0, LONGEST)


def rows_of(count: int, dim: int, generator: np.random.Generator) -> np.ndarray:
    """Awkward rows, then normal ones of various lengths, float32 [count, D]."""
    scaled = [of_length(generator.standard_normal(dim), length) for length in LENGTHS]
    single, channels = np.zeros(dim), generator.standard_normal(dim)
    single[generator.integers(dim)] = -7.3
    channels[generator.choice(dim, 3, replace=False)] *= 60
    awkward = [
        np.zeros(dim),
        *scaled,
        single,
        np.full(dim, 0.37),
        np.where(np.arange(dim) % 2, 1.0, -1.0),
        channels,
        generator.standard_t(1.5, dim),
        generator.standard_t(3, dim),
        of_length(generator.standard_normal(dim) ** 5, 40.0),
    ]
    if count < len(awkward):
        raise SystemExit(f"--rows must be at least {len(awkward)}")
    plain = generator.standard_normal((count - len(awkward), dim))
    plain *= np.exp(generator.standard_normal((len(plain), 1)))
    return np.concatenate([np.stack(awkward), plain]).astype(np.float32)


def of_length(row: np.ndarray, length: float) -> np.ndarray:
    """The row, stretched."""
    return row * (length / np.linalg.norm(row))


def main() -> None:
    """Make one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the .npz to write")
    parser.add_argument("--seed", type=int, required=True, help="start of the random numbers")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256], help="powers of two from 8")
    parser.add_argument("--q", type=int, nargs="+", default=[4, 10, 15, 38, 152], help="steps to the largest")
    parser.add_argument("--rows", type=int, default=32, help="rows for each D")
    arguments = parser.parse_args()
    generator = np.random.default_rng(arguments.seed)
    arrays = {}
    for dim in arguments.dims:
        rows = arrays[f"x_{dim}"] = rows_of(arguments.rows, dim, generator)
        for name, codec in CODECS.items():
            for q in arguments.q:
                made = codec(dim, q, device="cpu").roundtrip(torch.from_numpy(rows)).numpy()
                if not np.isfinite(made).all():
                    raise SystemExit(f"{name}, Q {q}, D {dim}: the codec made values that are not finite")
                arrays[f"{name}_q{q}_{dim}"] = made
    np.savez_compressed(arguments.out, **arrays)
    print(hashlib.sha256(arguments.out.read_bytes()).hexdigest(), arguments.out.name)


if __name__ == "__main__":
    main()
