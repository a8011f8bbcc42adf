"""KV policies side by side on the shipped pair: memory, distortion, recall, acceptance.

    python benchmarks/kv.py [--per-depth K] [--seed N]

Runs ``kakeya_engine eval kv`` (all policies in turn on each prompt) and stores the report that the gate
accepts as ``benchmarks/results/kv.json``. Recall parity with plain decoding is claimed where all positions
are kept in 4 bits or more. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json

from results_file import evaluate

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
        *("--per-depth", str(options.per_depth), "--seed", str(options.seed)),
    )
    print(json.dumps({"stored": str(stored)}))


if __name__ == "__main__":
    main()
