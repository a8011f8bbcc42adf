"""KV policies side by side on the shipped pair: memory, distortion, recall, acceptance.

    python benchmarks/kv.py [--per-depth K] [--seed N]

Runs ``kakeya_engine eval kv`` (all policies in turn on each prompt) and stores the report that the gate
accepts as ``benchmarks/results/kv.json``. Recall parity with plain decoding is claimed where all positions
are kept in 4 bits or more, and of every policy the bytes that its caches may hold. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json

from results_file import evaluate

# The native caches of the shipped pair hold 909,312 bytes of the longest prompt and its answer.
BYTES = {
    "sliding-bounded:0,16": 870_000,
    "sink-window:4,64": 240_000,
    "affine:8,64": 260_000,
    "affine:4,64": 145_000,
    "rotated:4,64": 145_000,
    "lattice:d4,38": 490_000,
    "lattice:e8,38": 490_000,
    "rotated:5,64@inner:2": 435_000,
    "lattice-packed:e8,5": 435_000,
}
KEEPING = ("affine:8,64", "affine:4,64", "rotated:4,64", "lattice:e8,38", "lattice-packed:e8,5")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--per-depth", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    stored = evaluate(
        "kv",
        *("kv", "--speed-prompts", "none"),
        *(word for policy in KEEPING for word in ("--claim-parity", policy)),
        *(word for policy, most in BYTES.items() for word in ("--claim-bytes", f"{policy}={most}")),
        *("--per-depth", str(options.per_depth), "--seed", str(options.seed)),
    )
    print(json.dumps({"stored": str(stored)}))


if __name__ == "__main__":
    main()
