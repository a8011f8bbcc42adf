"""The engine against mlx-lm's own loop on the shipped pair, per prompt set.

    python benchmarks/throughput.py [--limit N] [--max-tokens N]

Runs ``kakeya_engine eval throughput`` on each set, arms interleaved prompt by prompt. A report that the gate
accepts is stored as ``benchmarks/results/throughput-<set>.json``. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json

from results_file import evaluate

SETS = ("code", "chat", "retrieval")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    stored = [
        evaluate(
            f"throughput-{name}",
            *("throughput", "--prompts", name, "--claim", "speedup"),
            *("--limit", str(options.limit), "--max-tokens", str(options.max_tokens)),
        )
        for name in SETS
    ]
    print(json.dumps({"stored": [str(path) for path in stored]}))


if __name__ == "__main__":
    main()
